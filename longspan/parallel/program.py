"""What every device runs: its own keys first, then those of others, each pair once; and the same backwards."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import FAR, statistics_dtype
from longspan.biases import partition_floats
from longspan.combine import Result, combine
from longspan.engines import Request
from longspan.engines.gradient import Passes, differentiable
from longspan.masks import Mask
from longspan.parallel.by_head import bias_of_all, of_head, one_head, over_heads, side_by_side
from longspan.parallel.collectives import Columns, Halo, Listed, gathered, reach, ring, ring_back, scattered, tokens
from longspan.parallel.exchange import Lists, lists, tables_only
from longspan.parallel.parts import Selection, Setting, attended, gradients, nothing, slots_of
from longspan.parallel.plan import ParallelPlan


def attend(setting: Setting, call: Request) -> tuple[Any, Any]:
    """(out, lse) of this device's queries, differentiable once.

    The call has this device's q, k, v and rows of the bias; its mask and positions are those of all tokens, in order.
    """
    forward = partial(_forward, setting)
    return differentiable(Passes("ls.parallel.attention", forward, forward, partial(_backward, setting)), call)


class Device(NamedTuple):
    """One device, while it runs: what it holds, and which tokens come to it besides its neighbours'."""

    setting: Setting
    number: Any  # int32 []: which shard this is
    call: Request
    own: Selection  # its queries
    columns: Any  # (slots, real) of the keys that everybody sees, or None
    rows: Any  # (slots, real) of the queries that see everything, or None
    lists: Lists | None  # the blocks that are exchanged

    def hidden_keys(self, slots: Any, foreign: Any) -> Any:
        """Keys that everybody sees come by themselves to all but their owner."""
        return None if self.columns is None else foreign & _one_of(slots, *self.columns)

    def shard(self, distance) -> Selection:
        """The keys of the device that is so many before this one."""
        plan = self.setting.plan
        slots = slots_of(plan, (self.number - distance) % np.int32(plan.shards))
        inside = plan.rows * plan.shards == plan.length
        return Selection(slots, self.hidden_keys(slots, jnp.asarray(distance != 0)), inside)

    def ways(self) -> tuple[Halo | None, Columns | None, Listed | None]:
        """How keys come to this device, besides the ring."""
        return (
            Halo(self.setting, self.number) if self.setting.plan.halo else None,
            None if self.columns is None else Columns(self.setting, self.number, *self.columns),
            None if self.lists is None else Listed(self.setting, self.lists),
        )

    def foreign(self, way: Any) -> Selection:
        """The keys that come one way."""
        if isinstance(way, Columns):
            return Selection(way.slots, way.hidden(), inside=True)
        slots = way.slots()
        hidden = self.hidden_keys(slots, True)
        if isinstance(way, Listed):
            hidden = way.hidden() if hidden is None else way.hidden() | hidden
        return Selection(slots, hidden)

    def over(
        self, kv: Any, keys: Selection, call: Request | None = None
    ) -> tuple[Setting, Request, Selection, Selection]:
        """What is asked of an engine: this device's queries, or those of one head, over some keys."""
        call = self.call if call is None else call
        return self.setting, replace(call, k=kv[0], v=kv[1]), self.own, keys

    def attended(self, way: Any, kv: Any) -> Result:
        """This device's queries over the keys that came one way."""
        if not _by_head(way):
            return attended(*self.over(kv, self.foreign(way)))
        heads = kv[0].shape[2]

        def one(head):
            call, keys = of_head(self.call, head, heads), self.foreign(way.of_head(head))
            return attended(*self.over(one_head(kv, head, heads), keys, call))

        return side_by_side(over_heads(one, heads))

    def gradients(self, way: Any, kv: Any, given: tuple[Result, Any, Any]) -> tuple[Any, Any, Any]:
        """(dq, dkv, dbias) of the same."""
        if not _by_head(way):
            return gradients(*self.over(kv, self.foreign(way)), *given)
        heads = kv[0].shape[2]

        def one(head):
            call, keys = of_head(self.call, head, heads), self.foreign(way.of_head(head))
            return gradients(*self.over(one_head(kv, head, heads), keys, call), *one_head(given, head, heads))

        dq, dkv, dbias = over_heads(one, heads)
        return side_by_side(dq), side_by_side(dkv), bias_of_all(self.call.bias, dbias)


def _by_head(way: Any) -> bool:
    return isinstance(way, Listed) and way.by_head


