"""The backward pass of the `xla` engine: tiles are computed again, in the forward pass's order, from a given lse."""

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
    Plan,
    Run,
    Tensors,
    add_at,
    apart,
    each_head,
    indices,
    key_place,
    pad_queries,
    padded,
    places,
    read_keys,
    read_tile,
    rows_of,
    scaled_queries,
    write_tile,
)
from longspan.engines.xla.visit import LOW, drop, powers_of, scores_of, visit_all


def backward(plan: Plan):
    """A function of the operands, lse in two parts, delta and dout that gives dq, dk, dv and dbias."""

    @sequential_vmap
    def run(floats, rest, lse, low, delta, dout):
        q, k, _, biases = floats
        dtype = statistics_dtype(q.dtype)
        x = padded(plan, *floats, *rest)
        # Rows without keys have lse = -inf; any finite level will do, since all their weights are masked.
        level = jnp.where(jnp.isfinite(lse), lse, 0)
        if not biases:  # or that of a sink so low that masked scores would not vanish beside it
            level = jnp.maximum(level, LOW)
        by_query = [pad_queries(plan, x.layout, a) for a in (dout, *(a[..., None] for a in (delta, level, low)))]
        axes, copied = varying_axes(x, by_query), plan.copies(x.layout)

        def heads(carry, place):
            dq, keys, dbias = carry
            each = each_head(plan, x, place)
            own = [[jnp.zeros(a.shape, dtype) for a in (one.k, one.v)] for one in each] if copied else [keys]

            def tile(carry, i):
                return _differentiate_tiles(plan, each, by_query, carry, rows_of(plan, place, i), axes), None

            (dq, own, dbias), _ = jax.lax.scan(tile, (dq, vary(own, axes), dbias), indices(x.layout.q_tiles))
            if not copied:
                return (dq, own[0], dbias), None
            for (b, h, _), parts in zip(rows_of(plan, place, ZERO), own, strict=True):
                begin = key_place(plan, x.k, b, h, ZERO)
                keys = [add_at(big, part, begin) for big, part in zip(keys, parts, strict=True)]
            return (dq, keys, dbias), None

        zeros = [jnp.zeros(a.shape, dtype) for a in (x.k, x.v)]
        zeros = (jnp.zeros_like(x.q), zeros, no_gradients(x.biases, dtype))
        (dq, keys, dbias), _ = jax.lax.scan(heads, vary(zeros, axes), places(plan))
        dk, dv = (a[:, : plan.S].astype(k.dtype) for a in keys)
        return dq[:, : plan.T], dk, dv, unpad_biases(dbias, biases)

    return run


def _differentiate_tiles(plan: Plan, each: list[Tensors], by_query, carry, rows, axes):
    """Adds what one tile of queries, of some heads, contributes to (dq, each head's dk and dv, dbias)."""
    dq, keys, dbias = carry
    visits = []
    for x, row in zip(each, rows, strict=True):
        q_tile = scaled_queries(plan, x, row)
        mine = [read_tile(plan, x, a, row).astype(q_tile.dtype) for a in by_query]
        visits.append(partial(_gradients, plan, x, q_tile, *mine))
    start = vary([jnp.zeros_like(q_tile)] * plan.together, axes)
    parts, keys, dbias = visit_all(plan, each[0], rows[0], visits, (start, keys, dbias), _add_gradients)
    for row, part in zip(rows, parts, strict=True):
        dq = write_tile(plan, each[0], dq, part * np.asarray(plan.scale, part.dtype), row)
    return dq, keys, dbias


class Gradients(NamedTuple):
    """What one visit adds: to dq of its row, and to dk, dv and dbias of its run of keys."""

    dq: Any
    dk: Any
    dv: Any
    dbias: tuple[Any, ...]


def _gradients(plan: Plan, x: Tensors, q_tile, dout, delta, level, low, at: Run, allowed, _) -> Gradients:
    """One visit of the backward pass, as small arrays: the big ones are updated outside of branches, in place."""
    k, v = (read_keys(plan, a, at, allowed) for a in (x.k, x.v))
    if allowed is not None:  # a query that sees no key may hold anything
        q_tile = jnp.where(allowed.any(-1, keepdims=True), q_tile, 0)
    scores, slope = scores_of(plan, x, q_tile, k, at, allowed)
    powers = powers_of(x, scores - level, low, allowed)
    dv = drop(plan, x, at, powers).T @ dout
    dscores = powers * (drop(plan, x, at, dout @ v.T) - delta)
    dbias = bias_gradients(plan, x, at, dscores)
    if slope is not None:
        dscores = dscores * slope
    # q_tile carries the scale already, so dk needs none; dq gets it at the end of its row.
    return Gradients(dscores @ k, dscores.T @ q_tile, dv, dbias)


def _add_gradients(plan: Plan, x: Tensors, at: Run, new: list[Gradients], carry):
    dq, keys, dbias = carry
    dq = [a + part.dq for a, part in zip(dq, new, strict=True)]
    for one, part in zip(apart(plan, at), new, strict=True):
        dbias = add_bias_gradients(plan, x, one, dbias, part.dbias)
    place = key_place(plan, x.k, at.b, at.h, at.start)
    keys = [
        [add_at(big, a[None, :, None], place) for big, a in zip(own, (part.dk, part.dv), strict=True)]
        for own, part in zip(keys, new, strict=True)
    ]
    return dq, keys, dbias
