"""The `xla` engine: block-sparse attention in plain JAX. O(T) memory, forward and backward, anywhere JAX runs.

One loop over a few heads at a time, inside it one over tiles of queries, inside that one over the key tiles that the
layout lists, several neighbouring tiles at a time, with an online softmax. Operands are read and results written where
they lie; only these few heads' keys and values are copied, each head's side by side. The backward pass recomputes tiles
from (out, lse) in the same order and adds up dk and dv in place, so it needs no transposed layout. Nothing T×T exists,
and the program does not grow with T.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap

from longspan._types import Key, LogSumExp, Output, Query, statistics_dtype
from longspan.dropout import Dropout, keep
from longspan.engines._manual import vary, varying_axes
from longspan.engines._request import Request, without_pairs
from longspan.engines._slices import (
    ZERO,
    Plan,
    Run,
    Tensors,
    add_at,
    apart,
    bias_tile,
    bias_window,
    each_head,
    indices,
    key_place,
    pad_queries,
    padded,
    places,
    query_heads,
    read_keys,
    read_tile,
    rows_of,
    run_of,
    scaled_queries,
    sides,
    sum_to_bias,
    table_of,
    where_allowed,
    write_tile,
)
from longspan.layout import BlockLayout

# By platform: queries in a tile, keys in a tile, how many key tiles are visited at once, how many heads side by side.
# "cpu" was measured on 2 AVX2 cores, 8 heads of 64, f32 (benchmarks/tiles.py): larger visits amortise the cost of a
# step, smaller ones waste less at the edges of a mask. XLA gains little from a second core in one product of this size,
# but runs products that do not wait for each other at once, hence the heads. The others are the shapes that their
# matrix units like, not measured.
TILES = {"cpu": (128, 128, 5, 4), "gpu": (128, 128, 4, 1), "tpu": (256, 256, 4, 1)}

NEVER = -1e30  # a masked score; finite, because (-inf) - (-inf) is NaN in both passes
LOW = -1e20  # where the running maximum starts: below every score, and so far above NEVER that exp(NEVER - LOW) is 0


def unsupported(request: Request) -> str | None:
    """Plain JAX computes everything, everywhere."""
    return None


def tiles(request: Request) -> tuple[int, int]:
    """The platform's tiles, smaller for short sides."""
    q_tile, kv_tile, *_ = TILES.get(request.platform, TILES["cpu"])
    dims = request.dims
    return min(q_tile, max(dims["T"], 1)), min(kv_tile, max(dims["S"], 1))


def run(
    q: Query,
    k: Key,
    v: Key,
    layout: BlockLayout,
    *,
    bias,
    sinks,
    scale: float,
    soft_cap: float | None,
    dropout: Dropout | None,
) -> tuple[Output, LogSumExp]:
    """Attention over the tiles of a layout."""
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    if 0 in (B, T, N, S, H):
        return without_pairs(q, sinks)
    _, _, group, heads = TILES.get(jax.default_backend(), TILES["cpu"])
    # Layouts that list tiles one by one have few neighbours to visit together.
    group = 1 if layout.repeats else min(group, layout.kv_tiles)
    plan = Plan(B, T, S, N, K, H, scale, soft_cap, group * layout.kv_tile, layout.starts.shape[1] > 1)
    if not plan.per_head and plan.copies(layout):
        plan = replace(plan, together=max(n for n in range(1, heads + 1) if K % n == 0))
    # Marked here, outside custom_vjp, so that gradients of replicated operands are summed over their axes.
    q, k, v, bias, sinks = vary((q, k, v, bias, sinks), varying_axes(q, k, v, bias, sinks, layout, dropout))
    results: Any = _attend(plan, (q, k, v, bias, sinks), (layout, dropout))
    return results[:2]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, floats, rest):
    return _forward(plan)(floats, rest)


def _attend_fwd(plan: Plan, floats, rest):
    result = _attend(plan, floats, rest)  # not `_forward`: an outer derivative must meet the rule below
    return result, (floats, rest, result)


