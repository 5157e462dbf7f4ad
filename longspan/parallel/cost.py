"""`cost`: estimates of the compute and communication time of a layer's attention, from assumed rates of a chip."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longspan.array_types import no_type_check
from longspan.checks import check_static_size
from longspan.masks.sides import two_sides
from longspan.pairs import count_by_query
from longspan.parallel.balance import load, pairs_of
from longspan.parallel.plan import ParallelPlan, plan_communication
from longspan.parallel.traffic import DeviceSizes, received_bytes, shard_bytes, traffic
from longspan.render.html import page, table_html
from longspan.work import short


@dataclass(frozen=True)
class Chip:
    """Assumed rates of a chip: those of its data sheet, and the share of its FLOP/s that attention reaches.

    Example:
        >>> ls.parallel.Chip("mine", flops=1e14, link=1e11).share
        0.4
    """

    name: str
    flops: float  # per second, bfloat16
    link: float  # bytes per second that it receives from one neighbour
    share: float = 0.4  # of `flops` that attention reaches


V5E = Chip("TPU v5e", flops=197e12, link=50e9)
V5P = Chip("TPU v5p", flops=459e12, link=100e9)
H100 = Chip("H100 with NVLink", flops=989e12, link=450e9)
BACKWARD_FLOPS = 2.5  # of the backward pass, relative to the forward pass


@dataclass(frozen=True)
class Cost:
    """The cost of one layer's attention on one device, printed as a table.

    Bytes are exact, without the arrays of the mask (ids, flags) that are sent with the keys. If the plan depends on the
    mask's arrays, bytes and FLOPs are those of the worst case, and the load is that of the mask without its arrays.
    Times are estimates from the chip's assumed rates. The memory is that of q, k, v, out and received rows in the
    forward pass, without lse, gradients and temporaries.

    Example:
        >>> plan = ls.parallel.plan(ls.Causal() & ls.Window(1023, 0), 1 << 20, 256)
        >>> cost = ls.parallel.cost(plan, batch=1, heads=16, kv_heads=2, head_dim=128, dtype=jnp.bfloat16)
        >>> cost.sent_bytes, cost.more_shards_pay
        (1047552, True)
    """

    chip: Chip
    plan: ParallelPlan = field(repr=False)
    useful_flops: float  # of the busiest device, forward
    sent_bytes: int  # that each device receives, forward
    sent_bytes_backward: int
    bound_bytes: int  # a lower bound: those that the device with the most missing keys needs, forward
    gather_bytes: int  # those of an all-gather, forward
    rows: int  # tokens that a device holds
    halo_rows: int  # rows that it receives from its neighbours, and holds at the same time
    load: float  # the pairs of the busiest device divided by the mean
    shards: int  # devices that share the sequence
    shard_bytes: int  # memory of a device's q, k, v and out
    received_bytes: int  # memory of the received rows that a device holds at the same time
    doubled: "Cost | None" = None  # the same for twice the shards; None: the plan has no estimate for them

    @property
    def compute_seconds(self) -> float:
        """Forward and backward, from the chip's FLOP/s."""
        return self.useful_flops * (1 + BACKWARD_FLOPS) / (self.chip.flops * self.chip.share)

    @property
    def link_seconds(self) -> float:
        """Forward and backward, from the rate of one link."""
        return (self.sent_bytes + self.sent_bytes_backward) / self.chip.link

    @property
    def more_shards_pay(self) -> bool:
        """A rule of thumb: compute takes longer than communication, and no device receives more rows than it holds.

        With more shards compute shrinks, but communication does not, and becomes the longer of the two. A shard that is
        smaller than the window receives more rows than it holds. `doubled` has the numbers for twice the shards.
        """
        return self.compute_seconds > self.link_seconds and self.halo_rows <= self.rows

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _repr_html_(self) -> str:
        return page(table_html(self._rows()))

    def _rows(self) -> list[tuple[str, str]]:
        flops, link = short(self.chip.flops, "FLOP/s", 1000), short(self.chip.link, "B/s", 1000)
        sent, backward = short(self.sent_bytes, "B", 1024), short(self.sent_bytes_backward, "B", 1024)
        bound, gather = short(self.bound_bytes, "B", 1024), short(self.gather_bytes, "B", 1024)
        chip = f"{self.chip.name}: {flops}, of which attention reaches {self.chip.share:.0%}; link {link}"
        load = f"load max/mean {self.load:.2f}"
        useful = f"{short(self.useful_flops, 'FLOP', 1000)} forward, on the busiest device"
        if self.plan.pairs is None:
            load = f"{load} if the mask's arrays allow all pairs"
        if self.plan.pairs is None or any(self.plan.by_flags):
            useful = f"at most {useful}"
        elif self.plan.columns or self.plan.queries:  # the load leaves out the pairs of global tokens
            useful = f"about {useful}"
        at_most = "at most " * self.plan.data
        required = "in the worst case, " * self.plan.bound_is_worst_case + f"the mask requires {bound} forward"
        return [
            ("assumed chip", chip),
            ("devices", f"{self.shards:,} share the sequence, {self.rows:,} tokens each; {load}"),
            ("useful FLOPs", useful),
            ("received", f"{at_most}{sent} forward and {backward} backward"),
            ("lower bound", f"{required}; an all-gather sends {gather}"),
            ("memory", self._memory()),
            ("estimated time", self._time()),
            ("twice the devices", self._twice()),
            ("rule of thumb", self._rule_of_thumb()),
        ]

    def _memory(self) -> str:
        own, received = short(self.shard_bytes, "B", 1024), short(self.received_bytes, "B", 1024)
        return f"{own} of q, k, v and out, {received} of received rows"

    def _time(self) -> str:
        compute, link = _duration(self.compute_seconds), _duration(self.link_seconds)
        return f"{compute} of compute and {link} of communication, forward and backward"

    def _twice(self) -> str:
        if self.doubled is None:
            return f"no estimate: {_why_not_doubled(self.plan) or 'these are the costs for twice the devices'}"
        compute, link = _duration(self.doubled.compute_seconds), _duration(self.doubled.link_seconds)
        memory = short(self.doubled.shard_bytes + self.doubled.received_bytes, "B", 1024)
        return f"{compute} of compute and {link} of communication, {memory} of memory each"

    def _rule_of_thumb(self) -> str:
        if self.more_shards_pay:
            return "more shards help: compute takes longer than communication"
        if self.link_seconds >= self.compute_seconds:
            return "more shards do not help: communication takes at least as long as compute"
        return f"more shards do not help: a device receives {self.halo_rows:,} rows and holds {self.rows:,}"


