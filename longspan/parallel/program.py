"""What every device runs: its own keys first, then those of others, each pair once; and the same backwards."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan._types import FAR, statistics_dtype
from longspan.biases import apart, together
from longspan.engines._gradient import Floats
from longspan.masks import Mask
from longspan.parallel.by_head import bias_of_all, of_head, over_heads, side_by_side, upstream_of_head
from longspan.parallel.collectives import Columns, Halo, Listed, gathered, reach, ring, ring_back, scattered, tokens
from longspan.parallel.exchange import Lists, lists, tables_only
from longspan.parallel.parts import (
    Context,
    Keys,
    Partial,
    Queries,
    Setting,
    Upstream,
    attended,
    gradients,
    join,
    levels,
    nothing,
    slots_of,
    with_sinks,
)
from longspan.parallel.plan import Plan


def attend(setting: Setting, floats: Floats, context: Context) -> tuple[Any, Any]:
    """(out, lse) of this device's queries, differentiable once."""
    bias, integers = apart(floats.bias)
    return _attend(setting, floats._replace(bias=bias), (context, integers))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(setting: Setting, floats: Floats, rest):
    part, _ = _forward(setting, floats, rest)
    return part.out.astype(floats.q.dtype), part.lse


def _attend_fwd(setting: Setting, floats: Floats, rest):
    part, saved = _forward_once(setting, floats, rest)  # type: ignore[misc]
    return (part.out.astype(floats.q.dtype), part.lse), (floats, rest, part, saved)


def _attend_bwd(setting: Setting, residuals, cotangents):
    return _backward_once(setting, *residuals, cotangents), None


_attend.defvjp(_attend_fwd, _attend_bwd)


class _Here(NamedTuple):
    """What this device has to do with, in a few words."""

    setting: Setting
    context: Context
    queries: Queries
    columns: Any  # (slots, real) of the keys that everybody sees, or None
    rows: Any  # (slots, real) of the queries that see everything, or None
    lists: Lists | None  # the blocks that are exchanged

    def hidden_keys(self, slots: Any, foreign: Any) -> Any:
        """Keys that everybody sees come by themselves to all but their owner."""
        return None if self.columns is None else foreign & _one_of(slots, *self.columns)

    def shard(self, shard, distance) -> Keys:
        """A shard of so many devices before this one."""
        plan = self.setting.plan
        slots = slots_of(plan, (self.context.device - distance) % np.int32(plan.shards))
        inside = plan.rows * plan.shards == plan.length
        return Keys(shard[0], shard[1], slots, self.hidden_keys(slots, jnp.asarray(distance != 0)), inside)

    def ways(self) -> tuple[Halo | None, Columns | None, Listed | None]:
        """How keys come to this device, besides the ring."""
        device = self.context.device
        return (
            Halo(self.setting, device) if self.setting.plan.halo else None,
            None if self.columns is None else Columns(self.setting, device, *self.columns),
            None if self.lists is None else Listed(self.setting, self.lists),
        )

    def foreign(self, way: Any, kv: Any) -> Keys:
        """The keys that came one way."""
        if isinstance(way, Columns):
            return Keys(kv[0], kv[1], way.slots, way.hidden(), inside=True)
        slots = way.slots()
        hidden = self.hidden_keys(slots, True)
        if isinstance(way, Listed):
            hidden = way.hidden() if hidden is None else way.hidden() | hidden
        return Keys(kv[0], kv[1], slots, hidden)

    def attended(self, way: Any, kv: Any) -> Partial:
        """This device's queries over the keys that came one way."""
        if not _by_head(way):
            return attended(self.setting, self.context, self.queries, self.foreign(way, kv))
        heads = kv[0].shape[2]

        def one(head):
            of = of_head(self.context, self.queries, head, heads)
            return attended(self.setting, *of, self.foreign(way.of_head(head), _one_head(kv, head)))

        return side_by_side(over_heads(one, heads))

    def gradients(self, way: Any, kv: Any, up: Upstream) -> tuple[Any, Any, Any]:
        """(dq, dkv, dbias) of the same."""
        if not _by_head(way):
            return gradients(self.setting, self.context, self.queries, self.foreign(way, kv), up)
        heads = kv[0].shape[2]

        def one(head):
            of, keys = of_head(self.context, self.queries, head, heads), _one_head(kv, head)
            back = upstream_of_head(up, head, heads)
            return gradients(self.setting, *of, self.foreign(way.of_head(head), keys), back)

        dq, dkv, dbias = over_heads(one, heads)
        return side_by_side(dq), side_by_side(dkv), bias_of_all(self.queries.bias, dbias)


