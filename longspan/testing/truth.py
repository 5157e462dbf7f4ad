"""Attention and its gradients in float64 NumPy, with which every engine is compared.

Almost nothing here is compiled, because at the sizes of tests compiling takes far longer than computing. Only the bits
of dropout, and biases that are functions of positions, come from JAX.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.biases import Bias, combine_floats, partition_floats, terms
from longspan.dropout import keep
from longspan.engines import Request
from longspan.layout import BlockLayout
from longspan.masks.sides import Slots, two_sides


class Truth(NamedTuple):
    """The results of one call in float64, and the values from which tolerances are computed."""

    out: np.ndarray  # [B, T, N, Hv]
    lse: np.ndarray  # [B, T, N]
    gradients: dict[str, Any]  # of q, k, v, and of bias and sinks if given, each in its operand's structure
    kept: np.ndarray  # the weights [B, N, T, S] after dropout
    whole: np.ndarray  # the weights before dropout
    slope: np.ndarray  # the derivative of the soft cap at each score, [B, N, T, S]
    bias_sizes: Any  # the sums of absolute values of the terms of the bias's gradients, in the bias's structure


class _DenseOperands(NamedTuple):
    """The operands of one call for all pairs [B, N, T, S]; keys and values are repeated for every query head."""

    q: np.ndarray  # [B, T, N, H], 0 where a query attends to no key
    k: np.ndarray  # [B, S, N, H], 0 where no query of the head attends to a key
    v: np.ndarray
    times: np.ndarray  # the number of times each pair counts; 0 if it is masked
    bias: np.ndarray
    factor: np.ndarray  # the factor of dropout for each weight: 0 or 1 / (1 - rate); 1 without dropout


def attention_in_float64(operands: dict[str, Any], mask: Any, features: dict[str, Any], cotangents) -> Truth:
    """The results of `attention(**operands, mask=mask, **features)` and of its backward pass.

    Args:
        operands: q, k, v, and optionally bias and sinks, in any dtype.
        mask: as for `attention`.
        features: the other arguments of `attention`.
        cotangents: the gradients of out and of lse. The gradient of an lse of -inf is ignored.
    """
    request = Request.of(**{name: operands[name] for name in "qkv"}, mask=mask, **features)
    given = features.get("scale")
    scale = _wide(request.scale if given is None else given)
    dims = request.dims
    positions = dict(q_positions=request.q_positions, kv_positions=request.kv_positions)
    q_side, kv_side = two_sides(dims["T"], dims["S"], batch=dims["B"], heads=dims["N"], **positions, xp=np)
    q_slots, kv_slots = q_side.slots(), kv_side.slots()
    pairs = _dense_operands(operands, request, (q_slots, kv_slots))

    scores = np.einsum("btnh,bsnh->bnts", pairs.q, pairs.k) * scale
    slope = np.ones_like(scores)
    if request.soft_cap is not None:
        bent = np.tanh(scores / request.soft_cap)
        scores, slope = request.soft_cap * bent, 1 - bent * bent
    sinks = None if operands.get("sinks") is None else _wide(operands["sinks"])
    whole, lse = _softmax(scores + pairs.bias, pairs.times, sinks)
    kept = whole * pairs.factor
    out = np.einsum("bnts,bsnh->btnh", kept, pairs.v)

    dout, dlse = _wide(cotangents[0]), np.where(np.isfinite(lse), _wide(cotangents[1]), 0)
    delta = np.sum(dout * out, -1) - dlse
    dweights = np.einsum("btnh,bsnh->bnts", dout, pairs.v) * pairs.factor
    by_pair = whole * (dweights - delta.swapaxes(1, 2)[..., None])
    dscores = by_pair * slope * scale
    gradients = dict(
        q=np.einsum("bnts,bsnh->btnh", dscores, pairs.k),
        k=_sum_groups(np.einsum("bnts,btnh->bsnh", dscores, pairs.q), dims["K"]),
        v=_sum_groups(np.einsum("bnts,btnh->bsnh", kept, dout), dims["K"]),
    )
    sizes = None
    if operands.get("bias") is not None:
        gradients["bias"] = _bias_gradients(operands["bias"], q_slots, kv_slots, by_pair)
        sizes = _bias_gradients(operands["bias"], q_slots, kv_slots, np.abs(by_pair))
    if sinks is not None:
        finite = np.where(np.isfinite(lse), lse, np.inf)  # with lse = -inf, the sink's weight is 0
        gradients["sinks"] = np.sum(np.exp(sinks - finite) * -delta, (0, 1))
    return Truth(out, lse, gradients, kept, whole, slope, sizes)


def _dense_operands(operands: dict[str, Any], request: Request, slots: tuple[Slots, Slots]) -> _DenseOperands:
    dims = request.dims
    B, N = dims["B"], dims["N"]
    shape = (B, N, dims["T"], dims["S"])
    allowed = np.broadcast_to(np.asarray(request.mask.allowed(*slots)), shape)
    bias = np.zeros(shape)
    if operands.get("bias") is not None:
        bias = sum((_term(term, *slots, shape) for term in terms(operands["bias"])), start=bias)
        allowed, bias = allowed & (bias != -np.inf), np.where(allowed & (bias != -np.inf), bias, 0)
    times = allowed * _multiplicity(request.layout, shape)
    # Tokens without an allowed pair may hold anything, also NaN. They become 0, because 0 * NaN is NaN.
    q_used = np.swapaxes(np.any(allowed, 3), 1, 2)[..., None]  # [B, T, N, 1]
    kv_used = np.swapaxes(np.any(allowed, 2), 1, 2)[..., None]  # [B, S, N, 1]
    group = N // dims["K"]
    q = np.where(q_used, _wide(operands["q"]), 0)
    k = np.where(kv_used, np.repeat(_wide(operands["k"]), group, axis=2), 0)
    v = np.where(kv_used, np.repeat(_wide(operands["v"]), group, axis=2), 0)
    factor = np.ones(())
    if request.dropout is not None:
        dropout = request.dropout.drawn(B, N)
        bits = jax.jit(keep)(dropout, *_counters(dropout, B, N), *(side.position for side in slots))
        factor = np.asarray(bits) / (1 - request.dropout.rate)
    return _DenseOperands(q, k, v, times, bias, factor)


def _softmax(scores: np.ndarray, times: np.ndarray, sinks: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Weights [B, N, T, S] and lse [B, T, N]. A row without keys has weights of 0; its lse is its sink, or -inf."""
    empty = (times == 0).all(-1, keepdims=True)
    sink = np.full((1, 1, 1, 1), -np.inf)
    if sinks is not None:
        sink = sinks.reshape(1, -1, 1, 1)
    highest = np.maximum(np.where(times == 0, -np.inf, scores).max(-1, keepdims=True, initial=-np.inf), sink)
    highest = np.where(empty, 0, highest)
    powers = times * np.exp(np.where(times == 0, -np.inf, scores - highest))
    total = powers.sum(-1, keepdims=True) + np.where(empty, 1, np.exp(np.where(empty, 0, sink) - highest))
    lse = np.where(empty, sink, highest + np.log(total))
    return powers / total, lse[..., 0].swapaxes(1, 2)


