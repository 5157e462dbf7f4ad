"""The `xla` engine: block-sparse attention in plain JAX. O(T) memory, forward and backward, anywhere JAX runs.

One loop over heads, inside it one over tiles of queries, inside that one over the key tiles that the layout lists,
several neighbouring tiles at a time, with an online softmax. Operands are read and results written where they lie; only
one head's keys and values at a time are copied side by side. The backward pass recomputes tiles from (out, lse) in the
same order and adds up dk and dv in place, so it needs no transposed layout. Nothing T×T exists, and the program does
not grow with T.
"""

from dataclasses import dataclass
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
from longspan.layout import BlockLayout

# Queries in a tile, keys in a tile, and how many key tiles are visited at once, by platform. "cpu" was measured on 2
# AVX2 cores, 8 heads of 64, f32 (benchmarks/tiles.py); larger visits amortise the cost of a step, smaller ones waste
# less at the edges of a mask. The others are the shapes that their matrix units like, not measured.
TILES = {"cpu": (256, 256, 3), "gpu": (128, 128, 4), "tpu": (256, 256, 4)}

ZERO = np.int32(0)  # indices share one dtype, also under x64
NEVER = -1e30  # a masked score; finite, because (-inf) - (-inf) is NaN in both passes
LOW = -1e20  # where the running maximum starts: below every score, and so far above NEVER that exp(NEVER - LOW) is 0


def unsupported(request: Request) -> str | None:
    """Plain JAX computes everything, everywhere."""
    return None


def tiles(request: Request) -> tuple[int, int]:
    """The platform's tiles, smaller for short sides."""
    q_tile, kv_tile, _ = TILES.get(request.platform, TILES["cpu"])
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
    _, _, group = TILES.get(jax.default_backend(), TILES["cpu"])
    # Layouts that list tiles one by one have few neighbours to visit together.
    group = 1 if layout.repeats else min(group, layout.kv_tiles)
    plan = Plan(B, T, S, N, K, H, scale, soft_cap, group * layout.kv_tile, layout.starts.shape[1] > 1)
    # Marked here, outside custom_vjp, so that gradients of replicated operands are summed over their axes.
    q, k, v, bias, sinks = vary((q, k, v, bias, sinks), varying_axes(q, k, v, bias, sinks, layout, dropout))
    results: Any = _attend(plan, (q, k, v, bias, sinks), (layout, dropout))
    return results[:2]


@dataclass(frozen=True)
class Plan:
    """The static part of a call."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    scale: float
    soft_cap: float | None
    width: int  # keys visited at once
    per_head: bool  # the layout differs between heads

    @property
    def steps(self) -> int:
        """How many heads the row loop goes through: key/value heads, or query heads if their layouts differ."""
        return self.N if self.per_head else self.K

    @property
    def group(self) -> int:
        """Query heads computed together, on the same keys."""
        return self.N // self.steps


class Tensors(NamedTuple):
    """A call's arrays, long enough for every slice of a tile. Copied only where they must be padded."""

    q: Any  # [B, T', N, H]
    k: Any  # [B, S', K, H]
    v: Any
    bias: Any  # None, or [B or 1, N or 1, T' or 1, S' or 1]
    layout: BlockLayout
    dropout: Dropout | None


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
        x = _padded(plan, q, k, v, bias, *rest)
        axes = varying_axes(x)

        def head(results, place):
            one = _one_head(plan, x, place)

            def tile(results, i):
                row = (*place, i)
                new = _attend_tile(plan, one, sinks, row, axes)
                return tuple(_write_tile(plan, x, a, part, row) for a, part in zip(results, new, strict=True)), None

            return jax.lax.scan(tile, results, _count(x.layout.q_tiles))[0], None

        column = jnp.zeros((*x.q.shape[:3], 1), dtype)
        (out, *columns), _ = jax.lax.scan(head, vary((jnp.zeros_like(x.q), column, column), axes), _all_heads(plan))
        return out[:, : plan.T], *(a[:, : plan.T, :, 0] for a in columns)

    return forward


