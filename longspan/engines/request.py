"""`Request`: one checked call of `attention`, with everything that its result depends on."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from longspan.array_types import Namespace, statistics_dtype
from longspan.axes import BATCH_AXES, HEAD_AXIS, shard_indices
from longspan.biases import bound
from longspan.checks import (
    FLOATS,
    check_bound_lengths,
    check_broadcast,
    check_extents,
    check_lengths,
    check_positions,
    check_qkv,
    is_abstract,
    number_of,
    with_batch,
)
from longspan.combine import Result
from longspan.dropout import Dropout
from longspan.layout import BlockLayout, plan_checked_layout
from longspan.maskinfo import MaskInfo
from longspan.masks import Dense, Full, Mask, PerHead
from longspan.masks.pytree import short

STATIC = dict(static=True)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Request:
    """One checked call of `attention`: its arrays and numbers. `Request.of` makes one from the arguments.

    The arrays may be `jax.ShapeDtypeStruct`s where an engine only inspects a request (`unsupported`, `tiles`, `notes`).
    When an engine runs it, `layout` is set, `dropout` has its random words and the indices of rows and heads, and `q`
    is already multiplied by `q_scale`.

    Example:
        >>> x = jax.ShapeDtypeStruct((2, 7, 6, 5), jnp.float32)
        >>> Request.of(q=x, k=x, v=x, mask=ls.Causal()).dims
        {'B': 2, 'T': 7, 'S': 7, 'N': 6, 'K': 6, 'H': 5, 'Hv': 5}
    """

    array_axes: ClassVar = {
        **dict(q="BTNH", k="BSKH", v="BSKH", bias="BNTS", sinks="N"),
        **dict(q_positions="BT", kv_positions="BS", rows="B", heads="N"),
    }

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    mask: Mask
    bias: Any = None  # floats [B or 1, N or 1, T or 1, S or 1], a `Bias`, or a tuple of them, summed (`biases.terms`)
    sinks: Any = None  # floats, [N]
    q_scale: Any = None  # a float array []: a scale that is data, by which queries are multiplied
    dropout: Dropout | None = None
    q_positions: Any = None  # int32 [T] or [B or 1, T]; None: each slot's index
    kv_positions: Any = None
    # int32 [B], [N]: the indices of batch rows and heads in the whole batch, where these are one shard; None: from 0.
    # Engines read them from the layout (`layout.sides`) and the dropout.
    rows: Any = None
    heads: Any = None
    layout: BlockLayout | None = None  # planned by the caller; None: `with_layout` plans one with the engine's tiles
    scale: float = field(default=1.0, metadata=STATIC)
    soft_cap: float | None = field(default=None, metadata=STATIC)
    all_heads: int | None = field(default=None, metadata=STATIC)  # the number of heads of all shards, if `heads` is set
    platform: str = field(default="cpu", metadata=STATIC)

    @classmethod
    def of(
        cls, *, q, k, v, mask=None, bias=None, scale=None, soft_cap=None, sinks=None, dropout_rate: Any = 0.0,
        dropout_key=None, q_positions=None, kv_positions=None, batch_axes: Any = BATCH_AXES, head_axis: Any = HEAD_AXIS,
    ) -> "Request":  # fmt: skip
        """Checks the arguments of `attention` and resolves the mask to a rule, positions and perhaps a layout."""
        q, k, v = with_batch(q, k, v)
        check_qkv(q, k, v)
        (B, T, N, H), S = q.shape, k.shape[1]
        if sinks is not None:
            _check_sinks(sinks, N)
        rate = _check_dropout(dropout_rate, dropout_key)
        soft_cap = _check_soft_cap(soft_cap, q.dtype)
        is_data = isinstance(scale, jax.Array | jax.ShapeDtypeStruct)  # a NumPy scalar is static
        static_scale = _check_scale(scale, is_data, q.dtype)
        rule, layout, positions = _resolve(mask, (B, N, T, S), (q_positions, kv_positions))
        numbers = shard_indices(q, batch_axes, head_axis)
        whole, in_shard = None, {}
        if numbers is not None:
            whole = numbers.all_rows, numbers.all_heads
            in_shard = dict(rows=numbers.rows, heads=numbers.heads, all_heads=numbers.all_heads)
        check_lengths(T, S)
        check_extents(rule, q_len=T, kv_len=S, batch=B, heads=N, whole=whole)
        return cls(
            q=_as_jax(q),
            k=_as_jax(k),
            v=_as_jax(v),
            mask=rule,
            bias=bound(bias, (B, N, T, S)),
            sinks=_as_jax(sinks),
            q_scale=scale if is_data else None,
            dropout=Dropout(key=dropout_key, rate=rate) if rate > 0 else None,
            q_positions=_as_int32(positions[0]),
            kv_positions=_as_int32(positions[1]),
            **in_shard,
            layout=layout,
            scale=1 / math.sqrt(max(H, 1)) if scale is None else static_scale,
            soft_cap=soft_cap,
            platform=jax.default_backend(),
        )

    @property
    def dims(self) -> dict[str, int]:
        """The size of every axis, by its letter."""
        (batch, q_len, heads, size), (_, kv_len, kv_heads, _) = self.q.shape, self.k.shape
        return dict(B=batch, T=q_len, S=kv_len, N=heads, K=kv_heads, H=size, Hv=self.v.shape[3])

    @property
    def has_positions(self) -> bool:
        """Whether tokens have positions other than their slots' indices."""
        return self.q_positions is not None or self.kv_positions is not None

    @property
    def has_pairs(self) -> bool:
        """Whether there is at least one query, key, head and batch row."""
        return 0 not in (self.dims[axis] for axis in "BTSNK")

    def plan_layout(self, q_tile: int, kv_tile: int, *, xp: Namespace = jnp) -> BlockLayout:
        """The layout of this call: the caller's, or one with these tiles.

        Computed with JAX by default, also for static masks: NumPy tables would become constants of the compiled
        program that grow with the length.
        """
        if self.layout is None:
            given = {name: getattr(self, name) for name in ("q_positions", "kv_positions", "rows", "heads")}
            return plan_checked_layout(self.mask, self.dims["T"], self.dims["S"], q_tile, kv_tile, **given, xp=xp)
        if self.rows is None:
            return self.layout
        return _layout_of_shard(self.layout, self.mask, self.rows, self.heads)

    def with_layout(self, q_tile: int, kv_tile: int) -> "Request":
        """The request with the layout and the dropout that engines expect; tiles of the caller's layout stay."""
        if self.all_heads is not None:
            mask = _repeat_for_all_heads(self.mask, self.dims["N"], self.all_heads)
            return replace(self, mask=mask, all_heads=None).with_layout(q_tile, kv_tile)
        dropout = self.dropout
        if dropout is not None and dropout.words is None:
            if self.rows is None:
                dropout = dropout.drawn(self.dims["B"], self.dims["N"])
            else:
                dropout = dropout.drawn(self.rows, self.heads)
        return replace(self, layout=self.plan_layout(q_tile, kv_tile), dropout=dropout)

    def with_scale(self, *, dense: bool = False) -> "Request":
        """The request with queries multiplied by `q_scale`: engines take only a static scale.

        `dense` is for engines that JAX differentiates, any number of times.
        """
        if self.q_scale is None:
            return self
        multiply = _scale_queries if dense else _scale_queries_once
        return replace(self, q=multiply(self.q, jnp.asarray(self.q_scale)), q_scale=None)

    def with_features(self) -> "Request":
        """The request with one feature of zeros for heads of size 0: their scores are 0 either way."""
        wide = {}
        for name in "qkv":
            x = getattr(self, name)
            if x.shape[3] == 0:
                wide[name] = jnp.zeros((*x.shape[:3], 1), x.dtype)
        return replace(self, **wide)

    def without_pairs(self) -> Result:
        """The result of a call without queries, keys or heads: zeros, and the sinks' logits as lse."""
        B, T, N, _ = self.q.shape
        dtype = statistics_dtype(self.q.dtype)
        if self.sinks is None:
            lse = jnp.full((N,), -jnp.inf, dtype)
        else:
            lse = self.sinks.astype(dtype)
        out = jnp.zeros((B, T, N, self.dims["Hv"]), self.q.dtype)
        return Result(out, jnp.broadcast_to(lse.reshape(1, 1, N), (B, T, N)))


