"""The part of a call that one device computes: attention of some queries to some keys."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import statistics_dtype
from longspan.biases import Bias, map_terms, partition_floats, terms
from longspan.combine import Result
from longspan.engines import Engine, Request, choose
from longspan.masks import Global
from longspan.masks.base import SLOT
from longspan.masks.by_slot import kv_flags
from longspan.parallel.order import chunk_of, runs_of
from longspan.parallel.plan import ParallelPlan


@dataclass(frozen=True)
class ShardConfig:
    """The static inputs of the program that every device runs."""

    plan: ParallelPlan
    engine: Any
    axis: str  # the mesh axis that shards the sequence
    all_axes: tuple[str, ...]  # all axes of the mesh


class TokenSelection(NamedTuple):
    """Some tokens of the sequence, as queries or as keys."""

    slots: Any  # int32 [B or 1, n]; may lie outside the sequence
    hidden: Any = None  # bool [B or 1, n]: queries that are computed elsewhere, keys that are received another way
    inside: bool = False  # no slot lies outside the sequence


def slots_of(plan: ParallelPlan, device: Any) -> Any:
    """The tokens that a device holds, int32 [1, rows]."""
    size = plan.rows // runs_of(plan.order)
    within = jnp.arange(size, dtype=np.int32)
    chunks = [chunk_of(plan.order, plan.shards, device, run) for run in range(runs_of(plan.order))]
    return jnp.concatenate([chunk * np.int32(size) + within for chunk in chunks])[None]


def place_of(plan: ParallelPlan, slots: Any) -> tuple[Any, Any]:
    """(device, row) of tokens."""
    size = plan.rows // runs_of(plan.order)
    chunk, within = slots // np.int32(size), slots % np.int32(size)
    run = chunk >= plan.shards
    device = jnp.where(run, np.int32(2 * plan.shards - 1) - chunk, chunk)
    return device, within + jnp.where(run, np.int32(size), np.int32(0))


def attend_to_part(config: ShardConfig, call: Request, queries: TokenSelection, keys: TokenSelection) -> Result:
    """Attention of the call's queries to its keys; its mask, positions and bias are those of all tokens."""
    engine, part = _engine_request(config, call, queries, keys)
    out, lse, residual, _ = engine.forward(part, part.layout)  # type: ignore[arg-type]
    if residual is None:
        residual = jnp.zeros_like(lse)
    return Result(out.astype(lse.dtype), lse, residual)


def gradients_of_part(
    config: ShardConfig, call: Request, queries: TokenSelection, keys: TokenSelection, whole: Result, delta, dout
):
    """(dq, (dk, dv), dbias) of `attend_to_part`, given lse and delta over all keys; dbias has all columns."""
    engine, part = _engine_request(config, call, queries, keys)
    given = Result(None, whole.lse, whole.lse_residual)
    dq, dk, dv, dbias = engine.backward(part, part.layout, given, delta, dout)  # type: ignore[arg-type]
    slots = jnp.clip(keys.slots, 0, config.plan.length - 1)
    return dq.astype(statistics_dtype(call.q.dtype)), (dk, dv), _into_columns(call.bias, dbias, slots)


def _engine_request(
    config: ShardConfig, call: Request, queries: TokenSelection, keys: TokenSelection
) -> tuple[Engine, Request]:
    """The engine and its request: the mask is cut to these queries and keys, and sinks are added later."""
    length = config.plan.length
    q_slots = jnp.clip(queries.slots, 0, length - 1)
    kv_slots = jnp.clip(keys.slots, 0, length - 1)
    mask = call.mask
    if SLOT in mask.reads:
        mask = mask.cut(q_slots, kv_slots, q_len=length, kv_len=length)
    visible = _visible_keys(keys, length)
    if visible is not None:
        mask = mask & kv_flags(visible)
    if queries.hidden is not None:
        mask = mask & Global(q_flags=~queries.hidden, columns=False)
    part = replace(
        call,
        mask=mask,
        bias=_columns_of(call.bias, kv_slots),
        sinks=None,
        q_positions=_positions_at(call.q_positions, queries.slots, q_slots),
        kv_positions=_positions_at(call.kv_positions, keys.slots, kv_slots),
    )
    engine, _ = choose(config.engine, part)
    return engine, part.with_layout(*engine.tiles(part))


def _visible_keys(keys: TokenSelection, length: int) -> Any:
    """Keys that lie in the sequence and are not hidden, bool [B or 1, n]; None: all of them."""
    if keys.inside and keys.hidden is None:
        return None
    if keys.inside:
        return ~keys.hidden
    inside = (keys.slots >= 0) & (keys.slots < length)
    if keys.hidden is None:
        return inside
    return inside & ~keys.hidden


def empty_result(call: Request) -> Result:
    """The result of attention to no keys."""
    dtype = statistics_dtype(call.q.dtype)
    lse = jnp.full(call.q.shape[:3], -jnp.inf, dtype)
    return Result(jnp.zeros((*call.q.shape[:3], call.dims["Hv"]), dtype), lse, jnp.zeros_like(lse))


def _columns_of(bias: Any, slots: Any) -> Any:
    """The columns at some slots of a bias's arrays [B or 1, N or 1, n or 1, T or 1]."""
    return map_terms(lambda term: _take(term, slots) if _has_columns(term) else term, bias)


def _has_columns(term: Any) -> bool:
    return not isinstance(term, Bias) and term.shape[3] != 1


def _take(array, slots):
    if slots.shape[0] == 1:
        return jnp.take(array, slots[0], axis=3)
    shape = (slots.shape[0], *array.shape[1:3], slots.shape[1])
    rows = jnp.broadcast_to(array, (slots.shape[0], *array.shape[1:]))
    return jnp.take_along_axis(rows, jnp.broadcast_to(slots[:, None, None], shape), axis=3)


def _into_columns(bias: Any, gradient: Any, slots: Any) -> Any:
    """The gradient of a bias's floats, from that of some of its columns; summed in float32."""
    floats, _ = partition_floats(bias)
    if bias is None:
        return None
    found = []
    for term, part, mine in zip(terms(bias), terms(gradient), terms(floats), strict=True):
        wide = jax.tree.map(lambda x: x.astype(statistics_dtype(x.dtype)), part)
        if _has_columns(term):
            wide = jax.linear_transpose(lambda x: _take(x, slots), jnp.zeros_like(mine, wide.dtype))(wide)[0]
        found.append(wide)
    return tuple(found) if isinstance(bias, tuple) else found[0]


def _positions_at(positions: Any, slots: Any, inside: Any) -> Any:
    """The positions of tokens. Without given positions they are the slots, also outside the sequence: they increase."""
    if positions is None:
        return slots
    if inside.shape[0] == 1:
        return jnp.take(positions, inside[0], axis=1)
    return jnp.take_along_axis(jnp.broadcast_to(positions, (inside.shape[0], positions.shape[1])), inside, axis=1)
