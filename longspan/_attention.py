"""`attention`: check, bind the mask to the batch, plan the tiles, run an engine."""

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float

from longspan._axes import entries, on_auto_axes
from longspan._checks import (
    FLOATS,
    check_bound_lengths,
    check_broadcast,
    check_extents,
    check_keywords,
    check_positions,
    check_qkv,
    is_abstract,
    number_of,
    with_batch,
)
from longspan._constants import unfolded
from longspan._programs import jit_by_function
from longspan._types import (
    Array,
    EngineName,
    Key,
    LogSumExp,
    Output,
    Positions,
    Query,
    Real,
    Value,
    no_type_check,
    statistics_dtype,
)
from longspan.biases import AnyBias, bound
from longspan.dropout import Dropout, make_dropout, numbers_of
from longspan.engines import Engine, Request, choose
from longspan.engines._contract import has_no_pairs, is_differentiable, with_features, without_pairs
from longspan.engines._gradient import attend, forward_mode_refused
from longspan.layout import BlockLayout, plan
from longspan.maskinfo import MaskInfo
from longspan.masks import Dense, Full, Mask
from longspan.masks.pytree import short


@overload
def attention(
    q: Query,
    k: Key,
    v: Value,
    *,
    mask: Mask | MaskInfo | BlockLayout | Bool[Array, "..."] | None = ...,
    bias: AnyBias | None = ...,
    scale: Real | None = ...,
    soft_cap: Real | None = ...,
    sinks: Float[Array, "N"] | None = ...,
    dropout_rate: Real = ...,
    dropout_key: jax.Array | None = ...,
    q_positions: Positions | None = ...,
    kv_positions: Positions | None = ...,
    engine: EngineName | Engine = ...,
    return_lse: Literal[False] = ...,
) -> Output: ...


@overload
def attention(
    q: Query,
    k: Key,
    v: Value,
    *,
    mask: Mask | MaskInfo | BlockLayout | Bool[Array, "..."] | None = ...,
    bias: AnyBias | None = ...,
    scale: Real | None = ...,
    soft_cap: Real | None = ...,
    sinks: Float[Array, "N"] | None = ...,
    dropout_rate: Real = ...,
    dropout_key: jax.Array | None = ...,
    q_positions: Positions | None = ...,
    kv_positions: Positions | None = ...,
    engine: EngineName | Engine = ...,
    return_lse: Literal[True],
) -> tuple[Output, LogSumExp]: ...


@overload
def attention(
    q: Query,
    k: Key,
    v: Value,
    *,
    mask: Mask | MaskInfo | BlockLayout | Bool[Array, "..."] | None = ...,
    bias: AnyBias | None = ...,
    scale: Real | None = ...,
    soft_cap: Real | None = ...,
    sinks: Float[Array, "N"] | None = ...,
    dropout_rate: Real = ...,
    dropout_key: jax.Array | None = ...,
    q_positions: Positions | None = ...,
    kv_positions: Positions | None = ...,
    engine: EngineName | Engine = ...,
    return_lse: bool,
) -> Output | tuple[Output, LogSumExp]: ...


