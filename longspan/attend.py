"""`attention`: checks the arguments, plans the tiles that the mask allows, and runs an engine."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float

from longspan.array_types import Array, EngineName, Key, LogSumExp, Output, Positions, Query, Real, Value, no_type_check
from longspan.axes import BATCH_AXES, HEAD_AXIS, on_auto_axes, spec_entries
from longspan.biases import AnyBias
from longspan.checks import hint_keywords
from longspan.constants import unfolded
from longspan.engines import Engine, Request, choose
from longspan.engines.gradient import attend, forward_mode_refused
from longspan.layout import BlockLayout
from longspan.maskinfo import MaskInfo
from longspan.masks import Mask
from longspan.programs import jit_by_function
from longspan.tested_jax import untested_jax_noted


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
    batch_axes: str | Sequence[str] = ...,
    head_axis: str | None = ...,
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
    batch_axes: str | Sequence[str] = ...,
    head_axis: str | None = ...,
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
    batch_axes: str | Sequence[str] = ...,
    head_axis: str | None = ...,
    engine: EngineName | Engine = ...,
    return_lse: bool,
) -> Output | tuple[Output, LogSumExp]: ...


@hint_keywords
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
    batch_axes: str | Sequence[str] = BATCH_AXES,
    head_axis: str | None = HEAD_AXIS,
    engine: EngineName | Engine = "auto",
    return_lse: bool = False,
) -> Output | tuple[Output, LogSumExp]:
    """Attention over the pairs that a mask allows: softmax(soft_cap(q·k·scale) + bias) · v.

    A query that sees no key gives zeros and zero gradient. Keys that no query may attend to are never read.

    `engine="reference"` has all derivatives. The other engines have first derivatives in reverse mode (`grad`, `vjp`,
    `jacrev`). With them, a second derivative raises a NotImplementedError, and forward mode (`jvp`, `jacfwd`,
    `linearize`) raises a TypeError. Inside `jit`, this TypeError comes from JAX and names `custom_vjp`.

    Args:
        q: queries [B, T, N, H]. Queries, keys and values may all lack the batch axis; then B = 1.
        k: keys [B, S, K, H], where N is a multiple of K (groups of query heads share a key/value head).
        v: values [B, S, K, Hv]; Hv may differ from H.
        mask: a `Mask`, a `MaskInfo`, a `BlockLayout` planned earlier, or bools [T, S] or broadcastable to
            [B, N, T, S]; `True` allows a pair. By default every pair is allowed.
        bias: floats [T, S] or broadcastable to [B, N, T, S], a `Bias` that is computed from positions (`alibi`,
            `relative_bias`, `ScoreBias`), or a tuple of these, which are summed. It is added after the soft cap; -inf
            masks a key.
        scale: the factor of the scores, by default 1/sqrt(H). A Python or NumPy number is static; a JAX array of shape
            () is data, which may be traced and has a gradient.
        soft_cap: if given, scores become soft_cap·tanh(scores / soft_cap). A static number: of Python, of NumPy, or a
            concrete array of shape ().
        sinks: one logit per query head, [N], that takes part in the softmax without a value.
        dropout_rate: the share of weights to drop; the others are scaled by 1 / (1 - rate). A static number.
        dropout_key: a JAX random key. Whether a weight is dropped depends only on the key, the batch row, the head and
            the positions, so every engine drops the same weights.
        q_positions: int [T] or [B, T]; by default each slot's index.
        kv_positions: int [S] or [B, S]; by default each slot's index.
        batch_axes: inside `shard_map`, the mesh axes that split batch rows. Dropout, `Custom` and `ScoreBias` then use
            the indices of the rows in the whole batch. Other mesh axes, and axes along which `q` does not vary, have no
            effect.
        head_axis: inside `shard_map`, the mesh axis that splits heads. `PerHead` may hold the masks of this device's
            heads, or of all heads.
        engine: "auto" for the first engine that can run the call; the name of an engine, which raises if it cannot; or
            an instance of `longspan.engines.Engine`.
        return_lse: whether to return the log-sum-exp of the scores too.

    Returns:
        The output [B, T, N, Hv], or (output, lse) with `return_lse`. lse [B, T, N] is the natural logarithm of the sum
        of exponentiated scores, with the sinks, in float32 (float64 for float64 inputs). Neither has a batch axis if
        `q` has none.

    Example:
        >>> q = k = v = jnp.ones((1, 8, 2, 4))
        >>> ls.attention(q, k, v, mask=ls.Causal() & ls.Window(3, 0)).shape
        (1, 8, 2, 4)
    """
    request = Request.of(
        q=q, k=k, v=v, mask=mask, bias=bias, scale=scale, soft_cap=soft_cap, sinks=sinks, dropout_rate=dropout_rate,
        dropout_key=dropout_key, q_positions=q_positions, kv_positions=kv_positions,
        batch_axes=batch_axes, head_axis=head_axis,
    )  # fmt: skip
    out, lse = answer(request, engine)
    if len(q.shape) == 3:
        out, lse = out[0], lse[0]
    if return_lse:
        return out, lse
    return out


def answer(request: Request, engine: Any) -> tuple[Any, Any]:
    """(out, lse) of a request, computed by an engine or its name."""
    chosen, _ = choose(engine, request)
    with forward_mode_refused(chosen), untested_jax_noted():
        return on_auto_axes(_run_engine, _like_queries, (chosen,), (request,))


def attention_of_layer(
    q, k, v, layer, *, mask: BlockLayout, scale=None, soft_cap=None, sinks=None, heads_first: bool = False
) -> jax.Array:
    """`attention` with one layer of stacked keys and values [layers, B, S, K, H], read in place if the engine can.

    With `heads_first` the stacks are [layers, B, K, S, H]. The engine gets them as they are, without a transpose.

    For one device. A result that was read in place has no derivative of its own: `models/decoders/cache.py` wraps this
    function in a `custom_vjp`, whose backward pass differentiates `attention` of the layer.
    """
    layer_k, layer_v = _shape_of_layer(k, heads_first), _shape_of_layer(v, heads_first)
    options: dict[str, Any] = dict(mask=mask, scale=scale, soft_cap=soft_cap, sinks=sinks)
    request = Request.of(q=q, k=layer_k, v=layer_v, **options).with_scale()
    result = None
    if request.layout is not None and 0 not in request.dims.values():
        engine = choose("auto", request)[0]
        result = engine.run_layer(request, request.layout, k, v, layer, heads_first=heads_first)
    if result is not None:
        return result[0]
    k, v = k[layer], v[layer]
    if heads_first:
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    return attention(q, k, v, **options)


def plan_attention_layout(q, k, v, **call) -> BlockLayout:
    """The layout that `attention` plans for a call, for use in several calls; q, k and v may be `ShapeDtypeStruct`s."""
    request = Request.of(q=q, k=k, v=v, **call)
    return request.plan_layout(*choose("auto", request)[0].tiles(request))


def _shape_of_layer(stack: Any, heads_first: bool) -> jax.ShapeDtypeStruct:
    """The shape of one layer as [B, S, K, H]."""
    B, S, K, H = stack.shape[1:]
    if heads_first:
        S, K = K, S
    return jax.ShapeDtypeStruct((B, S, K, H), stack.dtype)


def _like_queries(engine: Engine, operands, results) -> tuple[P, P]:
    """The partition specs of (out, lse), from the sharding of the queries."""
    of_q = spec_entries(operands[0].q)
    return P(*of_q), P(*of_q[:3])


@partial(jit_by_function, static_argnums=0)
def _run_engine(engine: Engine, request: Request):
    data = {name: getattr(request, name) for name in ("mask", "q_positions", "kv_positions", "rows", "heads", "layout")}
    request = replace(request, **unfolded(data))
    if not request.has_pairs:
        return request.without_pairs()[:2]
    features = request.dims["Hv"]
    request = request.with_scale(dense=engine.differentiable).with_features()
    out, lse = attend(engine, request.with_layout(*engine.tiles(request)))
    if not features:  # `with_features` added one
        out = out[..., :0]
    return out, lse
