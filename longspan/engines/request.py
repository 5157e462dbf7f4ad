"""`Request`: one call of `attention`, checked. All that decides its result is in it, and nothing goes beside it."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from longspan.array_types import Namespace, statistics_dtype
from longspan.axes import BATCH_AXES, HEAD_AXIS, numbers_of
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
    """One call of `attention`: its arrays and numbers. `Request.of` checks a call and makes one of it.

    Engines judge it by shapes, dtypes and what is there (`unsupported`, `tiles`, `notes`: arrays may then be
    `jax.ShapeDtypeStruct`s), and run it. When it is run, `layout` is there, `dropout` has its words and numbers, and
    `q_scale` is part of `q`.

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
    q_scale: Any = None  # a float array [] that queries are multiplied by besides: a scale that is data
    dropout: Dropout | None = None
    q_positions: Any = None  # int32 [T] or [B or 1, T]; None: each slot's index
    kv_positions: Any = None
    # int32 [B], [N]: the numbers of batch rows and heads, if they are some of a whole's (a shard's); None: from 0. An
    # engine reads them off the layout (`layout.sides`) and the dropout.
    rows: Any = None
    heads: Any = None
    layout: BlockLayout | None = None  # planned by the caller; None: with the engine's own tiles, before it is run
    scale: float = field(default=1.0, metadata=STATIC)
    soft_cap: float | None = field(default=None, metadata=STATIC)
    all_heads: int | None = field(default=None, metadata=STATIC)  # how many the whole has, if `heads` are some of them
    platform: str = field(default="cpu", metadata=STATIC)

    @classmethod
    def of(
        cls, *, q, k, v, mask=None, bias=None, scale=None, soft_cap=None, sinks=None, dropout_rate: Any = 0.0,
        dropout_key=None, q_positions=None, kv_positions=None, batch_axes: Any = BATCH_AXES, head_axis: Any = HEAD_AXIS,
    ) -> "Request":  # fmt: skip
        """A checked call: its mask is resolved to a rule, positions and perhaps a layout. Arguments of `attention`."""
        q, k, v = with_batch(q, k, v)
        check_qkv(q, k, v)
        (B, T, N, H), S = q.shape, k.shape[1]
        if sinks is not None:
            _check_sinks(sinks, N)
        rate = _check_dropout(dropout_rate, dropout_key)
        soft_cap = _check_soft_cap(soft_cap, q.dtype)
        is_data = isinstance(scale, jax.Array | jax.ShapeDtypeStruct)  # NumPy's are static
        static_scale = _check_scale(scale, is_data, q.dtype)
        rule, layout, positions = _resolve(mask, (B, N, T, S), (q_positions, kv_positions))
        numbers = numbers_of(q, batch_axes, head_axis)
        whole = None if numbers is None else (numbers.all_rows, numbers.all_heads)
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
            rows=None if numbers is None else numbers.rows,
            heads=None if numbers is None else numbers.heads,
            all_heads=None if numbers is None else numbers.all_heads,
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
        """Whether there are queries, keys, heads and batch rows at all."""
        return 0 not in (self.dims[axis] for axis in "BTSNK")

    def plan_layout(self, q_tile: int, kv_tile: int, *, xp: Namespace = jnp) -> BlockLayout:
        """The layout of this call: the caller's, or one of such tiles.

        In JAX even if the mask is static: NumPy tables would become constants that grow with the length.
        """
        if self.layout is None:
            given = {name: getattr(self, name) for name in ("q_positions", "kv_positions", "rows", "heads")}
            return plan_checked_layout(self.mask, self.dims["T"], self.dims["S"], q_tile, kv_tile, **given, xp=xp)
        if self.rows is None:
            return self.layout
        return _some_of(self.layout, self.mask, self.rows, self.heads)

    def with_layout(self, q_tile: int, kv_tile: int) -> "Request":
        """The request as an engine runs it, of such tiles unless the caller planned others."""
        if self.all_heads is not None:
            mask = _for_all_heads(self.mask, self.dims["N"], self.all_heads)
            return replace(self, mask=mask, all_heads=None).with_layout(q_tile, kv_tile)
        dropout = self.dropout
        if dropout is not None and dropout.words is None:
            numbers = (self.dims["B"], self.dims["N"]) if self.rows is None else (self.rows, self.heads)
            dropout = dropout.drawn(*numbers)
        return replace(self, layout=self.plan_layout(q_tile, kv_tile), dropout=dropout)

    def with_scale(self, *, dense: bool = False) -> "Request":
        """The request with a scale that is data in its queries: engines take a static one.

        `dense` is for engines that JAX differentiates by itself, as often as asked.
        """
        if self.q_scale is None:
            return self
        by = _scale_dense if dense else _scaled
        return replace(self, q=by(self.q, jnp.asarray(self.q_scale)), q_scale=None)

    def with_features(self) -> "Request":
        """The request with a feature of zeros in heads that have none: all their scores are 0, as those of none are."""
        wide = {name: getattr(self, name) for name in "qkv"}
        wide = {name: jnp.zeros((*x.shape[:3], 1), x.dtype) for name, x in wide.items() if x.shape[3] == 0}
        return replace(self, **wide) if wide else self

    def without_pairs(self) -> Result:
        """The result of a call without queries, keys or heads: zeros, and the sinks' logits as lse."""
        B, T, N, _ = self.q.shape
        dtype = statistics_dtype(self.q.dtype)
        sink = jnp.full((N,), -jnp.inf, dtype) if self.sinks is None else self.sinks.astype(dtype)
        out = jnp.zeros((B, T, N, self.dims["Hv"]), self.q.dtype)
        return Result(out, jnp.broadcast_to(sink.reshape(1, 1, N), (B, T, N)))


def _for_all_heads(mask: Mask, here: int, count: int) -> Mask:
    """The mask, where what tells just the heads here apart is repeated for all: heads are read by number."""
    parts = mask.parts()
    if not parts:
        return mask
    mask = mask.with_parts([_for_all_heads(part, here, count) for part in parts])
    return PerHead(mask.masks * (count // here)) if isinstance(mask, PerHead) and len(mask.masks) == here > 1 else mask


def _some_of(layout: BlockLayout, mask: Mask, rows: Any, heads: Any) -> BlockLayout:
    """A layout of some rows and heads, from one of these or of all."""
    tables = {}
    for name in ("starts", "stops", "common", "common_count"):
        table = getattr(layout, name)
        for axis, numbers in enumerate((rows, heads)):
            if table is not None and table.shape[axis] not in (1, len(numbers)):
                table = jnp.take(jnp.asarray(table), numbers, axis=axis)
        tables[name] = table
    return replace(layout, mask=mask, **tables, rows=rows, heads=heads)


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


def _check_scale(scale: Any, is_data: bool, dtype: Any) -> float:
    """The static part of a scale: 1 if it is None, or an array of JAX, which is data, may be traced, has a gradient."""
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
            f"`scale` must be a finite number of {kept.dtype}, in which scores are computed, got {number!r}. "
            "Give None for 1/sqrt(H)."
        )
    return float(number)


def _got(value: Any) -> str:
    """What came in the place of a number that is part of the compiled program."""
    if isinstance(value, Tracer):
        return f"got a traced {short(value)}: it is part of the compiled program. Name it in `static_argnames`"
    return f"got {value!r}"