def _multiplicity(layout: BlockLayout | None, shape: tuple[int, ...]) -> np.ndarray:
    """The number of times each pair counts: once, unless the layout lists tiles more than once."""
    if layout is None or not layout.repeats:
        return np.ones((1, 1, 1, 1))
    tile = np.arange(layout.kv_tiles)
    starts, stops = np.asarray(layout.starts)[..., None], np.asarray(layout.stops)[..., None]
    count = ((starts <= tile) & (tile < stops)).sum(3)  # [b, n, q tiles, kv tiles]
    by_slot = count.repeat(layout.q_tile, axis=2).repeat(layout.kv_tile, axis=3)
    return by_slot[:, :, : shape[2], : shape[3]]


def _term(term: Any, q: Slots, kv: Slots, shape: tuple[int, ...]) -> np.ndarray:
    """The values of one term of the bias for all pairs."""
    if not isinstance(term, Bias):
        return np.broadcast_to(_wide(term), shape)
    floats, others = partition_floats(term)
    with jax.enable_x64(True):
        values = jax.jit(_values, static_argnums=4)(_wide_tree(floats), others, q.position, kv.position, shape)
        return np.asarray(values, np.float64)


def _bias_gradients(bias: Any, q: Slots, kv: Slots, by_pair: np.ndarray) -> Any:
    """The gradients of the float arrays in a bias, from the gradient of its sum [B, N, T, S]."""
    found = tuple(_term_gradient(term, q, kv, by_pair) for term in terms(bias))
    return found if isinstance(bias, tuple) else found[0]


def _term_gradient(term: Any, q: Slots, kv: Slots, by_pair: np.ndarray) -> Any:
    if not isinstance(term, Bias):
        shape = (1,) * (4 - term.ndim) + tuple(term.shape)
        repeated = tuple(axis for axis, size in enumerate(shape) if size == 1)
        return by_pair.sum(repeated, keepdims=True).reshape(term.shape)
    floats, others = partition_floats(term)

    def pulled_back(floats, others, q_pos, kv_pos, by_pair):
        values = lambda floats: _values(floats, others, q_pos, kv_pos, by_pair.shape)  # noqa: E731
        return jax.vjp(values, floats)[1](by_pair)[0]

    with jax.enable_x64(True):
        gradient = jax.jit(pulled_back)(_wide_tree(floats), others, q.position, kv.position, by_pair)
        return jax.tree.map(lambda x: np.asarray(x, np.float64), gradient)


def _values(floats: Any, others: Any, q_pos: Any, kv_pos: Any, shape: tuple[int, ...]) -> jax.Array:
    """The values of a `Bias` for all pairs."""
    B, N, T, S = shape
    q_pos, kv_pos = jnp.asarray(q_pos)[:, 0, :, 0], jnp.asarray(kv_pos)[:, 0, 0, :]
    q, kv = two_sides(T, S, batch=B, heads=N, q_positions=q_pos, kv_positions=kv_pos)
    return jnp.broadcast_to(combine_floats(floats, others).at(q.slots(), kv.slots(), np.float64), shape)


def _counters(dropout: Any, batch: int, heads: int) -> tuple[Any, Any]:
    return dropout.rows.reshape(batch, 1, 1, 1), dropout.heads.reshape(1, heads, 1, 1)


def _sum_groups(x: np.ndarray, kv_heads: int) -> np.ndarray:
    """Sums [B, S, N, H] over the query heads that share a key/value head."""
    B, S, N, H = x.shape
    return x.reshape(B, S, kv_heads, N // kv_heads, H).sum(3)


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def _wide_tree(tree: Any) -> Any:
    return jax.tree.map(_wide, tree)
