"""`DecoderAttention`: projections, norms and rotary positions around `ls.attention`, with or without a cache."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from longspan.array_types import statistics_dtype
from longspan.cache.store import AppendStep
from longspan.layout import BlockLayout
from longspan.masks import Mask
from longspan.models.decoders.cache import attend_cached
from longspan.models.decoders.family import DecoderConfig, LayerKind, QueryScaling
from longspan.models.decoders.products import linear_each
from longspan.models.layers import linear, rms_norm
from longspan.nn.rope import apply_rope
from longspan.parallel.sequence_sharding import UNSHARDED, SequenceSharding


class DecoderTokens(NamedTuple):
    """The masks and positions of a batch, which all layers share; mappings are by kind of layer."""

    masks: Mapping[str, Mask | BlockLayout]  # of slots; with a cache, layouts of its positions
    ropes: Mapping[str, tuple[Any, Any]]  # (inv_freq, factor)
    positions: Any  # int32 [T] or [B, T]: of the rotations
    steps: Mapping[str, AppendStep] | None = None  # the append to each kind's cache; None without a cache
    sharding: SequenceSharding = UNSHARDED


class DecoderAttention(nnx.Module):
    """Self-attention of one kind of layer."""

    def __init__(self, config: DecoderConfig, kind: LayerKind, *, dtype, param_dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config, self.kind = config, kind
        heads, kv_heads, head_dim = config.heads
        qkv_bias, out_bias, _ = config.biases
        features = config.hidden_size
        if config.family.fused:
            self.qkv = linear(config, features, (heads + 2 * kv_heads) * head_dim, use_bias=qkv_bias, **options)
        else:
            self.query = linear(config, features, heads * head_dim, use_bias=qkv_bias, **options)
            self.key = linear(config, features, kv_heads * head_dim, use_bias=qkv_bias, **options)
            self.value = linear(config, features, kv_heads * head_dim, use_bias=qkv_bias, **options)
        self.out = linear(config, heads * head_dim, features, use_bias=out_bias, **options)
        if config.family.qk_norm:
            self.query_norm = rms_norm(config, head_dim, dtype=dtype, param_dtype=param_dtype)
            self.key_norm = rms_norm(config, head_dim, dtype=dtype, param_dtype=param_dtype)
        elif config.family.joint_qk_norm:
            self.query_norm = rms_norm(config, heads * head_dim, dtype=dtype, param_dtype=param_dtype)
            self.key_norm = rms_norm(config, kv_heads * head_dim, dtype=dtype, param_dtype=param_dtype)
        if config.family.sinks:
            self.sinks = nnx.Param(jnp.zeros(heads, param_dtype))

    def __call__(
        self, x: Float[Array, "B T D"], tokens: DecoderTokens, stack: Any = None, layer: Any = None, at: Any = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The output, and the stack with the new keys and values.

        Args:
            x: the input.
            tokens: the masks and positions of the batch.
            stack: the cached keys and values of several layers; None without a cache.
            layer: the index of this layer in `stack`.
            at: the index of this layer in the parameters, if they are a stack that is read in place; otherwise None.
        """
        q, k, v = self._project(x, at)
        kind = self.kind.attention
        if self.kind.rotates:
            q, k = apply_rope(tokens.ropes[kind], False, tokens.positions, q, k)
        if self.config.query_scaling is not None:
            q = scale_queries(q, tokens.positions, self.config.query_scaling)
        options: dict[str, Any] = dict(scale=self.config.scale, soft_cap=self.config.soft_cap)
        options |= dict(mask=tokens.masks[kind], sinks=self._sinks(at))
        if tokens.steps is None:
            out = tokens.sharding.attention(q, k, v, **options)
        else:
            options |= dict(in_place=at is not None)
            stack, out = attend_cached(tokens.steps[kind], stack, layer, q, k, v, **options)
        (out,) = linear_each([self.out], out.reshape(*out.shape[:2], -1), at)
        return out, stack

    def _sinks(self, at: Any) -> jax.Array | None:
        """The sink logit of each head, or None."""
        if not self.config.family.sinks:
            return None
        sinks = self.sinks[...]
        return sinks if at is None else sinks[at]

    def _project(self, x: Float[Array, "B T D"], at: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        heads, kv_heads, head_dim = self.config.heads
        if self.config.family.fused:
            (qkv,) = linear_each([self.qkv], x, at)
            q, k, v = jnp.split(qkv, np.cumsum([heads * head_dim, kv_heads * head_dim]).tolist(), axis=-1)
        else:
            q, k, v = linear_each([self.query, self.key, self.value], x, at)
        if self.config.family.joint_qk_norm:
            q, k = self.query_norm(q, at), self.key_norm(k, at)
        q = q.reshape(*x.shape[:2], heads, head_dim)
        k = k.reshape(*x.shape[:2], kv_heads, head_dim)
        v = v.reshape(*x.shape[:2], kv_heads, head_dim)
        if self.config.family.qk_norm:
            q, k = self.query_norm(q, at), self.key_norm(k, at)
        return q, k, v


def scale_queries(q: Float[Array, "B T N H"], positions: Any, scaling: QueryScaling) -> Float[Array, "B T N H"]:
    """Queries multiplied by a factor that grows with their positions, int32 [T] or [B, T]."""
    wide = statistics_dtype(q.dtype)
    lengths = (positions // np.int32(scaling.length)).astype(wide)
    factors = (1 + scaling.beta * jnp.log(1 + lengths)).astype(q.dtype)
    return q * factors.reshape(-1, q.shape[1], 1, 1)
