"""The `reference` engine: dense, readable, the definition of correct. T×S memory."""

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
    """Softmax attention over the pairs that the mask allows, written out; everything, everywhere."""

    name = "reference"
    differentiable = True
    dense = True

    def tiles(self, request: Request) -> tuple[int, int]:
        """It has no tiles; these are what `explain` counts in."""
        return 128, 128

    def notes(self, request: Request) -> tuple[str, ...]:
        return ("dense: every pair is computed, whatever the mask allows",)

    def temporary_bytes(self, request: Request) -> int:
        """The scores; the weights, and what a gradient keeps, come on top."""
        sizes = [request.dims[axis] for axis in "BNTS"]
        return math.prod(sizes) * statistics_dtype(request.q.dtype).itemsize

    def run(self, request: Request, layout: BlockLayout):
        """(out, lse), which JAX differentiates as often as asked."""
        pairs = _pairs(request, layout)
        scores, _ = _scores(request, pairs)
        N = request.dims["N"]
        sinks = None if request.sinks is None else request.sinks.astype(scores.dtype).reshape(1, N, 1, 1)
        weights, lse = _softmax(scores, pairs.times, sinks)
        out = jnp.einsum("bnts,bsnh->btnh", _dropped(request, pairs, weights), pairs.v)
        return out.astype(request.q.dtype), lse.swapaxes(1, 2)

    def backward(self, request: Request, layout: BlockLayout, result: Result, delta, dout):
        """The gradients of weights exp(score - lse - lse_residual), for a lse of these keys or of more."""
        lse, low = result.lse, result.lse_residual
        pairs = _pairs(request, layout)
        scores, slope = _scores(request, pairs)
        level, low, delta = (_column(jnp.where(jnp.isfinite(lse), a, 0)) for a in (lse, low, delta))
        none = pairs.times == 0
        weights = jnp.where(none, 0, pairs.times * jnp.exp(jnp.where(none, 0, scores - level - low)))
        dout = dout.astype(scores.dtype)
        dv = jnp.einsum("bnts,btnh->bsnh", _dropped(request, pairs, weights), dout)
        dweights = _dropped(request, pairs, jnp.einsum("btnh,bsnh->bnts", dout, pairs.v))
        dbias = dscores = weights * (dweights - delta)
        dscores = dscores * slope * np.asarray(request.scale, scores.dtype)
        dq = jnp.einsum("bnts,bsnh->btnh", dscores, pairs.k)
        dk = jnp.einsum("bnts,btnh->bsnh", dscores, pairs.q)
        dk, dv = (_sum_groups(x, request.dims["K"]).astype(request.k.dtype) for x in (dk, dv))
        return dq.astype(request.q.dtype), dk, dv, _bias_gradient(request, layout, dbias)


ENGINE = Reference()


class _Pairs(NamedTuple):
    """A request written out: what is seen, with keys and values repeated for every query head."""

    times: Any  # [B, N, T, S]: how often each pair counts, 0 where it is not allowed
    q: Any  # [B, T, N, H], 0 where a query sees nothing
    k: Any  # [B, S, N, H], 0 where no query of the head sees a key
    v: Any
    bias: Any  # [B, N, T, S], finite, or None
    kept: Any  # bool [B, N, T, S]: what dropout leaves, or None


def _pairs(request: Request, layout: BlockLayout) -> _Pairs:
    B, T, S, N, K = (request.dims[axis] for axis in "BTSNK")
    dtype, bias, kept = statistics_dtype(request.q.dtype), None, None
    q_side, kv_side = layout.sides(batch=B, heads=N)
    q_slots, kv_slots = q_side.slots(), kv_side.slots()
    # Behind a barrier: without a mask this is a constant of T×S elements, which XLA would take seconds to fold.
    allowed = jax.lax.optimization_barrier(layout.mask.allowed(q_slots, kv_slots))
    allowed = jnp.broadcast_to(allowed, (B, N, T, S))
    if request.bias is not None:
        bias = jnp.broadcast_to(total(request.bias, q_slots, kv_slots, dtype), (B, N, T, S))
        allowed, bias = allowed & (bias != -jnp.inf), jnp.where(bias == -jnp.inf, 0, bias)
    times = allowed.astype(dtype) * _multiplicity(layout, (B, N, T, S), dtype)
    # Where nobody looks there may be anything, NaN included: zeroed here, so that 0 * NaN never happens.
    q = jnp.where(allowed.any(-1).swapaxes(1, 2)[..., None], request.q.astype(dtype), 0)
    seen = allowed.any(2).swapaxes(1, 2)[..., None]
    k, v = (jnp.where(seen, jnp.repeat(x.astype(dtype), N // K, axis=2), 0) for x in (request.k, request.v))
    if request.dropout is not None:
        rows, heads = request.dropout.rows.reshape(B, 1, 1, 1), request.dropout.heads.reshape(1, N, 1, 1)
        kept = keep(request.dropout, rows, heads, q_slots.position, kv_slots.position)
    return _Pairs(times, q, k, v, bias, kept)


def _scores(request: Request, pairs: _Pairs):
    """Scores [B, N, T, S], and the slope of the soft cap."""
    scores = jnp.einsum("btnh,bsnh->bnts", pairs.q, pairs.k) * np.asarray(request.scale, pairs.q.dtype)
    slope = np.ones((), pairs.q.dtype)
    if request.soft_cap is not None:
        bent = jnp.tanh(scores / request.soft_cap)
        scores, slope = request.soft_cap * bent, 1 - bent * bent
    return scores if pairs.bias is None else scores + pairs.bias, slope


def _dropped(request: Request, pairs: _Pairs, weights):
    return weights if request.dropout is None else jnp.where(pairs.kept, weights / (1 - request.dropout.rate), 0)


def _softmax(scores, times, sink):
    """Weights and log-sum-exp where each pair counts `times`; rows without any pair give 0 and the sink, or -inf."""
    none = times == 0
    empty = none.all(-1, keepdims=True)
    nothing = np.asarray(-np.inf, scores.dtype)
    if sink is not None:
        # Zeroed like keys that nobody sees: the logit of such a row may be anything, and must not be exponentiated.
        # Nor has it a gradient if it is not finite: a loss of lse² would give it NaN.
        nothing = jnp.where(jnp.isfinite(sink), sink, jax.lax.stop_gradient(sink))
        sink = jnp.where(empty, 0, sink)
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
    total = jnp.where(empty, 1, total)
    return powers / total, jnp.where(empty, nothing, most + jnp.log(total))[..., 0]


def _multiplicity(layout: BlockLayout, shape, dtype):
    """How often each pair counts: once, unless the layout lists tiles more than once."""
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
    """The gradient of the bias, in its structure, from that of its sum [B, N, T, S]."""
    if request.bias is None:
        return None
    q, kv = (side.slots() for side in layout.sides(batch=request.dims["B"], heads=request.dims["N"]))
    floats, integers = partition_floats(request.bias)

    def summed(floats):
        return jnp.broadcast_to(total(combine_floats(floats, integers), q, kv, gradient.dtype), gradient.shape)

    return jax.vjp(summed, floats)[1](gradient)[0]
