"""Sums over visits in which the kernel over keys collects the gradient of a bias: by key, query, pair or head."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from longspan.engines.pallas_tpu.operands import Operands
from longspan.engines.pallas_tpu.places import LANES, Visit, place_in, tile_slice
from longspan.engines.pallas_tpu.plan import TpuPlan
from longspan.engines.pallas_tpu.refs import vmem


class SumByKey(NamedTuple):
    """One number per key [B, N, S]: a row of the grid computes those of its own key tile."""

    name: str

    def add_to(self, operands: Operands) -> None:
        plan = operands.plan
        block = pl.BlockSpec((None, None, None, 1, plan.kv_tile), lambda b, h, i: (b, h, i, 0, 0))
        operands.refs.write(self.name, (plan.B, plan.heads, plan.kv_tiles, 1, plan.kv_tile), np.float32, block)
        operands.refs.keep(f"{self.name} column", vmem((plan.kv_tile, LANES)))

    def begin_row(self, walk: Any) -> None:
        walk.refs[f"{self.name} column"][...] = jnp.zeros_like(walk.refs[f"{self.name} column"])

    def add(self, walk: Any, slot: Any, dvalue: jax.Array) -> None:
        """Adds [kv_tile, q_tile], or its sum [kv_tile, 1]."""
        walk.refs[f"{self.name} column"][...] += jnp.sum(dvalue, axis=1, keepdims=True)

    def end_row(self, walk: Any) -> None:
        walk.refs[self.name][...] = walk.refs[f"{self.name} column"][...].T[:1]

    def result(self, plan: TpuPlan, results: dict[str, Any]) -> jax.Array:
        return results[self.name].reshape(plan.B, plan.N, -1)[:, :, : plan.S]


class SumByQuery(NamedTuple):
    """One number per query [B, N, T], in HBM: each visit adds to those of its query tile."""

    name: str

    def add_to(self, operands: Operands) -> None:
        plan = operands.plan
        operands.add_sum(self.name, (plan.B, plan.heads, plan.q_tiles, 1, plan.q_tile), _of_tile, (1, plan.q_tile))

    def begin_row(self, walk: Any) -> None:
        pass

    def add(self, walk: Any, slot: Any, dvalue: jax.Array) -> None:
        """Adds [kv_tile, q_tile], or its sum [1, q_tile]."""
        walk.buffer(self.name, slot)[...] += jnp.sum(dvalue, axis=0, keepdims=True)

    def end_row(self, walk: Any) -> None:
        pass

    def result(self, plan: TpuPlan, results: dict[str, Any]) -> jax.Array:
        return results[f"{self.name} sum"].reshape(plan.B, plan.N, -1)[:, :, : plan.T]


class SumByPair(NamedTuple):
    """One number per pair [B or 1, N or 1, T, S], in HBM: each visit adds to those of its tile."""

    name: str
    rows: int
    heads: int

    def add_to(self, operands: Operands) -> None:
        plan = operands.plan
        shape = self.rows, self.heads, plan.q_tiles * plan.q_tile, plan.kv_tiles * plan.kv_tile
        operands.add_sum(self.name, shape, partial(_of_pair, plan), (plan.q_tile, plan.kv_tile))

    def begin_row(self, walk: Any) -> None:
        pass

    def add(self, walk: Any, slot: Any, dvalue: jax.Array) -> None:
        """Adds [kv_tile, q_tile]."""
        walk.buffer(self.name, slot)[...] += dvalue.T

    def end_row(self, walk: Any) -> None:
        pass

    def result(self, plan: TpuPlan, results: dict[str, Any]) -> jax.Array:
        return results[f"{self.name} sum"][:, :, : plan.T, : plan.S]


class SumByHead(NamedTuple):
    """An array [width] for each batch row and head [B, N, width], which stays on the chip for all rows of the grid."""

    name: str
    width: int

    def add_to(self, operands: Operands) -> None:
        plan = operands.plan
        block = pl.BlockSpec((None, None, 1, self.width), lambda b, h, i: (b, h, 0, 0))
        operands.refs.write(self.name, (plan.B, plan.heads, 1, self.width), np.float32, block)

    def begin_row(self, walk: Any) -> None:
        @pl.when(walk.i == 0)
        def _():
            walk.refs[self.name][...] = jnp.zeros_like(walk.refs[self.name])

    def add(self, walk: Any, slot: Any, dvalue: jax.Array) -> None:
        """Adds [1, width]."""
        walk.refs[self.name][...] += dvalue

    def end_row(self, walk: Any) -> None:
        pass

    def result(self, plan: TpuPlan, results: dict[str, Any]) -> jax.Array:
        return results[self.name].reshape(plan.B, plan.N, -1)


GradientSum = SumByKey | SumByQuery | SumByPair | SumByHead


def total(x: jax.Array) -> jax.Array:
    """The sum of all entries [rows, columns], as [1, 1]."""
    return jnp.sum(jnp.sum(x, axis=0, keepdims=True), axis=1, keepdims=True)


def _of_pair(plan: TpuPlan, ref: Any, at: Visit) -> Any:
    plane = place_in(ref.shape[0], at.b), place_in(ref.shape[1], at.h)
    return ref.at[*plane, tile_slice(at.j, plan.q_tile), tile_slice(at.i, plan.kv_tile)]


def _of_tile(ref: Any, at: Visit) -> Any:
    return ref.at[at.b, at.h, at.j]