def _by_head(way: Any) -> bool:
    return isinstance(way, Listed) and way.by_head


def _one_head(kv: Any, head: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, head, 1, axis=2), kv)


class _Saved(NamedTuple):
    """What the backward pass need not ask for again."""

    halo: Any = None  # k, v
    columns: Any = None  # k, v
    listed: Any = None  # k, v
    rows: Any = None  # q, and the partial result
    distances: Any = None  # how far the ring went, if that is data
    beyond: Any = None  # whether global tokens were too many
    otherwise: Any = None  # what the way for too many need not ask for again


def _here(setting: Setting, floats: Floats, rest) -> tuple[_Here, Any, Any]:
    """What is at hand, the mask without its global tokens, and how many of these are too many."""
    context, integers = rest
    plan = setting.plan
    bias = together(floats.bias, integers)
    slots = slots_of(plan, context.device)
    pinned = context.mask.pinned(plan.length)
    columns = rows = None
    beyond = jnp.zeros((), np.int32)
    if any(step.kind == "columns" for step in plan.steps):
        *columns, more = tokens(plan, plan.columns, pinned.kv_flags, plan.by_flags[0])
        beyond = jnp.maximum(beyond, more)
    if any(step.kind == "queries" for step in plan.steps):
        *rows, more = tokens(plan, plan.queries, pinned.q_flags, plan.by_flags[1])
        beyond = jnp.maximum(beyond, more)
    hidden = None if rows is None else _one_of(slots, *rows)
    rest = _rest(plan, context.mask)
    blocks = None
    if plan.exchange is not None:
        blocks = _lists(plan, context, rest, floats.k.shape[2])
        beyond = jnp.maximum(beyond, blocks.beyond)
    return _Here(setting, context, Queries(floats.q, slots, bias, hidden), columns, rows, blocks), rest, beyond


def _rest(plan: Plan, mask: Mask) -> Mask:
    """The mask without its global tokens, if the plan brings those together by themselves."""
    pinned = mask.pinned(plan.length)
    taken = pinned.columns <= {*plan.columns} and pinned.rows <= {*plan.queries}
    return pinned.rest if taken and (bool(pinned.kv_flags), bool(pinned.q_flags)) == plan.by_flags else mask


