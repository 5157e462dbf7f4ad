"""What a device computes by itself: some queries over some keys, and how partial results join."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan._types import statistics_dtype
from longspan.biases import Bias, apart, map_terms, terms
from longspan.dropout import Dropout
from longspan.engines import Engine, Request, choose
from longspan.layout import plan as layout_of
from longspan.masks import Global, Mask
from longspan.masks.base import SLOT
from longspan.masks.by_slot import KvFlags
from longspan.parallel.order import chunk_of, runs_of
from longspan.parallel.plan import Plan


@dataclass(frozen=True)
class Setting:
    """What is static about a call, on every device."""

    plan: Plan
    engine: Any
    axis: str  # the mesh axis that shares the sequence
    everybody: tuple[str, ...]  # all axes of the mesh
    scale: float
    soft_cap: float | None
    platform: str


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What a device knows besides q, k and v. Arrays along the sequence are whole, in the order of the tokens."""

    mask: Mask
    q_positions: Any  # int32 [B or 1, T], or None: each token's index
    kv_positions: Any
    dropout: Dropout | None
    rows: Any  # int32 [B], [N]: the numbers of its batch rows and heads
    heads: Any
    device: Any  # int32 []: which shard this is


class Queries(NamedTuple):
    """Some queries: which tokens they are."""

    q: Any  # [B, n, N, H]
    slots: Any  # int32 [B or 1, n]
    bias: Any  # their rows of the bias
    hidden: Any = None  # bool [B or 1, n]: those that are computed elsewhere


class Keys(NamedTuple):
    """Some keys: which tokens they are."""

    k: Any  # [B, n, K, H]
    v: Any
    slots: Any  # int32 [B or 1, n]; may lie outside of the sequence
    hidden: Any = None  # bool [B or 1, n]: those that come by another way
    inside: bool = False  # all of them are tokens of the sequence


class Partial(NamedTuple):
    """Attention over some keys: what merges into attention over all."""

    out: Any  # [B, n, N, Hv], float32 or 64
    lse: Any  # [B, n, N]
    low: Any  # what lse lost by rounding


def slots_of(plan: Plan, device: Any) -> Any:
    """Which tokens a device holds, int32 [1, rows]."""
    size = plan.rows // runs_of(plan.order)
    within = jnp.arange(size, dtype=np.int32)
    chunks = [chunk_of(plan.order, plan.shards, device, run) for run in range(runs_of(plan.order))]
    return jnp.concatenate([chunk * np.int32(size) + within for chunk in chunks])[None]


def place_of(plan: Plan, slots: Any) -> tuple[Any, Any]:
    """(device, row) of some tokens."""
    size = plan.rows // runs_of(plan.order)
    chunk, within = slots // np.int32(size), slots % np.int32(size)
    run = chunk >= plan.shards
    device = jnp.where(run, np.int32(2 * plan.shards - 1) - chunk, chunk)
    return device, within + jnp.where(run, np.int32(size), np.int32(0))


def asked(setting: Setting, context: Context, queries: Queries, keys: Keys) -> tuple[Engine, Request]:
    """The engine and the request of some queries over some keys: the mask is cut to them."""
    length = setting.plan.length
    q_slots, kv_slots = (jnp.clip(slots, 0, length - 1) for slots in (queries.slots, keys.slots))
    mask = context.mask
    if SLOT in mask.reads:
        mask = mask.cut(q_slots, kv_slots, q_len=length, kv_len=length)
    seen = None if keys.inside else (keys.slots >= 0) & (keys.slots < length)
    if keys.hidden is not None:
        seen = ~keys.hidden if seen is None else seen & ~keys.hidden
    if seen is not None:
        mask = mask & KvFlags(seen)
    if queries.hidden is not None:
        mask = mask & Global(q_flags=~queries.hidden, columns=False)
    request = Request(
        queries.q,
        keys.k,
        keys.v,
        mask,
        bias=columns_of(queries.bias, kv_slots),
        dropout=context.dropout,
        q_positions=_at(context.q_positions, queries.slots, q_slots),
        kv_positions=_at(context.kv_positions, keys.slots, kv_slots),
        rows=context.rows,
        heads=context.heads,
        scale=setting.scale,
        soft_cap=setting.soft_cap,
        platform=setting.platform,
    )
    return choose(setting.engine, request)[0], request


def attended(setting: Setting, context: Context, queries: Queries, keys: Keys) -> Partial:
    """Some queries over some keys."""
    engine, request = asked(setting, context, queries, keys)
    forward, layout = getattr(engine, "forward", None), _layout(engine, request)
    out, lse, *low = engine.run(request, layout) if forward is None else forward(request, layout)
    return Partial(out.astype(lse.dtype), lse, low[0] if low else jnp.zeros_like(lse))