def _attend_tile(plan: Plan, x: Tensors, sinks, row, axes):
    """One tile of queries: its output, lse, and what rounding took from lse."""
    q_tile = _scaled_queries(plan, x, row)
    dtype, column = q_tile.dtype, (q_tile.shape[0], 1)
    start = (jnp.full(column, _lowest(x, dtype), dtype), jnp.zeros(column, dtype), jnp.zeros_like(q_tile))
    visit = partial(_online_softmax, plan, x, q_tile)
    most, total, out = _visit_all(plan, x, row, visit, vary(start, axes))
    if sinks is not None:
        sink = sinks[_heads(plan, row[1])].astype(dtype).repeat(x.layout.q_tile).reshape(column)
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


def _online_softmax(plan: Plan, x: Tensors, q_tile, at: "Run", allowed, carry):
    """One visit of the forward pass: scores of a run of keys, folded into (max, total, weighted values)."""
    most, total, out = carry
    k, v = _key_tiles(plan, x, at, allowed)
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
        x = _padded(plan, q, k, v, bias, *rest)
        # What the gradient of every weight in a row is measured against.
        delta = jnp.sum(dout.astype(dtype) * out.astype(dtype), axis=-1) - dlse.astype(dtype)
        # Rows without keys have lse = -inf; any finite level will do, since all their weights are masked.
        finite = jnp.isfinite(lse)
        delta = jnp.where(finite, delta, 0)  # their cotangent may be NaN: that of lse², say
        level = jnp.where(finite, lse, 0)
        by_query = [_pad_queries(plan, x.layout, a) for a in (dout, *(a[..., None] for a in (delta, level, low)))]
        axes = varying_axes(x, dout, dlse)

        def head(carry, place):
            dq, *keys, dbias = carry
            one = _one_head(plan, x, place)
            own = keys if one is x else vary([jnp.zeros(one.k.shape, dtype) for _ in keys], axes)

            def tile(carry, i):
                return _differentiate_tile(plan, one, by_query, carry, (*place, i), axes), None

            (dq, *own, dbias), _ = jax.lax.scan(tile, (dq, *own, dbias), _count(x.layout.q_tiles))
            if one is not x:
                b, h = place
                where = _key_place(plan, x.k, b, h, ZERO)
                own = [_add_at(big, part, where) for big, part in zip(keys, own, strict=True)]
            return (dq, *own, dbias), None

        dbias = None if x.bias is None else jnp.zeros(x.bias.shape, dtype)
        zeros = (jnp.zeros_like(x.q), jnp.zeros(x.k.shape, dtype), jnp.zeros(x.v.shape, dtype), dbias)
        (dq, dk, dv, dbias), _ = jax.lax.scan(head, vary(zeros, axes), _all_heads(plan))
        dk, dv = (a[:, : plan.S].astype(k.dtype) for a in (dk, dv))
        if bias is not None:
            dbias = dbias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
        dsinks = None
        if sinks is not None:
            weight = jnp.where(finite, jnp.exp(sinks.astype(dtype).reshape(1, 1, -1) - level - low), 0)
            dsinks = -jnp.sum(weight * delta, axis=(0, 1)).astype(sinks.dtype)
        return dq[:, : plan.T], dk, dv, dbias, dsinks

    return backward


def _differentiate_tile(plan: Plan, x: Tensors, by_query, carry, row, axes):
    """Adds what one tile of queries contributes to (dq, dk, dv, dbias)."""
    dq, *others = carry
    q_tile = _scaled_queries(plan, x, row)
    mine = [_read_tile(plan, x, a, row).astype(q_tile.dtype) for a in by_query]
    visit = partial(_gradients, plan, x, q_tile, *mine)
    start = (vary(jnp.zeros_like(q_tile), axes), *others)
    new, *others = _visit_all(plan, x, row, visit, start, _add_gradients)
    return _write_tile(plan, x, dq, new * np.asarray(plan.scale, new.dtype), row), *others


