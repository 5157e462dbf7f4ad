"""`attention` over a sequence that devices share: check, plan what is sent, run the program on all of them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float

from longspan.array_types import Array, EngineName, Key, LogSumExp, Output, Positions, Query, Real, Value, no_type_check
from longspan.axes import BATCH_AXES, HEAD_AXIS
from longspan.biases import AnyBias, Bias, Whole, map_terms, terms
from longspan.checks import hint_keywords
from longspan.constants import unfolded
from longspan.engines import Engine, Request
from longspan.layout import BlockLayout
from longspan.maskinfo import MaskInfo
from longspan.masks import Mask
from longspan.parallel.arrays import laid_out, lettered
from longspan.parallel.order import Order, check_length, check_order, padded, stored
from longspan.parallel.parts import Setting
from longspan.parallel.plan import Asked, ParallelPlan, plan_communication
from longspan.parallel.program import attend
from longspan.parallel.specs import Axes, as_data, check_zigzag, rule_specs
from longspan.programs import jit_by_function
from longspan.tested_jax import untested_jax_noted


@overload
def attention(
    q: Query,
    k: Key,
    v: Value,
    *,
    mesh: Mesh | AbstractMesh,
    mask: Mask | MaskInfo | Bool[Array, "..."] | None = ...,
    axis: str = ...,
    batch_axes: str | Sequence[str] = ...,
    head_axis: str | None = ...,
    order: Order = ...,
    global_capacity: int | None = ...,
    plan: ParallelPlan | None = ...,
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
    mesh: Mesh | AbstractMesh,
    mask: Mask | MaskInfo | Bool[Array, "..."] | None = ...,
    axis: str = ...,
    batch_axes: str | Sequence[str] = ...,
    head_axis: str | None = ...,
    order: Order = ...,
    global_capacity: int | None = ...,
    plan: ParallelPlan | None = ...,
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
    mesh: Mesh | AbstractMesh,
    mask: Mask | MaskInfo | Bool[Array, "..."] | None = ...,
    axis: str = ...,
    batch_axes: str | Sequence[str] = ...,
    head_axis: str | None = ...,
    order: Order = ...,
    global_capacity: int | None = ...,
    plan: ParallelPlan | None = ...,
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


@hint_keywords
@no_type_check
def attention(
    q: Query,
    k: Key,
    v: Value,
    *,
    mesh: Mesh | AbstractMesh,
    mask: Mask | MaskInfo | Bool[Array, "..."] | None = None,
    axis: str = "sp",
    batch_axes: str | Sequence[str] = BATCH_AXES,
    head_axis: str | None = HEAD_AXIS,
    order: Order = "contiguous",
    global_capacity: int | None = None,
    plan: ParallelPlan | None = None,
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
) -> Output | tuple[Output, LogSumExp]:
    """`ls.attention` over a sequence that the devices of a mesh axis share: exact for every mask, in one call.

    Takes and returns whole arrays, under `jit` or not, and splits batch, sequence and heads by itself: each device
    computes for its own queries and receives only what the mask makes it need, as `ls.parallel.plan(mask, T, shards)`
    says beforehand. A length that the axis does not divide is padded inside. Gradients are exact too, once: second
    derivatives are a NotImplementedError.

    Arrays [B, T] of the mask and given positions lie on devices as the tokens do, and come along with the keys; a ring
    gathers them, a few bytes per token.

    Args:
        q: queries [B, T, N, H], or [T, N, H] with keys and values likewise.
        k: keys [B, T, K, H]. Key/value heads are repeated as often as `head_axis` makes it necessary.
        v: values [B, T, K, Hv].
        mesh: a mesh of devices, as `ls.parallel.mesh` makes.
        mask: a `Mask`, a `MaskInfo`, or bools [T, T] or broadcastable to [B, N, T, T]; by default everything.
        axis: the mesh axis that shares the sequence.
        batch_axes: those that share the batch; names that the mesh lacks are skipped.
        head_axis: the one that shares the heads, likewise.
        order: how the tokens lie: "contiguous", or "zigzag" as `ls.parallel.shard_batch` gives them. Then q, k, v,
            arrays [B, T] of the mask, biases by query or by key and positions are in that order; rules about slots
            (`Blocks`, `Dense`, `Between`) and biases [T, T] are refused.
        global_capacity: how many tokens the flags of a `Global` may name before all keys are sent; by default 128.
        plan: a plan made earlier, which is used as it is; one for another mask, length or order is refused. By default
            this call's own: plans of masks without arrays are remembered, the 64 used last.
        bias: as for `ls.attention`; rows of arrays lie where their queries do.
        scale: as for `ls.attention`.
        soft_cap: as for `ls.attention`.
        sinks: one logit per query head, [N]; counted once.
        dropout_rate: as for `ls.attention`.
        dropout_key: a JAX random key; the same weights are dropped as on one device.
        q_positions: int [T] or [B, T]; by default each token's index before it was put in order. Where positions are
            given, all keys may have to be sent: rules by position say nothing before the data come.
        kv_positions: likewise.
        engine: what each device computes with.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        The output [B, T, N, Hv], sharded like the queries; with `return_lse` also lse [B, T, N].

    Example:
        >>> mesh = ls.parallel.mesh(dp=2, sp=4)
        >>> q = k = v = jnp.ones((2, 64, 2, 4))
        >>> ls.parallel.attention(q, k, v, mask=ls.Causal() & ls.Window(3, 0), mesh=mesh).sharding.spec
        P('dp', 'sp')
    """
    check_order(order)
    axes = Axes.of(mesh, axis, batch_axes, head_axis)
    _check_place(axes, q, k, v)
    if isinstance(mask, BlockLayout):
        raise TypeError("A BlockLayout is planned for one device. Pass its mask, `mask=layout.mask`.")
    request = Request.of(
        q=q, k=k, v=v, mask=mask, bias=bias, scale=scale, soft_cap=soft_cap, sinks=sinks, dropout_rate=dropout_rate,
        dropout_key=dropout_key, q_positions=q_positions, kv_positions=kv_positions, batch_axes=(), head_axis=None,
    )  # fmt: skip
    check_call(axes, request, order)
    plan = chosen_plan(plan, request, axes, order, global_capacity)
    with untested_jax_noted():
        out, lse = _attend_on_mesh(request, setting=Setting(plan, engine, axis, tuple(mesh.axis_names)), axes=axes)
    if len(q.shape) == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _check_place(axes: Axes, *operands: Any) -> None:
    """Not inside of another's `shard_map` over the same devices, and devices known."""
    mine = {axes.sequence, *axes.batch, *axes.heads}
    around = jax.sharding.get_abstract_mesh()
    taken = mine & {*around.manual_axes}
    if taken:
        raise ValueError(
            f"ls.parallel.attention takes global arrays and opens a shard_map of its own, but is called in one over "
            f"{', '.join(map(repr, sorted(taken)))}. Call it outside of that."
        )
    if isinstance(axes.mesh, AbstractMesh) and around.empty and not any(map(_may_be_placed, operands)):
        raise ValueError(
            "`mesh` is an AbstractMesh, which has no devices, and q, k and v do not lie on any: pass a Mesh, or arrays "
            "that are placed on one."
        )


