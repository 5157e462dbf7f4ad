"""The self-attention of each family of encoders: projections around one call of a Longspan function."""

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from longspan._types import Array
from longspan.attention import attention
from longspan.masks import Full, Global, Segments, Window
from longspan.models.config import BertConfig, BigBirdConfig, LongformerConfig
from longspan.models.dense import linear
from longspan.patterns import bigbird_random_blocks
from longspan.recipes import bigbird_attention, longformer_attention


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """What the layers of one call know about the tokens."""

    valid: Bool[Array, "B T"] | None = None  # None: no padding
    is_global: Bool[Array, "B T"] | None = None  # None: Longformer without global tokens
    full: bool = field(default=False, metadata=dict(static=True))  # BigBird: this call attends to everything


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Site:
    """What tells a layer's attention from the next one's."""

    random_blocks: Int[Array, "*L N rows r"] | None = None
    window: int | None = field(default=None, metadata=dict(static=True))


class FullAttention(nnx.Module):
    """Every token sees every token that is not padding."""

    def __init__(self, config: BertConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        kinds = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        size, use_bias = config.hidden_size, getattr(config, "use_bias", True)
        self.config = config
        self.query = linear(config, size, size, use_bias=use_bias, **kinds)
        self.key = linear(config, size, size, use_bias=use_bias, **kinds)
        self.value = linear(config, size, size, use_bias=use_bias, **kinds)

    def __call__(self, x: Float[Array, "B T D"], tokens: Tokens, site: Site, dropout_key) -> Float[Array, "B T D"]:
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        return self.attend(x, q, k, v, tokens, site, self.dropout(dropout_key)).reshape(x.shape)

    def attend(self, x, q, k, v, tokens: Tokens, site: Site, dropout: dict):
        mask = None if tokens.valid is None else Global(kv_flags=tokens.valid, rows=False)
        return attention(q, k, v, mask=mask, **dropout)

    def heads(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        return x.reshape(*x.shape[:2], self.config.num_attention_heads, -1)

    def dropout(self, key) -> dict:
        rate = self.config.attention_probs_dropout_prob
        return {} if key is None or rate == 0 else dict(dropout_rate=rate, dropout_key=key)


class LongformerAttention(FullAttention):
    """A window around every token, and global tokens that see and are seen by all, with their own projections."""

    def __init__(self, config: LongformerConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        kinds = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        super().__init__(config, **kinds)
        self.query_global = linear(config, config.hidden_size, config.hidden_size, **kinds)
        self.key_global = linear(config, config.hidden_size, config.hidden_size, **kinds)
        self.value_global = linear(config, config.hidden_size, config.hidden_size, **kinds)

    def attend(self, x, q, k, v, tokens, site, dropout):
        valid = tokens.valid
        if tokens.is_global is None:
            # One call instead of two, and no global projections.
            padding = Full() if valid is None else Segments(jnp.where(valid, 0, -1))
            return attention(q, k, v, mask=Window(site.window, site.window) & padding, **dropout)
        kinds = tokens.is_global.astype(jnp.int32)
        kinds = kinds if valid is None else jnp.where(valid, kinds, -1)
        projections = (self.heads(p(x)) for p in (self.query_global, self.key_global, self.value_global))
        return longformer_attention(q, k, v, *projections, window=site.window, token_kinds=kinds, **dropout)


class BigBirdAttention(FullAttention):
    """Blocks that see their neighbours, both end blocks and random blocks; or everything, if the call says so."""

    def attend(self, x, q, k, v, tokens, site, dropout):
        if tokens.full:
            return super().attend(x, q, k, v, tokens, site, dropout)
        masks = dict(q_mask=tokens.valid, kv_mask=tokens.valid)
        return bigbird_attention(
            q, k, v, block_size=self.config.block_size, rand_attn=site.random_blocks, **masks, **dropout
        )


def random_blocks(config: BigBirdConfig, seq_len: int) -> Int[np.ndarray, "L N rows r"]:
    """The random blocks of every layer: those it was trained with, or the first block, as in Hugging Face's eval."""
    layers, heads, r = config.num_hidden_layers, config.num_attention_heads, config.num_random_blocks
    if config.random_blocks == "hf_eval":
        return np.zeros((layers, heads, seq_len // config.block_size - 2, r), np.int32)
    draw = functools.partial(
        bigbird_random_blocks,
        seq_len,
        block_size=config.block_size,
        num_random_blocks=r,
        num_heads=heads,
        max_seq_len=config.max_position_embeddings,
    )
    return np.stack([np.asarray(draw(seed=layer), np.int32) for layer in range(layers)])


ATTENTION: dict[str, type[FullAttention]] = {
    "bert": FullAttention,
    "roberta": FullAttention,
    "longformer": LongformerAttention,
    "big_bird": BigBirdAttention,
}
