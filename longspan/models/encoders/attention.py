"""`FullAttention`: the self-attention of an encoder, with projections around a call of a Longspan function.

A family with another attention overrides `attend`, and if necessary `tokens` and `fit`, which prepare a call, and
`layer_groups`, which describes the layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from longspan.masks import Global, Mask, Segments
from longspan.masks.by_slot import kv_flags
from longspan.models.encoders.family import EncoderConfig
from longspan.models.layers import concatenated_linear, linear
from longspan.parallel.sequence_sharding import UNSHARDED, SequenceSharding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EncoderTokens:
    """The padding, the documents and the global tokens of a batch, which all layers share."""

    # `Any`, not shapes: JAX rebuilds the object with placeholders, which a type checker would reject.
    valid: Any = None  # bool [B, T]; None: no padding
    segments: Any = None  # int [B, T], negative for padding; None: every row is one document
    positions: Any = None  # int32 [T] or [B, T]: of the rotations; None in models with a table of positions
    is_global: Any = None  # bool [B, T]; None: a Longformer without global tokens
    full: bool = field(default=False, metadata=dict(static=True))  # BigBird: full attention in this call
    sharding: SequenceSharding = field(default=UNSHARDED, metadata=dict(static=True))


class EncoderCall(NamedTuple):
    """The arguments of an encoder's call that concern its attention."""

    length: int
    valid: Any  # bool [B, T]
    segments: Any  # int [B, T]: `segment_ids`, negative for padding
    position_ids: Any
    global_attention_mask: Any
    attention_type: str | None
    sharding: SequenceSharding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerOptions:
    """The settings that differ between layers. Arrays of several layers have the layers as their first axis."""

    random_blocks: Any = None  # int [N, rows, r]
    window: int | None = field(default=None, metadata=dict(static=True))


class FullAttention(nnx.Module):
    """Every token attends to all tokens that are not padding."""

    has_globals: ClassVar[bool] = False  # whether a call takes `global_attention_mask`
    packs: ClassVar[bool] = True  # whether a call takes `segment_ids`

    config: Any  # `Any`: subclasses read fields of their family

    def __init__(self, config: EncoderConfig, *, use_bias: bool = True, dtype, param_dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        size = config.hidden_size
        self.config = config
        self.query = linear(config, size, size, **options)
        self.key = linear(config, size, size, **options)
        self.value = linear(config, size, size, **options)

    def __call__(
        self, x: Float[Array, "B T D"], tokens: EncoderTokens, layer: LayerOptions, dropout_key
    ) -> Float[Array, "B T D"]:
        q, k, v = map(self.heads, concatenated_linear((self.query, self.key, self.value), x))
        return self.attend(x, q, k, v, tokens, layer, self.dropout(dropout_key)).reshape(x.shape)

    def attend(self, x, q, k, v, tokens: EncoderTokens, layer: LayerOptions, dropout: dict) -> Any:
        return tokens.sharding.attention(q, k, v, mask=_mask(tokens), **dropout)

    def heads(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        return x.reshape(*x.shape[:2], self.config.num_attention_heads, -1)

    def dropout(self, key) -> dict:
        rate = self.config.attention_probs_dropout_prob
        if key is None or rate == 0:
            return {}
        return dict(dropout_rate=rate, dropout_key=key)

    def tokens(self, call: EncoderCall) -> EncoderTokens:
        """The arguments of a call, checked, as `EncoderTokens`."""
        self.check_unused(global_attention_mask=call.global_attention_mask, attention_type=call.attention_type)
        return EncoderTokens(valid=call.valid, segments=call.segments)

    def fit(self, x: Float[Array, "B T D"], tokens: EncoderTokens) -> tuple[jax.Array, EncoderTokens]:
        """The input, padded to a length that the attention supports."""
        return x, tokens

    def layer_groups(self, length: int, tokens: EncoderTokens) -> Sequence[tuple[int, LayerOptions]]:
        """The layers in order, in groups that have the same static options: (number of layers, their options)."""
        return [(self.config.num_hidden_layers, LayerOptions())]

    def check_unused(self, **arguments) -> None:
        """Raises unless arguments that this family does not have are None."""
        for name, value in arguments.items():
            if value is not None:
                raise ValueError(f"`{name}` is not supported by a {self.config.model_type} model. Leave `{name}` out.")


def segments_of(valid: Any, segment_ids: Any) -> Any:
    """The segment id of every token, -1 for padding; None if a row is one document without padding."""
    if segment_ids is None and valid is None:
        return None
    if segment_ids is None:
        return jnp.where(valid, 0, -1).astype(jnp.int32)
    segment_ids = jnp.asarray(segment_ids, jnp.int32)
    if valid is None:
        return segment_ids
    return jnp.where(valid, segment_ids, jnp.int32(-1))


def _mask(tokens: EncoderTokens) -> Mask | None:
    if tokens.segments is not None:
        return Segments(tokens.segments)
    if tokens.valid is None:
        return None
    if tokens.sharding.mesh is None:
        return Global(kv_flags=tokens.valid, rows=False)
    if tokens.sharding.order != "contiguous":
        # Flags are read by position, and `valid` has the order of the slots, by which `Segments` are read.
        return Segments(segments_of(tokens.valid, None))
    # The same pairs. `Global` on a mesh would send the flagged keys to all devices, as if they were few.
    return kv_flags(tokens.valid)