def _duration(seconds: float) -> str:
    """Three digits with a unit.

    Example:
        >>> _duration(67.1), _duration(0.00153), _duration(4.19e-5), _duration(0.0)
        ('67.1 s', '1.53 ms', '0.0419 ms', '0 ms')
    """
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"


@no_type_check
def cost(
    plan: ParallelPlan, *, batch: int, heads: int, kv_heads: int, head_dim: int, dtype: Any, chip: Chip = V5E
) -> Cost:
    """The cost of one layer's attention on one device, under a plan.

    Args:
        plan: a plan from `ls.parallel.plan`. If it depends on the mask's arrays, the worst case is counted.
        batch: the number of batch rows on a device.
        heads: the number of query heads on a device.
        kv_heads: the number of key/value heads on a device.
        head_dim: the head size.
        dtype: the dtype of queries, keys and values.
        chip: the assumed rates: `ls.parallel.V5E`, `V5P`, `H100`, or your own `Chip`.

    Example:
        >>> plan = ls.parallel.plan(ls.Causal() & ls.Window(1023, 0), 1 << 20, 256)
        >>> print(ls.parallel.cost(plan, batch=1, heads=16, kv_heads=2, head_dim=128, dtype=jnp.bfloat16))
        assumed chip       TPU v5e: 197 TFLOP/s, of which attention reaches 40%; link 50 GB/s
        devices            256 share the sequence, 4,096 tokens each; load max/mean 1.00
        useful FLOPs       34.36 GFLOP forward, on the busiest device
        received           1023 KiB forward and 1023 KiB backward
        lower bound        the mask requires 1023 KiB forward; an all-gather sends 1020 MiB
        memory             36 MiB of q, k, v and out, 1023 KiB of received rows
        estimated time     1.53 ms of compute and 0.0419 ms of communication, forward and backward
        twice the devices  0.763 ms of compute and 0.0419 ms of communication, 19 MiB of memory each
        rule of thumb      more shards help: compute takes longer than communication
    """
    if not isinstance(plan, ParallelPlan):
        raise TypeError(f"`plan` must be a ParallelPlan from `ls.parallel.plan`, got {type(plan).__name__}.")
    if not isinstance(chip, Chip):
        raise TypeError(f"`chip` must be a Chip, such as `ls.parallel.V5E`, got {chip!r}.")
    for name, value in dict(batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim).items():
        check_static_size(name, value, 1)
    doubled = _doubled_plan(plan)
    twice = None
    if doubled is not None:
        twice = _cost(doubled, batch, heads, kv_heads, head_dim, dtype, chip, None)
    return _cost(plan, batch, heads, kv_heads, head_dim, dtype, chip, twice)