class Saved(NamedTuple):
    """What the backward pass need not ask for again."""

    halo: Any = None  # k, v
    columns: Any = None  # k, v
    listed: Any = None  # k, v
    rows: Any = None  # q, and lse over all keys
    distances: Any = None  # how far the ring went, if that is data
    beyond: Any = None  # whether global tokens were too many
    otherwise: Any = None  # what the way for too many need not ask for again


def _here(setting: Setting, call: Request) -> tuple[Device, Mask, Any]:
    """This device, the mask without its global tokens, and how many of these are too many."""
    plan = setting.plan
    number = jax.lax.axis_index(setting.axis).astype(np.int32)
    slots = slots_of(plan, number)
    pinned = call.mask.pinned(plan.length)
    columns = rows = None
    beyond = jnp.zeros((), np.int32)
    if any(step.kind == "columns" for step in plan.steps):
        *columns, more = tokens(plan, plan.columns, pinned.kv_flags, plan.by_flags[0])
        beyond = jnp.maximum(beyond, more)
    if any(step.kind == "queries" for step in plan.steps):
        *rows, more = tokens(plan, plan.queries, pinned.q_flags, plan.by_flags[1])
        beyond = jnp.maximum(beyond, more)
    hidden = None if rows is None else _one_of(slots, *rows)
    rest = _rest(plan, call.mask)
    blocks = None
    if plan.exchange is not None:
        blocks = _lists(plan, call, number, rest)
        beyond = jnp.maximum(beyond, blocks.beyond)
    return Device(setting, number, call, Selection(slots, hidden), columns, rows, blocks), rest, beyond


def _rest(plan: ParallelPlan, mask: Mask) -> Mask:
    """The mask without its global tokens, if the plan brings those together by themselves."""
    pinned = mask.pinned(plan.length)
    taken = pinned.columns <= {*plan.columns} and pinned.rows <= {*plan.queries}
    return pinned.rest if taken and (bool(pinned.kv_flags), bool(pinned.q_flags)) == plan.by_flags else mask


