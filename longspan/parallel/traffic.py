"""The bytes of a plan: what each step sends, for a call of some sizes.

Counted as ring algorithms send: of a collective whose result has R bytes on g devices, a permute takes R, an
all-gather and an all-to-all R·(g − 1)/g, an all-reduce 2·R·(g − 1)/g, a reduce-scatter R·(g − 1).
"""

from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from longspan.array_types import statistics_dtype
from longspan.parallel.arrays import gathers
from longspan.parallel.plan import ParallelPlan, Step, hops_home


class Sizes(NamedTuple):
    """What one device holds of a call."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: Any
    devices: int  # of the whole mesh
    arrays: tuple[tuple[int, int], ...] = ()  # of the mask, by token: (entries per token, bytes of one)

    def row(self, itemsize: int) -> int:
        """One token's k and v, of every batch row."""
        return self.batch * self.kv_heads * (self.head_dim + self.v_head_dim) * itemsize

    @property
    def item(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def wide(self) -> int:
        """Of what is summed."""
        return np.dtype(statistics_dtype(self.dtype)).itemsize


class Traffic(NamedTuple):
    """Bytes per device; where they depend on data, the most that may come."""

    # Exact, for one step may be several collectives, or XLA join those of several steps: only sums are rounded.
    steps: tuple[tuple[Step, Fraction, Fraction], ...]  # forward, backward
    agreement: Fraction  # forward: on how far a ring goes, and whether global tokens are too many
    arrays: Fraction  # forward: ids, flags and positions of the tokens that come
    bound: int
    gather: int

    @property
    def forward(self) -> int:
        return int(self._forward)

    @property
    def backward(self) -> int:
        """What both passes send, as a whole number, without the forward pass."""
        return int(self._forward + sum(step[2] for step in self.steps)) - self.forward

    @property
    def _forward(self) -> Fraction:
        return sum((step[1] for step in self.steps), self.agreement + self.arrays)


def traffic(plan: ParallelPlan, sizes: Sizes) -> Traffic:
    """The bytes that each step of a plan sends."""
    steps = tuple((step, *_bytes(plan, sizes, step)) for step in plan.steps)
    agreed = _all_reduce(8 * plan.data + 4 * (plan.fallback is not None), sizes.devices)
    row = sizes.row(sizes.item)
    return Traffic(
        steps,
        agreed,
        sum((count * _of_arrays(plan, itemsize) for count, itemsize in sizes.arrays), Fraction()),
        plan.bound_rows * row,
        plan.gather_rows * row,
    )


def _of_arrays(plan: ParallelPlan, itemsize: int) -> Fraction:
    """What it takes that every device has an array's entries of the tokens that come to it."""
    if gathers(plan):
        return Fraction(plan.gather_rows * itemsize)
    tokens = len({*plan.columns, *plan.queries}) * (plan.shards > 1)
    summed = max(itemsize, 4) if itemsize == 1 else itemsize  # bools as ints
    return sum(step.rows for step in plan.halo) * itemsize + _all_reduce(tokens * summed, plan.shards)


def _all_reduce(result: int, devices: int) -> Fraction:
    return Fraction(2 * result * (devices - 1), devices)


def _bytes(plan: ParallelPlan, sizes: Sizes, step: Step) -> tuple[Fraction, Fraction]:
    """(forward, backward) of a step."""
    row, wide = sizes.row(sizes.item), sizes.row(sizes.wide)
    if step.kind in ("permute", "exchange"):
        return Fraction(step.rows * row), Fraction(step.rows * row)
    if step.kind == "ring":
        # Gradients travel as they are summed.
        return Fraction(step.rows * row), Fraction(step.rows * row + hops_home(plan, step) * plan.rows * wide)
    if step.kind == "columns":
        return _all_reduce(step.rows * row, plan.shards), _all_reduce(step.rows * wide, plan.shards)
    number = sizes.batch * step.rows * sizes.heads
    # Out: q, then the weighted sum with the greatest lse and the weights; back: delta and dout, then dq.
    out = number * (sizes.head_dim * sizes.item + (sizes.v_head_dim + 2) * sizes.wide)
    back = number * (sizes.v_head_dim * sizes.item + (sizes.head_dim + 1) * sizes.wide)
    return _all_reduce(out, plan.shards), _all_reduce(back, plan.shards)
