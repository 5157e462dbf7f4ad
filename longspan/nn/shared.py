"""What both kinds of Flax modules share: sizes of heads, how parameters are split, a norm, and `attention_fn`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype

from longspan.array_types import EngineName, no_type_check, statistics_dtype
from longspan.attend import attention
from longspan.axes import entries, on_auto_axes, once
from longspan.biases import terms
from longspan.engines import Engine
from longspan.maskinfo import MaskInfo
from longspan.masks import Causal, Dense, Full, Mask


class Heads(NamedTuple):
    """How many heads of queries and of keys, and their size."""

    num: int
    num_kv: int
    size: int

    def of(self, name: str) -> tuple[int, int]:
        """The features (heads, size) of one projection: query, key or value, and their global twins."""
        return (self.num if name.startswith("query") else self.num_kv), self.size


def resolve_heads(
    num_heads: int, num_kv_heads: int | None, head_dim: int | None, qkv_features: int | None, in_features: int
) -> Heads:
    """The heads of a module; their size is given, or all features of queries or of the input shared out."""
    num_kv = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads < 1 or num_kv < 1 or num_heads % num_kv:
        raise ValueError(
            f"`num_heads` must be a multiple of `num_kv_heads`, got {num_heads} and {num_kv}. Change one of them."
        )
    if head_dim is not None and qkv_features not in (None, num_heads * head_dim):
        raise ValueError(
            f"`qkv_features` must be num_heads · head_dim = {num_heads * head_dim}, got {qkv_features}. Give only one "
            "of `head_dim` and `qkv_features`."
        )
    features = in_features if qkv_features is None else qkv_features
    if head_dim is None and features % num_heads:
        name = "the input's features" if qkv_features is None else "`qkv_features`"
        raise ValueError(
            f"{name} must be a multiple of num_heads={num_heads}, got {features}. Give `head_dim`, or change them."
        )
    return Heads(num_heads, num_kv, features // num_heads if head_dim is None else head_dim)


class Split(NamedTuple):
    """The mesh axes that a projection's kernel and bias are split over, one an array axis."""

    kernel: tuple[str | None, ...]
    bias: tuple[str | None, ...]


def split_of(name: str, mesh_axis: str | None, heads: Heads) -> Split | None:
    """Heads are split over a mesh axis, and the output projection sums over it; None without a mesh axis."""
    if mesh_axis is None:
        return None
    if name == "out":
        return Split((mesh_axis, None, None), (None,))
    # A single head cannot be split: every device keeps it.
    axis = mesh_axis if heads.of(name)[0] > 1 else None
    return Split((None, axis, None), (axis, None))


def rms_norm(
    x: jax.Array, scale: jax.Array, eps: float, *, dtype: Any = None, adds_one: bool = False, rounds_first: bool = False
) -> jax.Array:
    """Root mean square norm, x / √(mean(x²) + eps) · scale over the last axis: in float32 at least, rounded once.

    Args:
        x: [..., D].
        scale: [D].
        eps: a small number.
        dtype: of the result; by default that of `x`.
        adds_one: whether to multiply by 1 + scale.
        rounds_first: whether the quotient is rounded to `dtype`, and then multiplied there.
    """
    wide, dtype = statistics_dtype(x.dtype), x.dtype if dtype is None else dtype
    y, scale = x.astype(wide), scale.reshape(*[1] * (x.ndim - 1), -1)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    if rounds_first:
        y, wide = y.astype(dtype), dtype
    scale = scale.astype(wide)
    return (y * (1 + scale if adds_one else scale)).astype(dtype)


def dot_general(x, kernel, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None):
    """`jax.lax.dot_general`, also of heads that lie on explicit mesh axes: it would ask how their sum is to lie."""
    if out_sharding is not None:
        given: dict[str, Any] = dict(precision=precision, preferred_element_type=preferred_element_type)
        return jax.lax.dot_general(x, kernel, dimension_numbers, **given, out_sharding=out_sharding)
    static = dimension_numbers, precision, preferred_element_type
    return on_auto_axes(_product, _like_both, static, (x, kernel))


def _product(dimension_numbers, precision, preferred_element_type, x, kernel):
    given: dict[str, Any] = dict(precision=precision, preferred_element_type=preferred_element_type)
    return jax.lax.dot_general(x, kernel, dimension_numbers, **given)


def _like_both(dimension_numbers, precision, preferred_element_type, operands, product):
    """Axes of x that are not summed over, then those of the kernel, lie as they did."""
    sides = zip(operands, dimension_numbers[0], strict=True)
    return once(*(entry for side, summed in sides for axis, entry in enumerate(entries(side)) if axis not in summed))


