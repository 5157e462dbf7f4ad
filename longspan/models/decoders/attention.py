"""A decoder's self-attention: projections, norms and rotary positions around `attention`, with or without a cache."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from longspan.cache.store import AppendStep
from longspan.layout import BlockLayout
from longspan.masks import Mask
from longspan.models.decoders.cache import attend_cached
from longspan.models.decoders.family import DecoderConfig
from longspan.models.decoders.products import linear_each
from longspan.models.layers import linear, rms_norm
from longspan.nn.rope import apply_rope
from longspan.parallel.sequence_sharding import UNSHARDED, SequenceSharding


class Tokens(NamedTuple):
    """What all layers know of a batch, by kind of layer. Masks go by slots, or by the positions of a cache."""

    masks: Mapping[str, Mask | BlockLayout]
    ropes: Mapping[str, tuple[Any, Any]]  # (inv_freq, factor)
    positions: Any  # int32 [T] or [B, T]: for rotations
    steps: Mapping[str, AppendStep] | None = None  # into the caches, if there are any
    sharding: SequenceSharding = UNSHARDED  # which devices share the sequence


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
            self.query_norm = rms_norm(config, size, dtype=dtype, param_dtype=param_dtype)
            self.key_norm = rms_norm(config, size, dtype=dtype, param_dtype=param_dtype)

    def __call__(
        self, x: Float[Array, "B T D"], tokens: Tokens, stack: Any = None, layer: Any = None, at: Any = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The output, and the stack of keys and values with the new ones.

        Args:
            x: the input.
            tokens: what all layers know of the batch.
            stack: keys and values of several layers; None without a cache.
            layer: which layer of it this is.
            at: which one of its parameters, if these are a stack too, and read where they lie.
        """
        q, k, v = self._project(x, at)
        q, k = apply_rope(tokens.ropes[self.kind], False, tokens.positions, q, k)
        options: dict[str, Any] = dict(scale=self.config.scale, soft_cap=self.config.soft_cap)
        options |= dict(mask=tokens.masks[self.kind])
        if tokens.steps is None:
            out = tokens.sharding.attention(q, k, v, **options)
        else:
            options |= dict(in_place=at is not None)
            stack, out = attend_cached(tokens.steps[self.kind], stack, layer, q, k, v, **options)
        (out,) = linear_each([self.out], out.reshape(*out.shape[:2], -1), at)
        return out, stack

    def _project(self, x: Float[Array, "B T D"], at: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        heads, kv_heads, size = self.config.heads
        if self.config.family.fused:
            (qkv,) = linear_each([self.qkv], x, at)
            parts = jnp.split(qkv, np.cumsum([heads * size, kv_heads * size]).tolist(), axis=-1)
        else:
            parts = linear_each([self.query, self.key, self.value], x, at)
        q, k, v = (part.reshape(*x.shape[:2], -1, size) for part in parts)
        if self.config.family.qk_norm:
            q, k = self.query_norm(q, at), self.key_norm(k, at)
        return q, k, v
