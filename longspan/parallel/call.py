"""`attention` over a sequence that devices share: checks the call, plans the communication and runs the program."""

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
from longspan.parallel.arrays import lettered, place_arrays
from longspan.parallel.order import Order, check_length, check_order, padded, stored
from longspan.parallel.parts import ShardConfig
from longspan.parallel.plan import ParallelPlan, PlanInputs, plan_communication
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
    """`ls.attention` over a sequence that is sharded over a mesh axis; exact for every mask.

    Takes and returns global arrays, inside or outside `jit`, and shards batch, sequence and heads. Each device computes
    the output of its own queries and receives only the keys that the mask requires; `ls.parallel.plan(mask, T, shards)`
    prints this communication. A length that the axis does not divide is padded internally. First derivatives are exact;
    second derivatives raise a NotImplementedError.

    Arrays [B, T] of the mask and given positions are sharded like the tokens and sent with the keys. If the plan
    contains a ring, an exchange of blocks or flags of global tokens, each device gathers the whole arrays instead,
    which takes a few bytes per token.

    Args:
        q: queries [B, T, N, H], or [T, N, H] if keys and values lack the batch axis too.
        k: keys [B, T, K, H]. Key/value heads are repeated if `head_axis` does not divide them.
        v: values [B, T, K, Hv].
        mesh: a mesh of devices, for example from `ls.parallel.mesh`.
        mask: a `Mask`, a `MaskInfo`, or bools [T, T] or broadcastable to [B, N, T, T]; by default everything is
            allowed.
        axis: the mesh axis that shards the sequence.
        batch_axes: the mesh axes that shard the batch; names that the mesh lacks are ignored.
        head_axis: the mesh axis that shards the heads; ignored if the mesh lacks it.
        order: the order of the tokens: "contiguous", or "zigzag" as in the output of `ls.parallel.shard_batch`. In
            zigzag order q, k, v, arrays [B, T] of the mask, biases by query or by key and positions are all in that
            order. Rules by slot (`Blocks`, `Dense`, `Between`, `FirstOfSegment`, your own rules that read slots) and
            biases [T, T] raise a ValueError.
        global_capacity: the number of tokens that the flags of a `Global` may name; with more, all keys are sent. By
            default 128, and at most an eighth of a device's tokens.
        plan: a plan from `ls.parallel.plan` for the same mask, length, number of devices and order. By default the call
            makes its plan; the last 64 plans of masks without arrays are cached.
        bias: as in `ls.attention`; the query axis of a bias array is sharded like the queries.
        scale: as in `ls.attention`.
        soft_cap: as in `ls.attention`.
        sinks: one logit per query head, [N].
        dropout_rate: as in `ls.attention`.
        dropout_key: a JAX random key. It drops the same weights as on one device.
        q_positions: int [T] or [B, T]; by default the index of each token in the sequence. With given positions, rules
            by position bound no keys at plan time, so all keys may be sent.
        kv_positions: likewise.
        engine: the engine of each device.
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
        out, lse = _attend_on_mesh(request, config=ShardConfig(plan, engine, axis, tuple(mesh.axis_names)), axes=axes)
    if len(q.shape) == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _check_place(axes: Axes, *operands: Any) -> None:
    """The call is not inside a `shard_map` over the same mesh axes, and the devices are known."""
    used = {axes.sequence, *axes.batch, *axes.heads}
    context = jax.sharding.get_abstract_mesh()
    taken = used & {*context.manual_axes}
    if taken:
        raise ValueError(
            f"ls.parallel.attention takes global arrays and calls shard_map itself, but is called inside a shard_map "
            f"over {', '.join(map(repr, sorted(taken)))}. Call it outside of that shard_map."
        )
    if isinstance(axes.mesh, AbstractMesh) and context.empty and not any(map(_may_be_placed, operands)):
        raise ValueError(
            "`mesh` is an AbstractMesh, which has no devices, and q, k and v are not placed on a mesh. Pass a Mesh, or "
            "arrays that are placed on one."
        )


def _may_be_placed(x: Any) -> bool:
    return isinstance(x, Tracer) or isinstance(getattr(x, "sharding", None), NamedSharding)


def check_call(axes: Axes, request: Request, order: str) -> None:
    """The call can be sharded over these axes."""
    dims = request.dims
    B, T, S, N, K = dims["B"], dims["T"], dims["S"], dims["N"], dims["K"]
    if T != S:
        raise ValueError(
            f"ls.parallel.attention is self-attention, with as many queries as keys, got {T} queries and {S} keys. Use "
            "`ls.attention` for cross-attention."
        )
    if axes.shards > T:
        raise ValueError(
            f"{T} tokens cannot be shared by the {axes.shards} devices of axis {axes.sequence!r}. Give each device at "
            "least one token."
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
            f"{K} key/value heads cannot be split over {parts} devices. Repeating them to {np.lcm(K, parts)} heads "
            f"needs a multiple of {np.lcm(K, parts)} query heads, got {N}. Choose another mesh, or leave the axis out "
            "of `head_axis`."
        )
    if order == "zigzag":
        check_zigzag(request.mask, request.bias)


def chosen_plan(
    given: ParallelPlan | None, request: Request, axes: Axes, order: str, capacity: int | None
) -> ParallelPlan:
    """The plan of a call, or the given one after checking that it is for this call."""
    length, shards = request.dims["T"], axes.shards
    options: dict[str, Any] = dict(
        kv_heads=request.dims["K"] * axes.repeats(request.dims["K"]),
        positions=not request.has_positions,
        travel=all(isinstance(term, Bias) or term.shape[2] == 1 for term in terms(request.bias)),
    )
    if given is None:
        return plan_communication(request.mask, length, shards, order, global_capacity=capacity, **options)
    if not isinstance(given, ParallelPlan):
        raise TypeError(f"`plan` must be a ParallelPlan from `ls.parallel.plan`, got {type(given).__name__}.")
    if given.order != order:
        raise ValueError(f"This plan is for order={given.order!r}, but the call has order={order!r}. Plan again.")
    if (given.length, given.shards) != (length, shards):
        raise ValueError(
            f"This plan is for {given.length} tokens on {given.shards} devices, but the call has {length} on {shards}. "
            "Plan again."
        )
    if capacity is not None and given.capacity not in (0, capacity):
        raise ValueError(
            f"This plan is for global_capacity={given.capacity}, but the call has global_capacity={capacity}. "
            "Leave out `global_capacity` or `plan`."
        )
    # Masks with the same structure have the same plan, so keys are compared: the call is not planned again.
    if given.key != PlanInputs.of(request.mask, length, shards, order, **options, capacity=capacity).key():
        raise ValueError(
            f"This plan is for {given.text}, and the call has {request.mask!r}. The mask, the heads, the positions or "
            "the bias of the call differ from those of the plan. Leave the plan out, or plan again."
        )
    return given


@partial(jit_by_function, static_argnames=("config", "axes"))
def _attend_on_mesh(request: Request, *, config: ShardConfig, axes: Axes):
    """(out, lse) of the program on all devices, for padded and sharded arrays."""
    if not request.has_pairs:
        return request.without_pairs()[:2]
    T, features = request.dims["T"], request.dims["Hv"]
    request, specs, letters = _shard(request.with_scale().with_features(), config.plan, axes)

    def local(request: Request):
        device = jax.lax.axis_index(axes.sequence).astype(np.int32)
        known = place_arrays(config, device, _known(request), letters)
        request = replace(request, **dict(zip(KNOWN, known, strict=True)))
        return attend(config, _numbered(request, axes))

    out_specs = specs.q, P(*specs.q[:3])
    run: Any = jax.shard_map(local, mesh=axes.mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)
    if AxisType.Explicit in axes.mesh.axis_types:  # shard_map requires that the types of arrays have these specs
        request = jax.tree.map(
            lambda x, spec: reshard(x, NamedSharding(axes.mesh, axes.explicit(spec))), request, specs
        )
    out, lse = run(request)
    out = out[:, :T]
    if not features:
        out = out[..., :0]
    return out, lse[:, :T]


def _shard(request: Request, plan: ParallelPlan, axes: Axes) -> tuple[Request, Request, list[str]]:
    """The padded call, the spec of each of its arrays, and the axes of the arrays of its mask and positions."""
    T, times = request.dims["T"], axes.repeats(request.dims["K"])
    padding = padded(T, plan.shards, plan.order) - T
    k, v = request.k, request.v
    if times > 1:
        k, v = jnp.repeat(k, times, axis=2), jnp.repeat(v, times, axis=2)
    dropout, mask = request.dropout, request.mask
    if dropout is not None:
        dropout = dropout.drawn(None, None)
    if axes.numbered:
        mask = as_data(mask)
    request = replace(
        request,
        q=_padded(request.q, 1, padding),
        k=_padded(k, 1, padding),
        v=_padded(v, 1, padding),
        bias=map_terms(lambda term: _shardable(axes, term, padding, plan), request.bias),
        dropout=dropout,
        mask=mask,
        q_positions=_by_row(request.q_positions, T),
        kv_positions=_by_row(request.kv_positions, T),
    )
    known, known_specs, letters = _shard_known(unfolded(_known(request)), T, padding, axes)
    qkv_spec = P(axes.batch or None, axes.sequence, axes.heads or None, None)
    specs: Any = replace(
        request,
        **dict(q=qkv_spec, k=qkv_spec, v=qkv_spec, bias=_bias_specs(axes, request.bias)),
        sinks=None if request.sinks is None else P(axes.heads or None),
        dropout=jax.tree.map(lambda _: P(), dropout),
        **dict(zip(KNOWN, known_specs, strict=True)),
    )
    return replace(request, **dict(zip(KNOWN, known, strict=True))), specs, letters


def _by_row(positions: Any, length: int) -> Any:
    if positions is None:
        return None
    return positions.reshape(-1, length)


def _shard_known(known: Any, length: int, padding: int, axes: Axes) -> tuple[Any, Any, list[str]]:
    """A mask and positions with padded arrays by token, the spec of each array, and its axes."""
    leaves, tree = jax.tree.flatten(known)
    arrays, specs, letters = [], [], []
    for (names, _), leaf in zip(lettered(known, length), leaves, strict=True):
        specs.append(axes.spec(names, np.shape(leaf)))
        letters.append(names)
        if names[-1:] == "t":
            leaf = _padded(jnp.asarray(leaf), leaf.ndim - 1, padding)
        arrays.append(leaf)
    return tree.unflatten(arrays), tree.unflatten(specs), letters


KNOWN = ("mask", "q_positions", "kv_positions")  # parts of a call that each device has for all tokens it needs


def _known(request: Request) -> tuple[Any, ...]:
    return tuple(getattr(request, name) for name in KNOWN)


def _numbered(request: Request, axes: Axes) -> Request:
    """One device's part of a call, with the indices of its rows and heads."""
    batch, heads = request.dims["B"], request.dims["N"]
    row_numbers = axes.number(axes.batch) * np.int32(batch) + jnp.arange(batch, dtype=np.int32)
    head_numbers = axes.number(axes.heads) * np.int32(heads) + jnp.arange(heads, dtype=np.int32)
    if request.dropout is not None:
        request = replace(request, dropout=replace(request.dropout, rows=row_numbers, heads=head_numbers))
    if not axes.numbered:  # without numbers, engines read arrays directly
        return request
    return replace(request, rows=row_numbers, heads=head_numbers)


def _bias_specs(axes: Axes, bias) -> Any:
    """Rows of arrays are sharded like the queries; arrays of a `Bias` by batch rows and heads only."""
    return map_terms(
        lambda term: rule_specs(axes, term) if isinstance(term, Bias) else axes.spec("BNtS", term.shape), bias
    )


def _shardable(axes: Axes, term, padding: int, plan: ParallelPlan):
    """A term of the bias in a form that can be sharded."""
    if isinstance(term, Bias):
        # A term with arrays of unknown axes cannot be sharded by head: it is replicated, and computed in JAX.
        replicated = axes.count(axes.heads) > 1 and not type(term).array_axes and term.by_distance() is not None
        return Whole(term) if replicated else term
    if plan.order != "contiguous" and term.shape[3] > 1:  # columns are looked up by token, not by slot
        term = term[..., np.argsort(stored(plan.length, plan.shards, plan.order))]
    if term.shape[2] > 1:
        term = _padded(term, 2, padding)
    return term


def _padded(x, axis: int, padding: int):
    if not padding:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, padding)
    return jnp.pad(x, widths)
