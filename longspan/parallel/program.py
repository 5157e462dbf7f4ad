"""The program that every device runs: attention to its own keys, then to those of others, and the backward pass.

Each pair of a query and a key is computed once, on one device. Partial results are combined by their log-sum-exps.
"""

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
from longspan.parallel.by_head import bias_of_all, merge_heads, of_head, one_head, over_heads
from longspan.parallel.collectives import (
    GlobalKeys,
    Halo,
    ListedBlocks,
    gathered,
    global_tokens,
    reach,
    ring,
    ring_back,
    scattered,
)
from longspan.parallel.exchange import BlockLists, block_lists, tables_only
from longspan.parallel.parts import (
    ShardConfig,
    TokenSelection,
    attend_to_part,
    empty_result,
    gradients_of_part,
    slots_of,
)
from longspan.parallel.plan import ParallelPlan


def attend(config: ShardConfig, call: Request) -> tuple[Any, Any]:
    """(out, lse) of this device's queries; first derivatives are supported.

    The call has this device's q, k, v and rows of the bias. Its mask and positions are those of all tokens, in order.
    """
    forward = partial(_forward, config)
    return differentiable(Passes("ls.parallel.attention", forward, forward, partial(_backward, config)), call)


class ShardInputs(NamedTuple):
    """The inputs of one device's program: its part of the call, and the tokens that it receives."""

    config: ShardConfig
    number: Any  # int32 []: the number of its shard
    call: Request
    own: TokenSelection  # its queries
    columns: Any  # (slots, real) of the global keys, or None
    rows: Any  # (slots, real) of the global queries, or None
    lists: BlockLists | None  # the blocks that are exchanged

    def hidden_keys(self, slots: Any, foreign: Any) -> Any:
        """Global keys among the keys of other devices: they are received separately. None if there are none."""
        if self.columns is None:
            return None
        return foreign & _is_listed(slots, *self.columns)

    def shard(self, distance) -> TokenSelection:
        """The keys of the device `distance` before this one."""
        plan = self.config.plan
        slots = slots_of(plan, (self.number - distance) % np.int32(plan.shards))
        inside = plan.rows * plan.shards == plan.length
        return TokenSelection(slots, self.hidden_keys(slots, jnp.asarray(distance != 0)), inside)

    def sources(self) -> tuple[Halo | None, GlobalKeys | None, ListedBlocks | None]:
        """The collectives that bring keys to this device, other than the ring."""
        halo = columns = blocks = None
        if self.config.plan.halo:
            halo = Halo(self.config, self.number)
        if self.columns is not None:
            columns = GlobalKeys(self.config, self.number, *self.columns)
        if self.lists is not None:
            blocks = ListedBlocks(self.config, self.lists)
        return halo, columns, blocks

    def received(self, source: Any) -> TokenSelection:
        """The keys that a source brings."""
        if isinstance(source, GlobalKeys):
            return TokenSelection(source.slots, source.hidden(), inside=True)
        slots = source.slots()
        hidden = self.hidden_keys(slots, True)
        if isinstance(source, ListedBlocks):
            unused = source.hidden()
            hidden = unused if hidden is None else unused | hidden
        return TokenSelection(slots, hidden)

    def over(
        self, kv: Any, keys: TokenSelection, call: Request | None = None
    ) -> tuple[ShardConfig, Request, TokenSelection, TokenSelection]:
        """The arguments of `attend_to_part`: this device's queries, or those of one head, and some keys."""
        if call is None:
            call = self.call
        return self.config, replace(call, k=kv[0], v=kv[1]), self.own, keys

    def attend_to(self, source: Any, kv: Any) -> Result:
        """Attention of this device's queries to the keys of a source."""
        if not _by_head(source):
            return attend_to_part(*self.over(kv, self.received(source)))
        heads = kv[0].shape[2]

        def one(head):
            call, keys = of_head(self.call, head, heads), self.received(source.of_head(head))
            return attend_to_part(*self.over(one_head(kv, head, heads), keys, call))

        return merge_heads(over_heads(one, heads))

    def gradients(self, source: Any, kv: Any, given: tuple[Result, Any, Any]) -> tuple[Any, Any, Any]:
        """(dq, dkv, dbias) of `attend_to`."""
        if not _by_head(source):
            return gradients_of_part(*self.over(kv, self.received(source)), *given)
        heads = kv[0].shape[2]

        def one(head):
            call, keys = of_head(self.call, head, heads), self.received(source.of_head(head))
            return gradients_of_part(*self.over(one_head(kv, head, heads), keys, call), *one_head(given, head, heads))

        dq, dkv, dbias = over_heads(one, heads)
        return merge_heads(dq), merge_heads(dkv), bias_of_all(self.call.bias, dbias)


def _by_head(source: Any) -> bool:
    return isinstance(source, ListedBlocks) and source.by_head


class SavedForBackward(NamedTuple):
    """Results of the forward pass's communication, which the backward pass does not repeat."""

    halo: Any = None  # k, v
    columns: Any = None  # k, v
    listed: Any = None  # k, v
    rows: Any = None  # q of the global queries, and their lse over all keys
    distances: Any = None  # how far the ring went, if that is data
    beyond: Any = None  # whether the fallback was used
    fallback: Any = None  # what the fallback saved


