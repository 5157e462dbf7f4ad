"""The loop over the visits of a query tile, and the scores of a visit, for both passes of the `xla` engine."""

import jax
import jax.numpy as jnp

from longspan.array_types import statistics_dtype
from longspan.dropout import keep
from longspan.engines.varying import vary, varying_axes
from longspan.engines.xla.biases import bias_tile
from longspan.engines.xla.parts import (
    Tensors,
    TilePlan,
    TileRun,
    query_heads,
    run_of,
    runs_of_heads,
    sides,
    table_of,
    where_allowed,
)

MASKED_SCORE = -1e30  # finite, because (-inf) - (-inf) is NaN in both passes
# Where the running maximum starts: below every score, and so far above MASKED_SCORE that the exponential of their
# difference is 0.
LOWEST_SCORE = -1e20


def visit_all(plan: TilePlan, x: Tensors, row, visits, carry, combine=None):
    """Visits all tiles that the layout lists for a row: its intervals, then the tiles that all rows have in common."""
    b, h, i = row
    layout, tile = x.layout, x.layout.kv_tile
    starts = table_of(layout.starts, b, h)[i]
    stops = table_of(layout.stops, b, h)[i]

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
        # A tile inside an interval of the row was visited there; here it becomes an empty run.
        inside = jnp.any((starts <= listed[c]) & (listed[c] < stops))
        at = run_of(x, row, first, jnp.where(inside, first, first + tile), tile)
        return _visit(plan, x, at, visits, carry, combine)

    return jax.lax.fori_loop(0, count, common, carry)


def _visit(plan: TilePlan, x: Tensors, at: TileRun, visits, carry, combine):
    """Visits one run of keys: skips it if it is EMPTY, and applies no mask if it is FULL."""
    layout, size = x.layout, x.layout.q_tile
    q_side, kv_side = sides(plan, x, at, plan.heads_per_step)
    end = jnp.minimum(at.stop, plan.S)
    some, every = layout.mask.classify(q_side.run(at.i * size, size), kv_side.run(at.start, at.width))
    full = jnp.all(every) & (at.start == at.first) & (at.start + at.width <= end)
    if x.biases:  # a bias of -inf masks its key, so FULL is unknown before the bias is read
        full = full & False
    kind = jnp.where(jnp.any(some) & (at.first < at.stop), jnp.where(full, 2, 1), 0)

    def each(allowed, carry):
        return [f(*args) for f, *args in zip(visits, runs_of_heads(plan, at), allowed, carry, strict=True)]

    def unmasked(carry):
        return each([None] * plan.heads_per_step, carry)

    def masked(carry):
        q_slots, kv_slots = q_side.slots(at.i * size, size), kv_side.slots(at.start, at.width)
        allowed = layout.mask.allowed(q_slots, kv_slots) & (kv_slots.index >= at.first) & (kv_slots.index < end)
        return each(_allowed_per_head(plan, x, at, allowed), carry)

    if combine is None:
        return jax.lax.switch(kind, [lambda c: c, masked, unmasked], carry)
    # XLA would copy large arrays that pass through the branches. So the branches return only the contribution of the
    # visit, and `combine` adds it to the carry outside of them.
    no_carry = [None] * plan.heads_per_step
    shapes = jax.eval_shape(masked, no_carry)
    axes = varying_axes(x, carry)

    def zeros():
        return vary(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes), axes)

    branches = [zeros, lambda: vary(masked(no_carry), axes), lambda: vary(unmasked(no_carry), axes)]
    return combine(plan, x, at, jax.lax.switch(kind, branches), carry)


def _allowed_per_head(plan: TilePlan, x: Tensors, at: TileRun, allowed):
    """The allowed pairs [1, heads or 1, queries or 1, keys or 1], as [rows, keys] for each head of a step."""
    shape = (1, plan.group, x.layout.q_tile, at.width)
    if allowed.shape[1] == 1:
        parts = [allowed] * plan.heads_per_step
    else:
        parts = jnp.split(allowed, plan.heads_per_step, axis=1)
    if x.biases:
        runs, dtype = runs_of_heads(plan, at), statistics_dtype(x.q.dtype)
        parts = [part & (bias_tile(plan, x, one, dtype) != -jnp.inf) for part, one in zip(parts, runs, strict=True)]
    return [jnp.broadcast_to(part, shape).reshape(-1, at.width) for part in parts]


def scores_of(plan: TilePlan, x: Tensors, q_tile, k, at: TileRun, allowed):
    """Scores [rows, keys] of a visit, very low where not allowed, and the derivative of the soft cap (None: no cap)."""
    scores, slope = q_tile @ k.T, None
    if plan.soft_cap is not None:
        capped = jnp.tanh(scores / plan.soft_cap)
        scores, slope = plan.soft_cap * capped, 1 - capped * capped
    if x.biases:
        bias = jnp.broadcast_to(bias_tile(plan, x, at, scores.dtype), (1, plan.group, x.layout.q_tile, at.width))
        scores = scores + jnp.where(bias == -jnp.inf, 0, bias).reshape(scores.shape)
    return where_allowed(allowed, scores, lowest(x, scores.dtype) if x.biases else MASKED_SCORE), slope


def along_keys(reduce, a):
    """Reduces [rows, keys] over the keys in two steps: XLA on CPU vectorises only along an axis that remains."""
    lanes = next(n for n in (64, 16, 1) if a.shape[1] % n == 0)
    return reduce(reduce(a.reshape(a.shape[0], -1, lanes), axis=1), axis=-1, keepdims=True)


def lowest(x: Tensors, dtype) -> float:
    """Where the running maximum starts. A bias may be as low as the lowest float, a common mask value."""
    return float(jnp.finfo(dtype).min) if x.biases else LOWEST_SCORE


def powers_of(x: Tensors, scores, level, allowed):
    """exp(scores - level), 0 where not allowed. Without a bias, masked scores are so low that the exponential is 0."""
    powers = jnp.exp(scores - level)
    if not x.biases:
        return powers
    return where_allowed(allowed, powers, 0)


def drop(plan: TilePlan, x: Tensors, at: TileRun, weights):
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