def _cost(
    plan: ParallelPlan, batch: int, heads: int, kv_heads: int, head_dim: int, dtype: Any, chip: Chip, twice: Cost | None
) -> Cost:
    sizes = DeviceSizes(batch, heads, kv_heads, head_dim, head_dim, np.dtype(dtype), plan.shards)
    bytes_of = traffic(plan, sizes)
    # The plan's load does not count global queries, whose work is on all devices.
    busiest = load(_pairs_by_tiles(plan)) if plan.load is None else plan.load
    pairs = _pairs(plan) * busiest / plan.shards
    return Cost(
        chip,
        plan,
        useful_flops=4.0 * head_dim * heads * batch * pairs,
        sent_bytes=bytes_of.forward,
        sent_bytes_backward=bytes_of.backward,
        bound_bytes=bytes_of.bound,
        gather_bytes=bytes_of.gather,
        rows=plan.rows,
        halo_rows=sum(step.rows for step in plan.halo),
        load=busiest,
        shards=plan.shards,
        shard_bytes=shard_bytes(plan, sizes),
        received_bytes=received_bytes(plan, sizes),
        doubled=twice,
    )


def _doubled_plan(plan: ParallelPlan) -> ParallelPlan | None:
    """The plan for twice the shards; None if there is none."""
    if _why_not_doubled(plan) is not None:
        return None
    kv_heads = None if plan.exchange is None else plan.exchange.heads
    return plan_communication(plan.mask, plan.length, 2 * plan.shards, plan.order, kv_heads=kv_heads)


def _why_not_doubled(plan: ParallelPlan) -> str | None:
    """The reason why there is no plan for twice the shards; None if there is one."""
    if 2 * plan.shards > plan.length:
        return "twice the devices would be more devices than tokens"
    if any(plan.by_flags) or (plan.exchange is not None and plan.exchange.data):
        return "the plan for twice the devices needs the mask's flags or tables"  # which a plan does not keep
    return None


def _pairs(plan: ParallelPlan) -> float:
    """The allowed pairs per batch row and head; counted by tiles where there is no exact count."""
    if plan.pairs is not None and any(plan.by_flags):
        # Rules with arrays allow everything in the plan's mask. Flags name at most `capacity` tokens.
        keys = len(plan.columns) + plan.capacity * plan.by_flags[0]
        queries = len(plan.queries) + plan.capacity * plan.by_flags[1]
        return float(sum(plan.pairs) + plan.length * (keys + queries))
    q, kv = two_sides(plan.length, plan.length, xp=np)
    exact = count_by_query(plan.mask, q, kv) if plan.mask.heads == 1 else None
    if exact is None:
        return float(_pairs_by_tiles(plan).sum())
    return float(exact)


def _pairs_by_tiles(plan: ParallelPlan) -> np.ndarray:
    return pairs_of(plan.mask, plan.length, plan.shards, plan.order)