def _may_be_placed(x: Any) -> bool:
    return isinstance(x, Tracer) or isinstance(getattr(x, "sharding", None), NamedSharding)


def check_call(axes: Axes, request: Request, order: str) -> None:
    """A call that can be split so."""
    B, T, S, N, K = (request.dims[letter] for letter in "BTSNK")
    if T != S:
        raise ValueError(
            f"ls.parallel.attention is for sequences that attend to themselves, got {T} queries and {S} keys. Use "
            "`ls.attention` for others."
        )
    if axes.shards > T:
        raise ValueError(
            f"{T} tokens cannot be shared by the {axes.shards} devices of axis {axes.sequence!r}: "
            "give each at least one."
        )
    check_length(T, axes.shards, order)
    for name, size, names in (("batch rows", B, axes.batch), ("query heads", N, axes.heads)):
        if size % axes.count(names):
            raise ValueError(
                f"{size} {name} cannot be split over the {axes.count(names)} devices of {', '.join(map(repr, names))}. "
                "Choose another mesh, or leave the axis out of `batch_axes` or `head_axis`."
            )
    parts = axes.count(axes.heads)
    if K % parts and N % np.lcm(K, parts):
        raise ValueError(
            f"{K} key/value heads, repeated or not, cannot be split over {parts} devices with {N} query heads. "
            "Choose another mesh, or leave the axis out of `head_axis`."
        )
    if order == "zigzag":
        check_zigzag(request.mask, request.bias)