class Gradients(NamedTuple):
    """What one visit adds: to dq of its row, and to dk, dv and dbias of its run of keys."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any


def _gradients(plan: Plan, x: Tensors, q_tile, dout, delta, level, low, at: "Run", allowed, _) -> Gradients:
    """One visit of the backward pass, as small arrays: the big ones are updated outside of branches, in place."""
    k, v = _key_tiles(plan, x, at, allowed)
    if allowed is not None:  # a query that sees no key may hold anything
        q_tile = jnp.where(allowed.any(-1, keepdims=True), q_tile, 0)
    scores, slope = _scores(plan, x, q_tile, k, at, allowed)
    powers = _powers(x, scores - level, low, allowed)
    dv = _drop(plan, x, at, powers).T @ dout
    dscores = powers * (_drop(plan, x, at, dout @ v.T) - delta)
    dbias = None if x.bias is None else _sum_to_bias(plan, x, at, dscores)
    if slope is not None:
        dscores = dscores * slope
    # q_tile carries the scale already, so dk needs none; dq gets it at the end of its row.
    return Gradients(dscores @ k, dscores.T @ q_tile, dv, dbias)


def _add_gradients(plan: Plan, x: Tensors, at: "Run", new: Gradients, carry):
    dq, dk, dv, dbias = carry
    place = _key_place(plan, dk, at.b, at.h, at.start)
    dk, dv = (_add_at(big, part[None, :, None], place) for big, part in ((dk, new.dk), (dv, new.dv)))
    if dbias is not None:
        dbias = _add_at(dbias, new.dbias, _bias_window(plan, x, at)[0])
    return dq + new.dq, dk, dv, dbias


class Run(NamedTuple):
    """One visit: a row (batch row, head step, query tile) and the keys [first, stop) of [start, start + width)."""

    b: Any
    h: Any
    i: Any
    start: Any  # `first`, or less at the end of the keys, so that the run lies inside of them
    first: Any
    stop: Any
    width: int


def _run(x: Tensors, row, first, stop, width: int) -> Run:
    b, h, i = row
    return Run(b, h, i, jnp.minimum(first, np.int32(x.k.shape[1] - width)), first, stop, width)


def _visit_all(plan: Plan, x: Tensors, row, visit, carry, combine=None):
    """Visits all that the layout lists for a row: its intervals, then the tiles common to all rows."""
    b, h, i = row
    layout, tile = x.layout, x.layout.kv_tile
    starts, stops = (_table(a, b, h)[i] for a in (layout.starts, layout.stops))

    def interval(p, carry):
        stop = stops[p] * tile

        def step(state):
            first, carry = state
            at = _run(x, row, first, stop, plan.width)
            return first + plan.width, _visit(plan, x, at, visit, carry, combine)

        return jax.lax.while_loop(lambda state: state[0] < stop, step, (starts[p] * tile, carry))[1]

    carry = jax.lax.fori_loop(0, starts.shape[0], interval, carry)
    if layout.common is None:
        return carry
    listed, count = _table(layout.common, b, h), _table(layout.common_count, b, h)

    def common(c, carry):
        first = listed[c] * tile
        # A tile inside the row's own intervals was visited there; here it becomes an empty run.
        inside = jnp.any((starts <= listed[c]) & (listed[c] < stops))
        at = _run(x, row, first, jnp.where(inside, first, first + tile), tile)
        return _visit(plan, x, at, visit, carry, combine)

    return jax.lax.fori_loop(0, count, common, carry)


def _visit(plan: Plan, x: Tensors, at: Run, visit, carry, combine):
    """Visits one run of keys: not at all if it is EMPTY, without a mask if it is FULL."""
    layout, size = x.layout, x.layout.q_tile
    q_side, kv_side = _sides(plan, x, at)
    end = jnp.minimum(at.stop, plan.S)
    some, every = layout.mask.classify(q_side.run(at.i * size, size), kv_side.run(at.start, at.width))
    full = jnp.all(every) & (at.start == at.first) & (at.start + at.width <= end)
    if x.bias is not None:  # a bias of -inf masks its key, which shows only when it is read
        full = full & False
    kind = jnp.where(jnp.any(some) & (at.first < at.stop), jnp.where(full, 2, 1), 0)

    def masked(carry):
        q_slots, kv_slots = q_side.slots(at.i * size, size), kv_side.slots(at.start, at.width)
        allowed = layout.mask.allowed(q_slots, kv_slots) & (kv_slots.index >= at.first) & (kv_slots.index < end)
        allowed = jnp.broadcast_to(allowed, (1, plan.group, size, at.width))
        if x.bias is not None:
            allowed = allowed & (_bias_tile(plan, x, at) != -jnp.inf)
        return visit(at, allowed.reshape(plan.group * size, at.width), carry)

    if combine is None:
        return jax.lax.switch(kind, [lambda c: c, masked, lambda c: visit(at, None, c)], carry)
    # Big arrays stay out of the branches, where XLA would copy them.
    shapes = jax.eval_shape(masked, None)
    axes = varying_axes(x, carry)

    def nothing(_):
        return vary(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes), axes)

    branches = [nothing, lambda c: vary(masked(c), axes), lambda c: vary(visit(at, None, c), axes)]
    return combine(plan, x, at, jax.lax.switch(kind, branches, None), carry)


def _scores(plan: Plan, x: Tensors, q_tile, k, at: Run, allowed):
    """Scores [rows, keys] of a visit, NEVER where not allowed, and the slope of the soft cap."""
    scores, slope = q_tile @ k.T, None
    if plan.soft_cap is not None:
        bent = jnp.tanh(scores / plan.soft_cap)
        scores, slope = plan.soft_cap * bent, 1 - bent * bent
    if x.bias is not None:
        bias = jnp.broadcast_to(_bias_tile(plan, x, at), (1, plan.group, x.layout.q_tile, at.width))
        scores = scores + jnp.where(bias == -jnp.inf, 0, bias).reshape(scores.shape).astype(scores.dtype)
    return _where(allowed, scores, NEVER if x.bias is None else _lowest(x, scores.dtype)), slope


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
    return powers if x.bias is None else _where(allowed, powers, 0)


def _key_tiles(plan: Plan, x: Tensors, at: Run, allowed):
    """The keys and values of a visit; those that no query of the tile sees may hold anything, and become 0."""
    place = _key_place(plan, x.k, at.b, at.h, at.start)
    k, v = (jax.lax.dynamic_slice(a, place, (1, at.width, 1, plan.H))[0, :, 0] for a in (x.k, x.v))
    dtype = statistics_dtype(k.dtype)
    seen = None if allowed is None else allowed.any(0).reshape(-1, 1)
    return tuple(_where(seen, a.astype(dtype), 0) for a in (k, v))


def _drop(plan: Plan, x: Tensors, at: Run, weights):
    """Dropout of a visit's weights (or of their gradients)."""
    if x.dropout is None:
        return weights
    q_side, kv_side = _sides(plan, x, at)
    size = x.layout.q_tile
    kept = keep(
        x.dropout,
        x.dropout.rows[at.b].reshape(1, 1, 1, 1),
        x.dropout.heads[_heads(plan, at.h)].reshape(1, -1, 1, 1),
        q_side.slots(at.i * size, size).position,
        kv_side.slots(at.start, at.width).position,
    )
    kept = jnp.broadcast_to(kept, (1, plan.group, size, at.width)).reshape(weights.shape)
    return jnp.where(kept, weights / (1 - x.dropout.rate), 0)


