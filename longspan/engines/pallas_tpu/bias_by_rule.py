"""Biases that are functions of more than the distance (`ScoreBias`): the function itself runs in the kernel.

The parts of the function that need only the batch row, the head and whole arrays run outside of the kernel, once for
each row and head (see `hoist`): `slopes[h]` becomes a number of scalar memory. The gradient of these numbers is summed
in the kernel, and continues outside.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from longspan.biases import Bias, combine_floats, partition_floats
from longspan.engines.door import NUMBER, PAIRS, TABLE, Answer, RecordedValues, record_values
from longspan.engines.pallas_tpu.gradient_sums import GradientSum, SumByHead, SumByKey, SumByPair, SumByQuery
from longspan.engines.pallas_tpu.hoist import SplitFunction
from longspan.engines.pallas_tpu.operands import Operands
from longspan.engines.pallas_tpu.places import LANES, place_in
from longspan.engines.pallas_tpu.plan import TpuPlan
from longspan.layout import BlockLayout
from longspan.masks.sides import KEYS, QUERIES


@dataclass(frozen=True)
class PreparedRule:
    """A bias's function, split for the kernels of one orientation."""

    split: SplitFunction
    boundary: list[Any]  # the values that pass to the kernel: [B or 1, N or 1, ...] each


@dataclass(frozen=True)
class RuleTerm:
    """A bias that a kernel computes by its own function."""

    answers: Sequence[Answer]  # those by slot and by pair, which a kernel loads
    place: int  # of the first of them
    name: str
    plan: TpuPlan
    layout: BlockLayout
    floats: Any  # the float arrays of the bias
    record: Callable[[Any], RecordedValues]  # from the float arrays
    prepared: dict[int, PreparedRule]  # by orientation; made outside of the kernels

    @classmethod
    def of(cls, bias: Bias, plan: TpuPlan, layout: BlockLayout, place: int, name: str) -> "RuleTerm":
        """The term of a bias that defines `at`."""
        floats, others = partition_floats(bias)

        def record(floats: Any) -> RecordedValues:
            term = combine_floats(floats, others)
            return record_values(layout, plan.B, plan.N, lambda q, kv: term.at(q, kv, np.float32))

        return cls(_loaded(record(floats)), place, name, plan, layout, floats, record, {})

    def add_to(self, operands: Operands) -> None:
        self.prepared[operands.axis] = self._prepare(operands.axis, self.floats)
        for n, array in enumerate(self.prepared[operands.axis].boundary):
            operands.refs.read(f"{self.name} value {n}", *_as_operand(array))

    def tile(self, walk: Any, j: Any, slot: Any) -> jax.Array:
        return self._values(walk, j, self._loads(walk, j, slot), self._read_boundary(walk))

    def sums(self) -> list[GradientSum]:
        return [*self._boundary_sums(), *self._answer_sums()]

    def add_gradient(self, walk: Any, j: Any, slot: Any, dscores: jax.Array) -> None:
        floats, others = partition_floats((self._read_boundary(walk), self._loads(walk, j, slot)))

        def values(floats: Any) -> jax.Array:
            boundary, loads = combine_floats(floats, others)
            return jnp.broadcast_to(self._values(walk, j, loads, boundary), dscores.shape)

        dboundary, dloads = jax.vjp(values, floats)[1](dscores)[0]
        found = [x for x in dboundary if x is not None]
        for each, dvalue in zip(self._boundary_sums(), found, strict=True):
            row = jnp.broadcast_to(dvalue, (1, LANES)) if dvalue.ndim == 0 else dvalue.reshape(1, -1)
            each.add(walk, slot, row)
        for each, dvalue in zip(self._answer_sums(), [x for x in dloads if x is not None], strict=True):
            each.add(walk, slot, dvalue)

    def gradient(self, plan: TpuPlan, results: dict[str, Any]) -> Any:
        def read_by_kernel(floats: Any) -> Any:
            answers = [answer.array for answer in _loaded(self.record(floats))]
            return partition_floats((self._prepare(KEYS, floats).boundary, answers))[0]

        (boundary, answers), pull_back = jax.vjp(read_by_kernel, self.floats)
        sums = iter(self.sums())

        def gradient_of(array: Any) -> Any:
            if array is None:
                return None
            found = next(sums).result(plan, results)
            if array.ndim == 2:  # a scalar for each row and head, repeated along the lanes
                found = found[..., 0]
            elif array.ndim > 3 and found.ndim == 3:
                found = found.reshape(*found.shape[:2], *array.shape[2:])
            sizes = zip(array.shape, found.shape, strict=True)
            shared = [axis for axis, (size, here) in enumerate(sizes) if size != here]
            return found.sum(tuple(shared), keepdims=True).astype(array.dtype)

        return pull_back(([gradient_of(x) for x in boundary], [gradient_of(x) for x in answers]))[0]

    def _prepare(self, axis: int, floats: Any) -> PreparedRule:
        """The split function (batch row, head, known answers, q_index, kv_index, other answers), and its boundary."""
        recorded, layout, plan = self.record(floats), self.layout, self.plan
        known = [answer.array if answer.kind == TABLE else jnp.int32(0) for answer in _known(recorded)]
        index = [jnp.zeros(_shape(plan, axis, side), np.int32) for side in (QUERIES, KEYS)]
        loads = [_example(plan, axis, answer) for answer in _loaded(recorded)]
        evaluate = partial(_evaluate, recorded, len(known))
        split = SplitFunction.of(evaluate, 2 + len(known), jnp.int32(0), jnp.int32(0), *known, *index, *loads)
        rows, heads = jnp.arange(plan.B, dtype=np.int32), jnp.arange(plan.N, dtype=np.int32)
        if layout.rows is not None:
            rows, heads = layout.rows[: plan.B], layout.heads[: plan.N]
        by_row = [0 if answer.kind == NUMBER else None for answer in _known(recorded)]
        known = [
            jnp.broadcast_to(answer.array, (plan.B,)) if answer.kind == NUMBER else answer.array
            for answer in _known(recorded)
        ]
        by_head = jax.vmap(split.outside, (None, 0, *[None] * len(known)))
        found = jax.vmap(by_head, (0, None, *by_row))(rows, heads, *known)
        boundary = []
        for value, array in zip(split.boundary, found, strict=True):
            # An array that passes unchanged is the same for all rows and heads.
            boundary.append(array[:1, :1] if split.is_argument(value) and array.ndim > 2 else array)
        return PreparedRule(split, boundary)

    def _values(self, walk: Any, j: Any, loads: list[Any], boundary: list[Any]) -> jax.Array:
        found = self.prepared[walk.operands.axis].split.inside(boundary, *walk.slots(j), *loads)
        if found.ndim == 4:
            return found.reshape(found.shape[2:])
        return found

    def _loads(self, walk: Any, j: Any, slot: Any) -> list[Any]:
        return [walk.load(j, slot, self.place + n) for n in range(len(self.answers))]

    def _read_boundary(self, walk: Any) -> list[Any]:
        boundary = self.prepared[walk.operands.axis].boundary
        return [_value_in_kernel(walk.refs[f"{self.name} value {n}"], x) for n, x in enumerate(boundary)]

    def _boundary_sums(self) -> list[GradientSum]:
        floats = [x for x in self.prepared[KEYS].boundary if jnp.issubdtype(x.dtype, np.floating)]
        widths = [LANES if x.ndim == 2 else math.prod(x.shape[2:]) for x in floats]
        return [SumByHead(f"d{self.name} value {n}", width) for n, width in enumerate(widths)]

    def _answer_sums(self) -> list[GradientSum]:
        found: list[GradientSum] = []
        for n, (kind, axis, array, _) in enumerate(self.answers):
            name = f"d{self.name} answer {n}"
            if not jnp.issubdtype(array.dtype, np.floating):
                continue
            if kind == PAIRS:
                found.append(SumByPair(name, *array.shape[:2]))
            elif axis == QUERIES:
                found.append(SumByQuery(name))
            else:
                found.append(SumByKey(name))
        return found