def _lists(plan: ParallelPlan, call: Request, number: Any, rest: Mask) -> Lists:
    """The blocks that are exchanged."""
    of = plan.exchange
    assert of is not None
    known = tables_only(rest, not call.has_positions)
    numbers = None if call.rows is None else (call.rows, call.heads)
    return lists(known, of, number, numbers, plan.rows // of.unit, plan.length, call.dims["K"])


def _forward(setting: Setting, call: Request) -> Result:
    """The plan's way, or that for too many global tokens: which one, all devices agree."""
    device, rest, beyond = _here(setting, call)
    if setting.plan.fallback is None:
        return _found(device, rest)
    other = replace(setting, plan=setting.plan.fallback)

    # A way saves what it brought, and nothing in the place of what the other would have saved.
    there = jax.eval_shape(lambda: _forward(other, call).residuals)
    usual = jax.eval_shape(lambda: _found(device, rest).residuals)

    def otherwise() -> Result:
        found = _forward(other, call)
        return found._replace(residuals=_nothing_of(usual)._replace(otherwise=found.residuals))

    def as_planned() -> Result:
        found = _found(device, rest)
        return found._replace(residuals=found.residuals._replace(otherwise=_nothing_of(there)))

    # All axes: programs of other rows and heads wait for each other too.
    too_many = jax.lax.pmax(beyond, setting.everybody) > 0
    found = jax.lax.cond(too_many, otherwise, as_planned)
    return found._replace(residuals=found.residuals._replace(beyond=too_many))


def _nothing_of(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _found(device: Device, rest: Mask) -> Result:
    setting, call = device.setting, device.call
    plan, own = setting.plan, (call.k, call.v)
    brought = Saved(*(None if way is None else way.bring(*own) for way in device.ways()))

    def visit(shard, distance, part: Result) -> Result:
        return combine([part, attended(*device.over(shard, device.shard(distance)))])

    part = nothing(call)
    if plan.ring is None:
        part = visit(own, 0, part)
    else:
        distances = _distances(device, rest)
        part = ring(setting, own, distances, visit, part)
        brought = brought._replace(distances=distances if plan.data else None)
    for way, kv in zip(device.ways(), brought[:3], strict=True):
        if way is not None:
            part = combine([part, device.attended(way, kv)])
    if device.rows is not None:
        part, rows = _row_part(device, part)
        brought = brought._replace(rows=rows)
    return _with_sinks(part, call.sinks)._replace(residuals=brought)


def _with_sinks(part: Result, sinks: Any) -> Result:
    """The sinks' logits joined in, once."""
    if sinks is None:
        return part
    logits = sinks.astype(part.lse.dtype).reshape(1, 1, -1)
    return combine([part, Result(None, jnp.broadcast_to(logits, part.lse.shape))])


def _distances(device: Device, rest: Mask) -> tuple[Any, Any]:
    """How far the ring goes, before and after."""
    plan = device.setting.plan
    assert plan.ring is not None
    if not plan.data:
        return plan.ring.shift, plan.ring.after
    return reach(device.setting, device.number, device.call, rest)


def _row_part(device: Device, part: Result) -> tuple[Result, Any]:
    """The queries that see everything: they travel, each device answers for its own keys, their owner gets the sum."""
    setting, call, (slots, real) = device.setting, device.call, device.rows
    q = gathered(setting, device.number, slots, real, call.q)
    mine = attended(*_travelling(device, q))
    whole = combine([mine], across=setting.axis)
    placed = scattered(
        setting, device.number, slots, real, jax.tree.map(jnp.zeros_like, part),
        whole._replace(lse=jnp.where(whole.lse == -jnp.inf, 0, whole.lse)),
    )  # fmt: skip
    seen = scattered(
        setting, device.number, slots, real,
        jnp.zeros(part.lse.shape, np.int32), (whole.lse != -jnp.inf).astype(np.int32),
    )  # fmt: skip
    placed = placed._replace(lse=jnp.where(seen == 0, -jnp.inf, placed.lse))
    return combine([part, placed]), (q, _with_sinks(whole, call.sinks)._replace(out=None))


def _travelling(device: Device, q: Any) -> tuple[Setting, Request, Selection, Selection]:
    """What is asked of an engine: queries that see everything over this device's keys."""
    slots, real = device.rows
    # Arrays along the queries cannot travel: plans keep such queries at home.
    call = replace(device.call, q=q)
    return device.setting, call, Selection(slots, ~real), device.shard(0)._replace(hidden=None)


def _backward(setting: Setting, call: Request, result: Result, delta, dout) -> tuple[Any, Any, Any, Any]:
    device, rest, _ = _here(setting, call)
    saved = result.residuals
    if setting.plan.fallback is None:
        return _taken_back(device, rest, result, delta, dout)
    other = replace(setting, plan=setting.plan.fallback)
    return jax.lax.cond(
        saved.beyond,
        lambda: _backward(other, call, result._replace(residuals=saved.otherwise), delta, dout),
        lambda: _taken_back(device, rest, result, delta, dout),
    )


def _taken_back(device: Device, rest: Mask, result: Result, delta, dout) -> tuple[Any, Any, Any, Any]:
    setting, call, saved = device.setting, device.call, result.residuals
    plan, own, given = setting.plan, (call.k, call.v), (result._replace(out=None, residuals=None), delta, dout)
    state = _zeros(call.q), _zeros(partition_floats(call.bias)[0])
    totals = _zeros(own)

    def visit(shard, distance, state):
        dq, dkv, dbias = gradients(*device.over(shard, device.shard(distance)), *given)
        return dkv, _plus(state, (dq, dbias))

    if plan.ring is None:
        dkv, state = visit(own, 0, state)
        totals = _plus(totals, dkv)
    else:
        distances = _distances(device, rest) if saved.distances is None else saved.distances
        state, totals = ring_back(setting, own, distances, visit, state, totals)
    for way, kv in zip(device.ways(), saved[:3], strict=True):
        if way is not None:
            dq, dkv, dbias = device.gradients(way, kv, given)
            state, totals = _plus(state, (dq, dbias)), way.take_home(dkv, totals)
    (dq, dbias), (dk, dv) = state, totals
    if device.rows is not None:
        return _row_gradients(device, saved.rows, delta, dout, (dq, dk, dv, dbias))
    return dq, dk, dv, dbias


def _row_gradients(device: Device, saved, delta, dout, so_far) -> tuple[Any, Any, Any, Any]:
    setting, (slots, real) = device.setting, device.rows
    q, whole = saved
    delta, dout = gathered(setting, device.number, slots, real, (delta, dout))
    dq, dkv, dbias = gradients(*_travelling(device, q), whole, delta, dout)
    home = jax.lax.psum(dq, setting.axis)
    return (
        scattered(setting, device.number, slots, real, so_far[0], home),
        *_plus(so_far[1:3], dkv),
        _plus(so_far[3], dbias),
    )


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