def chosen_plan(
    given: ParallelPlan | None, request: Request, axes: Axes, order: str, capacity: int | None
) -> ParallelPlan:
    """The plan of a call, or the one that was given, if it is for this call."""
    length, shards = request.dims["T"], axes.shards
    more: dict[str, Any] = dict(
        kv_heads=request.dims["K"] * axes.repeats(request.dims["K"]),
        positions=not request.has_positions,
        travel=all(isinstance(term, Bias) or term.shape[2] == 1 for term in terms(request.bias)),
    )
    if given is None:
        return plan_communication(request.mask, length, shards, order, global_capacity=capacity, **more)
    if not isinstance(given, ParallelPlan):
        raise TypeError(f"`plan` must be what `ls.parallel.plan` makes, got {type(given).__name__}.")
    if given.order != order:
        raise ValueError(f"This plan is for order={given.order!r}, but the call has order={order!r}. Make another one.")
    if (given.length, given.shards) != (length, shards):
        raise ValueError(
            f"This plan is for {given.length} tokens on {given.shards} devices, but the call has {length} on {shards}. "
            "Make another one."
        )
    if capacity is not None and given.capacity not in (0, capacity):
        raise ValueError(
            f"This plan is for global_capacity={given.capacity}, but the call has global_capacity={capacity}. "
            "Leave one of them out."
        )
    # Not planned again: a plan says what it was made of, and masks with the same structure have the same plan.
    if given.key != Asked.of(request.mask, length, shards, order, **more, capacity=capacity).key():
        raise ValueError(
            f"This plan is for {given.text}, but the call, with its heads, positions and bias, is another: "
            f"{request.mask!r}. "
            "Leave the plan out, or make another one."
        )
    return given


@partial(jit_by_function, static_argnames=("setting", "axes"))
def _attend_on_mesh(request: Request, *, setting: Setting, axes: Axes):
    """(out, lse) of the program on all devices, of arrays that are padded and split."""
    if not request.has_pairs:
        return request.without_pairs()[:2]
    T, features = request.dims["T"], request.dims["Hv"]
    request, specs, letters = _split(request.with_scale().with_features(), setting.plan, axes)

    def local(request: Request):
        device = jax.lax.axis_index(axes.sequence).astype(np.int32)
        known = laid_out(setting, device, _known(request), letters)
        request = replace(request, **dict(zip(KNOWN, known, strict=True)))
        return attend(setting, _numbered(request, axes))

    out_specs = specs.q, P(*specs.q[:3])
    run: Any = jax.shard_map(local, mesh=axes.mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)
    if AxisType.Explicit in axes.mesh.axis_types:  # where types say how arrays are laid out, they are asked to lie so
        request = jax.tree.map(
            lambda x, spec: reshard(x, NamedSharding(axes.mesh, axes.explicit(spec))), request, specs
        )
    out, lse = run(request)
    return out[:, :T] if features else out[:, :T, :, :0], lse[:, :T]


