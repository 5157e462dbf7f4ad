"""Biases that are functions of more than the distance (`ScoreBias`): the function itself runs in the kernel.

What needs only the batch row, the head and whole arrays runs outside of the kernel (see `prepared`). Its gradient is
summed in the kernel, and continues outside.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.biases import Bias, combine_floats, partition_floats
from longspan.engines.door import PAIRS, Answer, RecordedValues, record_values
from longspan.engines.pallas_tpu.gradient_sums import GradientSum, SumByHead, SumByKey, SumByPair, SumByQuery
from longspan.engines.pallas_tpu.operands import Operands
from longspan.engines.pallas_tpu.places import LANES
from longspan.engines.pallas_tpu.plan import TpuPlan
from longspan.engines.pallas_tpu.prepared import PreparedRule, loaded_places
from longspan.layout import BlockLayout
from longspan.masks.sides import KEYS, QUERIES


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
        self.prepared[operands.axis].add_to(operands.refs)

    def tile(self, walk: Any, j: Any, slot: Any) -> jax.Array:
        return self._values(walk, j, self._loads(walk, j, slot), self.prepared[walk.operands.axis].values(walk.refs))

    def sums(self) -> list[GradientSum]:
        return [*self._boundary_sums(), *self._answer_sums()]

    def add_gradient(self, walk: Any, j: Any, slot: Any, dscores: jax.Array) -> None:
        floats, others = partition_floats(
            (self.prepared[walk.operands.axis].values(walk.refs), self._loads(walk, j, slot))
        )

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
        recorded = self.record(floats)
        return PreparedRule.of(self.name, recorded.at, recorded.answers, self.plan, self.layout, axis)

    def _values(self, walk: Any, j: Any, loads: list[Any], boundary: list[Any]) -> jax.Array:
        (found,) = self.prepared[walk.operands.axis].split.inside(boundary, *walk.slots(j), *loads)
        if found.ndim == 4:
            return found.reshape(found.shape[2:])
        return found

    def _loads(self, walk: Any, j: Any, slot: Any) -> list[Any]:
        return [walk.load(j, slot, self.place + n) for n in range(len(self.answers))]

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


def _loaded(recorded: RecordedValues) -> list[Answer]:
    """The answers that a kernel loads."""
    return [recorded.answers[place] for place in loaded_places(recorded.answers)]
