"""The bias in the kernels: arrays are streamed by tile, and `Bias` objects are computed in the tile.

A biased call has one query head per grid step, because a bias may differ between heads. Gradients are summed in the
kernel over keys: of an array by tile, row or column, of slopes and tables in one block per head.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from longspan.biases import Bias, terms
from longspan.engines.door import ENTRIES, PAIRS, Answer
from longspan.engines.pallas_tpu.plan import TpuPlan
from longspan.engines.pallas_tpu.places import Visit, place_in, tile_slice
from longspan.engines.request import Request
from longspan.layout import BlockLayout
from longspan.masks.sides import KEYS, QUERIES


@dataclass
class KernelBias:
    """The terms of a bias, and the answers that a kernel loads for them, counted after those of the mask."""

    answers: list[Answer] = field(default_factory=list)
    terms: list[Any] = field(default_factory=list)

    @classmethod
    def of_request(cls, request: Request, layout: BlockLayout, first_place: int) -> "KernelBias":
        """The bias of a request; `first_place` is the number of the mask's answers."""
        bias = cls()
        for term in terms(request.bias):
            place = first_place + len(bias.answers)
            if isinstance(term, Bias):
                raise NotImplementedError(repr(term))
            answer = _array_answer(term, request.dims["S"])
            bias.answers.append(answer)
            bias.terms.append(ArrayTerm(place, answer.kind, answer.axis, tuple(term.shape)))
        return bias

    def of(self, walk: Any, j: Any, slot: Any) -> jax.Array:
        """The sum of all terms for a visit, in float32."""
        total = self.terms[0].of(walk, j, slot)
        for term in self.terms[1:]:
            total = total + term.of(walk, j, slot)
        return jnp.broadcast_to(total, (walk.operands.tile, walk.operands.other_tile))

    def add_gradients(self, operands: Any) -> None:
        """Adds the results and buffers of a kernel over keys that computes the gradient of every term."""
        for n, term in enumerate(self.terms):
            term.add_gradient(operands, f"dbias {n}")

    def sums_stay_in_a_head(self, plan: TpuPlan) -> bool:
        """Whether no two heads or batch rows add to the same sums in HBM, so that cores may share them."""
        return all(term.sums_stay_in_a_head(plan) for term in self.terms)

    def begin_row(self, walk: Any) -> None:
        for n, term in enumerate(self.terms):
            term.begin_row(walk, f"dbias {n}")

    def add_visit(self, walk: Any, j: Any, slot: Any, dscores: jax.Array) -> None:
        """Adds one visit to the gradient of every term; `dscores` is [kv_tile, q_tile]."""
        for n, term in enumerate(self.terms):
            term.add_visit(walk, j, slot, dscores, f"dbias {n}")

    def end_row(self, walk: Any) -> None:
        for n, term in enumerate(self.terms):
            term.end_row(walk, f"dbias {n}")

    def gradients(self, plan: TpuPlan, results: dict[str, Any]) -> Any:
        """The gradient of every term, from the results of the kernel; None without a bias."""
        if not self.terms:
            return None
        return tuple(term.gradient(plan, results, f"dbias {n}") for n, term in enumerate(self.terms))


@dataclass(frozen=True)
class ArrayTerm:
    """An array [B or 1, N or 1, T or 1, S or 1]."""

    place: int
    kind: str
    axis: int
    shape: tuple[int, ...]

    def of(self, walk: Any, j: Any, slot: Any) -> jax.Array:
        return walk.load(j, slot, self.place).astype(np.float32)

    def sums_stay_in_a_head(self, plan: TpuPlan) -> bool:
        return self.kind != PAIRS or self.shape[:2] == (plan.B, plan.N)

    def add_gradient(self, operands: Any, name: str) -> None:
        plan = operands.plan
        if self.kind == PAIRS:
            shape = *self.shape[:2], plan.q_tiles * plan.q_tile, plan.kv_tiles * plan.kv_tile
            operands.add_sum(name, shape, partial(_pairs_of_visit, plan), (plan.q_tile, plan.kv_tile))
        elif self.axis == QUERIES:
            shape = plan.B, plan.heads, plan.q_tiles, 1, plan.q_tile
            operands.add_sum(name, shape, _queries_of_visit, (1, plan.q_tile))
        else:
            block = pl.BlockSpec((None, None, None, 1, plan.kv_tile), lambda b, h, i: (b, h, i, 0, 0))
            operands.refs.write(name, (plan.B, plan.heads, plan.kv_tiles, 1, plan.kv_tile), np.float32, block)
            operands.refs.keep(f"{name} column", pltpu.VMEM((plan.kv_tile, 128), np.float32))

    def begin_row(self, walk: Any, name: str) -> None:
        if self.kind == ENTRIES and self.axis == KEYS:
            walk.refs[f"{name} column"][...] = jnp.zeros_like(walk.refs[f"{name} column"])

    def add_visit(self, walk: Any, j: Any, slot: Any, dscores: jax.Array, name: str) -> None:
        if self.kind == PAIRS:
            walk.buffer(name, slot)[...] += dscores.T
        elif self.axis == QUERIES:
            walk.buffer(name, slot)[...] += jnp.sum(dscores, axis=0, keepdims=True)
        else:
            walk.refs[f"{name} column"][...] += jnp.sum(dscores, axis=1, keepdims=True)

    def end_row(self, walk: Any, name: str) -> None:
        if self.kind == ENTRIES and self.axis == KEYS:
            walk.refs[name][...] = walk.refs[f"{name} column"][...].T[:1]

    def gradient(self, plan: TpuPlan, results: dict[str, Any], name: str) -> jax.Array:
        if self.kind == PAIRS:
            return results[f"{name} sum"][:, :, : plan.T, : plan.S]
        if self.axis == QUERIES:
            found = results[f"{name} sum"].reshape(plan.B, plan.N, -1, 1)[:, :, : plan.T]
        else:
            found = results[name].reshape(plan.B, plan.N, 1, -1)[..., : plan.S]
        repeated = [axis for axis, (size, here) in enumerate(zip(self.shape, found.shape)) if size != here]
        return found.sum(tuple(repeated), keepdims=True)


def _pairs_of_visit(plan: TpuPlan, ref: Any, at: Visit) -> Any:
    plane = place_in(ref.shape[0], at.b), place_in(ref.shape[1], at.h)
    return ref.at[*plane, tile_slice(at.j, plan.q_tile), tile_slice(at.i, plan.kv_tile)]


def _queries_of_visit(ref: Any, at: Visit) -> Any:
    return ref.at[at.b, at.h, at.j]


def _array_answer(array: jax.Array, kv_len: int) -> Answer:
    """An array of a bias as a kernel loads it: by pair, by key or by query. Broadcast axes stay of size 1."""
    q_len = array.shape[2]
    if q_len > 1 and array.shape[3] > 1:
        return Answer(PAIRS, 0, array, False)
    if q_len > 1:
        return Answer(ENTRIES, QUERIES, array[..., 0].astype(np.float32), False)
    by_key = jnp.broadcast_to(array[:, :, 0], (*array.shape[:2], kv_len))
    return Answer(ENTRIES, KEYS, by_key.astype(np.float32), False)
