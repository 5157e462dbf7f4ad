"""What a device computes by itself: some queries over some keys."""

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
class Setting:
    """What is static about the program that every device runs."""

    plan: ParallelPlan
    engine: Any
    axis: str  # the mesh axis that shares the sequence
    everybody: tuple[str, ...]  # all axes of the mesh


class Selection(NamedTuple):
    """Some tokens of the sequence, as queries or as keys."""

    slots: Any  # int32 [B or 1, n]; may lie outside of the sequence
    hidden: Any = None  # bool [B or 1, n]: queries that are computed elsewhere, keys that come by another way
    inside: bool = False  # none lies outside


def slots_of(plan: ParallelPlan, device: Any) -> Any:
    """Which tokens a device holds, int32 [1, rows]."""
    size = plan.rows // runs_of(plan.order)
    within = jnp.arange(size, dtype=np.int32)
    chunks = [chunk_of(plan.order, plan.shards, device, run) for run in range(runs_of(plan.order))]
    return jnp.concatenate([chunk * np.int32(size) + within for chunk in chunks])[None]


def place_of(plan: ParallelPlan, slots: Any) -> tuple[Any, Any]:
    """(device, row) of some tokens."""
    size = plan.rows // runs_of(plan.order)
    chunk, within = slots // np.int32(size), slots % np.int32(size)
    run = chunk >= plan.shards
    device = jnp.where(run, np.int32(2 * plan.shards - 1) - chunk, chunk)
    return device, within + jnp.where(run, np.int32(size), np.int32(0))


def attended(setting: Setting, call: Request, queries: Selection, keys: Selection) -> Result:
    """Some queries over some keys, which the call holds; its mask, positions and bias are those of all tokens."""
    engine, part = _asked(setting, call, queries, keys)
    out, lse, residual, _ = engine.forward(part, part.layout)  # type: ignore[arg-type]
    return Result(out.astype(lse.dtype), lse, jnp.zeros_like(lse) if residual is None else residual)


def gradients(setting: Setting, call: Request, queries: Selection, keys: Selection, whole: Result, delta, dout):
    """(dq, (dk, dv), dbias) of the same, for the lse and delta of all keys; dbias for all columns."""
    engine, part = _asked(setting, call, queries, keys)
    given = Result(None, whole.lse, whole.lse_residual)
    dq, dk, dv, dbias = engine.backward(part, part.layout, given, delta, dout)  # type: ignore[arg-type]
    slots = jnp.clip(keys.slots, 0, setting.plan.length - 1)
    return dq.astype(statistics_dtype(call.q.dtype)), (dk, dv), _into_columns(call.bias, dbias, slots)


def _asked(setting: Setting, call: Request, queries: Selection, keys: Selection) -> tuple[Engine, Request]:
    """The engine and the request of some queries over some keys: the mask is cut to them, and sinks join later."""
    length = setting.plan.length
    q_slots, kv_slots = (jnp.clip(tokens.slots, 0, length - 1) for tokens in (queries, keys))
    mask = call.mask
    if SLOT in mask.reads:
        mask = mask.cut(q_slots, kv_slots, q_len=length, kv_len=length)
    seen = None if keys.inside else (keys.slots >= 0) & (keys.slots < length)
    if keys.hidden is not None:
        seen = ~keys.hidden if seen is None else seen & ~keys.hidden
    if seen is not None:
        mask = mask & kv_flags(seen)
    if queries.hidden is not None:
        mask = mask & Global(q_flags=~queries.hidden, columns=False)
    part = replace(
        call,
        mask=mask,
        bias=_columns_of(call.bias, kv_slots),
        sinks=None,
        q_positions=_at(call.q_positions, queries.slots, q_slots),
        kv_positions=_at(call.kv_positions, keys.slots, kv_slots),
    )
    engine, _ = choose(setting.engine, part)
    return engine, part.with_layout(*engine.tiles(part))


def nothing(call: Request) -> Result:
    """What queries that saw nothing have."""
    dtype = statistics_dtype(call.q.dtype)
    lse = jnp.full(call.q.shape[:3], -jnp.inf, dtype)
    return Result(jnp.zeros((*call.q.shape[:3], call.dims["Hv"]), dtype), lse, jnp.zeros_like(lse))


def _columns_of(bias: Any, slots: Any) -> Any:
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
    floats, _ = partition_floats(bias)
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