def _shard_inputs(config: ShardConfig, call: Request) -> tuple[ShardInputs, Mask, Any]:
    """The inputs, the mask without its global tokens, and the number of tokens or blocks beyond the plan's capacity."""
    plan = config.plan
    number = jax.lax.axis_index(config.axis).astype(np.int32)
    slots = slots_of(plan, number)
    pinned = call.mask.pinned(plan.length)
    columns = rows = hidden = lists = None
    beyond = jnp.zeros((), np.int32)
    if any(step.kind == "columns" for step in plan.steps):
        *columns, extra = global_tokens(plan, plan.columns, pinned.kv_flags, plan.by_flags[0])
        beyond = jnp.maximum(beyond, extra)
    if any(step.kind == "queries" for step in plan.steps):
        *rows, extra = global_tokens(plan, plan.queries, pinned.q_flags, plan.by_flags[1])
        beyond = jnp.maximum(beyond, extra)
        hidden = _is_listed(slots, *rows)
    rest = _without_global_tokens(plan, call.mask)
    if plan.exchange is not None:
        lists = _lists(plan, call, number, rest)
        beyond = jnp.maximum(beyond, lists.beyond)
    return ShardInputs(config, number, call, TokenSelection(slots, hidden), columns, rows, lists), rest, beyond


def _without_global_tokens(plan: ParallelPlan, mask: Mask) -> Mask:
    """The mask without its global tokens, if the plan has transfers for them; else the whole mask."""
    pinned = mask.pinned(plan.length)
    in_plan = pinned.columns <= {*plan.columns} and pinned.rows <= {*plan.queries}
    if in_plan and (bool(pinned.kv_flags), bool(pinned.q_flags)) == plan.by_flags:
        return pinned.rest
    return mask


