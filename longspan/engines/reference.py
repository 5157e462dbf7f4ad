"""The `reference` engine: dense attention that defines the correct result. It needs T×S memory."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import statistics_dtype
from longspan.biases import combine_floats, partition_floats, total
from longspan.combine import Result
from longspan.dropout import keep
from longspan.engines.contract import Engine
from longspan.engines.request import Request
from longspan.layout import BlockLayout


class Reference(Engine):
    """Dense softmax attention with a mask. It supports every feature on every platform."""

    name = "reference"
    differentiable = True
    dense = True

    def tiles(self, request: Request) -> tuple[int, int]:
        """The tiles that `explain` counts; the engine itself has none."""
        return 128, 128

    def notes(self, request: Request) -> tuple[str, ...]:
        return ("this engine is dense: it computes every pair, also those that the mask forbids",)

    def temporary_bytes(self, request: Request) -> int:
        """The size of the scores. Weights, and the residuals of a gradient, are not counted."""
        sizes = [request.dims[axis] for axis in "BNTS"]
        return math.prod(sizes) * statistics_dtype(request.q.dtype).itemsize

    def run(self, request: Request, layout: BlockLayout):
        """(out, lse). JAX differentiates it, any number of times."""
        pairs = _written_out(request, layout)
        scores, _ = _scores(request, pairs)
        sinks = request.sinks
        if sinks is not None:
            sinks = sinks.astype(scores.dtype).reshape(1, -1, 1, 1)
        weights, lse = _softmax(scores, pairs.count, sinks)
        out = jnp.einsum("bnts,bsnh->btnh", _dropped(request, pairs, weights), pairs.v)
        return out.astype(request.q.dtype), lse.swapaxes(1, 2)

    def backward(self, request: Request, layout: BlockLayout, result: Result, delta, dout):
        """The gradients of weights exp(score - lse - lse_residual); lse may cover more keys than the request."""
        pairs = _written_out(request, layout)
        scores, slope = _scores(request, pairs)
        finite = jnp.isfinite(result.lse)
        lse = _column(jnp.where(finite, result.lse, 0))
        lse_residual = _column(jnp.where(finite, result.lse_residual, 0))
        delta = _column(jnp.where(finite, delta, 0))
        masked = pairs.count == 0
        weights = jnp.where(masked, 0, pairs.count * jnp.exp(jnp.where(masked, 0, scores - lse - lse_residual)))
        dout = dout.astype(scores.dtype)
        dv = jnp.einsum("bnts,btnh->bsnh", _dropped(request, pairs, weights), dout)
        dweights = _dropped(request, pairs, jnp.einsum("btnh,bsnh->bnts", dout, pairs.v))
        dbias = dscores = weights * (dweights - delta)
        dscores = dscores * slope * np.asarray(request.scale, scores.dtype)
        dq = jnp.einsum("bnts,bsnh->btnh", dscores, pairs.k)
        dk = jnp.einsum("bnts,btnh->bsnh", dscores, pairs.q)
        dk = _sum_groups(dk, request.dims["K"]).astype(request.k.dtype)
        dv = _sum_groups(dv, request.dims["K"]).astype(request.k.dtype)
        return dq.astype(request.q.dtype), dk, dv, _bias_gradient(request, layout, dbias)


ENGINE = Reference()


class _DensePairs(NamedTuple):
    """The arrays of a request for all pairs of queries and keys, with keys and values repeated for every query head."""

    count: Any  # [B, N, T, S]: how often each pair counts; 0: not allowed
    q: Any  # [B, T, N, H], 0 where a query sees no key
    k: Any  # [B, S, N, H], 0 where no query of the head sees the key
    v: Any
    bias: Any  # [B, N, T, S], finite, or None
    kept: Any  # bool [B, N, T, S]: False where dropout drops the weight; None without dropout


def _written_out(request: Request, layout: BlockLayout) -> _DensePairs:
    B, T, S, N, K, _, _ = request.dims.values()
    dtype, bias, kept = statistics_dtype(request.q.dtype), None, None
    q_side, kv_side = layout.sides(batch=B, heads=N)
    q_slots, kv_slots = q_side.slots(), kv_side.slots()
    # Without a mask this is a constant of T×S elements. The barrier keeps XLA from folding it, which takes seconds.
    allowed = jax.lax.optimization_barrier(layout.mask.allowed(q_slots, kv_slots))
    allowed = jnp.broadcast_to(allowed, (B, N, T, S))
    if request.bias is not None:
        bias = jnp.broadcast_to(total(request.bias, q_slots, kv_slots, dtype), (B, N, T, S))
        allowed = allowed & (bias != -jnp.inf)
        bias = jnp.where(bias == -jnp.inf, 0, bias)
    count = allowed.astype(dtype) * _multiplicity(layout, (B, N, T, S), dtype)
    # Masked queries, keys and values may hold NaN. They become 0 here, because 0 * NaN is NaN.
    q = jnp.where(allowed.any(-1).swapaxes(1, 2)[..., None], request.q.astype(dtype), 0)
    seen = allowed.any(2).swapaxes(1, 2)[..., None]
    k = jnp.where(seen, jnp.repeat(request.k.astype(dtype), N // K, axis=2), 0)
    v = jnp.where(seen, jnp.repeat(request.v.astype(dtype), N // K, axis=2), 0)
    if request.dropout is not None:
        rows, heads = request.dropout.rows.reshape(B, 1, 1, 1), request.dropout.heads.reshape(1, N, 1, 1)
        kept = keep(request.dropout, rows, heads, q_slots.position, kv_slots.position)
    return _DensePairs(count, q, k, v, bias, kept)


def _scores(request: Request, pairs: _DensePairs):
    """Scores [B, N, T, S], and the derivative of the soft cap."""
    scores = jnp.einsum("btnh,bsnh->bnts", pairs.q, pairs.k) * np.asarray(request.scale, pairs.q.dtype)
    slope = np.ones((), pairs.q.dtype)
    if request.soft_cap is not None:
        capped = jnp.tanh(scores / request.soft_cap)
        scores, slope = request.soft_cap * capped, 1 - capped * capped
    if pairs.bias is not None:
        scores = scores + pairs.bias
    return scores, slope


def _dropped(request: Request, pairs: _DensePairs, weights):
    if request.dropout is None:
        return weights
    return jnp.where(pairs.kept, weights / (1 - request.dropout.rate), 0)


def _softmax(scores, count, sink):
    """Weights and lse where each pair counts `count` times; rows without keys give 0 and the sink's logit, or -inf."""
    masked = count == 0
    empty = masked.all(-1, keepdims=True)
    lse_of_empty = np.asarray(-np.inf, scores.dtype)
    if sink is not None:
        # In rows without keys the logit may be infinite or NaN, so it is replaced by 0 before it is exponentiated. A
        # logit that is not finite has no gradient either: a loss of lse² would make it NaN.
        lse_of_empty = jnp.where(jnp.isfinite(sink), sink, jax.lax.stop_gradient(sink))
        sink = jnp.where(empty, 0, sink)
    # Finite, not -inf: a row without keys has max = -inf, and (-inf) - (-inf) is NaN in both passes.
    scores = jnp.where(masked, jnp.finfo(scores.dtype).min, scores)
    max_score = scores.max(-1, keepdims=True)
    if sink is not None:
        max_score = jnp.maximum(max_score, sink)
    max_score = jax.lax.stop_gradient(max_score)
    powers = jnp.where(masked, 0, count * jnp.exp(scores - max_score))
    total = powers.sum(-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - max_score)
    total = jnp.where(empty, 1, total)
    return powers / total, jnp.where(empty, lse_of_empty, max_score + jnp.log(total))[..., 0]


