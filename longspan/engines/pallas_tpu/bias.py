"""The bias in the kernels: arrays are streamed tile by tile, and `Bias` objects are computed in the tile.

A biased call has one query head per grid step, because a bias may differ between heads. The kernel over keys sums the
gradient of every term.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.biases import Bias, terms
from longspan.engines.door import ENTRIES, PAIRS, Answer
from longspan.engines.pallas_tpu.bias_by_distance import DistanceTerm
from longspan.engines.pallas_tpu.bias_by_rule import RuleTerm
from longspan.engines.pallas_tpu.gradient_sums import GradientSum, SumByKey, SumByPair, SumByQuery
from longspan.engines.pallas_tpu.operands import Operands
from longspan.engines.pallas_tpu.plan import TpuPlan
from longspan.layout import BlockLayout
from longspan.masks.sides import KEYS, QUERIES


class KernelBias:
    """The terms of a bias as a kernel computes them. `answers` are the arrays it loads, after those of the mask."""

    def __init__(self, bias: Any, plan: TpuPlan, layout: BlockLayout, first_place: int) -> None:
        self.answers: list[Answer] = []
        self.terms: list[Any] = []
        for n, term in enumerate(terms(bias)):
            place, name = first_place + len(self.answers), f"bias {n}"
            if not isinstance(term, Bias):
                made: Any = ArrayTerm.of(term, plan, place, name)
            elif term.by_distance() is not None:
                made = DistanceTerm.of(term, layout, place, name)
            else:
                made = RuleTerm.of(term, plan, layout, place, name)
            self.terms.append(made)
            self.answers += made.answers

    def add_to(self, operands: Operands) -> None:
        """Adds the arrays of terms that are not answers."""
        for term in self.terms:
            term.add_to(operands)

    def tile(self, walk: Any, j: Any, slot: Any) -> jax.Array:
        """The sum of all terms for a visit, in float32 and in the kernel's orientation."""
        total = self.terms[0].tile(walk, j, slot)
        for term in self.terms[1:]:
            total = total + term.tile(walk, j, slot)
        return jnp.broadcast_to(total, (walk.operands.tile, walk.operands.other_tile))

    def sums(self) -> list[GradientSum]:
        """The sums that the kernel over keys needs for the gradients of all terms."""
        return [each for term in self.terms for each in term.sums()]

    def add_gradients(self, walk: Any, j: Any, slot: Any, dscores: jax.Array) -> None:
        """Adds the gradients [kv_tile, q_tile] of a visit's scores to the sums of every term."""
        for term in self.terms:
            term.add_gradient(walk, j, slot, dscores)

    def gradients(self, plan: TpuPlan, results: dict[str, Any]) -> tuple[Any, ...] | None:
        """The gradient of every term, from the results of the kernel; None without a bias."""
        if not self.terms:
            return None
        return tuple(term.gradient(plan, results) for term in self.terms)

    def adds_within_a_head(self, plan: TpuPlan) -> bool:
        """Whether each sum in HBM belongs to one batch row and head, so that several cores may compute them."""
        pairs = [each for each in self.sums() if isinstance(each, SumByPair)]
        return all((each.rows, each.heads) == (plan.B, plan.N) for each in pairs)


@dataclass(frozen=True)
class ArrayTerm:
    """An array [B or 1, N or 1, T or 1, S or 1]. Axes of size 1 are not widened."""

    answers: Sequence[Answer]
    place: int
    sum: GradientSum
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: jax.Array, plan: TpuPlan, place: int, name: str) -> "ArrayTerm":
        """The term of an array that is loaded by pair, by query, or by key."""
        shape = tuple(array.shape)
        if shape[2] > 1 and shape[3] > 1:
            return cls([Answer(PAIRS, 0, array, False)], place, SumByPair(f"d{name}", *shape[:2]), shape)
        if shape[2] > 1:
            answer = Answer(ENTRIES, QUERIES, array[..., 0].astype(np.float32), False)
            return cls([answer], place, SumByQuery(f"d{name}"), shape)
        by_key = jnp.broadcast_to(array[:, :, 0], (*shape[:2], plan.S)).astype(np.float32)
        return cls([Answer(ENTRIES, KEYS, by_key, False)], place, SumByKey(f"d{name}"), shape)

    def add_to(self, operands: Operands) -> None:
        pass

    def tile(self, walk: Any, j: Any, slot: Any) -> jax.Array:
        return walk.load(j, slot, self.place).astype(np.float32)

    def sums(self) -> list[GradientSum]:
        return [self.sum]

    def add_gradient(self, walk: Any, j: Any, slot: Any, dscores: jax.Array) -> None:
        self.sum.add(walk, slot, dscores)

    def gradient(self, plan: TpuPlan, results: dict[str, Any]) -> jax.Array:
        found = self.sum.result(plan, results)
        if isinstance(self.sum, SumByQuery):
            found = found[..., None]
        elif isinstance(self.sum, SumByKey):
            found = found[:, :, None]
        repeated = [axis for axis, (size, here) in enumerate(zip(self.shape, found.shape, strict=True)) if size != here]
        return found.sum(tuple(repeated), keepdims=True)
