"""The self-attention of each family of encoders: projections around one call of a Longspan function."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from longspan._types import Array
from longspan.attention import attention
from longspan.masks import Global
from longspan.models.config import BertConfig, BigBirdConfig, LongformerConfig
from longspan.models.dense import linear
from longspan.patterns import bigbird_attention, bigbird_random_blocks, longformer_attention


@dataclass(frozen=True)
class Tokens:
    """What every layer of one call knows about the tokens; None means all valid, all local."""

    valid: Bool[Array, "B T"] | None = None
    kinds: Int[Array, "B T"] | None = None
    full: bool = False  # BigBird only: this call attends to everything


class FullAttention(nnx.Module):
    """Every token sees every token that is not padding."""

    def __init__(self, config: BertConfig, layer: int, *, dtype, param_dtype, rngs: nnx.Rngs):
        size, use_bias = config.hidden_size, getattr(config, "use_bias", True)
        self.heads, self.rate = config.num_attention_heads, config.attention_probs_dropout_prob
        for name in ("query", "key", "value"):
            setattr(self, name, linear(config, size, size, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs))

    def __call__(self, x: Float[Array, "B T D"], tokens: Tokens, dropout_key=None) -> Float[Array, "B T D"]:
        q, k, v = self.project(x, "query", "key", "value")
        return _join(self.full(q, k, v, tokens, dropout_key))

    def full(self, q, k, v, tokens: Tokens, dropout_key):
        mask = None if tokens.valid is None else Global(kv_flags=tokens.valid, rows=False)
        return attention(q, k, v, mask=mask, **self.dropout(dropout_key))

    def project(self, x, *names: str):
        return [getattr(self, name)(x).reshape(*x.shape[:2], self.heads, -1) for name in names]

    def dropout(self, key) -> dict:
        return {} if key is None or self.rate == 0 else dict(dropout_rate=self.rate, dropout_key=key)


class LongformerAttention(FullAttention):
    """A window around every token, and global tokens that see and are seen by all, with their own projections."""

    def __init__(self, config: LongformerConfig, layer: int, *, dtype, param_dtype, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        size, self.window = config.hidden_size, config.windows[layer]
        for name in ("query_global", "key_global", "value_global"):
            setattr(self, name, linear(config, size, size, dtype=dtype, param_dtype=param_dtype, rngs=rngs))

    def __call__(self, x: Float[Array, "B T D"], tokens: Tokens, dropout_key=None) -> Float[Array, "B T D"]:
        local = self.project(x, "query", "key", "value")
        # Without token kinds nobody is global, and the global projections would be computed for nothing.
        glob = local if tokens.kinds is None else self.project(x, "query_global", "key_global", "value_global")
        dropout = self.dropout(dropout_key)
        return _join(longformer_attention(*local, *glob, window=self.window, token_kinds=tokens.kinds, **dropout))


class BigBirdAttention(FullAttention):
    """Blocks that see their neighbours, both end blocks and random blocks; or everything, if the call says so."""

    def __init__(self, config: BigBirdConfig, layer: int, *, dtype, param_dtype, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config, self.layer = config, layer

    def __call__(self, x: Float[Array, "B T D"], tokens: Tokens, dropout_key=None) -> Float[Array, "B T D"]:
        q, k, v = self.project(x, "query", "key", "value")
        if tokens.full:
            return _join(self.full(q, k, v, tokens, dropout_key))
        return _join(
            bigbird_attention(
                q, k, v,
                block_size=self.config.block_size,
                rand_attn=jnp.asarray(self.random_blocks(x.shape[1])),
                q_mask=tokens.valid,
                kv_mask=tokens.valid,
                **self.dropout(dropout_key),
            )
        )  # fmt: skip

    def random_blocks(self, seq_len: int) -> Int[np.ndarray, "N nb-2 r"]:
        config = self.config
        if config.random_blocks == "hf_eval":
            shape = (self.heads, seq_len // config.block_size - 2, config.num_random_blocks)
            return np.zeros(shape, np.int32)
        return bigbird_random_blocks(
            seq_len,
            block_size=config.block_size,
            num_random_blocks=config.num_random_blocks,
            num_heads=self.heads,
            seed=self.layer,
            max_seq_len=config.max_position_embeddings,
        )


def _join(heads: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
    return jnp.reshape(heads, (*heads.shape[:2], -1))


ATTENTION: dict[str, type[FullAttention]] = {
    "bert": FullAttention,
    "roberta": FullAttention,
    "longformer": LongformerAttention,
    "big_bird": BigBirdAttention,
}
