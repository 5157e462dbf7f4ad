"""The `cpu` engine: a native block-sparse kernel, forward and backward, called through the XLA FFI (see native/).

This file turns a call into operands, and teaches JAX what it cannot know about a foreign call: its gradient, how `vmap`
folds into the batch, and that batch rows and heads are independent, so that sharding them needs no communication.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longspan._types import Key, LogSumExp, Output, Query, statistics_dtype
from longspan.dropout import Dropout
from longspan.engines import _native
from longspan.engines._manual import vary, varying_axes
from longspan.engines._program import encode, knows
from longspan.engines._request import Request, without_pairs
from longspan.layout import BlockLayout

DTYPES = ("float32", "bfloat16", "float16", "float64")
MOST_HEAD_SIZE = 256
TILE = 128  # what the kernel handles at once; larger tiles of a given layout are cut up inside
PAD_BYTES = 64  # rows of the backward pass's scratch: kPadBytes in native/problem.h


def unsupported(request: Request) -> str | None:
    """Everything the reference computes, on CPUs, if the native library is there."""
    if request.platform != "cpu":
        return f"it runs on CPUs, and this runs on {request.platform}"
    if np.dtype(request.q.dtype).name not in DTYPES:
        return f"it computes {', '.join(DTYPES)}, not {np.dtype(request.q.dtype).name}"
    if request.dims["H"] > MOST_HEAD_SIZE:
        return f"its heads have at most {MOST_HEAD_SIZE} elements, not {request.dims['H']}"
    return _native.missing()


def tiles(request: Request) -> tuple[int, int]:
    """The kernel's own tiles, smaller for short sides."""
    return min(TILE, max(request.dims["T"], 1)), min(TILE, max(request.dims["S"], 1))


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
    """Attention over the tiles of a layout, by the native kernel."""
    B, T, N, H = q.shape
    if 0 in (B, T, N, k.shape[1], H):
        return without_pairs(q, sinks)
    sinks = None if sinks is None else sinks.astype(statistics_dtype(q.dtype))
    plan, operands = _prepare(layout, (B, N), bias, sinks, scale, soft_cap, dropout)
    # Marked here, outside custom_vjp, so that gradients of replicated operands are summed over their axes.
    axes = varying_axes(q, k, v, bias, sinks, operands)
    floats, operands = vary(((q, k, v, bias, sinks), operands), axes)
    return _attend(plan, floats, operands)


@dataclass(frozen=True)
class Plan:
    """The static part of a call."""

    scale: float
    soft_cap: float
    dropout_rate: float
    dropout_threshold: int
    q_tile: int
    kv_tile: int
    words: tuple[int, ...]
    roles: tuple[int, ...]  # which of the further operands is the bias, ..., as `enum Role` in native/program.h
    axes: tuple[tuple[str, ...], ...]  # of starts, stops, bias, sinks (if given) and all further operands

    def attributes(self) -> dict[str, Any]:
        return dict(
            scale=np.float64(self.scale),
            soft_cap=np.float64(self.soft_cap),
            dropout_rate=np.float64(self.dropout_rate),
            dropout_threshold=np.int64(self.dropout_threshold),
            q_tile=np.int64(self.q_tile),
            kv_tile=np.int64(self.kv_tile),
            roles=_native.static_ints(self.roles),
            program=_native.static_ints(self.words),
        )


ROLES = ("bias", "sinks", "q_pos", "kv_pos", "columns", "column_count", "row_ids", "head_ids", "seed")