def _multiplicity(layout: BlockLayout, shape, dtype):
    """How often each pair counts: once, unless the layout lists a tile more than once."""
    if not layout.repeats:
        return jnp.ones((1, 1, 1, 1), dtype)
    tile = jnp.arange(layout.kv_tiles, dtype=np.int32).reshape(1, 1, 1, 1, -1)
    inside = (layout.starts[..., None] <= tile) & (tile < layout.stops[..., None])
    count = jnp.asarray(inside).sum(3, dtype=dtype)  # [b, n, q tiles, kv tiles]
    by_slot = count.repeat(layout.q_tile, axis=2).repeat(layout.kv_tile, axis=3)
    return by_slot[:, :, : shape[2], : shape[3]]


def _column(by_query):
    """[B, T, N] as [B, N, T, 1]."""
    return by_query.swapaxes(1, 2)[..., None]


def _sum_groups(x, kv_heads: int):
    """Sums [B, S, N, H] over the query heads that share a key/value head."""
    B, S, N, H = x.shape
    return x.reshape(B, S, kv_heads, N // kv_heads, H).sum(3)


def _bias_gradient(request: Request, layout: BlockLayout, gradient):
    """The gradient of the bias, in its structure, from the gradient [B, N, T, S] of the sum of its terms."""
    if request.bias is None:
        return None
    q_side, kv_side = layout.sides(batch=request.dims["B"], heads=request.dims["N"])
    q_slots, kv_slots = q_side.slots(), kv_side.slots()
    floats, integers = partition_floats(request.bias)

    def summed(floats):
        return jnp.broadcast_to(
            total(combine_floats(floats, integers), q_slots, kv_slots, gradient.dtype), gradient.shape
        )

    return jax.vjp(summed, floats)[1](gradient)[0]