@no_type_check
def attention_fn(
    mask: Mask | MaskInfo | None = None, *, engine: EngineName | Engine = "auto", **options: Any
) -> Callable:
    """An `attention_fn` for Flax's own attention modules that attends under a Longspan mask.

    One line in an existing model: `MultiHeadDotProductAttention(..., attention_fn=attention_fn(Causal()))` in linen,
    `MultiHeadAttention(..., attention_fn=attention_fn(Causal()))` in NNX. Masks that Flax passes (arrays, `is_causal`)
    hold too. A query that sees no key gives 0, not Flax's mean of all values. Dropout draws every weight on its own,
    as Flax does with `broadcast_dropout=False`. A `precision` that the engines do not have is refused: they have JAX's
    default, which for float32 on CPUs is also the highest.

    Args:
        mask: a `Mask` or a `MaskInfo`; by default only Flax's masks hold.
        engine: as in `attention`.
        options: further arguments of `attention`: `scale`, `soft_cap`, `sinks`, and a `bias` beside Flax's.

    Example:
        >>> import flax.linen as nn
        >>> layer = nn.MultiHeadDotProductAttention(2, attention_fn=attention_fn(ls.Causal() & ls.Window(3, 0)))
        >>> x = jnp.ones((1, 8, 4))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (1, 8, 4)
    """
    if mask is not None and not isinstance(mask, Mask | MaskInfo):
        raise TypeError(
            f"`mask` must be a Mask or a MaskInfo, got {type(mask).__name__}. Give an array to the Flax module's call "
            "instead."
        )
    given, own = mask, terms(options.pop("bias", None))

    def attend(
        query,
        key,
        value,
        bias=None,
        mask=None,
        broadcast_dropout=True,
        dropout_rng=None,
        dropout_rate=0.0,
        deterministic=False,
        dtype=None,
        precision=None,
        module=None,
        is_causal=False,
    ):
        """Flax's arguments, answered by Longspan."""
        _check_flax(module)
        _check_place(given, query, key, is_causal)
        query, key, value = promote_dtype(query, key, value, dtype=dtype)
        _check_precision(precision, query.dtype)
        batch = query.shape[:-3]
        drop = 0.0 if deterministic else float(dropout_rate)
        out: Any = attention(
            *(x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)),
            bias=own if bias is None else (*own, _one_batch(bias, batch)),
            dropout_rate=drop,
            dropout_key=dropout_rng if drop else None,
            engine=engine,
            **_combined(given, None if mask is None else _one_batch(mask, batch), is_causal),
            **options,
        )
        return out.reshape(*batch, *out.shape[1:])

    return attend


def _check_flax(module) -> None:
    if module is not None:
        raise NotImplementedError(
            "`sow_weights` wants the attention weights, which Longspan never holds as an array. Leave it out."
        )


def _check_place(mask, query, key, is_causal: bool) -> None:
    """A cache of keys and one query: who says where the query stands?"""
    known = isinstance(mask, MaskInfo) and mask.q_positions is not None
    rule = mask.mask if isinstance(mask, MaskInfo) else mask
    if query.shape[-3] == 1 < key.shape[-3] and not known and (is_causal or (rule is not None and rule.reads_q_place)):
        raise NotImplementedError(
            f"One query and {key.shape[-3]} keys look like Flax's `decode=True`, where "
            f"{'is_causal' if is_causal else repr(mask)} would take the query for position 0. Use `attention` with "
            "`q_positions` for decoding."
        )


def _check_precision(precision, dtype) -> None:
    """Refuses what the engines do not do: they multiply as JAX does by default, on CPUs in float32 for float32."""
    given = precision if isinstance(precision, tuple) else (precision,)
    wanted = {jax.lax.Precision(one) for one in given if one is not None} - {jax.lax.Precision.DEFAULT}
    wide, backend = dtype in (jnp.float32, jnp.float64), jax.default_backend()
    if wanted and (wanted != {jax.lax.Precision.HIGHEST} or not wide or backend != "cpu"):
        raise NotImplementedError(
            f"precision={precision!r} for {dtype} on a {backend}: Longspan's engines choose the precision themselves, "
            "JAX's default, which is the highest only for float32 on a CPU. Leave it None."
        )


def _combined(mask, array, is_causal: bool) -> dict[str, Any]:
    """The `mask` (and positions) of a call, of Longspan's mask, Flax's array and its `is_causal`."""
    positions = {}
    if isinstance(mask, MaskInfo):
        positions = {name: p for name in ("q_positions", "kv_positions") if (p := getattr(mask, name)) is not None}
        mask = mask.mask
    for more in (None if array is None else Dense(array.astype(bool)), Causal() if is_causal else None):
        if more is not None:
            mask = more if mask is None else mask & more
    return dict(mask=Full() if mask is None else mask, **positions)


def _one_batch(array, batch: tuple[int, ...]):
    """Flax's [batch..., heads, T, S] as [B, heads, T, S]; axes that are missing or 1 stay 1."""
    array = jnp.asarray(array)
    if array.ndim < 3:
        return array.reshape((1,) * (4 - array.ndim) + array.shape)
    lead = array.shape[:-3]
    if all(n == 1 for n in lead):
        return array.reshape(1, *array.shape[-3:])
    return jnp.broadcast_to(array, (*batch, *array.shape[-3:])).reshape(int(np.prod(batch)), *array.shape[-3:])