def _padded(plan: Plan, q, k, v, bias, layout: BlockLayout, dropout: Dropout | None) -> Tensors:
    """Pads queries to whole tiles, and keys to at least one visit."""
    more_k = max(plan.width, layout.kv_tile) - plan.S
    k, v = (_pad(a, more_k) for a in (k, v))
    if bias is not None:
        more_q = layout.q_tiles * layout.q_tile - plan.T if bias.shape[2] > 1 else 0
        bias = _pad(_pad(bias, more_q, axis=2), more_k if bias.shape[3] > 1 else 0, axis=3)
    return Tensors(_pad_queries(plan, layout, q), k, v, bias, layout, dropout)


def _pad_queries(plan: Plan, layout: BlockLayout, a):
    return _pad(a, layout.q_tiles * layout.q_tile - plan.T)


def _pad(a, more: int, axis: int = 1):
    return a if more <= 0 else jnp.pad(a, [(0, more if i == axis else 0) for i in range(a.ndim)])


def _one_head(plan: Plan, x: Tensors, place) -> Tensors:
    """The same tensors with the keys and values of one head alone, side by side, if its tiles read them all anyway."""
    if x.layout.q_tiles * plan.width < plan.S:
        return x
    b, h = place
    where, sizes = _key_place(plan, x.k, b, h, ZERO), (1, x.k.shape[1], 1, plan.H)
    k, v = (jax.lax.dynamic_slice(a, where, sizes) for a in (x.k, x.v))
    return x._replace(k=k, v=v)