class Upstream(NamedTuple):
    """What comes back to some queries: over all keys, not only those at hand."""

    lse: Any
    low: Any
    delta: Any
    dout: Any


def gradients(setting: Setting, context: Context, queries: Queries, keys: Keys, up: Upstream):
    """(dq, dk, dv, dbias) of some queries over some keys; dbias for all columns."""
    engine, request = asked(setting, context, queries, keys)
    layout = _layout(engine, request)
    dq, dk, dv, dbias = engine.backward(request, layout, up.lse, up.low, up.delta, up.dout)
    wide = statistics_dtype(request.q.dtype)
    slots = jnp.clip(keys.slots, 0, setting.plan.length - 1)
    return dq.astype(wide), (dk, dv), _into_columns(queries.bias, dbias, slots)


def join(a: Partial, b: Partial) -> Partial:
    """Attention over two disjoint sets of keys as attention over both."""
    most = jnp.maximum(a.lse, b.lse)
    most = jnp.where(jnp.isfinite(most), most, 0)
    weights = [_power(part, most) for part in (a, b)]
    total = weights[0] + weights[1]
    empty = total == 0
    safe = jnp.where(empty, 1, total)
    outs = [
        jnp.where((part.lse == -jnp.inf)[..., None], 0, part.out) * (weight / safe)[..., None]
        for part, weight in zip((a, b), weights, strict=True)
    ]
    return Partial(outs[0] + outs[1], *levels(most, safe, empty))


def levels(most, total, empty):
    """(lse, low) of a sum that was measured from `most`."""
    more = jnp.log(total)
    lse = most + more
    return jnp.where(empty, -jnp.inf, lse), jnp.where(empty, 0, more - (lse - most))


def _power(part: Partial, most):
    # NaN is seen: it must show.
    none = part.lse == -jnp.inf
    return jnp.where(none, 0, jnp.exp((jnp.where(none, 0, part.lse) - most) + part.low))


def nothing(q, value_size: int) -> Partial:
    """What queries that saw nothing have."""
    wide = statistics_dtype(q.dtype)
    lse = jnp.full(q.shape[:3], -jnp.inf, wide)
    return Partial(jnp.zeros((*q.shape[:3], value_size), wide), lse, jnp.zeros_like(lse))


def with_sinks(part: Partial, sinks: Any) -> Partial:
    """The sinks' logits joined in, once."""
    if sinks is None:
        return part
    logits = jnp.broadcast_to(sinks.astype(part.lse.dtype).reshape(1, 1, -1), part.lse.shape)
    return join(part, Partial(jnp.zeros_like(part.out), logits, jnp.zeros_like(logits)))


def columns_of(bias: Any, slots: Any) -> Any:
    """The columns of a bias's arrays [B or 1, N or 1, n or 1, T or 1] at some slots."""
    return map_terms(lambda term: term if isinstance(term, Bias) or term.shape[3] == 1 else _take(term, slots), bias)


def _take(array, slots):
    if slots.shape[0] == 1:
        return jnp.take(array, slots[0], axis=3)
    shape = (slots.shape[0], *array.shape[1:3], slots.shape[1])
    rows = jnp.broadcast_to(array, (slots.shape[0], *array.shape[1:]))
    return jnp.take_along_axis(rows, jnp.broadcast_to(slots[:, None, None], shape), axis=3)


def _into_columns(bias: Any, gradient: Any, slots: Any) -> Any:
    """The gradient of a bias, floats alone, from that of some of its columns; summed in float32."""
    floats, _ = apart(bias)
    if bias is None:
        return None
    found = []
    for term, part, mine in zip(terms(bias), terms(gradient), terms(floats), strict=True):
        wide = jax.tree.map(lambda x: x.astype(statistics_dtype(x.dtype)), part)
        if isinstance(term, Bias) or term.shape[3] == 1:
            found.append(wide)
        else:
            found.append(jax.linear_transpose(lambda x: _take(x, slots), jnp.zeros_like(mine, wide.dtype))(wide)[0])
    return tuple(found) if isinstance(bias, tuple) else found[0]


def _at(positions: Any, slots: Any, inside: Any) -> Any:
    """The positions of some tokens; those outside of the sequence, which nobody sees, have some that grow."""
    if positions is None:
        return slots
    if inside.shape[0] == 1:
        return jnp.take(positions, inside[0], axis=1)
    return jnp.take_along_axis(jnp.broadcast_to(positions, (inside.shape[0], positions.shape[1])), inside, axis=1)


def _layout(engine: Engine, request: Request):
    q_tile, kv_tile = engine.tiles(request)
    given = {name: getattr(request, name) for name in ("q_positions", "kv_positions", "rows", "heads")}
    return layout_of(request.mask, request.dims["T"], request.dims["S"], q_tile, kv_tile, **given, xp=jnp)