def _known(recorded: RecordedValues) -> list[Answer]:
    """The answers that are known outside of the kernel: whole arrays, and numbers of the batch row."""
    return [answer for answer in recorded.answers if answer.kind in (TABLE, NUMBER)]


def _loaded(recorded: RecordedValues) -> list[Answer]:
    """The other answers."""
    return [answer for answer in recorded.answers if answer.kind not in (TABLE, NUMBER)]


def _evaluate(recorded: RecordedValues, known: int, batch: Any, head: Any, *more: Any) -> Any:
    """The values of a bias, from the answers that are known, the indices of slots, and the answers that are loaded."""
    answers, (q_index, kv_index), loads = iter(more[:known]), more[known : known + 2], iter(more[known + 2 :])
    found = [next(answers if answer.kind in (TABLE, NUMBER) else loads) for answer in recorded.answers]
    return recorded.at(lambda place: found[place], batch, head, q_index, kv_index)


def _shape(plan: TpuPlan, axis: int, side: int) -> tuple[int, int]:
    """The shape of numbers by slot of one side, in a kernel whose rows are tiles of `axis`."""
    size = plan.q_tile if side == QUERIES else plan.kv_tile
    return (size, 1) if side == axis else (1, size)


def _example(plan: TpuPlan, axis: int, answer: Answer) -> jax.Array:
    """A value like the one that a kernel loads."""
    dtype = np.float32 if jnp.issubdtype(answer.array.dtype, np.floating) else np.int32
    if answer.kind == PAIRS:
        return jnp.zeros((plan.q_tile, plan.kv_tile) if axis == QUERIES else (plan.kv_tile, plan.q_tile), dtype)
    return jnp.zeros(_shape(plan, axis, answer.axis), dtype)


def _as_operand(array: jax.Array) -> tuple[jax.Array, pl.BlockSpec]:
    """A value [B or 1, N or 1, ...] as an operand: a scalar in scalar memory, an array in vector memory."""
    rows, heads, *shape = array.shape
    if array.dtype == bool:
        array = array.astype(np.int32)
    if not shape:
        block = pl.BlockSpec((1, 1, 1, 1), lambda b, h, i: (b, h, 0, 0), memory_space=pltpu.SMEM)
        return array[..., None, None], block
    if len(shape) == 1:
        array = array[:, :, None]
    block = None, None, *array.shape[2:]
    zeros = (0,) * (array.ndim - 2)
    return array, pl.BlockSpec(block, lambda b, h, i: (place_in(rows, b), place_in(heads, h), *zeros))


def _value_in_kernel(ref: Any, of: jax.Array) -> Any:
    """What a kernel reads of a value [B or 1, N or 1, ...]."""
    if of.ndim == 2:
        value = ref[0, 0, 0, 0]
    else:
        value = ref[...].reshape(of.shape[2:])
    return value != 0 if of.dtype == bool else value