def _lists(plan: ParallelPlan, call: Request, number: Any, rest: Mask) -> BlockLists:
    """The blocks that are exchanged."""
    exchange = plan.exchange
    assert exchange is not None
    known = tables_only(rest, not call.has_positions)
    numbers = None if call.rows is None else (call.rows, call.heads)
    return block_lists(known, exchange, number, numbers, plan.rows // exchange.unit, plan.length, call.dims["K"])


def _forward(config: ShardConfig, call: Request) -> Result:
    """The forward pass of the plan, or of its fallback: all devices choose the same one."""
    inputs, rest, beyond = _shard_inputs(config, call)
    if config.plan.fallback is None:
        return _forward_as_planned(inputs, rest)
    other = replace(config, plan=config.plan.fallback)

    # Both branches of `cond` must return the same shapes: each fills the other's saved arrays with zeros.
    fallback_shapes = jax.eval_shape(lambda: _forward(other, call).residuals)
    planned_shapes = jax.eval_shape(lambda: _forward_as_planned(inputs, rest).residuals)

    def fallback() -> Result:
        found = _forward(other, call)
        return found._replace(residuals=_zeros_of(planned_shapes)._replace(fallback=found.residuals))

    def as_planned() -> Result:
        found = _forward_as_planned(inputs, rest)
        return found._replace(residuals=found.residuals._replace(fallback=_zeros_of(fallback_shapes)))

    # Over all mesh axes, because devices with other rows and heads take part in the same collectives.
    too_many = jax.lax.pmax(beyond, config.all_axes) > 0
    found = jax.lax.cond(too_many, fallback, as_planned)
    return found._replace(residuals=found.residuals._replace(beyond=too_many))


def _zeros_of(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _forward_as_planned(inputs: ShardInputs, rest: Mask) -> Result:
    config, call = inputs.config, inputs.call
    plan, own = config.plan, (call.k, call.v)
    saved = SavedForBackward(*(None if source is None else source.bring(*own) for source in inputs.sources()))

    def visit(shard, distance, part: Result) -> Result:
        return combine([part, attend_to_part(*inputs.over(shard, inputs.shard(distance)))])

    part = empty_result(call)
    if plan.ring is None:
        part = visit(own, 0, part)
    else:
        distances = _distances(inputs, rest)
        part = ring(config, own, distances, visit, part)
        if plan.data:
            saved = saved._replace(distances=distances)
    for source, kv in zip(inputs.sources(), saved[:3], strict=True):
        if source is not None:
            part = combine([part, inputs.attend_to(source, kv)])
    if inputs.rows is not None:
        part, rows = _global_queries(inputs, part)
        saved = saved._replace(rows=rows)
    return _with_sinks(part, call.sinks)._replace(residuals=saved)


def _with_sinks(part: Result, sinks: Any) -> Result:
    """The result with the sink logits added to the softmax."""
    if sinks is None:
        return part
    logits = sinks.astype(part.lse.dtype).reshape(1, 1, -1)
    return combine([part, Result(None, jnp.broadcast_to(logits, part.lse.shape))])


def _distances(inputs: ShardInputs, rest: Mask) -> tuple[Any, Any]:
    """The number of shards that the ring visits before and after."""
    plan = inputs.config.plan
    assert plan.ring is not None
    if not plan.data:
        return plan.ring.shift, plan.ring.after
    return reach(inputs.config, inputs.number, inputs.call, rest)


def _global_queries(inputs: ShardInputs, part: Result) -> tuple[Result, Any]:
    """Global queries are sent to all devices, each attends to its own keys, and the owner receives the combination."""
    config, call, (slots, real) = inputs.config, inputs.call, inputs.rows
    q = gathered(config, inputs.number, slots, real, call.q)
    mine = attend_to_part(*_sent_queries(inputs, q))
    whole = combine([mine], across=config.axis)
    # Rows are added into zeros, so lse = -inf travels as 0 with a flag.
    placed = scattered(
        config, inputs.number, slots, real, jax.tree.map(jnp.zeros_like, part),
        whole._replace(lse=jnp.where(whole.lse == -jnp.inf, 0, whole.lse)),
    )  # fmt: skip
    seen = scattered(
        config, inputs.number, slots, real,
        jnp.zeros(part.lse.shape, np.int32), (whole.lse != -jnp.inf).astype(np.int32),
    )  # fmt: skip
    placed = placed._replace(lse=jnp.where(seen == 0, -jnp.inf, placed.lse))
    return combine([part, placed]), (q, _with_sinks(whole, call.sinks)._replace(out=None))


def _sent_queries(inputs: ShardInputs, q: Any) -> tuple[ShardConfig, Request, TokenSelection, TokenSelection]:
    """The arguments of `attend_to_part`: global queries, and this device's keys."""
    slots, real = inputs.rows
    # Biases with rows by query cannot be sent: plans of such calls send no queries.
    call = replace(inputs.call, q=q)
    return inputs.config, call, TokenSelection(slots, ~real), inputs.shard(0)._replace(hidden=None)


def _backward(config: ShardConfig, call: Request, result: Result, delta, dout) -> tuple[Any, Any, Any, Any]:
    inputs, rest, _ = _shard_inputs(config, call)
    saved = result.residuals
    if config.plan.fallback is None:
        return _backward_as_planned(inputs, rest, result, delta, dout)
    other = replace(config, plan=config.plan.fallback)
    return jax.lax.cond(
        saved.beyond,
        lambda: _backward(other, call, result._replace(residuals=saved.fallback), delta, dout),
        lambda: _backward_as_planned(inputs, rest, result, delta, dout),
    )


def _backward_as_planned(inputs: ShardInputs, rest: Mask, result: Result, delta, dout) -> tuple[Any, Any, Any, Any]:
    config, call, saved = inputs.config, inputs.call, result.residuals
    plan, own, given = config.plan, (call.k, call.v), (result._replace(out=None, residuals=None), delta, dout)
    state = _zeros(call.q), _zeros(partition_floats(call.bias)[0])
    totals = _zeros(own)

    def visit(shard, distance, state):
        dq, dkv, dbias = gradients_of_part(*inputs.over(shard, inputs.shard(distance)), *given)
        return dkv, _plus(state, (dq, dbias))

    if plan.ring is None:
        dkv, state = visit(own, 0, state)
        totals = _plus(totals, dkv)
    else:
        distances = _distances(inputs, rest) if saved.distances is None else saved.distances
        state, totals = ring_back(config, own, distances, visit, state, totals)
    for source, kv in zip(inputs.sources(), saved[:3], strict=True):
        if source is not None:
            dq, dkv, dbias = inputs.gradients(source, kv, given)
            state, totals = _plus(state, (dq, dbias)), source.take_home(dkv, totals)
    (dq, dbias), (dk, dv) = state, totals
    if inputs.rows is not None:
        return _global_query_gradients(inputs, saved.rows, delta, dout, (dq, dk, dv, dbias))
    return dq, dk, dv, dbias


def _global_query_gradients(inputs: ShardInputs, saved, delta, dout, so_far) -> tuple[Any, Any, Any, Any]:
    config, (slots, real) = inputs.config, inputs.rows
    q, whole = saved
    delta, dout = gathered(config, inputs.number, slots, real, (delta, dout))
    dq, dkv, dbias = gradients_of_part(*_sent_queries(inputs, q), whole, delta, dout)
    total_dq = jax.lax.psum(dq, config.axis)
    return (
        scattered(config, inputs.number, slots, real, so_far[0], total_dq),
        *_plus(so_far[1:3], dkv),
        _plus(so_far[3], dbias),
    )


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, statistics_dtype(x.dtype)), tree)


def _plus(totals: Any, more: Any) -> Any:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), totals, more)


def _is_listed(slots, listed, real):
    """Which of the slots [1, n] are among the real ones of `listed` [B or 1, m]."""
    # By bisection: for a long prefix, a table of all pairs would be as large as a dense mask.
    rows = jnp.sort(jnp.where(real, listed, np.int32(FAR)), axis=1)
    place = jax.vmap(lambda row: jnp.searchsorted(row, slots[0]))(rows)
    return jnp.take_along_axis(rows, jnp.minimum(place, rows.shape[1] - 1), axis=1) == slots