def _prepare(layout: BlockLayout, rows_heads, bias, sinks, scale, soft_cap, dropout) -> tuple[Plan, tuple]:
    """The plan of a call, and its operands without gradients: starts, stops, and what roles or words name."""
    B, N = rows_heads
    layout = _broadcast_layout(layout, B, N)
    first = (bias is not None) + (sinks is not None)
    roles: dict[str, int] = dict.fromkeys(ROLES, -1)
    if bias is not None:
        roles["bias"] = 0
    if sinks is not None:
        roles["sinks"] = first - 1
    program = encode(layout, B, N, first)
    extras: list[tuple[str, Any, tuple[str, ...]]] = [
        ("q_pos", layout.q_positions, ("b", "")),
        ("kv_pos", layout.kv_positions, ("b", "")),
        ("columns", layout.common, ("l", "n", "")),
        ("column_count", layout.common_count, ("l", "n")),
    ]
    if dropout is not None:
        extras += [("row_ids", dropout.rows, ("B",)), ("seed", dropout.words, ("",))]
    if dropout is not None or program.needs_head_ids:
        extras.append(("head_ids", np.arange(N) if dropout is None else dropout.heads, ("n",)))
    for name, array, axes in extras:
        if array is not None:
            wanted = np.uint32 if name == "seed" else np.int32
            roles[name] = program.add(jnp.asarray(array).astype(wanted), *axes)
    tables = [jnp.asarray(a).astype(np.int32) for a in (layout.starts, layout.stops)]
    floats = [("b", "n", "", "")] * (bias is not None) + [("n",)] * (sinks is not None)
    plan = Plan(
        scale=scale,
        soft_cap=soft_cap or 0.0,
        dropout_rate=0.0 if dropout is None else dropout.rate,
        dropout_threshold=0 if dropout is None else dropout.threshold,
        q_tile=layout.q_tile,
        kv_tile=layout.kv_tile,
        words=tuple(program.words),
        roles=tuple(roles.values()),
        axes=(*[("l", "n", "", "")] * 2, *floats, *program.axes),
    )
    return plan, (*tables, *program.operands)


def _broadcast_layout(layout: BlockLayout, batch: int, heads: int) -> BlockLayout:
    """The layout with all its tables of one size; bit tiles follow them, so by batch row where positions differ."""
    tables = [a for a in (layout.starts, layout.common) if a is not None]
    b, n = (max(a.shape[axis] for a in tables) for axis in (0, 1))
    if not knows(layout.mask):
        q, kv = layout.sides(batch=batch, heads=heads)
        # Asked of the rule, for its arrays do not tell: a user's may read the number of the row or head.
        told = jax.eval_shape(lambda: layout.mask.allowed(q.slots(), kv.slots())).shape
        b, n = max(b, told[0]), max(n, told[1])
    wide = {
        name: jnp.broadcast_to(table, (b, n, *table.shape[2:]))
        for name in ("starts", "stops", "common", "common_count")
        if (table := getattr(layout, name)) is not None and table.shape[:2] != (b, n)
    }
    return replace(layout, **wide) if wide else layout


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, floats, operands):
    q, k, v, *extras = floats
    return tuple(_call("forward", plan, (q, k, v), _given(extras), operands)[:2])


def _attend_fwd(plan: Plan, floats, operands):
    dtype, extras = floats[0].dtype, floats[3:]
    # The gradients of bias and sinks may be wider than 16 bits, so then they must not be made from a rounded output.
    kind = "wide_forward" if _given(extras) and dtype.itemsize == 2 else "forward"
    results: Any = _only_once(kind, plan, floats, operands)
    out, lse, low = results
    return (out.astype(dtype), lse), (floats, operands, out, lse, low)


def _attend_bwd(plan: Plan, residuals, cotangents):
    return _gradients(plan, *residuals, cotangents), None


_attend.defvjp(_attend_fwd, _attend_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _only_once(kind: str, plan: Plan, floats, operands):
    q, k, v, *extras = floats
    return _call(kind, plan, (q, k, v), _given(extras), operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(plan: Plan, floats, operands, out, lse, low, cotangents):
    q, k, v, bias, sinks = floats
    dout, dlse = cotangents
    # What the gradient of every weight in a row is measured against.
    delta = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), axis=-1) - dlse.astype(lse.dtype)
    delta = jnp.where(jnp.isfinite(lse), delta, 0)  # a row without keys may get NaN: the cotangent of lse², say
    own = (lse, low, dout.astype(q.dtype), delta)
    extras = _given((bias, sinks))
    dq, dk, dv = _call("backward", plan, (q, k, v), extras, operands, own)
    dbias, dsinks = None, None
    if bias is not None:
        (dbias,) = _call("bias_gradient", plan, (q, k, v), extras, operands, own)
        dbias = dbias.astype(bias.dtype)
    if sinks is not None:
        # A row that sees nothing, neither key nor sink, has lse = -inf.
        weight = jnp.where(jnp.isfinite(lse), jnp.exp(sinks.reshape(1, 1, -1) - lse - low), 0)
        dsinks = -jnp.sum(weight * delta, axis=(0, 1))
    return dq, dk, dv, dbias, dsinks


def _second_derivative(*_):
    raise NotImplementedError(
        "engine='cpu' has no second derivatives: its backward pass is a native kernel. "
        "Use engine='reference' where you differentiate twice."
    )


