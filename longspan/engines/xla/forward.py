"""The forward pass of the `xla` engine: an online softmax over the visits of each query tile."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from longspan.array_types import statistics_dtype
from longspan.combine import Result, combine, normalised
from longspan.engines.varying import vary, varying_axes
from longspan.engines.xla.parts import (
    Tensors,
    TilePlan,
    TileRun,
    each_head,
    indices,
    padded,
    query_heads,
    read_keys,
    rows_of,
    scaled_queries,
    steps_of,
    write_tile,
)
from longspan.engines.xla.visit import along_keys, drop, lowest, powers_of, scores_of, visit_all


def forward(plan: TilePlan):
    """Returns the function from the operands to (out, lse, lse_residual)."""

    # `vmap` runs one example after the other. If it batched the loop, every example would take as many steps as the
    # longest one, and skipped tiles would become selects.
    @sequential_vmap
    def run(floats, rest):
        *qkvb, sinks = floats
        dtype = statistics_dtype(qkvb[0].dtype)
        x = padded(plan, *qkvb, *rest)
        axes = varying_axes(x)

        def heads(results, step):
            each = each_head(plan, x, step)

            def tile(results, i):
                rows = rows_of(plan, step, i)
                for row, new in zip(rows, _attend_tiles(plan, each, sinks, rows, axes), strict=True):
                    results = [write_tile(plan, x, a, part, row) for a, part in zip(results, new, strict=True)]
                return results, None

            return jax.lax.scan(tile, results, indices(x.layout.q_tiles))[0], None

        out, column = jnp.zeros((*x.q.shape[:3], plan.Hv), x.q.dtype), jnp.zeros((*x.q.shape[:3], 1), dtype)
        (out, *columns), _ = jax.lax.scan(heads, vary([out, column, column], axes), steps_of(plan))
        return out[:, : plan.T], *(a[:, : plan.T, :, 0] for a in columns)

    return run


def _attend_tiles(plan: TilePlan, each: list[Tensors], sinks, rows, axes):
    """(out, lse, lse_residual) of one query tile, for each head of a step."""
    q_tiles = [scaled_queries(plan, x, row) for x, row in zip(each, rows, strict=True)]
    dtype, rows_here = q_tiles[0].dtype, q_tiles[0].shape[0]
    max_score = jnp.full((rows_here, 1), lowest(each[0], dtype), dtype)
    start = (max_score, jnp.zeros((rows_here, 1), dtype), jnp.zeros((rows_here, plan.Hv), dtype))
    visits = [partial(_online_softmax, plan, x, q_tile) for x, q_tile in zip(each, q_tiles, strict=True)]
    sums = visit_all(plan, each[0], rows[0], visits, vary([start] * plan.heads_per_step, axes))
    return [_normalised(plan, x, sinks, row, *part) for x, row, part in zip(each, rows, sums, strict=True)]


def _normalised(plan: TilePlan, x: Tensors, sinks, row, max_score, total, out):
    result = normalised(max_score[:, 0], total[:, 0], out)
    if sinks is not None:
        sink = sinks[query_heads(plan, row[1])].astype(out.dtype).repeat(x.layout.q_tile)
        result = combine([result, Result(None, sink)])
    return result.out, result.lse[:, None], result.lse_residual[:, None]


def _online_softmax(plan: TilePlan, x: Tensors, q_tile, at: TileRun, allowed, carry):
    """One visit of the forward pass: adds a run of keys to (maximum, sum of exponentials, weighted values)."""
    old_max, total, out = carry
    k = read_keys(plan, x.k, at, None)  # masked keys are not zeroed: their scores are replaced
    v = read_keys(plan, x.v, at, allowed)
    scores, _ = scores_of(plan, x, q_tile, k, at, allowed)
    new_max = jnp.maximum(old_max, along_keys(jnp.max, scores))
    powers = powers_of(x, scores, new_max, allowed)
    rescale = jnp.exp(old_max - new_max)
    total = total * rescale + along_keys(jnp.sum, powers)
    return new_max, total, out * rescale + drop(plan, x, at, powers) @ v