def _attend_bwd(plan: Plan, residuals, cotangents):
    floats, rest, results = residuals
    return _no_second_derivative(plan, floats, rest, results, cotangents[:2]), None


_attend.defvjp(_attend_fwd, _attend_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _no_second_derivative(plan: Plan, floats, rest, results, cotangents):
    return _backward(plan)(floats, rest, *results, cotangents)


def _second_derivative(*_):
    raise NotImplementedError(
        "engine='xla' has no second derivatives: its backward pass is a loop of dynamic length. "
        "Use engine='reference' where you differentiate twice."
    )


_no_second_derivative.defvjp(_second_derivative, _second_derivative)


def _forward(plan: Plan):
    # Batched by vmap, a loop of dynamic length would visit the longest row for all of them and turn skipping into
    # selects. So vmap runs one example after the other.
    @sequential_vmap
    def forward(floats, rest):
        q, k, v, bias, sinks = floats
        dtype = statistics_dtype(q.dtype)
        x = padded(plan, q, k, v, bias, *rest)
        axes = varying_axes(x)

        def heads(results, place):
            each = each_head(plan, x, place)

            def tile(results, i):
                rows = rows_of(plan, place, i)
                for row, new in zip(rows, _attend_tiles(plan, each, sinks, rows, axes), strict=True):
                    results = [write_tile(plan, x, a, part, row) for a, part in zip(results, new, strict=True)]
                return results, None

            return jax.lax.scan(tile, results, indices(x.layout.q_tiles))[0], None

        column = jnp.zeros((*x.q.shape[:3], 1), dtype)
        (out, *columns), _ = jax.lax.scan(heads, vary([jnp.zeros_like(x.q), column, column], axes), places(plan))
        return out[:, : plan.T], *(a[:, : plan.T, :, 0] for a in columns)

    return forward


def _attend_tiles(plan: Plan, each: list[Tensors], sinks, rows, axes):
    """One tile of queries, of some heads: their outputs, lse, and what rounding took from lse."""
    q_tiles = [scaled_queries(plan, x, row) for x, row in zip(each, rows, strict=True)]
    dtype, column = q_tiles[0].dtype, (q_tiles[0].shape[0], 1)
    start = (jnp.full(column, _lowest(each[0], dtype), dtype), jnp.zeros(column, dtype), jnp.zeros_like(q_tiles[0]))
    visits = [partial(_online_softmax, plan, x, q_tile) for x, q_tile in zip(each, q_tiles, strict=True)]
    sums = _visit_all(plan, each[0], rows[0], visits, vary([start] * plan.together, axes))
    return [_normalised(plan, x, sinks, row, *part) for x, row, part in zip(each, rows, sums, strict=True)]


def _normalised(plan: Plan, x: Tensors, sinks, row, most, total, out):
    if sinks is not None:
        sink = sinks[query_heads(plan, row[1])].astype(out.dtype).repeat(x.layout.q_tile).reshape(most.shape)
        highest = jnp.maximum(most, sink)
        shrink = jnp.exp(most - highest)
        most, total, out = highest, total * shrink + jnp.exp(sink - highest), out * shrink
    empty = total == 0
    total = jnp.where(empty, 1, total)
    log_total = jnp.log(total)
    lse = most + log_total
    # Where scores are -1e9, as people mask with, rounding takes the whole logarithm.
    low = jnp.where(empty, 0, (most - lse) + log_total)
    return out / total, jnp.where(empty, -jnp.inf, lse), low


def _online_softmax(plan: Plan, x: Tensors, q_tile, at: Run, allowed, carry):
    """One visit of the forward pass: scores of a run of keys, folded into (max, total, weighted values)."""
    most, total, out = carry
    k = read_keys(plan, x.k, at, None)  # it may hold anything: its scores are masked
    v = read_keys(plan, x.v, at, allowed)
    scores, _ = _scores(plan, x, q_tile, k, at, allowed)
    highest = jnp.maximum(most, _along_keys(jnp.max, scores))
    powers = _powers(x, scores, highest, allowed)
    shrink = jnp.exp(most - highest)
    total = total * shrink + _along_keys(jnp.sum, powers)
    return highest, total, out * shrink + _drop(plan, x, at, powers) @ v


def _backward(plan: Plan):
    @sequential_vmap
    def backward(floats, rest, out, lse, low, cotangents):
        q, k, v, bias, sinks = floats
        dout, dlse = cotangents
        dtype = statistics_dtype(q.dtype)
        x = padded(plan, q, k, v, bias, *rest)
        # What the gradient of every weight in a row is measured against.
        delta = jnp.sum(dout.astype(dtype) * out.astype(dtype), axis=-1) - dlse.astype(dtype)
        # Rows without keys have lse = -inf; any finite level will do, since all their weights are masked.
        finite = jnp.isfinite(lse)
        delta = jnp.where(finite, delta, 0)  # their cotangent may be NaN: that of lse², say
        level = jnp.where(finite, lse, 0)
        by_query = [pad_queries(plan, x.layout, a) for a in (dout, *(a[..., None] for a in (delta, level, low)))]
        axes, copied = varying_axes(x, dout, dlse), plan.copies(x.layout)

        def heads(carry, place):
            dq, keys, dbias = carry
            each = each_head(plan, x, place)
            own = [[jnp.zeros(one.k.shape, dtype)] * 2 for one in each] if copied else [keys]

            def tile(carry, i):
                return _differentiate_tiles(plan, each, by_query, carry, rows_of(plan, place, i), axes), None

            (dq, own, dbias), _ = jax.lax.scan(tile, (dq, vary(own, axes), dbias), indices(x.layout.q_tiles))
            if not copied:
                return (dq, own[0], dbias), None
            for (b, h, _), parts in zip(rows_of(plan, place, ZERO), own, strict=True):
                begin = key_place(plan, x.k, b, h, ZERO)
                keys = [add_at(big, part, begin) for big, part in zip(keys, parts, strict=True)]
            return (dq, keys, dbias), None

        dbias = None if x.bias is None else jnp.zeros(x.bias.shape, dtype)
        zeros = (jnp.zeros_like(x.q), [jnp.zeros(x.k.shape, dtype)] * 2, dbias)
        (dq, keys, dbias), _ = jax.lax.scan(heads, vary(zeros, axes), places(plan))
        dk, dv = (a[:, : plan.S].astype(k.dtype) for a in keys)
        if bias is not None:
            dbias = dbias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
        dsinks = None
        if sinks is not None:
            weight = jnp.where(finite, jnp.exp(sinks.astype(dtype).reshape(1, 1, -1) - level - low), 0)
            dsinks = -jnp.sum(weight * delta, axis=(0, 1)).astype(sinks.dtype)
        return dq[:, : plan.T], dk, dv, dbias, dsinks

    return backward


def _differentiate_tiles(plan: Plan, each: list[Tensors], by_query, carry, rows, axes):
    """Adds what one tile of queries, of some heads, contributes to (dq, each head's dk and dv, dbias)."""
    dq, keys, dbias = carry
    visits = []
    for x, row in zip(each, rows, strict=True):
        q_tile = scaled_queries(plan, x, row)
        mine = [read_tile(plan, x, a, row).astype(q_tile.dtype) for a in by_query]
        visits.append(partial(_gradients, plan, x, q_tile, *mine))
    start = vary([jnp.zeros_like(q_tile)] * plan.together, axes)
    parts, keys, dbias = _visit_all(plan, each[0], rows[0], visits, (start, keys, dbias), _add_gradients)
    for row, part in zip(rows, parts, strict=True):
        dq = write_tile(plan, each[0], dq, part * np.asarray(plan.scale, part.dtype), row)
    return dq, keys, dbias


class Gradients(NamedTuple):
    """What one visit adds: to dq of its row, and to dk, dv and dbias of its run of keys."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any


def _gradients(plan: Plan, x: Tensors, q_tile, dout, delta, level, low, at: Run, allowed, _) -> Gradients:
    """One visit of the backward pass, as small arrays: the big ones are updated outside of branches, in place."""
    k, v = (read_keys(plan, a, at, allowed) for a in (x.k, x.v))
    if allowed is not None:  # a query that sees no key may hold anything
        q_tile = jnp.where(allowed.any(-1, keepdims=True), q_tile, 0)
    scores, slope = _scores(plan, x, q_tile, k, at, allowed)
    powers = _powers(x, scores - level, low, allowed)
    dv = _drop(plan, x, at, powers).T @ dout
    dscores = powers * (_drop(plan, x, at, dout @ v.T) - delta)
    dbias = None if x.bias is None else sum_to_bias(plan, x, at, dscores)
    if slope is not None:
        dscores = dscores * slope
    # q_tile carries the scale already, so dk needs none; dq gets it at the end of its row.
    return Gradients(dscores @ k, dscores.T @ q_tile, dv, dbias)


def _add_gradients(plan: Plan, x: Tensors, at: Run, new: list[Gradients], carry):
    dq, keys, dbias = carry
    dq = [a + part.dq for a, part in zip(dq, new, strict=True)]
    for one, part in zip(apart(plan, at), new, strict=True):
        if dbias is not None:
            dbias = add_at(dbias, part.dbias, bias_window(plan, x, one)[0])
    place = key_place(plan, x.k, at.b, at.h, at.start)
    keys = [
        [add_at(big, a[None, :, None], place) for big, a in zip(own, (part.dk, part.dv), strict=True)]
        for own, part in zip(keys, new, strict=True)
    ]
    return dq, keys, dbias


def _visit_all(plan: Plan, x: Tensors, row, visits, carry, combine=None):
    """Visits all that the layout lists for a row: its intervals, then the tiles common to all rows."""
    b, h, i = row
    layout, tile = x.layout, x.layout.kv_tile
    starts, stops = (table_of(a, b, h)[i] for a in (layout.starts, layout.stops))

    def interval(p, carry):
        stop = stops[p] * tile

        def step(state):
            first, carry = state
            at = run_of(x, row, first, stop, plan.width)
            return first + plan.width, _visit(plan, x, at, visits, carry, combine)

        return jax.lax.while_loop(lambda state: state[0] < stop, step, (starts[p] * tile, carry))[1]

    carry = jax.lax.fori_loop(0, starts.shape[0], interval, carry)
    if layout.common is None:
        return carry
    listed, count = table_of(layout.common, b, h), table_of(layout.common_count, b, h)

    def common(c, carry):
        first = listed[c] * tile
        # A tile inside the row's own intervals was visited there; here it becomes an empty run.
        inside = jnp.any((starts <= listed[c]) & (listed[c] < stops))
        at = run_of(x, row, first, jnp.where(inside, first, first + tile), tile)
        return _visit(plan, x, at, visits, carry, combine)

    return jax.lax.fori_loop(0, count, common, carry)


def _visit(plan: Plan, x: Tensors, at: Run, visits, carry, combine):
    """Visits one run of keys: not at all if it is EMPTY, without a mask if it is FULL."""
    layout, size = x.layout, x.layout.q_tile
    q_side, kv_side = sides(plan, x, at, plan.together)
    end = jnp.minimum(at.stop, plan.S)
    some, every = layout.mask.classify(q_side.run(at.i * size, size), kv_side.run(at.start, at.width))
    full = jnp.all(every) & (at.start == at.first) & (at.start + at.width <= end)
    if x.bias is not None:  # a bias of -inf masks its key, which shows only when it is read
        full = full & False
    kind = jnp.where(jnp.any(some) & (at.first < at.stop), jnp.where(full, 2, 1), 0)

    def each(allowed, carry):
        return [f(*args) for f, *args in zip(visits, apart(plan, at), allowed, carry, strict=True)]

    def unmasked(carry):
        return each([None] * plan.together, carry)

    def masked(carry):
        q_slots, kv_slots = q_side.slots(at.i * size, size), kv_side.slots(at.start, at.width)
        allowed = layout.mask.allowed(q_slots, kv_slots) & (kv_slots.index >= at.first) & (kv_slots.index < end)
        return each(_allowed_apart(plan, x, at, allowed), carry)

    if combine is None:
        return jax.lax.switch(kind, [lambda c: c, masked, unmasked], carry)
    # Big arrays stay out of the branches, where XLA would copy them.
    none = [None] * plan.together
    shapes = jax.eval_shape(masked, none)
    axes = varying_axes(x, carry)

    def nothing():
        return vary(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes), axes)

    branches = [nothing, lambda: vary(masked(none), axes), lambda: vary(unmasked(none), axes)]
    return combine(plan, x, at, jax.lax.switch(kind, branches), carry)


def _allowed_apart(plan: Plan, x: Tensors, at: Run, allowed):
    """What is allowed, [1, heads or 1, queries or 1, keys or 1], as [rows, keys] of every head of a step."""
    shape = (1, plan.group, x.layout.q_tile, at.width)
    same = allowed.shape[1] == 1
    parts = [allowed] * plan.together if same else jnp.split(allowed, plan.together, axis=1)
    if x.bias is not None:
        runs = apart(plan, at)
        parts = [part & (bias_tile(plan, x, one) != -jnp.inf) for part, one in zip(parts, runs, strict=True)]
    return [jnp.broadcast_to(part, shape).reshape(-1, at.width) for part in parts]


def _scores(plan: Plan, x: Tensors, q_tile, k, at: Run, allowed):
    """Scores [rows, keys] of a visit, NEVER where not allowed, and the slope of the soft cap."""
    scores, slope = q_tile @ k.T, None
    if plan.soft_cap is not None:
        bent = jnp.tanh(scores / plan.soft_cap)
        scores, slope = plan.soft_cap * bent, 1 - bent * bent
    if x.bias is not None:
        bias = jnp.broadcast_to(bias_tile(plan, x, at), (1, plan.group, x.layout.q_tile, at.width))
        scores = scores + jnp.where(bias == -jnp.inf, 0, bias).reshape(scores.shape).astype(scores.dtype)
    return where_allowed(allowed, scores, NEVER if x.bias is None else _lowest(x, scores.dtype)), slope


def _along_keys(reduce, a):
    """Reduces [rows, keys] over the keys, in two steps: XLA's CPU code only vectorises across an axis that stays."""
    lanes = next(n for n in (64, 16, 1) if a.shape[1] % n == 0)
    return reduce(reduce(a.reshape(a.shape[0], -1, lanes), axis=1), axis=-1, keepdims=True)


def _lowest(x: Tensors, dtype) -> float:
    """Where the running maximum starts. A bias may be as low as floats go (people mask with it), scores may not."""
    return LOW if x.bias is None else float(jnp.finfo(dtype).min)


def _powers(x: Tensors, scores, level, allowed):
    """exp(scores - level), 0 where not allowed; without a bias masked scores are low enough to vanish by themselves."""
    powers = jnp.exp(scores - level)
    return powers if x.bias is None else where_allowed(allowed, powers, 0)


def _drop(plan: Plan, x: Tensors, at: Run, weights):
    """Dropout of a visit's weights (or of their gradients)."""
    if x.dropout is None:
        return weights
    q_side, kv_side = sides(plan, x, at)
    size = x.layout.q_tile
    kept = keep(
        x.dropout,
        x.dropout.rows[at.b].reshape(1, 1, 1, 1),
        x.dropout.heads[query_heads(plan, at.h)].reshape(1, -1, 1, 1),
        q_side.slots(at.i * size, size).position,
        kv_side.slots(at.start, at.width).position,
    )
    kept = jnp.broadcast_to(kept, (1, plan.group, size, at.width)).reshape(weights.shape)
    return jnp.where(kept, weights / (1 - x.dropout.rate), 0)
