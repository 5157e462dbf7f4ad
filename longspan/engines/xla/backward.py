"""The backward pass of the `xla` engine: recomputes tiles from lse, in the order of the forward pass."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap

from longspan.array_types import statistics_dtype
from longspan.engines.varying import vary, varying_axes
from longspan.engines.xla.biases import add_bias_gradients, bias_gradients, no_gradients, unpad_biases
from longspan.engines.xla.parts import (
    ZERO,
    Tensors,
    TilePlan,
    TileRun,
    add_at,
    each_head,
    indices,
    key_index,
    pad_queries,
    padded,
    read_keys,
    read_tile,
    rows_of,
    runs_of_heads,
    scaled_queries,
    steps_of,
    write_tile,
)
from longspan.engines.xla.visit import LOWEST_SCORE, drop, powers_of, scores_of, visit_all


def backward(plan: TilePlan):
    """Returns the function from the operands, lse, lse_residual, delta and dout to (dq, dk, dv, dbias)."""

    @sequential_vmap
    def run(floats, rest, lse, lse_residual, delta, dout):
        q, k, _, biases = floats
        dtype = statistics_dtype(q.dtype)
        x = padded(plan, *floats, *rest)
        # Rows without keys have lse = -inf. Any finite value will do there, because all their weights are masked.
        lse = jnp.where(jnp.isfinite(lse), lse, 0)
        if not biases:  # the lse of a very low sink must not make the weights of masked scores greater than 0
            lse = jnp.maximum(lse, LOWEST_SCORE)
        columns = [a[..., None] for a in (delta, lse, lse_residual)]
        by_query = [pad_queries(plan, x.layout, a) for a in (dout, *columns)]
        axes, copied = varying_axes(x, by_query), plan.copies(x.layout)

        def heads(carry, step):
            dq, keys, dbias = carry
            each = each_head(plan, x, step)
            own = [keys]
            if copied:
                own = [[jnp.zeros(a.shape, dtype) for a in (one.k, one.v)] for one in each]

            def tile(carry, i):
                return _differentiate_tiles(plan, each, by_query, carry, rows_of(plan, step, i), axes), None

            (dq, own, dbias), _ = jax.lax.scan(tile, (dq, vary(own, axes), dbias), indices(x.layout.q_tiles))
            if not copied:
                return (dq, own[0], dbias), None
            for (b, h, _), parts in zip(rows_of(plan, step, ZERO), own, strict=True):
                begin = key_index(plan, x.k, b, h, ZERO)
                keys = [add_at(whole, part, begin) for whole, part in zip(keys, parts, strict=True)]
            return (dq, keys, dbias), None

        zeros = [jnp.zeros(a.shape, dtype) for a in (x.k, x.v)]
        zeros = (jnp.zeros_like(x.q), zeros, no_gradients(x.biases, dtype))
        (dq, keys, dbias), _ = jax.lax.scan(heads, vary(zeros, axes), steps_of(plan))
        dk, dv = keys
        dk, dv = dk[:, : plan.S].astype(k.dtype), dv[:, : plan.S].astype(k.dtype)
        return dq[:, : plan.T], dk, dv, unpad_biases(dbias, biases)

    return run


def _differentiate_tiles(plan: TilePlan, each: list[Tensors], by_query, carry, rows, axes):
    """Adds the gradients of one query tile, for the heads of a step, to (dq, dk and dv of each head, dbias)."""
    dq, keys, dbias = carry
    visits = []
    for x, row in zip(each, rows, strict=True):
        q_tile = scaled_queries(plan, x, row)
        mine = [read_tile(plan, x, a, row).astype(q_tile.dtype) for a in by_query]
        visits.append(partial(_gradients, plan, x, q_tile, *mine))
    start = vary([jnp.zeros_like(q_tile)] * plan.heads_per_step, axes)
    parts, keys, dbias = visit_all(plan, each[0], rows[0], visits, (start, keys, dbias), _add_gradients)
    for row, part in zip(rows, parts, strict=True):
        dq = write_tile(plan, each[0], dq, part * np.asarray(plan.scale, part.dtype), row)
    return dq, keys, dbias


class Gradients(NamedTuple):
    """The contribution of one visit: to dq of its row, and to dk, dv and dbias of its run of keys."""

    dq: Any
    dk: Any
    dv: Any
    dbias: tuple[Any, ...]


def _gradients(
    plan: TilePlan, x: Tensors, q_tile, dout, delta, lse, lse_residual, at: TileRun, allowed, _
) -> Gradients:
    """One visit of the backward pass. `_add_gradients` adds it to the large arrays, in place."""
    k = read_keys(plan, x.k, at, allowed)
    v = read_keys(plan, x.v, at, allowed)
    if allowed is not None:  # a query that sees no key may hold NaN
        q_tile = jnp.where(allowed.any(-1, keepdims=True), q_tile, 0)
    scores, slope = scores_of(plan, x, q_tile, k, at, allowed)
    weights = powers_of(x, scores - lse, lse_residual, allowed)
    dv = drop(plan, x, at, weights).T @ dout
    dscores = weights * (drop(plan, x, at, dout @ v.T) - delta)
    dbias = bias_gradients(plan, x, at, dscores)
    if slope is not None:
        dscores = dscores * slope
    # q_tile is scaled already, so dk needs no scale; dq is scaled at the end of its row.
    return Gradients(dscores @ k, dscores.T @ q_tile, dv, dbias)


def _add_gradients(plan: TilePlan, x: Tensors, at: TileRun, new: list[Gradients], carry):
    dq, keys, dbias = carry
    dq = [a + part.dq for a, part in zip(dq, new, strict=True)]
    for one, part in zip(runs_of_heads(plan, at), new, strict=True):
        dbias = add_bias_gradients(plan, x, one, dbias, part.dbias)
    index = key_index(plan, x.k, at.b, at.h, at.start)
    sums = []
    for (dk, dv), part in zip(keys, new, strict=True):
        sums.append([add_at(dk, part.dk[None, :, None], index), add_at(dv, part.dv[None, :, None], index)])
    return dq, sums, dbias
