"""`attention`: check, bind the mask to the batch, plan the tiles, run an engine; and `explain`, which tells."""

import math
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from longspan._checks import (
    check_bound_lengths,
    check_broadcast,
    check_choice,
    check_dropout,
    check_extents,
    check_positions,
    check_qkv,
    check_scale,
    check_sinks,
    check_soft_cap,
)
from longspan._types import Key, LogSumExp, Output, Positions, Query
from longspan.dropout import make_dropout
from longspan.engines import cpu, reference, xla
from longspan.engines._request import Request, without_pairs
from longspan.layout import BlockLayout, Counts, count, plan
from longspan.maskinfo import MaskInfo
from longspan.masks import Custom, Dense, Full, Mask, Not

# In the order in which "auto" tries them: the fastest first. `python -m benchmarks crossover` measures it: `cpu` was
# ahead of `xla` at every size and with every feature, by 1.1 (one query, 32 keys; `Custom`) to 7 times. Only the
# gradients of some 16 tokens come sooner from the reference: 0.2 ms do not pay for an engine that needs T×S memory.
ENGINES: dict[str, ModuleType] = {"cpu": cpu, "xla": xla, "reference": reference}


@no_type_check
def attention(
    q: Query,
    k: Key,
    v: Key,
    *,
    mask: Mask | MaskInfo | BlockLayout | Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    scale: float | Float[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key=None,
    q_positions: Positions | None = None,
    kv_positions: Positions | None = None,
    engine: str = "auto",
    return_lse: bool = False,
) -> Output | tuple[Output, LogSumExp]:
    """Attention over the pairs that a mask allows: softmax(soft_cap(q·k·scale) + bias) · v.

    A query that sees no key gives zeros and zero gradient. Keys that no query may see are never read.

    Args:
        q: queries [B, T, N, H].
        k: keys [B, S, K, H], where N is a multiple of K (grouped queries share a key/value head).
        v: values [B, S, K, H].
        mask: a `Mask`, a `MaskInfo`, a `BlockLayout` planned earlier, or bools [T, S] or broadcastable to
            [B, N, T, S]; `True` = may attend. By default everything.
        bias: floats [T, S] or broadcastable to [B, N, T, S], added after the soft cap; -inf is a masked key.
        scale: what scores are multiplied by; 1/sqrt(H) by default.
        soft_cap: if given, scores become soft_cap·tanh(scores / soft_cap).
        sinks: one logit a head, [N], that takes part in the softmax and has no value.
        dropout_rate: the share of weights to drop; the rest is scaled by 1 / (1 - rate).
        dropout_key: a JAX random key. The weight of a pair is dropped by its batch row, head and positions alone, so
            the result does not depend on the engine.
        q_positions: int [T] or [B, T]; by default each slot's index.
        kv_positions: int [S] or [B, S]; by default each slot's index.
        engine: "auto" (the first that can run), or the name of one, which raises if it cannot.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        The output [B, T, N, H]; with `return_lse` also lse [B, T, N], float32 (float64 for float64), natural log, the
        sink included.

    Example:
        >>> q = k = v = jnp.ones((1, 8, 2, 4))
        >>> ls.attention(q, k, v, mask=ls.Causal() & ls.Window(3, 0)).shape
        (1, 8, 2, 4)
    """
    call = _bind(q, k, v, mask, bias, soft_cap, scale, sinks, dropout_rate, dropout_key, q_positions, kv_positions)
    name, _ = choose(engine, call.request)
    H = q.shape[-1]
    if scale is None or isinstance(scale, int | float):
        scale = 1 / math.sqrt(max(H, 1)) if scale is None else float(scale)
    else:
        # A traced scale becomes part of the queries: engines take a static one.
        q, scale = (_scale_dense if name == "reference" else _scaled)(jnp.asarray(q), jnp.asarray(scale)), 1.0
    out, lse = _on_auto_axes(
        *(jnp.asarray(x) for x in (q, k, v)),
        call.request.mask,
        call.request.layout,
        call.positions,
        None if bias is None else jnp.asarray(bias).reshape(call.bias_shape),
        None if sinks is None else jnp.asarray(sinks),
        dropout_key if dropout_rate > 0 else None,
        engine=name,
        scale=scale,
        soft_cap=None if soft_cap is None else float(soft_cap),
        dropout_rate=float(dropout_rate),
    )
    return (out, lse) if return_lse else out


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


def _on_auto_axes(q, *operands, **static):
    """Runs where XLA places intermediate values by itself, also if the caller's mesh has explicit axes."""
    placed = jax.typeof(q).sharding
    if AxisType.Explicit not in placed.mesh.axis_types:
        return _run(q, *operands, **static)
    spec = (*placed.spec, *[None] * (4 - len(placed.spec)))
    results = tuple(NamedSharding(placed.mesh, P(*part)) for part in (spec, spec[:3]))
    with jax.sharding.use_abstract_mesh(placed.mesh):
        return jax.sharding.auto_axes(partial(_run, **static), out_sharding=results)(q, *operands)


@partial(jax.jit, static_argnames=("engine", "scale", "soft_cap", "dropout_rate"))
def _run(q, k, v, mask, layout, positions, bias, sinks, dropout_key, *, engine, scale, soft_cap, dropout_rate):
    B, T, N, _ = q.shape
    if 0 in (*q.shape, *k.shape):
        return without_pairs(q, sinks)
    if layout is None:
        request = Request(q, k, mask, None, bias, sinks, dropout_rate, jax.default_backend())
        # In JAX even if the mask is static: NumPy tables would become constants that grow with the length.
        layout = plan(
            mask,
            T,
            k.shape[1],
            *ENGINES[engine].tiles(request),
            q_positions=positions[0],
            kv_positions=positions[1],
            xp=jnp,
        )
    dropout = None if dropout_key is None else make_dropout(dropout_key, dropout_rate, B, N)
    return ENGINES[engine].run(q, k, v, layout, bias=bias, sinks=sinks, scale=scale, soft_cap=soft_cap, dropout=dropout)


@no_type_check
def explain(
    q: Query,
    k: Key,
    v: Key,
    *,
    mask: Mask | MaskInfo | BlockLayout | Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    scale: float | Float[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key=None,
    q_positions: Positions | None = None,
    kv_positions: Positions | None = None,
    engine: str = "auto",
    return_lse: bool = False,
) -> "Explanation":
    """What `attention` would do with the same arguments, which may be `jax.ShapeDtypeStruct`s: engine, tiles, FLOPs.

    Example:
        >>> x = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.float32)
        >>> report = ls.explain(x, x, x, mask=ls.Causal(), engine="reference")
        >>> report.engine, report.tiles_empty, report.tiles_partial, report.tiles_full
        ('reference', 28, 8, 28)
    """
    call = _bind(q, k, v, mask, bias, soft_cap, scale, sinks, dropout_rate, dropout_key, q_positions, kv_positions)
    name, refused = choose(engine, call.request)
    dims, request = call.request.dims, call.request
    layout, notes = request.layout, _notes(request, call.positions)
    q_tile, kv_tile = ENGINES[name].tiles(request) if layout is None else (layout.q_tile, layout.kv_tile)
    known = not any(_is_abstract(leaf) for leaf in jax.tree.leaves((request.mask, layout, call.positions)))
    counts = None
    if known and 0 not in dims.values():
        with jax.ensure_compile_time_eval():  # also inside `jit`, where what is known stays known
            if layout is None:
                positions = dict(zip(("q_positions", "kv_positions"), call.positions, strict=True))
                layout = plan(request.mask, dims["T"], dims["S"], q_tile, kv_tile, **positions)
            counts = count(layout)
    return Explanation(
        engine=name,
        reason=_reason(engine, name),
        refused=refused,
        mask=repr(request.mask),
        q_tile=q_tile,
        kv_tile=kv_tile,
        notes=notes,
        **_sizes(dims, q, sinks, bias, request.mask),
        **_work(dims, q_tile, kv_tile, counts, layout),
    )


@dataclass(frozen=True)
class Explanation:
    """What a call of `attention` does; it prints itself as a table. Counts are None where they depend on data.

    Tiles are those of the batch rows and heads that the mask tells apart; FLOPs and bytes are those of the whole call.

    Example:
        >>> x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.float32)
        >>> ls.explain(x, x, x, mask=ls.Causal(), engine="reference").useful_flops
        16842752
    """

    engine: str
    reason: str  # why this engine
    refused: dict[str, str]  # engine -> why it was not taken
    mask: str
    q_tile: int
    kv_tile: int
    tiles_total: int | None
    tiles_empty: int | None
    tiles_partial: int | None
    tiles_full: int | None
    useful_flops: int | None  # 4·H for each allowed pair and head, forward
    executed_flops: int | None  # 4·H for each pair in a tile that is computed, forward
    array_bytes: int  # q, k, v, out, lse, bias and sinks
    dense_mask_bytes: int  # what bools [B, N, T, S] would have taken, over the rows and heads told apart
    notes: tuple[str, ...]

    def __str__(self) -> str:
        rows = [
            ("engine", f"{self.engine}, {self.reason}"),
            *((f"  not {name}", why) for name, why in self.refused.items()),
            ("mask", self.mask),
            ("tiles", f"{self.q_tile} x {self.kv_tile}"),
            ("  empty", _share(self.tiles_empty, self.tiles_total)),
            ("  partial", _share(self.tiles_partial, self.tiles_total)),
            ("  full", _share(self.tiles_full, self.tiles_total)),
            ("useful FLOPs", _short(self.useful_flops, "FLOP", 1000)),
            ("executed FLOPs", _short(self.executed_flops, "FLOP", 1000)),
            ("arrays", _short(self.array_bytes, "B", 1024)),
            ("a dense mask", _short(self.dense_mask_bytes, "B", 1024)),
            *(("note", note) for note in self.notes),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def choose(engine: str, request: Request) -> tuple[str, dict[str, str]]:
    """The engine that runs a request, and why each one tried before it was refused."""
    check_choice("engine", engine, ("auto", *ENGINES))
    if engine != "auto":
        reason = ENGINES[engine].unsupported(request)
        if reason:
            raise NotImplementedError(f"engine={engine!r} cannot run this: {reason}")
        return engine, {}
    refused: dict[str, str] = {}
    for name, module in ENGINES.items():
        reason = module.unsupported(request)
        if reason is None:
            return name, refused
        refused[name] = reason
    raise NotImplementedError(f"No engine can run this: {refused}")


def _reason(asked: str, taken: str) -> str:
    if asked != "auto":
        return "as asked"
    return "faster than xla at every size measured" if taken == "cpu" else "the fastest that can run this"


@dataclass(frozen=True)
class _Call:
    request: Request
    positions: tuple[Any, Any]
    bias_shape: tuple[int, ...] | None


def _bind(q, k, v, mask, bias, soft_cap, scale, sinks, dropout_rate, dropout_key, q_positions, kv_positions) -> _Call:
    """Checks a call and resolves its mask to a rule, positions and perhaps a layout."""
    check_qkv(q, k, v)
    (B, T, N, _), S = q.shape, k.shape[1]
    bias_shape = None if bias is None else check_broadcast("bias", bias, (B, N, T, S), kind="float")
    if sinks is not None:
        check_sinks(sinks, N)
    check_dropout(dropout_rate, dropout_key)
    check_soft_cap(soft_cap)
    check_scale(scale)
    mask, layout, given = _resolve(mask, (B, N, T, S))
    positions = [q_positions, kv_positions]
    for i, name in enumerate(("q_positions", "kv_positions")):
        if given[i] is not None and positions[i] is not None:
            raise ValueError(f"`{name}` is given both to the call and in its mask. Keep one of them.")
        positions[i] = given[i] if positions[i] is None else positions[i]
        check_positions(name, positions[i], (T, S)[i], B)
    if layout is not None and (q_positions is not None or kv_positions is not None):
        raise ValueError("A BlockLayout is planned for its positions. Pass positions to `mask.layout(...)` instead.")
    check_extents(mask, q_len=T, kv_len=S, batch=B, heads=N)
    request = Request(q, k, mask, layout, bias, sinks, float(dropout_rate), jax.default_backend())
    return _Call(request, (_as_int32(positions[0]), _as_int32(positions[1])), bias_shape)


def _as_int32(positions):
    return positions if positions is None or _is_abstract(positions) else positions.astype(np.int32)


def _resolve(mask, shape) -> tuple[Mask, BlockLayout | None, tuple[Any, Any]]:
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
        return Dense(mask if _is_abstract(mask) else mask.reshape(full)), None, (None, None)
    raise TypeError(
        f"`mask` must be a Mask, a MaskInfo, a BlockLayout or an array of bools, got {type(mask).__name__}."
    )


def _notes(request: Request, positions) -> tuple[str, ...]:
    notes = []
    if any(isinstance(m, Custom) and m.bounds is None for m in _parts(request.mask)):
        notes.append("Custom without bounds: no tile of it can be skipped or known to be full")
    if any(_is_abstract(leaf) for leaf in jax.tree.leaves((request.mask, request.layout, positions))):
        notes.append("the mask's arrays are not known here: what is skipped depends on them")
    if any(p is not None for p in positions):
        notes.append("with given positions, tiles are found by bisection only where positions grow with the slots")
    return tuple(notes)


def _parts(mask: Mask):
    """A mask and all masks inside it."""
    yield mask
    inside = (mask.mask,) if isinstance(mask, Not) else getattr(mask, "masks", ())
    for part in inside:
        yield from _parts(part)


def _is_abstract(x) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct | Tracer)


def _sizes(dims, q, sinks, bias, mask: Mask) -> dict[str, int]:
    B, T, S, N, K, H = (dims[axis] for axis in "BTSNKH")
    item = np.dtype(q.dtype).itemsize
    arrays = item * B * H * (2 * T * N + 2 * S * K) + max(item, 4) * B * T * N
    arrays += sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in (bias, sinks) if x is not None)
    return dict(array_bytes=arrays, dense_mask_bytes=mask.batch * mask.heads * T * S)


def _work(dims, q_tile: int, kv_tile: int, counts: Counts | None, layout: BlockLayout | None) -> dict[str, int | None]:
    B, N, H = (dims[axis] for axis in "BNH")
    if counts is None or layout is None:
        names = ("tiles_total", "tiles_empty", "tiles_partial", "tiles_full", "useful_flops", "executed_flops")
        return dict.fromkeys(names, 0 if 0 in dims.values() else None)
    q, _ = layout.sides(xp=np)
    planes = np.array(list(layout.planes()))[-1] + 1
    apart = max(q.batch.size, planes[0]) * max(q.head.size, planes[1])
    copies = B * N // max(int(apart), 1)
    computed = counts.partial + counts.full
    total = layout.q_tiles * layout.kv_tiles * int(apart)
    return dict(
        tiles_total=total,
        tiles_empty=total - computed,
        tiles_partial=counts.partial,
        tiles_full=counts.full,
        useful_flops=4 * H * counts.pairs * copies,
        executed_flops=4 * H * q_tile * kv_tile * computed * copies,
    )


def _share(part: int | None, total: int | None) -> str:
    if part is None or total is None:
        return "depends on data"
    return f"{part:,} ({part / max(total, 1):.1%})"


def _short(amount: int | None, unit: str, step: int) -> str:
    if amount is None:
        return "depends on data"
    value, letters = float(amount), ["", "k", "M", "G", "T", "P"]
    while value >= step and len(letters) > 1:
        value, letters = value / step, letters[1:]
    return f"{value:.4g} {letters[0]}{unit}"