def _key_place(plan: Plan, keys, b, h, start):
    """Where keys from `start` on begin, in an array [B, S', K, H] of all of them or [1, S', 1, H] of one head's."""
    return b if keys.shape[0] > 1 else ZERO, start, _kv_head(plan, h) if keys.shape[2] > 1 else ZERO, ZERO


def _count(n: int):
    return jnp.arange(n, dtype=np.int32)


def _all_heads(plan: Plan):
    """Batch rows and head steps of the outer loop."""
    return tuple(a.reshape(-1) for a in jnp.indices((plan.B, plan.steps), dtype=np.int32))


def _scaled_queries(plan: Plan, x: Tensors, row):
    q_tile = _read_tile(plan, x, x.q, row)
    dtype = statistics_dtype(q_tile.dtype)
    return q_tile.astype(dtype) * np.asarray(plan.scale, dtype)


def _read_tile(plan: Plan, x: Tensors, a, row):
    """A row's tile [group·tile, X] of an array [B, T', N, X]."""
    sizes = (1, x.layout.q_tile, plan.group, a.shape[-1])
    return jax.lax.dynamic_slice(a, _corner(plan, x, row), sizes)[0].swapaxes(0, 1).reshape(-1, a.shape[-1])


def _write_tile(plan: Plan, x: Tensors, a, tile, row):
    tile = tile.reshape(plan.group, x.layout.q_tile, -1).swapaxes(0, 1)[None]
    return jax.lax.dynamic_update_slice(a, tile.astype(a.dtype), _corner(plan, x, row))


def _corner(plan: Plan, x: Tensors, row):
    b, h, i = row
    return b, i * x.layout.q_tile, h * plan.group, ZERO


def _heads(plan: Plan, h):
    """The query heads of a head step."""
    return h * plan.group + jnp.arange(plan.group, dtype=np.int32)


def _kv_head(plan: Plan, h):
    return h * plan.group // (plan.N // plan.K)


def _sides(plan: Plan, x: Tensors, at: Run):
    sides = x.layout.sides(batch=plan.B, heads=plan.N)
    here = dict(batch=at.b.reshape(1, 1, 1, 1), head=_heads(plan, at.h).reshape(1, -1, 1, 1))
    return tuple(side.at(**here) for side in sides)


def _table(table, b, h):
    """One batch row's and head's part of a layout's table."""
    table = jnp.asarray(table)
    return table[b if table.shape[0] > 1 else 0, h if table.shape[1] > 1 else 0]


def _bias_window(plan: Plan, x: Tensors, at: Run):
    """Where a visit's part of the bias starts, and its size."""
    full = ((at.b, 1), (at.h * plan.group, plan.group), (at.i * x.layout.q_tile, x.layout.q_tile), (at.start, at.width))
    window = [(ZERO, 1) if n == 1 else place for n, place in zip(x.bias.shape, full, strict=True)]
    return tuple(start for start, _ in window), tuple(size for _, size in window)


def _bias_tile(plan: Plan, x: Tensors, at: Run):
    return jax.lax.dynamic_slice(x.bias, *_bias_window(plan, x, at))


def _sum_to_bias(plan: Plan, x: Tensors, at: Run, dscores):
    """A visit's gradient of the bias, summed over the axes along which the bias is broadcast."""
    _, sizes = _bias_window(plan, x, at)
    full = dscores.reshape(1, plan.group, x.layout.q_tile, at.width)
    return full.sum(tuple(axis for axis, n in enumerate(sizes) if n == 1), keepdims=True)


def _add_at(big, part, place):
    return jax.lax.dynamic_update_slice(big, jax.lax.dynamic_slice(big, place, part.shape) + part, place)


def _where(condition, yes, no):
    """`jnp.where`, or just `yes` where everything is allowed."""
    return yes if condition is None else jnp.where(condition, yes, no)
