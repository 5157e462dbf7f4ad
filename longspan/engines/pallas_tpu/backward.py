"""The backward kernels: weights are recomputed from lse, and sums over visits stay on the chip.

`backward_over_keys` has one row per key tile. Fused, each visit also adds to dq, which lies in HBM and is read and
written with the visit: one kernel then reads everything once. `backward_over_queries` computes dq alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from longspan.engines.pallas_tpu.forward import (
    add_keys,
    add_queries,
    add_statistics,
    keep_by_query,
    key_positions,
    query_block,
    spread_statistics,
)
from longspan.engines.pallas_tpu.operands import Operands
from longspan.engines.pallas_tpu.places import Visit, tile_slice
from longspan.engines.pallas_tpu.plan import TpuPlan
from longspan.engines.pallas_tpu.refs import vmem
from longspan.engines.pallas_tpu.scores import (
    COLUMNS_BY_COLUMNS,
    ROWS_BY_COLUMNS,
    ROWS_BY_ROWS,
    as_columns,
    drop,
    kept,
    only,
    product,
    scores_of,
    seen_columns,
    seen_rows,
)
from longspan.engines.pallas_tpu.walk import Walk, add_buffers


class BackwardArrays(NamedTuple):
    """The arrays of the backward pass, by head."""

    q: Any  # [B, heads, group, T', H]
    k: Any  # [B, K, S', H]
    v: Any
    dout: Any
    statistics: dict[str, Any]  # lse, delta, ...: [B, heads, query tiles, group, q_tile]


def backward_over_queries(operands: Operands, x: BackwardArrays) -> Any:
    """The gradient of q, [B, heads, group, T', H]."""
    plan, refs = operands.plan, operands.refs
    add_queries(operands, dict(q=x.q, dout=x.dout))
    add_statistics(operands, x.statistics)
    add_keys(operands, x.k, x.v)
    refs.write("dq", x.q.shape, x.q.dtype, query_block(plan, plan.H))
    refs.keep("sum", vmem((plan.rows, plan.H)))
    add_buffers(operands)
    grid = plan.B, plan.heads, plan.q_tiles
    return refs.call(partial(_dq_kernel, operands, list(x.statistics)), "longspan_dq", grid, plan.interpret)["dq"]


def _dq_kernel(operands: Operands, statistics: list[str], refs: dict[str, Any]) -> None:
    plan, walk = operands.plan, Walk(operands, refs)
    spread_statistics(operands, refs, statistics)
    refs["sum"][...] = jnp.zeros_like(refs["sum"])
    walk.run(partial(_visit_for_dq, walk))
    dq = refs["sum"][...] * plan.scale
    refs["dq"][...] = dq.reshape(plan.group, plan.q_tile, plan.H).astype(refs["dq"].dtype)


def _visit_for_dq(walk: Walk, j: Any, slot: Any, *, masked: bool, careful: bool) -> None:
    plan, refs = walk.operands.plan, walk.refs
    k, v = walk.buffer("k", slot)[...], walk.buffer("v", slot)[...]
    bias, allowed = walk.bias_and_allowed(j, slot, masked)
    if careful:
        seen = seen_columns(allowed)
        k, v = only(seen, k), only(seen, v)

    if masked:
        by_head = plan.group, plan.q_tile, plan.kv_tile
        allowed = jnp.broadcast_to(allowed[None], by_head).reshape(plan.rows, plan.kv_tile)

    def statistic(name: str) -> Any:
        return as_columns(refs[f"{name} column"][...], plan.kv_tile)

    products = product(refs["q"][...].reshape(plan.rows, plan.H), k, ROWS_BY_ROWS)
    dweights = product(refs["dout"][...].reshape(plan.rows, plan.Hv), v, ROWS_BY_ROWS)
    scores = scores_of(plan, products, bias)
    weights = _weights(plan, scores.values, allowed, statistic)
    dscores = weights * (drop(plan, keep_by_query(walk, j, slot), dweights) - statistic("delta"))
    if scores.slope is not None:
        dscores = dscores * scores.slope
    if careful:  # after the slope, which is NaN for a query of NaN
        dscores = jnp.where(allowed, dscores, 0.0)
    refs["sum"][...] += product(dscores.astype(k.dtype), k, ROWS_BY_COLUMNS)


def backward_over_keys(operands: Operands, x: BackwardArrays, *, fused: bool) -> tuple[Any, Any, Any, Any]:
    """(dq or None, dk, dv, dbias): dq [B, heads, group, T', H] in float32 if `fused`, dk and dv [B, heads, S', X].

    dbias has the gradients of the bias's arrays, None without a bias.
    """
    plan, refs = operands.plan, operands.refs
    _add_key_rows(operands, x)
    for name, array in (("q", x.q), ("dout", x.dout)):
        buffer = vmem((2, plan.group, plan.q_tile, array.shape[4]), array.dtype)
        operands.add_stream(name, array, partial(_part_of_queries, plan), buffer)
    for name, array in x.statistics.items():
        buffer = vmem((2, plan.group, plan.q_tile), array.dtype)
        operands.add_stream(name, array, _part_of_statistic, buffer)
    if fused:
        operands.add_sum("dq", x.q.shape, partial(_part_of_queries, plan), (plan.group, plan.q_tile, plan.H))
    for each in operands.bias.sums():
        each.add_to(operands)
    add_buffers(operands)
    grid, name = (plan.B, plan.heads, plan.kv_tiles), "longspan_backward" if fused else "longspan_dkv"
    in_parallel = operands.bias.adds_within_a_head(plan)
    kernel = partial(_keys_kernel, operands, fused)
    results = refs.call(kernel, name, grid, plan.interpret, in_parallel)
    return results.get("dq sum"), results["dk"], results["dv"], operands.bias.gradients(plan, results)


def _add_key_rows(operands: Operands, x: BackwardArrays) -> None:
    """Adds keys, values and their gradients, of which a row reads and writes its own tile."""
    plan, refs = operands.plan, operands.refs
    for name, array in (("k", x.k), ("v", x.v)):
        size = array.shape[3]
        block = None, None, plan.kv_tile, size
        refs.read(name, array, pl.BlockSpec(block, lambda b, h, i: (b, plan.kv_head(h), i, 0)))
        of_head = pl.BlockSpec(block, lambda b, h, i: (b, h, i, 0))
        if plan.heads == plan.K:
            # Each tile is read by one row only, the row that writes its gradient.
            refs.write(f"d{name}", array.shape, array.dtype, of_head, reuses=name)
        else:
            refs.write(f"d{name}", (plan.B, plan.heads, *array.shape[2:]), np.float32, of_head)
        refs.keep(f"d{name} sum of row", vmem((plan.kv_tile, size)))


def _keys_kernel(operands: Operands, fused: bool, refs: dict[str, Any]) -> None:
    plan, walk = operands.plan, Walk(operands, refs)
    for name in ("dk", "dv"):
        refs[f"{name} sum of row"][...] = jnp.zeros_like(refs[f"{name} sum of row"])
    for each in operands.bias.sums():
        each.begin_row(walk)
    walk.run(partial(_visit_for_keys, walk, fused))
    refs["dk"][...] = (refs["dk sum of row"][...] * plan.scale).astype(refs["dk"].dtype)
    refs["dv"][...] = refs["dv sum of row"][...].astype(refs["dv"].dtype)
    for each in operands.bias.sums():
        each.end_row(walk)


def _visit_for_keys(walk: Walk, fused: bool, j: Any, slot: Any, *, masked: bool, careful: bool) -> None:
    """Adds a query tile to the gradients of a key tile. Scores are transposed: [kv_tile, q_tile]."""
    plan, refs = walk.operands.plan, walk.refs
    k, v = refs["k"][...], refs["v"][...]
    bias, allowed = walk.bias_and_allowed(j, slot, masked)
    seen_queries: Any = None
    if careful:
        seen, seen_queries = seen_rows(allowed), seen_columns(allowed)
        k, v = only(seen, k), only(seen, v)
    for g in range(plan.group):
        q, dout = walk.buffer("q", slot)[g], walk.buffer("dout", slot)[g]
        if careful:
            q, dout = only(seen_queries, q), only(seen_queries, dout)

        def statistic(name: str, g=g) -> Any:
            return walk.buffer(name, slot)[g : g + 1, :]

        scores = scores_of(plan, product(k, q, ROWS_BY_ROWS), bias)
        dweights = product(v, dout, ROWS_BY_ROWS)
        weights = _weights(plan, scores.values, allowed, statistic)
        if walk.operands.counts_repeats:
            weights = weights * walk.repeats(slot).astype(np.float32)
        keep = None
        if plan.dropout_rate:
            keep = kept(plan, [statistic("word 0"), statistic("word 1")], key_positions(walk, j, slot))
        dscores = weights * (drop(plan, keep, dweights) - statistic("delta"))
        if careful:
            dscores = jnp.where(allowed, dscores, 0.0)
        walk.operands.bias.add_gradients(walk, j, slot, dscores)
        if scores.slope is not None:
            dscores = dscores * scores.slope
        dscores = dscores.astype(q.dtype)
        # In this order, because its static schedule is the shortest.
        refs["dk sum of row"][...] += product(dscores, q, ROWS_BY_COLUMNS)
        if fused:
            walk.buffer("dq", slot)[g] += product(dscores, k, COLUMNS_BY_COLUMNS)
        refs["dv sum of row"][...] += product(drop(plan, keep, weights).astype(dout.dtype), dout, ROWS_BY_COLUMNS)


def _weights(plan: TpuPlan, scores: jax.Array, allowed: Any, statistic: Callable[[str], Any]) -> jax.Array:
    """exp(score - lse - lse_residual), 0 where not allowed; `allowed` is None if every pair is."""
    if plan.biased:
        weights = plan.exp(scores - statistic("lse") - statistic("residual"))
        return jnp.where(allowed, weights, 0.0)  # scores and lse may be as low as `masked_score`
    if allowed is not None:
        scores = jnp.where(allowed, scores, plan.masked_score)
    return plan.exp(scores - statistic("lse"))


def _part_of_queries(plan: TpuPlan, ref: Any, at: Visit) -> Any:
    return ref.at[at.b, at.h, :, tile_slice(at.j, plan.q_tile), :]


def _part_of_statistic(ref: Any, at: Visit) -> Any:
    return ref.at[at.b, at.h, at.j]
