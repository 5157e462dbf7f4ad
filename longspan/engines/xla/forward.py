"""The forward pass of the `xla` engine: tiles of queries against the keys they see, with an online softmax."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from longspan.array_types import statistics_dtype
from longspan.combine import Result, combine, normalised
from longspan.engines.varying import vary, varying_axes
from longspan.engines.xla.parts import (
    Plan,
    Run,
    Tensors,
    each_head,
    indices,
    padded,
    places,
    query_heads,
    read_keys,
    rows_of,
    scaled_queries,
    write_tile,
)
from longspan.engines.xla.visit import along_keys, drop, lowest, powers_of, scores_of, visit_all


def forward(plan: Plan):
    """A function of the operands that gives out, lse and what rounding took from lse."""

    # Batched by vmap, a loop of dynamic length would visit the longest row for all of them and turn skipping into
    # selects. So vmap runs one example after the other.
    @sequential_vmap
    def run(floats, rest):
        *qkvb, sinks = floats
        dtype = statistics_dtype(qkvb[0].dtype)
        x = padded(plan, *qkvb, *rest)
        axes = varying_axes(x)

        def heads(results, place):
            each = each_head(plan, x, place)

            def tile(results, i):
                rows = rows_of(plan, place, i)
                for row, new in zip(rows, _attend_tiles(plan, each, sinks, rows, axes), strict=True):
                    results = [write_tile(plan, x, a, part, row) for a, part in zip(results, new, strict=True)]
                return results, None

            return jax.lax.scan(tile, results, indices(x.layout.q_tiles))[0], None

        out, column = jnp.zeros((*x.q.shape[:3], plan.Hv), x.q.dtype), jnp.zeros((*x.q.shape[:3], 1), dtype)
        (out, *columns), _ = jax.lax.scan(heads, vary([out, column, column], axes), places(plan))
        return out[:, : plan.T], *(a[:, : plan.T, :, 0] for a in columns)

    return run


def _attend_tiles(plan: Plan, each: list[Tensors], sinks, rows, axes):
    """One tile of queries, of some heads: their outputs, lse, and what rounding took from lse."""
    q_tiles = [scaled_queries(plan, x, row) for x, row in zip(each, rows, strict=True)]
    dtype, rows_here = q_tiles[0].dtype, q_tiles[0].shape[0]
    most = jnp.full((rows_here, 1), lowest(each[0], dtype), dtype)
    start = (most, jnp.zeros((rows_here, 1), dtype), jnp.zeros((rows_here, plan.Hv), dtype))
    visits = [partial(_online_softmax, plan, x, q_tile) for x, q_tile in zip(each, q_tiles, strict=True)]
    sums = visit_all(plan, each[0], rows[0], visits, vary([start] * plan.together, axes))
    return [_normalised(plan, x, sinks, row, *part) for x, row, part in zip(each, rows, sums, strict=True)]


def _normalised(plan: Plan, x: Tensors, sinks, row, most, total, out):
    result = normalised(most[:, 0], total[:, 0], out)
    if sinks is not None:
        sink = sinks[query_heads(plan, row[1])].astype(out.dtype).repeat(x.layout.q_tile)
        result = combine([result, Result(None, sink)])
    return result.out, result.lse[:, None], result.lse_residual[:, None]


def _online_softmax(plan: Plan, x: Tensors, q_tile, at: Run, allowed, carry):
    """One visit of the forward pass: scores of a run of keys, folded into (max, total, weighted values)."""
    most, total, out = carry
    k = read_keys(plan, x.k, at, None)  # it may hold anything: its scores are masked
    v = read_keys(plan, x.v, at, allowed)
    scores, _ = scores_of(plan, x, q_tile, k, at, allowed)
    highest = jnp.maximum(most, along_keys(jnp.max, scores))
    powers = powers_of(x, scores, highest, allowed)
    shrink = jnp.exp(most - highest)
    total = total * shrink + along_keys(jnp.sum, powers)
    return highest, total, out * shrink + drop(plan, x, at, powers) @ v