@no_type_check
def attention(
    q: Query,
    k: Key,
    v: Value,
    *,
    mask: Mask | MaskInfo | BlockLayout | Bool[Array, "..."] | None = None,
    bias: AnyBias | None = None,
    scale: Real | None = None,
    soft_cap: Real | None = None,
    sinks: Float[Array, "N"] | None = None,
    dropout_rate: Real = 0.0,
    dropout_key: jax.Array | None = None,
    q_positions: Positions | None = None,
    kv_positions: Positions | None = None,
    engine: EngineName | Engine = "auto",
    return_lse: bool = False,
    **unknown: Any,  # for the sake of a message; no overload has it, so checkers know better
) -> Output | tuple[Output, LogSumExp]:
    """Attention over the pairs that a mask allows: softmax(soft_cap(q·k·scale) + bias) · v.

    A query that sees no key gives zeros and zero gradient. Keys that no query may see are never read.

    `engine="reference"` has all derivatives. The others have gradients (`grad`, `vjp`, `jacrev`), once: second
    derivatives are a NotImplementedError, forward mode (`jvp`, `jacfwd`, `linearize`) is a TypeError, which inside
    `jit` is JAX's own and speaks of `custom_vjp`.

    Args:
        q: queries [B, T, N, H]; or [T, N, H] with keys and values likewise, which is B = 1 for all other arguments.
        k: keys [B, S, K, H], where N is a multiple of K (grouped queries share a key/value head).
        v: values [B, S, K, Hv]; Hv may differ from H.
        mask: a `Mask`, a `MaskInfo`, a `BlockLayout` planned earlier, or bools [T, S] or broadcastable to
            [B, N, T, S]; `True` = may attend. By default everything.
        bias: floats [T, S] or broadcastable to [B, N, T, S], a `Bias` that is computed from positions (`alibi`,
            `relative_bias`, `ScoreBias`), or a tuple of them, summed; added after the soft cap; -inf is a masked key.
        scale: what scores are multiplied by; 1/sqrt(H) by default. A number of Python or NumPy is part of the compiled
            program; a JAX array of shape () is data, which may be traced and has a gradient.
        soft_cap: if given, scores become soft_cap·tanh(scores / soft_cap). Any number that is known when the call is
            traced: of Python, of NumPy, or an array of shape ().
        sinks: one logit per head, [N], that takes part in the softmax and has no value.
        dropout_rate: the share of weights to drop; the rest is scaled by 1 / (1 - rate). A number like `soft_cap`.
        dropout_key: a JAX random key. The weight of a pair is dropped by its batch row, head and positions alone, so
            the result does not depend on the engine.
        q_positions: int [T] or [B, T]; by default each slot's index.
        kv_positions: int [S] or [B, S]; by default each slot's index.
        engine: "auto" (the first that can run), or the name of one, which raises if it cannot; or a
            `longspan.engines.Engine` of your own.
        return_lse: also return the log-sum-exp of the scores.
        unknown: nothing: arguments of `jax.nn.dot_product_attention` are told how to say them with a mask.

    Returns:
        The output [B, T, N, Hv]; with `return_lse` also lse [B, T, N], float32 (float64 for float64), natural log, the
        sink included. Without B if `q` has none.

    Example:
        >>> q = k = v = jnp.ones((1, 8, 2, 4))
        >>> ls.attention(q, k, v, mask=ls.Causal() & ls.Window(3, 0)).shape
        (1, 8, 2, 4)
    """
    check_keywords("attention", list(unknown))
    request = bind(q, k, v, mask, bias, scale, soft_cap, sinks, dropout_rate, dropout_key, q_positions, kv_positions)
    out, lse = answer(request, engine, scale=scale, dropout_key=dropout_key)
    if len(q.shape) == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def answer(request: Request, engine: Any, *, scale=None, dropout_key=None) -> tuple[Any, Any]:
    """(out, lse) of a request by an engine, with what a request does not hold: a traced scale and the dropout's key."""
    chosen, _ = choose(engine, request)
    if _is_array(scale):
        # A traced scale becomes part of the queries: engines take a static one.
        by = _scale_dense if is_differentiable(chosen) else _scaled
        request = replace(request, q=by(request.q, jnp.asarray(scale)))
    with forward_mode_refused(chosen):
        key = None if request.dropout is None else dropout_key
        return on_auto_axes(_run, _like_queries, (chosen,), (request, key))


def bind(
    q, k, v, mask, bias, scale, soft_cap, sinks, dropout_rate, dropout_key, q_positions, kv_positions, *,
    rows=None, heads=None,
) -> Request:  # fmt: skip
    """Checks a call, resolves its mask to a rule, positions and perhaps a layout, and makes a request of it all.

    `rows` [B] and `heads` [N] are the numbers of its batch rows and heads, for a call that is a part of another: one
    device's. Dropout, `Custom`, `PerHead` and `ScoreBias` then read these.
    """
    q, k, v = with_batch(q, k, v)
    check_qkv(q, k, v)
    (B, T, N, H), S = q.shape, k.shape[1]
    if sinks is not None:
        _check_sinks(sinks, N)
    rate = _check_dropout(dropout_rate, dropout_key)
    soft_cap = _check_soft_cap(soft_cap, q.dtype)
    static_scale = _check_scale(scale, q.dtype)
    rule, layout, positions = _resolve(mask, (B, N, T, S), (q_positions, kv_positions))
    if rows is not None or heads is not None:
        rows, heads = (jnp.arange(n, dtype=np.int32) if x is None else x for x, n in ((rows, B), (heads, N)))
    check_extents(rule, q_len=T, kv_len=S, batch=B, heads=N, some=rows is not None)
    return Request(
        _as_jax(q),
        _as_jax(k),
        _as_jax(v),
        rule,
        bias=bound(bias, (B, N, T, S)),
        sinks=_as_jax(sinks),
        dropout=Dropout(rate=rate) if rate > 0 else None,
        q_positions=_as_int32(positions[0]),
        kv_positions=_as_int32(positions[1]),
        rows=rows,
        heads=heads,
        layout=layout,
        scale=1 / math.sqrt(max(H, 1)) if scale is None else static_scale,
        soft_cap=soft_cap,
        platform=jax.default_backend(),
    )


