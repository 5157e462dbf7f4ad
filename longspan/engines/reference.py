"""The `reference` engine: dense, readable, the definition of correct. T×S memory."""

import jax
import jax.numpy as jnp
import numpy as np

from longspan._types import Key, LogSumExp, Output, Query, statistics_dtype
from longspan.dropout import Dropout, keep
from longspan.engines._request import Request, without_pairs
from longspan.layout import BlockLayout


def unsupported(request: Request) -> str | None:
    """The reference computes everything, everywhere."""
    return None


def tiles(request: Request) -> tuple[int, int]:
    """It has no tiles; these are what `explain` counts in."""
    return 128, 128


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
    """Softmax attention over the pairs that the mask allows, written out."""
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    if 0 in (B, T, N, S, H):
        return without_pairs(q, sinks)
    given, dtype = q.dtype, statistics_dtype(q.dtype)
    q_side, kv_side = layout.sides(batch=B, heads=N)
    q_slots, kv_slots = q_side.slots(), kv_side.slots()
    # Behind a barrier: without a mask this is a constant of T×S elements, which XLA would take seconds to fold.
    allowed = jax.lax.optimization_barrier(layout.mask.allowed(q_slots, kv_slots))
    allowed = jnp.broadcast_to(allowed, (B, N, T, S))
    if bias is not None:
        bias = jnp.broadcast_to(bias, (B, N, T, S)).astype(dtype)
        allowed, bias = allowed & (bias != -jnp.inf), jnp.where(bias == -jnp.inf, 0, bias)
    times = allowed.astype(dtype) * _multiplicity(layout, (B, N, T, S), dtype)

    # Where nobody looks there may be anything, NaN included: zeroed here, so that 0 * NaN never happens.
    q = jnp.where(allowed.any(-1).swapaxes(1, 2)[..., None], q.astype(dtype), 0)
    seen = allowed.reshape(B, K, N // K * T, S).any(2).swapaxes(1, 2)[..., None]
    k, v = (jnp.repeat(jnp.where(seen, x.astype(dtype), 0), N // K, axis=2) for x in (k, v))

    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * np.asarray(scale, dtype)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias
    weights, lse = _softmax(scores, times, None if sinks is None else sinks.astype(dtype).reshape(1, N, 1, 1))
    if dropout is not None:
        rows, heads = dropout.rows.reshape(B, 1, 1, 1), dropout.heads.reshape(1, N, 1, 1)
        kept = keep(dropout, rows, heads, q_slots.position, kv_slots.position)
        weights = jnp.where(kept, weights / (1 - dropout.rate), 0)
    out = jnp.einsum("bnts,bsnh->btnh", weights, v)
    return out.astype(given), lse.swapaxes(1, 2)


def _softmax(scores, times, sink):
    """Weights and log-sum-exp where each pair counts `times`; rows without any pair (and sink) give 0 and -inf."""
    none = times == 0
    # Finite, not -inf: a row without keys has max = -inf, and (-inf) - (-inf) is NaN in both passes.
    scores = jnp.where(none, jnp.finfo(scores.dtype).min, scores)
    most = scores.max(-1, keepdims=True)
    if sink is not None:
        most = jnp.maximum(most, sink)
    most = jax.lax.stop_gradient(most)
    powers = jnp.where(none, 0, times * jnp.exp(scores - most))
    total = powers.sum(-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - most)
    empty = total == 0
    lse = jnp.where(empty, -jnp.inf, most + jnp.log(jnp.where(empty, 1, total)))
    return powers / jnp.where(empty, 1, total), lse[..., 0]


def _multiplicity(layout: BlockLayout, shape, dtype):
    """How often each pair counts: once, unless the layout lists tiles more than once."""
    if not layout.repeats:
        return jnp.ones((1, 1, 1, 1), dtype)
    tile = jnp.arange(layout.kv_tiles, dtype=np.int32).reshape(1, 1, 1, 1, -1)
    inside = (layout.starts[..., None] <= tile) & (tile < layout.stops[..., None])
    count = jnp.asarray(inside).sum(3, dtype=dtype)  # [b, n, q tiles, kv tiles]
    by_slot = count.repeat(layout.q_tile, axis=2).repeat(layout.kv_tile, axis=3)
    return by_slot[:, :, : shape[2], : shape[3]]
