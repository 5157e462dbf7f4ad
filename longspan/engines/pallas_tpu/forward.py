"""The forward kernel: an online softmax over the key tiles that each query tile visits."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from longspan.engines.pallas_tpu.operands import Operands
from longspan.engines.pallas_tpu.places import LANES, Visit, tile_slice
from longspan.engines.pallas_tpu.plan import LN_2, TpuPlan
from longspan.engines.pallas_tpu.refs import vmem
from longspan.engines.pallas_tpu.scores import (
    ROWS_BY_COLUMNS,
    ROWS_BY_ROWS,
    as_columns,
    drop,
    kept,
    only,
    product,
    scores_of,
    seen_columns,
)
from longspan.engines.pallas_tpu.walk import Walk, add_buffers, spread_along_lanes


def forward(operands: Operands, q: Any, k: Any, v: Any, words: list[Any]) -> tuple[Any, ...]:
    """(out [B, heads, group, T', Hv], lse and its residual [B, heads, query tiles, group, q_tile]).

    q is [B, heads, group, T', H], k and v are [B, K, S', X]; `words` are those of dropout. The residual is None without
    a bias.
    """
    plan, refs = operands.plan, operands.refs
    add_queries(operands, dict(q=q))
    add_statistics(operands, {f"word {n}": word for n, word in enumerate(words)})
    add_keys(operands, k, v)
    wide = (*q.shape[:4], plan.Hv)
    refs.write("out", wide, plan.out_dtype, query_block(plan, plan.Hv))
    for name in ("lse", "residual")[: 1 + plan.biased]:
        shape = (plan.B, plan.heads, plan.q_tiles, plan.group, plan.q_tile)
        refs.write(name, shape, np.float32, statistic_block(plan))
    for name in ("max", "total"):
        refs.keep(name, vmem((plan.rows, LANES)))
    refs.keep("sum", vmem((plan.rows, plan.Hv)))
    add_buffers(operands)
    grid = plan.B, plan.heads, plan.q_tiles
    results = refs.call(partial(_forward_kernel, operands), "longspan_forward", grid, plan.interpret)
    return results["out"], results["lse"], results.get("residual")


def _forward_kernel(operands: Operands, refs: dict[str, Any]) -> None:
    plan, walk = operands.plan, Walk(operands, refs)
    spread_statistics(operands, refs, [name for name in ("word 0", "word 1") if name in refs])
    refs["max"][...] = jnp.full_like(refs["max"], plan.first_max)
    refs["total"][...] = jnp.zeros_like(refs["total"])
    refs["sum"][...] = jnp.zeros_like(refs["sum"])
    walk.run(partial(_visit_forward, walk))
    _write_results(plan, refs)


def _visit_forward(walk: Walk, j: Any, slot: Any, *, masked: bool, careful: bool) -> None:
    """One step of the online softmax. `careful` clears values that no query of the tile sees: they may hold NaN."""
    plan, refs = walk.operands.plan, walk.refs
    by_head = plan.group, plan.q_tile, plan.kv_tile
    v = walk.buffer("v", slot)[...]
    bias, allowed = walk.bias_and_allowed(j, slot, masked)
    if careful:
        v = only(seen_columns(allowed), v)
    if masked:
        allowed = allowed[None]
    products = product(refs["q"][...].reshape(plan.rows, plan.H), walk.buffer("k", slot)[...], ROWS_BY_ROWS)
    scores = scores_of(plan, products, bias).values
    if masked:
        scores = jnp.where(allowed, scores.reshape(by_head), plan.masked_score).reshape(plan.rows, plan.kv_tile)
    old_max = refs["max"][...]
    new_max = jnp.maximum(old_max, jnp.max(scores, axis=1, keepdims=True))
    powers = plan.exp(scores - as_columns(new_max, plan.kv_tile))
    if plan.biased:  # scores may be as low as `masked_score`
        powers = jnp.where(allowed, powers.reshape(by_head), 0.0).reshape(plan.rows, plan.kv_tile)
    rescale = plan.exp(old_max - new_max)
    refs["total"][...] = refs["total"][...] * rescale + jnp.sum(powers, axis=1, keepdims=True)
    powers = drop(plan, keep_by_query(walk, j, slot), powers)
    added = product(powers.astype(v.dtype), v, ROWS_BY_COLUMNS)
    refs["sum"][...] = refs["sum"][...] * as_columns(rescale, plan.Hv) + added
    refs["max"][...] = new_max


def _write_results(plan: TpuPlan, refs: dict[str, Any]) -> None:
    max_score, total = refs["max"][...], refs["total"][...]
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    out = refs["sum"][...] / as_columns(total, plan.Hv)
    refs["out"][...] = out.reshape(plan.group, plan.q_tile, plan.Hv).astype(plan.out_dtype)
    if plan.biased:
        log_total = jnp.log(total)
        lse = max_score + log_total
        # Scores near -1e9, a common mask value: the sum above rounds the whole logarithm away.
        _write_statistic(plan, refs["residual"], jnp.where(empty, 0.0, log_total - (lse - max_score)))
    else:
        lse = (max_score + jnp.log2(total)) * LN_2
    _write_statistic(plan, refs["lse"], jnp.where(empty, -jnp.inf, lse))


def _write_statistic(plan: TpuPlan, ref: Any, column: jax.Array) -> None:
    """Writes [rows, 128] as [group, q_tile]."""
    for g in range(plan.group):
        ref[g : g + 1, :] = column[g * plan.q_tile : (g + 1) * plan.q_tile].T[:1]


def keep_by_query(walk: Walk, j: Any, slot: Any) -> Any:
    """Whether dropout keeps each weight [rows, kv_tile] of a visit of key tile j; None without dropout."""
    plan = walk.operands.plan
    if not plan.dropout_rate:
        return None
    words = [as_columns(walk.refs[f"word {n} column"][...], plan.kv_tile) for n in range(2)]
    return kept(plan, words, key_positions(walk, j, slot))


def key_positions(walk: Walk, j: Any, slot: Any) -> Any:
    """The positions of the keys of a visit, by which dropout counts."""
    if walk.operands.dropout_place is None:
        return walk.slots(j)[1]
    return walk.load(j, slot, walk.operands.dropout_place)


def add_queries(operands: Operands, arrays: dict[str, Any]) -> None:
    """Adds arrays [B, heads, group, T', X], of which a row reads its own tile."""
    for name, array in arrays.items():
        operands.refs.read(name, array, query_block(operands.plan, array.shape[4]))


def add_statistics(operands: Operands, arrays: dict[str, Any]) -> None:
    """Adds numbers by query [B, heads, query tiles, group, q_tile], of which a row reads its own as columns."""
    plan = operands.plan
    for name, array in arrays.items():
        operands.refs.read(name, array, statistic_block(plan))
        operands.refs.keep(f"{name} column", vmem((plan.rows, LANES), array.dtype))


def spread_statistics(operands: Operands, refs: dict[str, Any], names: list[str]) -> None:
    """Writes the numbers of a row's queries as columns."""
    tile = operands.plan.q_tile
    for name in names:
        for g in range(operands.plan.group):
            spread_along_lanes(refs[name][g : g + 1, :], refs[f"{name} column"].at[pl.ds(g * tile, tile)])


def add_keys(operands: Operands, k: Any, v: Any) -> None:
    """Adds keys and values [B, K, S', X], or stacks [layers, B, K, S', X], of which a visit reads one tile."""
    plan = operands.plan
    for name, array in (("k", k), ("v", v)):
        buffer = vmem((2, plan.kv_tile, array.shape[-1]), array.dtype)
        operands.add_stream(name, array, partial(_part_of_keys, plan), buffer)


def _part_of_keys(plan: TpuPlan, ref: Any, at: Visit) -> Any:
    head, keys = plan.kv_head(at.h), tile_slice(at.j, plan.kv_tile)
    if at.layer is None:
        return ref.at[at.b, head, keys, :]
    return ref.at[at.layer, at.b, head, keys, :]


def query_block(plan: TpuPlan, size: int) -> pl.BlockSpec:
    """The block of a query tile in an array [B, heads, group, T', size]."""
    return pl.BlockSpec((None, None, plan.group, plan.q_tile, size), lambda b, h, i: (b, h, 0, i, 0))


def statistic_block(plan: TpuPlan) -> pl.BlockSpec:
    """The block of a query tile in an array [B, heads, query tiles, group, q_tile]."""
    return pl.BlockSpec((None, None, None, plan.group, plan.q_tile), lambda b, h, i: (b, h, i, 0, 0))
