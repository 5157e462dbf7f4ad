"""`attention_fn`: Longspan's attention inside of Flax's own attention modules."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype

from longspan.array_types import EngineName, no_type_check
from longspan.attend import attention
from longspan.biases import terms
from longspan.engines import Engine
from longspan.maskinfo import MaskInfo
from longspan.masks import Causal, Dense, Full, Mask


@no_type_check
def attention_fn(
    mask: Mask | MaskInfo | None = None, *, engine: EngineName | Engine = "auto", **options: Any
) -> Callable:
    """An `attention_fn` for Flax's own attention modules that attends under a Longspan mask.

    One line in an existing model: `MultiHeadDotProductAttention(..., attention_fn=attention_fn(Causal()))` in linen,
    `MultiHeadAttention(..., attention_fn=attention_fn(Causal()))` in NNX. A pair must be allowed by this mask, by the
    mask array that Flax passes, and by Flax's `is_causal`.

    Differs from Flax: a query that may attend to no key gives 0, not the mean of all values; dropout drops every weight
    independently, as Flax does with `broadcast_dropout=False`; the only `precision` is JAX's default (on a CPU,
    "highest" is the same for float32), and any other is a NotImplementedError.

    Args:
        mask: a `Mask` or a `MaskInfo`; by default only Flax's masks apply.
        engine: as in `attention`.
        options: further arguments of `attention`: `scale`, `soft_cap`, `sinks`, and a `bias` that is added to Flax's.

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
    longspan_mask, longspan_bias = mask, terms(options.pop("bias", None))

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
        """Takes the arguments that Flax passes to an `attention_fn`."""
        _check_no_sown_weights(module)
        _check_query_position(longspan_mask, query, key, is_causal)
        query, key, value = promote_dtype(query, key, value, dtype=dtype)
        _check_precision(precision, query.dtype)
        batch = query.shape[:-3]
        biases = longspan_bias
        if bias is not None:
            biases = (*biases, _one_batch_axis(bias, batch))
        dropout: dict[str, Any] = {}
        if dropout_rate and not deterministic:
            dropout = dict(dropout_rate=float(dropout_rate), dropout_key=dropout_rng)
        if mask is not None:
            mask = _one_batch_axis(mask, batch)
        out: Any = attention(
            *(x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)),
            bias=biases,
            engine=engine,
            **dropout,
            **_combined_mask(longspan_mask, mask, is_causal),
            **options,
        )
        return out.reshape(*batch, *out.shape[1:])

    return attend


def _check_no_sown_weights(module) -> None:
    if module is not None:
        raise NotImplementedError(
            "`sow_weights` needs the attention weights, which Longspan never stores as an array. Leave `sow_weights` "
            "out."
        )


def _check_query_position(mask, query, key, is_causal: bool) -> None:
    """Refuses one query with several keys, as Flax's cache gives, if the mask depends on the query's position."""
    rule, position_given = mask, False
    if isinstance(mask, MaskInfo):
        rule, position_given = mask.mask, mask.q_positions is not None
    is_decoding = query.shape[-3] == 1 < key.shape[-3]
    depends = is_causal or (rule is not None and rule.reads_q_place)
    if is_decoding and depends and not position_given:
        name = "is_causal" if is_causal else repr(mask)
        raise NotImplementedError(
            f"One query and {key.shape[-3]} keys look like a call with Flax's `decode=True`. Flax does not pass the "
            f"query's position, so {name} would use position 0. Use `ls.attention` with `q_positions` for decoding."
        )


def _check_precision(precision, dtype) -> None:
    """Refuses a precision that the engines lack: they multiply at JAX's default, on CPUs in float32 for float32."""
    given = precision
    if not isinstance(given, tuple):
        given = (given,)
    wanted = {jax.lax.Precision(one) for one in given if one is not None} - {jax.lax.Precision.DEFAULT}
    is_wide, backend = dtype in (jnp.float32, jnp.float64), jax.default_backend()
    if wanted and (wanted != {jax.lax.Precision.HIGHEST} or not is_wide or backend != "cpu"):
        raise NotImplementedError(
            f"precision={precision!r} for {dtype} on a {backend} is not supported: Longspan's engines use JAX's "
            "default precision, which is the highest only for float32 on a CPU. Leave `precision` None."
        )


def _combined_mask(mask, array, is_causal: bool) -> dict[str, Any]:
    """`mask` and positions of a call: Longspan's mask and Flax's array and its `is_causal`, combined by `&`."""
    positions = {}
    if isinstance(mask, MaskInfo):
        positions = {name: p for name in ("q_positions", "kv_positions") if (p := getattr(mask, name)) is not None}
        mask = mask.mask
    rules: list[Mask] = []
    if mask is not None:
        rules.append(mask)
    if array is not None:
        rules.append(Dense(array.astype(bool)))
    if is_causal:
        rules.append(Causal())
    combined = rules[0] if rules else Full()
    for rule in rules[1:]:
        combined = combined & rule
    return dict(mask=combined, **positions)


def _one_batch_axis(array, batch: tuple[int, ...]):
    """Flax's [batch..., heads, T, S] as [B, heads, T, S]; axes that are missing or of size 1 become 1."""
    array = jnp.asarray(array)
    if array.ndim < 3:
        return array.reshape((1,) * (4 - array.ndim) + array.shape)
    lead = array.shape[:-3]
    if all(n == 1 for n in lead):
        return array.reshape(1, *array.shape[-3:])
    return jnp.broadcast_to(array, (*batch, *array.shape[-3:])).reshape(int(np.prod(batch)), *array.shape[-3:])