def _repeat_for_all_heads(mask: Mask, here: int, all_heads: int) -> Mask:
    """The mask with each `PerHead` of only the heads `here` repeated for all heads: parts are looked up by number."""
    parts = mask.parts()
    if not parts:
        lowered = mask.atoms()
        if lowered is mask or not any(isinstance(part, PerHead) for part in lowered.walk()):
            return mask
        return _repeat_for_all_heads(lowered, here, all_heads)
    mask = mask.with_parts([_repeat_for_all_heads(part, here, all_heads) for part in parts])
    if isinstance(mask, PerHead) and len(mask.masks) == here > 1:
        return PerHead(mask.masks * (all_heads // here))
    return mask


def _layout_of_shard(layout: BlockLayout, mask: Mask, rows: Any, heads: Any) -> BlockLayout:
    """The layout of a shard's rows and heads, from a layout of these or of all."""
    tables = {}
    for name in ("starts", "stops", "common", "common_count"):
        table = getattr(layout, name)
        for axis, numbers in enumerate((rows, heads)):
            if table is not None and table.shape[axis] not in (1, len(numbers)):
                table = jnp.take(jnp.asarray(table), numbers, axis=axis)
        tables[name] = table
    return replace(layout, mask=mask, **tables, rows=rows, heads=heads)


def _scale_queries(q, scale):
    wide = jnp.promote_types(q.dtype, np.float32)
    return (q.astype(wide) * scale.astype(wide)).astype(q.dtype)


_scale_queries_once = jax.custom_vjp(_scale_queries)


def _scale_queries_fwd(q, scale):
    return _scale_queries(q, scale), (q, scale)


def _scale_queries_bwd(residuals, dout):
    # Queries that see no key may hold NaN. Their `dout` is 0, and they must not reach the gradient of the scale.
    (q, scale), wide = residuals, jnp.promote_types(dout.dtype, np.float32)
    terms = jnp.where(dout == 0, 0, dout.astype(wide) * q.astype(wide))
    return (dout.astype(wide) * scale.astype(wide)).astype(q.dtype), jnp.sum(terms).astype(scale.dtype)


_scale_queries_once.defvjp(_scale_queries_fwd, _scale_queries_bwd)


def _resolve(mask, shape, given) -> tuple[Mask, BlockLayout | None, tuple[Any, Any]]:
    """(rule, layout or None, (q_positions, kv_positions)); positions come from the call or from the mask."""
    rule, layout, of_mask = _rule_of(mask, shape)
    B, _, T, S = shape
    positions = []
    for name, from_call, from_mask, length in zip(("q_positions", "kv_positions"), given, of_mask, (T, S), strict=True):
        if from_call is not None and from_mask is not None:
            raise ValueError(f"`{name}` is given both to the call and in its mask. Remove one of them.")
        positions.append(from_mask if from_call is None else from_call)
        check_positions(name, positions[-1], length, B)
    if layout is not None and any(p is not None for p in given):
        raise ValueError(
            "A BlockLayout already has positions, so the call takes none. Pass positions to `mask.layout(...)` instead."
        )
    return rule, layout, (positions[0], positions[1])


def _rule_of(mask, shape) -> tuple[Mask, BlockLayout | None, tuple[Any, Any]]:
    """(rule, layout or None, positions of the mask, if it has them)."""
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
    message = f"`mask` must be a Mask, a MaskInfo, a BlockLayout or an array of bools, got {type(mask).__name__}."
    if callable(mask):
        message += " Wrap a function of positions: `ls.Custom(fn)`."
    raise TypeError(message)


def _as_jax(x):
    if x is None or is_abstract(x):
        return x
    return jnp.asarray(x)


def _as_int32(positions):
    if positions is None or is_abstract(positions):
        return positions
    return positions.astype(np.int32)


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
            f"`soft_cap` must lie between {kept.tiny:.3g} and {kept.max:.3g}, got {number!r}. This is the range of "
            f"{kept.dtype}, the dtype of the scores. Pass None for no cap."
        )
    return float(number)


def _check_scale(scale: Any, is_data: bool, dtype: Any) -> float:
    """The static scale; 1 if it is None, or if it is a JAX array, which is data and has a gradient."""
    if scale is None:
        return 1.0
    if is_data:
        if scale.shape != () or scale.dtype.name not in FLOATS:
            raise ValueError(f"`scale` must be a number or a float array of shape (), got {scale!r}.")
        return 1.0
    number = number_of(scale)
    if number is None:
        raise ValueError(f"`scale` must be a number or a float array of shape (), got {scale!r}.")
    kept = np.finfo(statistics_dtype(dtype))
    if not abs(number) <= float(kept.max):
        raise ValueError(
            f"`scale` must be finite in {kept.dtype}, the dtype of the scores, got {number!r}. Pass None for 1/sqrt(H)."
        )
    return float(number)


def _got(value: Any) -> str:
    """Describes a wrong argument where a static number was expected."""
    if isinstance(value, Tracer):
        return f"got a traced {short(value)}: it must be static. Name it in `static_argnames` of `jit`"
    return f"got {value!r}"
