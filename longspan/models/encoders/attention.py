"""Self-attention of an encoder: projections around one call of a Longspan function, here the one that sees all.

A family with another attention overrides what differs: `attend`, and what it makes of a call (`tokens`, `fit`) and of
each layer (`sites`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Float

from longspan.masks import Global
from longspan.masks.by_slot import kv_flags
from longspan.models.encoders.family import EncoderConfig
from longspan.models.layers import linear, side_by_side
from longspan.parallel.sequence_sharding import UNSHARDED, SequenceSharding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """What the layers of one call know about the tokens."""

    # Not shapes for the checker: JAX rebuilds the object with placeholders.
    valid: Any = None  # bool [B, T]; None: no padding
    is_global: Any = None  # bool [B, T]; None: a Longformer without global tokens
    full: bool = field(default=False, metadata=dict(static=True))  # BigBird: this call attends to everything
    sharding: SequenceSharding = field(default=UNSHARDED, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Site:
    """What tells a layer's attention from the next one's; arrays of several layers have these as their first axis."""

    random_blocks: Any = None  # int [N, rows, r]
    window: int | None = field(default=None, metadata=dict(static=True))


class FullAttention(nnx.Module):
    """Every token sees every token that is not padding."""

    has_globals: ClassVar[bool] = False  # whether a call may name global tokens

    config: Any  # of the family: subclasses read more of it than every encoder has

    def __init__(self, config: EncoderConfig, *, use_bias: bool = True, dtype, param_dtype, rngs: nnx.Rngs):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        size = config.hidden_size
        self.config = config
        self.query = linear(config, size, size, use_bias=use_bias, **kinds)
        self.key = linear(config, size, size, use_bias=use_bias, **kinds)
        self.value = linear(config, size, size, use_bias=use_bias, **kinds)

    def __call__(self, x: Float[Array, "B T D"], tokens: Tokens, site: Site, dropout_key) -> Float[Array, "B T D"]:
        q, k, v = map(self.heads, side_by_side((self.query, self.key, self.value), x))
        return self.attend(x, q, k, v, tokens, site, self.dropout(dropout_key)).reshape(x.shape)

    def attend(self, x, q, k, v, tokens: Tokens, site: Site, dropout: dict) -> Any:
        mask = None if tokens.valid is None else Global(kv_flags=tokens.valid, rows=False)
        if tokens.sharding.mesh is not None and tokens.valid is not None:
            mask = kv_flags(tokens.valid)  # the same, of keys that are not few enough to be sent to everybody
        return tokens.sharding.attention(q, k, v, mask=mask, **dropout)

    def heads(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        return x.reshape(*x.shape[:2], self.config.num_attention_heads, -1)

    def dropout(self, key) -> dict:
        rate = self.config.attention_probs_dropout_prob
        return {} if key is None or rate == 0 else dict(dropout_rate=rate, dropout_key=key)

    def tokens(self, seq_len: int, valid, global_attention_mask, attention_type: str | None) -> Tokens:
        """What a call's arguments say about its tokens."""
        self.refuse(global_attention_mask=global_attention_mask, attention_type=attention_type)
        return Tokens(valid=valid)

    def fit(self, x: Float[Array, "B T D"], tokens: Tokens) -> tuple[jax.Array, Tokens]:
        """The input at a length that the attention can run."""
        return x, tokens

    def sites(self, seq_len: int, tokens: Tokens) -> Sequence[tuple[int, Site]]:
        """The layers in order: how many in a row share a static site, and that site."""
        return [(self.config.num_hidden_layers, Site())]

    def refuse(self, **arguments) -> None:
        for name, value in arguments.items():
            if value is not None:
                raise ValueError(f"`{name}` means nothing to a {self.config.model_type} model. Leave it out.")