def _split(request: Request, plan: ParallelPlan, axes: Axes) -> tuple[Request, Request, list[str]]:
    """The call, padded to what devices divide; how each of its arrays is split; the axes of its mask and positions."""
    T, times = request.dims["T"], axes.repeats(request.dims["K"])
    more = padded(T, plan.shards, plan.order) - T
    q, k, v = (_padded(x, 1, more) for x in (request.q, request.k, request.v))
    k, v = (x if times == 1 else jnp.repeat(x, times, axis=2) for x in (k, v))
    bias = map_terms(lambda term: _prepared(axes, term, more, plan), request.bias)
    dropout = None if request.dropout is None else request.dropout.drawn(None, None)
    request = replace(
        request,
        q=q,
        k=k,
        v=v,
        bias=bias,
        dropout=dropout,
        mask=as_data(request.mask) if axes.numbered else request.mask,
        q_positions=None if request.q_positions is None else request.q_positions.reshape(-1, T),
        kv_positions=None if request.kv_positions is None else request.kv_positions.reshape(-1, T),
    )
    known, known_specs, letters = _split_known(unfolded(_known(request)), T, more, axes)
    here = P(axes.batch or None, axes.sequence, axes.heads or None, None)
    specs: Any = replace(
        request,
        **dict(q=here, k=here, v=here, bias=_bias_specs(axes, bias)),
        sinks=None if request.sinks is None else P(axes.heads or None),
        dropout=jax.tree.map(lambda _: P(), dropout),
        **dict(zip(KNOWN, known_specs, strict=True)),
    )
    return replace(request, **dict(zip(KNOWN, known, strict=True))), specs, letters


def _split_known(known: Any, length: int, more: int, axes: Axes) -> tuple[Any, Any, list[str]]:
    """A mask and positions, those arrays padded that are split like the tokens; how each is split; its axes."""
    letters = [each for each, _ in lettered(known, length)]
    leaves, tree = jax.tree.flatten(known)
    pairs = list(zip(letters, leaves, strict=True))
    leaves = [_padded(jnp.asarray(x), x.ndim - 1, more) if names[-1:] == "t" else x for names, x in pairs]
    return tree.unflatten(leaves), tree.unflatten([axes.spec(names, np.shape(x)) for names, x in pairs]), letters


KNOWN = ("mask", "q_positions", "kv_positions")  # what every device knows of all tokens, as far as it needs it


def _known(request: Request) -> tuple[Any, ...]:
    return tuple(getattr(request, name) for name in KNOWN)


def _numbered(request: Request, axes: Axes) -> Request:
    """One device's part of a call, with the numbers of its rows and heads."""
    rows, heads = (
        axes.number(names) * np.int32(size) + jnp.arange(size, dtype=np.int32)
        for names, size in ((axes.batch, request.dims["B"]), (axes.heads, request.dims["N"]))
    )
    if request.dropout is not None:
        request = replace(request, dropout=replace(request.dropout, rows=rows, heads=heads))
    # Without numbers engines need not look up what is here.
    return replace(request, rows=rows, heads=heads) if axes.numbered else request


def _bias_specs(axes: Axes, bias) -> Any:
    """Rows of arrays lie where the queries do; what is computed from positions is everywhere."""
    return map_terms(
        lambda term: rule_specs(axes, term) if isinstance(term, Bias) else axes.spec("BNtS", term.shape), bias
    )


def _prepared(axes: Axes, term, more: int, plan: ParallelPlan):
    """A term of the bias, ready to be split."""
    if not isinstance(term, Bias):
        if plan.order != "contiguous" and term.shape[3] > 1:  # as the tokens lie, but looked up by token
            term = term[..., np.argsort(stored(plan.length, plan.shards, plan.order))]
        return _padded(term, 2, more) if term.shape[2] > 1 else term
    # Kernels want what tells heads apart split like the heads; whose axes nobody knows, stays whole, and in JAX.
    split = axes.count(axes.heads) > 1 and not type(term).array_axes
    return Whole(term) if split and term.by_distance() is not None else term


def _padded(x, axis: int, more: int):
    if not more:
        return x
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])
