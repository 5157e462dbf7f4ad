"""`attention`: check, bind the mask to the batch, plan the tiles, run an engine."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float

from longspan.array_types import Array, EngineName, Key, LogSumExp, Output, Positions, Query, Real, Value, no_type_check
from longspan.axes import BATCH_AXES, HEAD_AXIS, entries, on_auto_axes
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
        batch_axes: inside of `shard_map`, the mesh axes that split batch rows. Dropout and rules by row (`Custom`,
            `ScoreBias`) are told the rows' numbers in the whole. Other axes, and axes along which `q` is the same
            everywhere, change nothing.
        head_axis: the one that splits heads, likewise; `PerHead` may hold the masks of these heads, or of all.
        engine: "auto" (the first that can run), or the name of one, which raises if it cannot; or a
            `longspan.engines.Engine` of your own.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        The output [B, T, N, Hv]; with `return_lse` also lse [B, T, N], float32 (float64 for float64), natural log, the
        sink included. Without B if `q` has none.

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
    return (out, lse) if return_lse else out


def answer(request: Request, engine: Any) -> tuple[Any, Any]:
    """(out, lse) of a request by an engine."""
    chosen, _ = choose(engine, request)
    with forward_mode_refused(chosen), untested_jax_noted():
        return on_auto_axes(_run_engine, _like_queries, (chosen,), (request,))


def attention_of_layer(q, k, v, layer, *, mask: BlockLayout, scale=None, soft_cap=None) -> jax.Array:
    """`attention` with one layer of stacks [layers, B, S, K, H] of keys and values, read where it lies if possible.

    Without gradients, and on one device.
    """
    one_k, one_v = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (k, v))
    request = Request.of(q=q, k=one_k, v=one_v, mask=mask, scale=scale, soft_cap=soft_cap).with_scale()
    found = None
    if request.layout is not None and 0 not in request.dims.values():
        found = choose("auto", request)[0].run_layer(request, request.layout, k, v, layer)
    if found is None:
        return attention(q, k[layer], v[layer], mask=mask, scale=scale, soft_cap=soft_cap)
    return found[0]


def plan_attention_layout(q, k, v, **call) -> BlockLayout:
    """The layout that `attention` plans for such a call, for many calls alike; q, k and v may be shapes alone."""
    request = Request.of(q=q, k=k, v=v, **call)
    return request.plan_layout(*choose("auto", request)[0].tiles(request))


def _like_queries(engine: Engine, operands, results) -> tuple[P, P]:
    """How (out, lse) lie."""
    of_q = entries(operands[0].q)
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
    return out if features else out[..., :0], lse