def attention_of_layer(q, k, v, layer, *, mask: BlockLayout, scale=None, soft_cap=None) -> jax.Array:
    """`attention` with one layer of stacks [layers, B, S, K, H] of keys and values, read where it lies if possible.

    Without gradients, and on one device.
    """
    one_k, one_v = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (k, v))
    request = bind(q, one_k, one_v, mask, None, scale, soft_cap, None, 0.0, None, None, None)
    run = getattr(choose("auto", request)[0], "run_layer", None)
    if run is None or 0 in request.dims.values():
        return attention(q, k[layer], v[layer], mask=mask, scale=scale, soft_cap=soft_cap)
    return run(replace(request, layout=None), request.layout, k, v, layer)[0]


def planned(q, k, v, *, mask, q_positions=None, kv_positions=None, scale=None, soft_cap=None) -> BlockLayout:
    """The layout that `attention` plans for such a call, for many calls alike; q, k and v may be shapes alone."""
    request = bind(q, k, v, mask, None, scale, soft_cap, None, 0.0, None, q_positions, kv_positions)
    return _layout_of(request, choose("auto", request)[0])


def _layout_of(request: Request, engine: Engine) -> BlockLayout:
    """In JAX even if the mask is static: NumPy tables would become constants that grow with the length."""
    given = {name: getattr(request, name) for name in ("q_positions", "kv_positions", "rows", "heads")}
    return plan(request.mask, request.dims["T"], request.dims["S"], *engine.tiles(request), **given, xp=jnp)


def _like_queries(engine: Engine, operands, results) -> tuple[P, P]:
    """How (out, lse) lie."""
    of_q = entries(operands[0].q)
    return P(*of_q), P(*of_q[:3])


@partial(jit_by_function, static_argnums=0)
def _run(engine: Engine, request: Request, dropout_key):
    data = {name: getattr(request, name) for name in ("mask", "q_positions", "kv_positions", "rows", "heads", "layout")}
    request = replace(request, **unfolded(data))
    if has_no_pairs(request):
        return without_pairs(request)
    features, layout = request.dims["Hv"], request.layout
    request = with_features(request)
    if layout is None:
        layout = _layout_of(request, engine)
    elif request.rows is not None:
        layout = replace(layout, rows=request.rows, heads=request.heads)
    if request.dropout is not None:
        numbers = numbers_of(request.q) if request.rows is None else (request.rows, request.heads)
        request = replace(request, dropout=make_dropout(dropout_key, request.dropout.rate, *numbers))
    out, lse = attend(engine, replace(request, layout=None), layout)
    return out if features else out[..., :0], lse


def _scale_dense(q, scale):
    wide = jnp.promote_types(q.dtype, np.float32)
    return (q.astype(wide) * scale.astype(wide)).astype(q.dtype)


_scaled = jax.custom_vjp(_scale_dense)


def _scaled_fwd(q, scale):
    return _scale_dense(q, scale), (q, scale)


def _scaled_bwd(residuals, dout):
    # Queries that see nothing may hold anything, NaN included, and have no gradient.
    (q, scale), wide = residuals, jnp.promote_types(dout.dtype, np.float32)
    terms = jnp.where(dout == 0, 0, dout.astype(wide) * q.astype(wide))
    return (dout.astype(wide) * scale.astype(wide)).astype(q.dtype), jnp.sum(terms).astype(scale.dtype)


_scaled.defvjp(_scaled_fwd, _scaled_bwd)


def _resolve(mask, shape, given) -> tuple[Mask, BlockLayout | None, tuple[Any, Any]]:
    """(rule, layout if planned, positions of the call or of the mask)."""
    rule, layout, own = _rule_of(mask, shape)
    B, _, T, S = shape
    positions = []
    for name, mine, theirs, length in zip(("q_positions", "kv_positions"), given, own, (T, S), strict=True):
        if mine is not None and theirs is not None:
            raise ValueError(f"`{name}` is given both to the call and in its mask. Keep one of them.")
        positions.append(theirs if mine is None else mine)
        check_positions(name, positions[-1], length, B)
    if layout is not None and any(p is not None for p in given):
        raise ValueError("A BlockLayout is planned for its positions. Pass positions to `mask.layout(...)` instead.")
    return rule, layout, (positions[0], positions[1])


