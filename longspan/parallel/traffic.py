"""The bytes that each transfer of a plan sends, and the memory of a device, for a call of given sizes.

Collectives are counted as ring algorithms. If the result has R bytes on g devices, a permute sends R bytes, an
all-gather and an all-to-all R·(g − 1)/g, an all-reduce 2·R·(g − 1)/g, a reduce-scatter R·(g − 1).
"""

from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from longspan.array_types import statistics_dtype
from longspan.parallel.arrays import gathers
from longspan.parallel.plan import ParallelPlan, Transfer, gradient_hops


class DeviceSizes(NamedTuple):
    """The sizes of a call's arrays on one device."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: Any
    devices: int  # of the whole mesh
    arrays: tuple[tuple[int, int], ...] = ()  # of the mask, by token: (entries per token, bytes per entry)

    def row(self, itemsize: int) -> int:
        """The bytes of one token's k and v, of all batch rows."""
        return self.batch * self.kv_heads * (self.head_dim + self.v_head_dim) * itemsize

    @property
    def item(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def wide(self) -> int:
        """The bytes of a number in sums of gradients and partial outputs."""
        return np.dtype(statistics_dtype(self.dtype)).itemsize

    @property
    def query(self) -> int:
        """The bytes of a global query on another device: q, and its output with lse and lse residual, all heads."""
        return self.batch * self.heads * (self.head_dim * self.item + (self.v_head_dim + 2) * self.wide)


class Traffic(NamedTuple):
    """Bytes that each device receives; if they depend on the mask's arrays, those of the worst case."""

    # Fractions, because a transfer may be several collectives and XLA may join transfers: only sums are rounded.
    steps: tuple[tuple[Transfer, Fraction, Fraction], ...]  # forward, backward
    agreement: Fraction  # forward: how far a ring goes, and whether the fallback is used
    arrays: Fraction  # forward: ids, flags and positions of the received tokens
    bound: int
    gather: int

    @property
    def forward(self) -> int:
        return int(self._forward)

    @property
    def backward(self) -> int:
        """The rounded bytes of both passes, minus those of the forward pass."""
        return int(self._forward + sum(step[2] for step in self.steps)) - self.forward

    @property
    def _forward(self) -> Fraction:
        return sum((step[1] for step in self.steps), self.agreement + self.arrays)


def traffic(plan: ParallelPlan, sizes: DeviceSizes) -> Traffic:
    """The bytes that each transfer of a plan sends."""
    steps = tuple((step, *_bytes(plan, sizes, step)) for step in plan.steps)
    agreement = _all_reduce(8 * plan.data + 4 * (plan.fallback is not None), sizes.devices)
    row = sizes.row(sizes.item)
    return Traffic(
        steps,
        agreement,
        sum((count * _of_arrays(plan, itemsize) for count, itemsize in sizes.arrays), Fraction()),
        plan.bound_rows * row,
        plan.gather_rows * row,
    )


def shard_bytes(plan: ParallelPlan, sizes: DeviceSizes) -> int:
    """The bytes of a device's q, k, v and out."""
    per_head = (sizes.head_dim + sizes.v_head_dim) * sizes.item
    return plan.rows * sizes.batch * (sizes.heads + sizes.kv_heads) * per_head


def received_bytes(plan: ParallelPlan, sizes: DeviceSizes) -> int:
    """The bytes of the received rows that a device holds at the same time in the forward pass.

    A ring holds two shards: the one it attends to, and the next one, which arrives meanwhile.
    """
    rows = queries = 0
    for step in plan.steps:
        if step.kind == "queries":
            queries += step.rows
        elif step.kind == "ring":
            rows += min(2, step.shift + step.after) * plan.rows
        else:
            rows += step.rows
    return rows * sizes.row(sizes.item) + queries * sizes.query


def _of_arrays(plan: ParallelPlan, itemsize: int) -> Fraction:
    """The bytes by which a device receives an array's entries for the tokens that it receives."""
    if gathers(plan):
        return Fraction(plan.gather_rows * itemsize)
    tokens = len({*plan.columns, *plan.queries}) * (plan.shards > 1)
    summed = max(itemsize, 4) if itemsize == 1 else itemsize  # bools are summed as int32
    return sum(step.rows for step in plan.halo) * itemsize + _all_reduce(tokens * summed, plan.shards)


def _all_reduce(result: int, devices: int) -> Fraction:
    return Fraction(2 * result * (devices - 1), devices)


def _bytes(plan: ParallelPlan, sizes: DeviceSizes, step: Transfer) -> tuple[Fraction, Fraction]:
    """(forward, backward) of a transfer."""
    row, wide = sizes.row(sizes.item), sizes.row(sizes.wide)
    if step.kind in ("permute", "exchange"):
        return Fraction(step.rows * row), Fraction(step.rows * row)
    if step.kind == "ring":
        # Gradients are sent in the dtype of their sums.
        return Fraction(step.rows * row), Fraction(step.rows * row + gradient_hops(plan, step) * plan.rows * wide)
    if step.kind == "columns":
        return _all_reduce(step.rows * row, plan.shards), _all_reduce(step.rows * wide, plan.shards)
    # Queries. Forward: q, then the weighted sums, the largest lse and the sum of weights. Backward: delta and dout,
    # then dq.
    per_query = sizes.v_head_dim * sizes.item + (sizes.head_dim + 1) * sizes.wide
    backward = step.rows * sizes.batch * sizes.heads * per_query
    return _all_reduce(step.rows * sizes.query, plan.shards), _all_reduce(backward, plan.shards)