def _lists(plan: Plan, context: Context, rest: Mask, heads: int) -> Lists:
    """The blocks that are exchanged."""
    of = plan.exchange
    assert of is not None
    known = tables_only(rest, context.q_positions is None and context.kv_positions is None)
    numbers = None if context.rows is None else (context.rows, context.heads)
    return lists(known, of, context.device, numbers, plan.rows // of.unit, plan.length, heads)


def _forward(setting: Setting, floats: Floats, rest) -> tuple[Partial, _Saved]:
    """The plan's way, or that for too many global tokens: which one, all devices agree."""
    here, without, beyond = _here(setting, floats, rest)
    if setting.plan.fallback is None:
        return _found(here, without, floats)
    other = replace(setting, plan=setting.plan.fallback)

    # A way saves what it brought, and nothing in the place of what the other would have saved.
    there = jax.eval_shape(lambda: _forward(other, floats, rest)[1])
    usual = jax.eval_shape(lambda: _found(here, without, floats)[1])

    def otherwise():
        part, saved = _forward(other, floats, rest)
        return part, _nothing_of(usual)._replace(otherwise=saved)

    def found():
        part, saved = _found(here, without, floats)
        return part, saved._replace(otherwise=_nothing_of(there))

    # All axes: programs of other rows and heads wait for each other too.
    too_many = jax.lax.pmax(beyond, setting.everybody) > 0
    part, saved = jax.lax.cond(too_many, otherwise, found)
    return part, saved._replace(beyond=too_many)


def _nothing_of(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _found(here: "_Here", without: Any, floats: Floats) -> tuple[Partial, "_Saved"]:
    setting = here.setting
    plan, context, queries, own = setting.plan, here.context, here.queries, (floats.k, floats.v)
    brought = _Saved(*(None if way is None else way.bring(*own) for way in here.ways()))

    def visit(shard, distance, part: Partial) -> Partial:
        return join(part, attended(setting, context, queries, here.shard(shard, distance)))

    part = nothing(floats.q, floats.v.shape[3])
    if plan.ring is None:
        part = visit(own, 0, part)
    else:
        distances = _distances(here, without)
        part = ring(setting, own, distances, visit, part)
        brought = brought._replace(distances=distances if plan.data else None)
    for way, kv in zip(here.ways(), brought[:3], strict=True):
        if way is not None:
            part = join(part, here.attended(way, kv))
    if here.rows is not None:
        part, rows = _row_part(here, floats, part)
        brought = brought._replace(rows=rows)
    return with_sinks(part, floats.sinks), brought


def _distances(here: _Here, without: Any) -> tuple[Any, Any]:
    """How far the ring goes, before and after."""
    plan = here.setting.plan
    assert plan.ring is not None
    if not plan.data:
        return plan.ring.shift, plan.ring.after
    return reach(here.setting, here.context, without)


def _row_part(here: _Here, floats: Floats, part: Partial) -> tuple[Partial, Any]:
    """The queries that see everything: they travel, each device answers for its own keys, their owner gets the sum."""
    setting, context, (slots, real) = here.setting, here.context, here.rows
    q = gathered(setting, context, slots, real, floats.q)
    mine = attended(setting, context, _travellers(here, q, slots, real), _own_keys(here, floats))
    whole = _summed(setting, mine)
    placed = scattered(
        setting, context, slots, real, Partial(*(jnp.zeros_like(x) for x in part)),
        whole._replace(lse=jnp.where(whole.lse == -jnp.inf, 0, whole.lse)),
    )  # fmt: skip
    seen = scattered(
        setting, context, slots, real, jnp.zeros(part.lse.shape, np.int32), (whole.lse != -jnp.inf).astype(np.int32)
    )
    placed = placed._replace(lse=jnp.where(seen == 0, -jnp.inf, placed.lse))
    return join(part, placed), (q, with_sinks(whole, floats.sinks))


def _own_keys(here: _Here, floats: Floats) -> Keys:
    keys = here.shard((floats.k, floats.v), 0)
    return keys._replace(hidden=None)


def _travellers(here: _Here, q, slots, real) -> Queries:
    # Arrays along the queries cannot travel: plans keep such queries at home.
    return Queries(q, slots, here.queries.bias, ~real)


def _summed(setting: Setting, part: Partial) -> Partial:
    """Partial results of all devices as one, on all of them."""
    most = jax.lax.pmax(part.lse, setting.axis)
    most = jnp.where(jnp.isfinite(most), most, 0)
    none = part.lse == -jnp.inf
    weight = jnp.where(none, 0, jnp.exp((jnp.where(none, 0, part.lse) - most) + part.low))
    total = jax.lax.psum(weight, setting.axis)
    out = jax.lax.psum(jnp.where(none[..., None], 0, part.out) * weight[..., None], setting.axis)
    empty = total == 0
    safe = jnp.where(empty, 1, total)
    return Partial(out / safe[..., None], *levels(most, safe, empty))


def _backward(setting: Setting, floats: Floats, rest, part: Partial, saved: _Saved, cotangents) -> Floats:
    here, without, _ = _here(setting, floats, rest)
    if setting.plan.fallback is None:
        return _taken_back(here, without, floats, part, saved, cotangents)
    other = replace(setting, plan=setting.plan.fallback)
    return jax.lax.cond(
        saved.beyond,
        lambda: _backward(other, floats, rest, part, saved.otherwise, cotangents),
        lambda: _taken_back(here, without, floats, part, saved, cotangents),
    )


def _taken_back(here: _Here, without: Any, floats: Floats, part: Partial, saved: _Saved, cotangents) -> Floats:
    setting = here.setting
    plan, context, queries, own = setting.plan, here.context, here.queries, (floats.k, floats.v)
    up = _upstream(floats, part, cotangents)
    state = jnp.zeros(floats.q.shape, part.lse.dtype), _zeros(floats.bias)
    totals = _zeros(own)

    def visit(shard, distance, state):
        dq, dkv, dbias = gradients(setting, context, queries, here.shard(shard, distance), up)
        return dkv, _plus(state, (dq, dbias))

    if plan.ring is None:
        dkv, state = visit(own, 0, state)
        totals = _plus(totals, dkv)
    else:
        distances = _distances(here, without) if saved.distances is None else saved.distances
        state, totals = ring_back(setting, own, distances, visit, state, totals)
    for way, kv in zip(here.ways(), saved[:3], strict=True):
        if way is not None:
            dq, dkv, dbias = here.gradients(way, kv, up)
            state, totals = _plus(state, (dq, dbias)), way.take_home(dkv, totals)
    (dq, dbias), (dk, dv) = state, totals
    if here.rows is not None:
        dq, dk, dv, dbias = _row_gradients(here, floats, up, saved.rows, (dq, dk, dv, dbias))
    found = Floats(dq, dk, dv, dbias, _sink_gradient(floats.sinks, part, up.delta))
    return jax.tree.map(lambda x, like: x.astype(like.dtype), found, floats)


def _upstream(floats: Floats, part: Partial, cotangents) -> Upstream:
    dout, dlse = cotangents
    wide = part.lse.dtype
    # What the gradient of every weight in a row is measured against. A row without keys may get NaN: from lse², say.
    delta = jnp.sum(dout.astype(wide) * part.out, axis=-1) - dlse.astype(wide)
    delta = jnp.where(jnp.isfinite(part.lse), delta, 0)
    return Upstream(part.lse, part.low, delta, dout.astype(floats.q.dtype))


def _row_gradients(here: _Here, floats: Floats, up: Upstream, saved, so_far):
    setting, context, (slots, real) = here.setting, here.context, here.rows
    q, whole = saved
    delta, dout = gathered(setting, context, slots, real, (up.delta, up.dout))
    travelled = Upstream(whole.lse, whole.low, delta, dout)
    dq, (dk, dv), dbias = gradients(
        setting, context, _travellers(here, q, slots, real), _own_keys(here, floats), travelled
    )
    home = jax.lax.psum(dq, setting.axis)
    return (
        scattered(setting, context, slots, real, so_far[0], home),
        so_far[1] + dk.astype(so_far[1].dtype),
        so_far[2] + dv.astype(so_far[2].dtype),
        _plus(so_far[3], dbias),
    )


def _sink_gradient(sinks, part: Partial, delta):
    if sinks is None:
        return None
    finite = jnp.isfinite(part.lse)
    logit = sinks.astype(part.lse.dtype).reshape(1, 1, -1)
    weight = jnp.where(finite, jnp.exp(logit - jnp.where(finite, part.lse, 0) - part.low), 0)
    return -jnp.sum(weight * delta, axis=(0, 1))


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, statistics_dtype(x.dtype)), tree)


def _plus(totals: Any, more: Any) -> Any:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), totals, more)


def _one_of(slots, listed, real):
    """Which of some slots [1, n] are among those listed [B or 1, m], as far as these are real."""
    # By bisection: a long prefix would make a table of all pairs as large as a mask.
    rows = jnp.sort(jnp.where(real, listed, np.int32(FAR)), axis=1)
    place = jax.vmap(lambda row: jnp.searchsorted(row, slots[0]))(rows)
    return jnp.take_along_axis(rows, jnp.minimum(place, rows.shape[1] - 1), axis=1) == slots


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward_once(setting: Setting, floats: Floats, rest):
    return _forward(setting, floats, rest)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward_once(setting: Setting, floats: Floats, rest, part, saved, cotangents):
    return _backward(setting, floats, rest, part, saved, cotangents)


def _second_derivative(setting: Setting, *_):
    raise NotImplementedError(
        "ls.parallel.attention has no second derivatives: its backward pass cannot itself be differentiated. "
        "Use ls.attention(..., engine='reference') where you differentiate twice."
    )


_forward_once.defvjp(_second_derivative, _second_derivative)
_backward_once.defvjp(_second_derivative, _second_derivative)