def _rule_of(mask, shape) -> tuple[Mask, BlockLayout | None, tuple[Any, Any]]:
    """(rule, layout if planned, positions if the mask brings its own)."""
    _, _, T, S = shape
    if mask is None:
        return Full(), None, (None, None)
    if isinstance(mask, Mask):
        return mask, None, (None, None)
    if isinstance(mask, MaskInfo):
        check_bound_lengths("MaskInfo", (mask.q_len, mask.kv_len), (T, S))
        return mask.mask, None, (mask.q_positions, mask.kv_positions)
    if isinstance(mask, BlockLayout):
        check_bound_lengths("BlockLayout", (mask.q_len, mask.kv_len), (T, S))
        return mask.mask, mask.forward or mask, (mask.q_positions, mask.kv_positions)
    if hasattr(mask, "shape") and hasattr(mask, "dtype"):
        full = check_broadcast("mask", mask, shape, kind="bool")
        return Dense(mask if is_abstract(mask) else mask.reshape(full)), None, (None, None)
    cure = " A function of positions becomes a mask by `ls.Custom(fn)`." if callable(mask) else ""
    raise TypeError(
        f"`mask` must be a Mask, a MaskInfo, a BlockLayout or an array of bools, got {type(mask).__name__}.{cure}"
    )


def _is_array(scale) -> bool:
    """Whether a scale is data, which may be traced and has a gradient: an array of JAX. NumPy's are static."""
    return isinstance(scale, jax.Array | jax.ShapeDtypeStruct)


def _as_jax(x):
    return x if x is None or is_abstract(x) else jnp.asarray(x)


def _as_int32(positions):
    return positions if positions is None or is_abstract(positions) else positions.astype(np.int32)


def _check_sinks(sinks: Any, heads: int) -> None:
    if not hasattr(sinks, "shape") or tuple(sinks.shape) != (heads,) or sinks.dtype.name not in FLOATS:
        got = f"shape {tuple(sinks.shape)}, {sinks.dtype}" if hasattr(sinks, "shape") else type(sinks).__name__
        raise ValueError(f"`sinks` must be one float logit per query head, shape [{heads}], got {got}.")


def _check_dropout(rate: Any, key: Any) -> float:
    number = number_of(rate)
    if number is None or not 0 <= number < 1:
        raise ValueError(f"`dropout_rate` must be a number in [0, 1), {_got(rate)}.")
    if number > 0 and key is None:
        raise ValueError(f"dropout_rate={number} needs a `dropout_key`. Pass `dropout_key=jax.random.key(seed)`.")
    return float(number)


def _check_soft_cap(soft_cap: Any, dtype: Any) -> float | None:
    if soft_cap is None:
        return None
    number = number_of(soft_cap)
    if number is None or not number > 0:
        raise ValueError(f"`soft_cap` must be a number > 0 or None, {_got(soft_cap)}.")
    kept = np.finfo(statistics_dtype(dtype))
    if not float(kept.tiny) <= number <= float(kept.max):  # scores are divided by it, and multiplied with it
        raise ValueError(
            f"`soft_cap` must lie between {kept.tiny:.3g} and {kept.max:.3g}, the numbers of {kept.dtype}, in which "
            f"scores are computed, got {number!r}. Give None for no cap."
        )
    return float(number)


def _check_scale(scale: Any, dtype: Any) -> float:
    """The static part of a scale: 1 if it is None, or an array of JAX, which is data."""
    if scale is None:
        return 1.0
    if _is_array(scale):
        if scale.shape != () or scale.dtype.name not in FLOATS:
            raise ValueError(f"`scale` must be a number or a float array of shape (), got {scale!r}.")
        return 1.0
    number = number_of(scale)
    if number is None:
        raise ValueError(f"`scale` must be a number or a float array of shape (), got {scale!r}.")
    kept = np.finfo(statistics_dtype(dtype))
    if not abs(number) <= float(kept.max):
        raise ValueError(
            f"`scale` must be a finite number of {kept.dtype}, in which scores are computed, got {number!r}. "
            "Give None for 1/sqrt(H)."
        )
    return float(number)


def _got(value: Any) -> str:
    """What came in the place of a number that is part of the compiled program."""
    if isinstance(value, Tracer):
        return f"got a traced {short(value)}: it is part of the compiled program. Name it in `static_argnames`"
    return f"got {value!r}"
