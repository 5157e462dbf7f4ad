"""The walk that both passes of the `xla` engine share: the visits of a row of tiles, and the scores of a visit."""

import jax
import jax.numpy as jnp

from longspan.array_types import statistics_dtype
from longspan.dropout import keep
from longspan.engines.varying import vary, varying_axes
from longspan.engines.xla.biases import bias_tile
from longspan.engines.xla.parts import (
    Plan,
    Run,
    Tensors,
    apart,
    query_heads,
    run_of,
    sides,
    table_of,
    where_allowed,
)

NEVER = -1e30  # a masked score; finite, because (-inf) - (-inf) is NaN in both passes
LOW = -1e20  # where the running maximum starts: below every score, and so far above NEVER that exp(NEVER - LOW) is 0


def visit_all(plan: Plan, x: Tensors, row, visits, carry, combine=None):
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
    if x.biases:  # a bias of -inf masks its key, which shows only when it is read
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
    if x.biases:
        runs, dtype = apart(plan, at), statistics_dtype(x.q.dtype)
        parts = [part & (bias_tile(plan, x, one, dtype) != -jnp.inf) for part, one in zip(parts, runs, strict=True)]
    return [jnp.broadcast_to(part, shape).reshape(-1, at.width) for part in parts]


def scores_of(plan: Plan, x: Tensors, q_tile, k, at: Run, allowed):
    """Scores [rows, keys] of a visit, NEVER where not allowed, and the slope of the soft cap."""
    scores, slope = q_tile @ k.T, None
    if plan.soft_cap is not None:
        bent = jnp.tanh(scores / plan.soft_cap)
        scores, slope = plan.soft_cap * bent, 1 - bent * bent
    if x.biases:
        bias = jnp.broadcast_to(bias_tile(plan, x, at, scores.dtype), (1, plan.group, x.layout.q_tile, at.width))
        scores = scores + jnp.where(bias == -jnp.inf, 0, bias).reshape(scores.shape)
    return where_allowed(allowed, scores, lowest(x, scores.dtype) if x.biases else NEVER), slope


def along_keys(reduce, a):
    """Reduces [rows, keys] over the keys, in two steps: XLA's CPU code only vectorises across an axis that stays."""
    lanes = next(n for n in (64, 16, 1) if a.shape[1] % n == 0)
    return reduce(reduce(a.reshape(a.shape[0], -1, lanes), axis=1), axis=-1, keepdims=True)


def lowest(x: Tensors, dtype) -> float:
    """Where the running maximum starts. A bias may be as low as floats go (people mask with it), scores may not."""
    return float(jnp.finfo(dtype).min) if x.biases else LOW


def powers_of(x: Tensors, scores, level, allowed):
    """exp(scores - level), 0 where not allowed; without a bias masked scores are low enough to vanish by themselves."""
    powers = jnp.exp(scores - level)
    return where_allowed(allowed, powers, 0) if x.biases else powers


def drop(plan: Plan, x: Tensors, at: Run, weights):
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
