"""A decoder's self-attention: projections, norms and rotary positions around `attention`, with or without a cache."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from longspan._attention import attention
from longspan.cache import Cache
from longspan.masks import Mask
from longspan.models.decoders._family import DecoderConfig
from longspan.models.decoders.norm import RMSNorm
from longspan.models.layers import linear
from longspan.parallel.shared import ALONE, Shared
from longspan.rope import rotate


class Tokens(NamedTuple):
    """What all layers know of a batch. Masks go by slots or by a cache's positions, rotations by positions."""

    masks: dict[str, Mask]  # by kind of layer; not asked for with a cache, which has its own
    ropes: dict[str, tuple[Any, Any]]  # (inv_freq, factor) by kind of layer
    positions: Any  # int32 [T] or [B, T]
    lengths: Any = None  # int32 [B]: how many tokens of each row a cache keeps
    shared: Shared = ALONE  # which devices share the sequence


class Attention(nnx.Module):
    """Self-attention of one kind of layers."""

    def __init__(self, config: DecoderConfig, kind: str, *, dtype, param_dtype, rngs: nnx.Rngs):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config, self.kind = config, kind
        (heads, kv_heads, size), (qkv_bias, out_bias, _) = config.heads, config.biases
        wide = config.hidden_size
        if config.family.fused:
            self.qkv = linear(config, wide, (heads + 2 * kv_heads) * size, use_bias=qkv_bias, **kinds)
        else:
            self.query = linear(config, wide, heads * size, use_bias=qkv_bias, **kinds)
            self.key = linear(config, wide, kv_heads * size, use_bias=qkv_bias, **kinds)
            self.value = linear(config, wide, kv_heads * size, use_bias=qkv_bias, **kinds)
        self.out = linear(config, heads * size, wide, use_bias=out_bias, **kinds)
        if config.family.qk_norm:
            self.query_norm = RMSNorm(config, size, dtype=dtype, param_dtype=param_dtype)
            self.key_norm = RMSNorm(config, size, dtype=dtype, param_dtype=param_dtype)

    def __call__(
        self, x: Float[Array, "B T D"], tokens: Tokens, cache: Cache | None
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        q, k, v = self._project(x)
        (inv_freq, factor), at = tokens.ropes[self.kind], tokens.positions
        q, k = (rotate(x, at, inv_freq, attention_factor=factor) for x in (q, k))
        options: dict[str, Any] = dict(scale=self.config.scale, soft_cap=self.config.soft_cap)
        if cache is None:
            out = tokens.shared.attention(q, k, v, mask=tokens.masks[self.kind], **options)
        else:
            cache, view = cache.append(k, v, tokens.lengths)
            out = attention(q, **view.of(cache.plan.mask), **options)
        return self.out(out.reshape(*out.shape[:2], -1)), cache

    def _project(self, x: Float[Array, "B T D"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        heads, kv_heads, size = self.config.heads
        if self.config.family.fused:
            parts = jnp.split(self.qkv(x), np.cumsum([heads * size, kv_heads * size]).tolist(), axis=-1)
        else:
            parts = [self.query(x), self.key(x), self.value(x)]
        q, k, v = (part.reshape(*x.shape[:2], -1, size) for part in parts)
        if self.config.family.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        return q, k, v