_only_once.defvjp(_second_derivative, _second_derivative)
_gradients.defvjp(_second_derivative, _second_derivative)


def _given(arrays) -> tuple:
    return tuple(a for a in arrays if a is not None)


def _call(kind: str, plan: Plan, qkv, extras, operands, own=()):
    """One native call, batched and partitioned by the rules below. Operands: q, k, v, starts, stops, own, the rest."""
    starts, stops, *rest = operands
    query, key, row = ("B", "", "n", ""), ("B", "", "k", ""), ("B", "", "n")
    axes = (query, key, key, *plan.axes[:2], *((row, row, query, row) if own else ()), *plan.axes[2:])
    plain = tuple(tuple("b" if name in BATCH else name for name in names) for names in axes)
    call = custom_vmap(partial(_partitioned, kind, plan, plain))
    call.def_vmap(partial(_fold, call, kind, axes))
    return call(*qkv, starts, stops, *own, *extras, *rest)


# Names of a first axis over batch rows: of size B; of size B or 1; of size B or 1, but alike in all tables of a layout.
BATCH = ("B", "b", "l")


def _fold(call, kind: str, axes, size: int, batched, *operands):
    """vmap: the mapped axis becomes part of the batch. What has no batch axis, or is summed over it, runs in a loop."""
    foldable = all(names[0] in BATCH for names, is_batched in zip(axes, batched, strict=True) if is_batched)
    if kind == "bias_gradient" or not foldable:
        moving = [x for x, b in zip(operands, batched, strict=True) if b]

        def one(moved):
            moved = iter(moved)
            return call(*(next(moved) if b else x for x, b in zip(operands, batched, strict=True)))

        out = jax.lax.map(one, moving)
        return out, jax.tree.map(lambda _: True, out)
    rows = operands[0].shape[1] if batched[0] else operands[0].shape[0]
    moved = {names[0] for names, is_batched in zip(axes, batched, strict=True) if is_batched}

    def fold(x, is_batched, names):
        may_stay = names[0] == "b" or (names[0] == "l" and "l" not in moved)
        if names[0] not in BATCH or (may_stay and not is_batched and x.shape[0] == 1):
            return x
        x = x if is_batched else x[None]
        return jnp.broadcast_to(x, (size, rows, *x.shape[2:])).reshape(size * rows, *x.shape[2:])

    out = call(*(fold(*each) for each in zip(operands, batched, axes, strict=True)))
    out = jax.tree.map(lambda x: x.reshape(size, rows, *x.shape[1:]), out)
    return out, jax.tree.map(lambda _: True, out)


def _partitioned(kind: str, plan: Plan, axes, *operands):
    """The call with the promise that batch rows and heads may be computed apart."""
    local = partial(_local, kind, plan)
    if jax.device_count() == 1 or jax.sharding.get_abstract_mesh().manual_axes:
        return local(*operands)  # inside shard_map everything is local already
    call = custom_partitioning(local)
    rule, fixed, sizes = _sharding_rule(kind, plan, axes, operands)
    call.def_partition(
        partition=partial(_partition, kind, plan, axes),
        infer_sharding_from_operands=partial(_infer, kind, plan, axes),
        sharding_rule=rule,
        need_replication_factors=fixed,
        **sizes,
    )
    return call(*operands)


