"""`cost`: how long a layer's attention computes and sends, by rates that are named assumptions."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from longspan.array_types import no_type_check
from longspan.checks import check_static_size
from longspan.masks.sides import two_sides
from longspan.pairs import count_by_query
from longspan.parallel.balance import load, pairs_of
from longspan.parallel.plan import ParallelPlan
from longspan.parallel.traffic import Sizes, traffic


@dataclass(frozen=True)
class Chip:
    """What a chip is assumed to do: rates of its data sheet, and which part of its FLOPs attention gets.

    Example:
        >>> ls.parallel.Chip("mine", flops=1e14, link=1e11).share
        0.4
    """

    name: str
    flops: float  # per second, bfloat16
    link: float  # bytes per second that it receives from one neighbour
    share: float = 0.4  # of the FLOPs


V5E = Chip("TPU v5e", flops=197e12, link=50e9)
V5P = Chip("TPU v5p", flops=459e12, link=100e9)
H100 = Chip("H100 with NVLink", flops=989e12, link=450e9)
BACKWARD = 2.5  # matrix products of a backward pass for each of the forward's two


@dataclass(frozen=True)
class Cost:
    """One layer's attention on one device; times are for the chip's assumed rates, bytes are exact.

    Example:
        >>> plan = ls.parallel.plan(ls.Causal() & ls.Window(1023, 0), 1 << 20, 256)
        >>> cost = ls.parallel.cost(plan, batch=1, heads=16, kv_heads=2, head_dim=128, dtype=jnp.bfloat16)
        >>> cost.sent_bytes, cost.more_shards_pay
        (1047552, True)
    """

    chip: Chip
    useful_flops: float  # of the busiest device, forward
    sent_bytes: int  # per device, forward
    sent_bytes_backward: int
    bound_bytes: int
    gather_bytes: int
    rows: int  # tokens that a device holds
    halo_rows: int  # that it receives of its neighbours, and holds at once
    load: float  # the busiest device's pairs over the mean

    @property
    def compute_seconds(self) -> float:
        """Forward and backward, by the chip's FLOPs."""
        return self.useful_flops * (1 + BACKWARD) / (self.chip.flops * self.chip.share)

    @property
    def link_seconds(self) -> float:
        """Forward and backward, by one link."""
        return (self.sent_bytes + self.sent_bytes_backward) / self.chip.link

    @property
    def more_shards_pay(self) -> bool:
        """Whether twice as many devices would take less time, and less memory.

        Products shrink with the shard, what is sent does not: the link becomes the longer of the two. And a shard that
        is smaller than the window receives more rows than it holds.
        """
        return self.compute_seconds > self.link_seconds and self.halo_rows <= self.rows

    def __str__(self) -> str:
        pays = "more shards would pay" if self.more_shards_pay else "more shards would not pay"
        why = ""
        if not self.more_shards_pay:
            slow = self.link_seconds >= self.compute_seconds
            shard = f"a device receives {self.halo_rows:,} rows and holds {self.rows:,}"
            why = f": {'the link takes longer than the products' if slow else shard}"
        return "\n".join([
            f"{self.chip.name}, assumed {self.chip.flops:.3g} FLOP/s · {self.chip.share} and {self.chip.link:.3g} B/s",
            f"  useful FLOPs per device, forward: {self.useful_flops:.3g}, load {self.load:.2f}",
            f"  bytes per device: {self.sent_bytes:,} forward, {self.sent_bytes_backward:,} backward; "
            f"bound {self.bound_bytes:,}, a gather {self.gather_bytes:,}",
            f"  forward and backward: {self.compute_seconds * 1e3:.3g} ms of products, "
            f"{self.link_seconds * 1e3:.3g} ms on the link",
            f"  {pays}{why}",
        ])  # fmt: skip


@no_type_check
def cost(
    plan: ParallelPlan, *, batch: int, heads: int, kv_heads: int, head_dim: int, dtype: Any, chip: Chip = V5E
) -> Cost:
    """What one layer of a model costs one device, under a plan.

    Args:
        plan: as `ls.parallel.plan` makes. Where it depends on data, the worst case is counted.
        batch: batch rows that a device holds.
        heads: query heads that it holds.
        kv_heads: key/value heads.
        head_dim: their size.
        dtype: of queries, keys and values.
        chip: the rates to reckon with: `ls.parallel.V5E`, `V5P`, `H100`, or a `Chip` of your own.

    Example:
        >>> plan = ls.parallel.plan(ls.Causal() & ls.Window(1023, 0), 1 << 20, 256)
        >>> print(ls.parallel.cost(plan, batch=1, heads=16, kv_heads=2, head_dim=128, dtype=jnp.bfloat16))
        TPU v5e, assumed 1.97e+14 FLOP/s · 0.4 and 5e+10 B/s
          useful FLOPs per device, forward: 3.44e+10, load 1.00
          bytes per device: 1,047,552 forward, 1,047,552 backward; bound 1,047,552, a gather 1,069,547,520
          forward and backward: 1.53 ms of products, 0.0419 ms on the link
          more shards would pay
    """
    if not isinstance(plan, ParallelPlan):
        raise TypeError(f"`plan` must be what `ls.parallel.plan` makes, got {type(plan).__name__}.")
    if not isinstance(chip, Chip):
        raise TypeError(f"`chip` must be a Chip, such as `ls.parallel.V5E`, got {chip!r}.")
    for name, value in dict(batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim).items():
        check_static_size(name, value, 1)
    sizes = Sizes(batch, heads, kv_heads, head_dim, head_dim, np.dtype(dtype), plan.shards)
    bytes_of = traffic(plan, sizes)
    # Global queries are everybody's work: the plan's load leaves them out.
    busiest = load(_by_tiles(plan)) if plan.load is None else plan.load
    pairs = _pairs(plan) * busiest / plan.shards
    return Cost(
        chip,
        useful_flops=4.0 * head_dim * heads * batch * pairs,
        sent_bytes=bytes_of.forward,
        sent_bytes_backward=bytes_of.backward,
        bound_bytes=bytes_of.bound,
        gather_bytes=bytes_of.gather,
        rows=plan.rows,
        halo_rows=sum(step.rows for step in plan.halo),
        load=busiest,
    )


def _pairs(plan: ParallelPlan) -> float:
    """Allowed pairs of a batch row and head; by tiles where they cannot be counted."""
    q, kv = two_sides(plan.length, plan.length, xp=np)
    exact = count_by_query(plan.mask, q, kv) if plan.mask.heads == 1 else None
    return float(_by_tiles(plan).sum() if exact is None else exact)


def _by_tiles(plan: ParallelPlan) -> np.ndarray:
    return pairs_of(plan.mask, plan.length, plan.shards, plan.order)
