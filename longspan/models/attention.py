"""The self-attention of each family of encoders: projections around one call of a Longspan function."""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from longspan._attention import attention
from longspan.masks import Full, Global, Segments, Window
from longspan.models.config import BertConfig, BigBirdConfig, LongformerConfig
from longspan.models.dense import linear, side_by_side
from longspan.patterns import bigbird_attention, bigbird_random_blocks, longformer_attention

# Up to so many global tokens in a row of the batch, a Longformer does not project every token for them.
FEW = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """What the layers of one call know about the tokens."""

    # Not shapes for the checker: JAX rebuilds the object with placeholders.
    valid: Any = None  # bool [B, T]; None: no padding
    is_global: Any = None  # bool [B, T]; None: a Longformer without global tokens
    full: bool = field(default=False, metadata=dict(static=True))  # BigBird: this call attends to everything


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Site:
    """What tells a layer's attention from the next one's."""

    random_blocks: Any = None  # int [N, rows, r]
    window: int | None = field(default=None, metadata=dict(static=True))


class FullAttention(nnx.Module):
    """Every token sees every token that is not padding."""

    config: Any  # of the family: subclasses read more of it than a BERT has

    def __init__(self, config: BertConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        size, use_bias = config.hidden_size, getattr(config, "use_bias", True)
        self.config = config
        self.query = linear(config, size, size, use_bias=use_bias, **kinds)
        self.key = linear(config, size, size, use_bias=use_bias, **kinds)
        self.value = linear(config, size, size, use_bias=use_bias, **kinds)

    def __call__(self, x: Float[Array, "B T D"], tokens: Tokens, site: Site, dropout_key) -> Float[Array, "B T D"]:
        q, k, v = map(self.heads, side_by_side((self.query, self.key, self.value), x))
        return self.attend(x, q, k, v, tokens, site, self.dropout(dropout_key)).reshape(x.shape)

    def attend(self, x, q, k, v, tokens: Tokens, site: Site, dropout: dict) -> Any:
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
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
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
        is_global = tokens.is_global if valid is None else tokens.is_global & valid
        kinds = is_global.astype(jnp.int32)
        kinds = kinds if valid is None else jnp.where(valid, kinds, -1)
        options = dict(window=site.window, token_kinds=kinds, **dropout)

        def many():
            projections = (self.heads(p(x)) for p in (self.query_global, self.key_global, self.value_global))
            return longformer_attention(q, k, v, *projections, **options)

        def few():
            rows = self.global_rows(x, is_global, valid).reshape(q.shape)
            # The rows of global tokens, computed here from q, k and v, are replaced: they are as few as the tokens.
            return jnp.where(is_global[..., None, None], rows, longformer_attention(q, k, v, q, k, v, **options))

        if dropout:
            return many()
        return jax.lax.cond(is_global.sum(1).max() <= FEW, few, many)

    def global_rows(self, x, is_global, valid) -> Float[Array, "B T D"]:
        """What at most `FEW` global tokens a row attend to; elsewhere 0.

        Their queries go through the key projection, q·(K x) = (Kᵀq)·x, and what they read through the value projection,
        Σ p (V x) = V (Σ p x), so that not every token has to: for one global token in 4096 that is 1/100 of the work.
        The keys' bias is the same for all keys of a query, and a softmax does not see it.
        """
        (B, T, D), N = x.shape, self.config.num_attention_heads
        # Weights of padding are 0, but 0 * NaN would not be.
        x = x if valid is None else jnp.where(valid[..., None], x, 0)
        G = min(FEW, T)
        place = jnp.argsort(~is_global, axis=1, stable=True)[:, :G]
        there = jnp.take_along_axis(is_global, place, axis=1)
        key, value = (p.kernel[...].astype(x.dtype).reshape(D, N, D // N) for p in (self.key_global, self.value_global))
        wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        queries = self.heads(self.query_global(jnp.take_along_axis(x, place[..., None], axis=1)))
        queries = jnp.einsum("bgnh,dnh->bgnd", queries, key) * jnp.asarray((D // N) ** -0.5, x.dtype)
        scores = jnp.einsum("bgnd,btd->bgnt", queries, x, preferred_element_type=wide)
        if valid is not None:
            # Finite: a row of padding alone has no global token, and its weights, whatever they are, go nowhere.
            scores = jnp.where(valid[:, None, None], scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        read = jnp.einsum("bgnt,btd->bgnd", weights, x)
        rows = jnp.einsum("bgnd,dnh->bgnh", read, value).reshape(B, G, D)
        bias: Any = self.value_global.bias
        rows = rows + bias[...].astype(x.dtype)[None, None]
        target = jnp.where(there, place, T)
        return jnp.zeros_like(x).at[jnp.arange(B)[:, None], target].set(rows, mode="drop")


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