def _local(kind: str, plan: Plan, *operands):
    """The native call itself, on the shapes it gets."""
    q, k = operands[:2]
    (B, T, N, H), (_, S, K, _) = q.shape, k.shape
    stats = statistics_dtype(q.dtype)
    result = partial(_result, jax.typeof(q))

    target, attributes = f"longspan_{kind}", plan.attributes()
    if kind in ("forward", "wide_forward"):
        row = result((B, T, N), stats)
        results = (result(q.shape, q.dtype if kind == "forward" else stats), row, row)
        return _native.call("longspan_forward", results, operands, **attributes)
    if kind == "backward":
        unit = PAD_BYTES // np.dtype(stats).itemsize
        # Room for several chunks of queries to add up dk and dv on their own: see native/backward.h.
        scratch = result((B, K, S + min(S, max(8192, S // 4)), -(-H // unit) * unit), stats)
        results = (result(q.shape, q.dtype), result(k.shape, k.dtype), result(k.shape, k.dtype), scratch, scratch)
        return _native.call(target, results, operands, **attributes)[:3]
    bias = operands[9]
    chunks = min(8, -(-T // plan.q_tile)) if bias.shape[2] == 1 and T > 1 else 0
    results = (result(bias.shape, stats), result((chunks, *bias.shape), stats))
    return _native.call(target, results, operands, **attributes)[:1]


def _result(like, shape, dtype) -> jax.ShapeDtypeStruct:
    """What a call returns; inside shard_map it varies along the same mesh axes as q."""
    if not like.manual_axis_type.varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = NamedSharding(like.sharding.mesh, P(*[None] * len(shape)))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=like.manual_axis_type)


def _results(kind: str, operands) -> tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]:
    """Shape and axes of each result."""
    q, k = operands[0].shape, operands[1].shape
    if kind in ("forward", "wide_forward"):
        return (q, ("b", "", "n", "")), *[(q[:3], ("b", "", "n"))] * 2
    if kind == "backward":
        return (q, ("b", "", "n", "")), (k, ("b", "", "k", "")), (k, ("b", "", "k", ""))
    return ((operands[9].shape, ("b", "n", "", "")),)


def _sharding_rule(kind: str, plan: Plan, axes, operands):
    """Shardy's rule: batch and head factors may be sharded, every other factor must not be."""
    heads, kv_heads = operands[0].shape[2], operands[1].shape[2]
    group = heads // kv_heads
    fixed: list[str] = []

    def factors(shape, names) -> str:
        found = []
        for size, name in zip(shape, names, strict=True):
            if size == 1 or name == "":
                fixed.append(f"x{len(fixed)}")
                found.append(fixed[-1])
            else:
                split = "(k g)" if kv_heads > 1 else "g"
                found.append("b" if name == "b" else "k" if name == "k" or group == 1 else split)
        return " ".join(found)

    left = ", ".join(factors(x.shape, names) for x, names in zip(operands, axes, strict=True))
    right = ", ".join(factors(shape, names) for shape, names in _results(kind, operands))
    sizes = dict(g=group) if group > 1 and kv_heads > 1 else {}
    return f"{left} -> {right}", tuple(fixed), sizes


def _partition(kind: str, plan: Plan, axes, mesh, arg_shapes, result_shapes):
    """Shardings for one device's part, from those of q."""
    where = _placement(arg_shapes, mesh)
    spec = partial(_spec, mesh, where)
    results = _results(kind, arg_shapes)

    def lower(*operands):
        out = _local(kind, plan, *operands)
        if kind == "backward" and where["group"]:
            out = (out[0], *(jax.lax.psum(x, where["group"]) for x in out[1:]))
        if kind == "bias_gradient":
            (shape, _), summed = results[0], ()
            summed += where["b"] if shape[0] == 1 else ()
            summed += where["n"] if shape[1] == 1 else ()
            out = tuple(jax.lax.psum(x, summed) for x in out) if summed else out
        return out

    shardings = tuple(spec(shape, names) for shape, names in results)
    return mesh, lower, shardings, tuple(spec(x.shape, names) for x, names in zip(arg_shapes, axes, strict=True))


def _infer(kind: str, plan: Plan, axes, mesh, arg_shapes, result_shapes):
    where = _placement(arg_shapes, mesh)
    return tuple(_spec(mesh, where, shape, names) for shape, names in _results(kind, arg_shapes))


def _spec(mesh, where, shape, names) -> NamedSharding:
    return NamedSharding(
        mesh, P(*((where[n] or None) if n and size > 1 else None for n, size in zip(names, shape, strict=True)))
    )


def _placement(arg_shapes, mesh) -> dict[str, tuple[str, ...]]:
    """The mesh axes that batch, query heads, kv heads, and queries that share a kv head are sharded over."""
    q, k = arg_shapes[:2]
    spec = (*q.sharding.spec, None, None, None, None)
    batch, heads = (_names(spec[i]) for i in (0, 2))
    kv_heads, shared = k.shape[2], []
    kv_axes: list[str] = []
    for axis in heads:
        if not shared and kv_heads % mesh.shape[axis] == 0:
            kv_axes.append(axis)
            kv_heads //= mesh.shape[axis]
        elif kv_heads == 1:
            shared.append(axis)
        else:
            break  # queries that share a kv head would be torn apart across several of them
    return dict(b=batch, n=(*kv_axes, *shared), k=tuple(kv_axes), group=tuple(shared))


def _names(entry) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
