"""Layers that all models use: Flax's, with the initial values and the precision of these models."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float

from longspan.array_types import statistics_dtype
from longspan.nn.nnx import RMSNorm

Config: TypeAlias = Any  # of any family: these layers read fields that all configs have
PIECE_TOKENS = 1024  # tokens of a piece in all batch rows together
MIN_PIECE_LENGTH = 256  # tokens of a piece in each row


def linear(
    config: Config, inputs: int, outputs: int, *, use_bias: bool = True, dtype, param_dtype, rngs: nnx.Rngs
) -> nnx.Linear:
    """Flax's linear layer with normal initial weights."""
    init = nnx.initializers.normal(config.initializer_range)
    return nnx.Linear(
        inputs, outputs, use_bias=use_bias, kernel_init=init, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )


def embed(config: Config, rows: int, *, dtype, param_dtype, rngs: nnx.Rngs) -> nnx.Embed:
    """Flax's table of embeddings with normal initial values."""
    init = nnx.initializers.normal(config.initializer_range)
    return nnx.Embed(rows, config.hidden_size, embedding_init=init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


def rms_norm(config: Config, size: int, *, dtype, param_dtype) -> RMSNorm:
    """The root mean square norm, as the config's family rounds it."""
    family = config.family
    options: dict[str, Any] = dict(dtype=jnp.dtype(dtype), param_dtype=param_dtype, adds_one=family.norm_adds_one)
    return RMSNorm(size, config.rms_norm_eps, **options, rounds_first=family.norm_rounds_first)


def multiplied(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """The product x · factor, computed in float32 (float64 for float64) and rounded once, as in PyTorch."""
    if factor == 1:
        return x
    return (x.astype(statistics_dtype(x.dtype)) * factor).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x − mean) / √(variance + eps) · scale + bias over the last axis, in float32 or float64; the bias is optional.

    Flax's own mixes dtypes, which strict promotion rejects, and computes the variance as E[x²] − E[x]², which loses
    digits.
    """

    def __init__(self, config: Config, *, use_bias: bool = True, dtype, param_dtype, rngs: nnx.Rngs):
        self.eps, self.dtype = config.layer_norm_eps, jnp.dtype(dtype)
        self.scale = nnx.Param(jnp.ones(config.hidden_size, param_dtype))
        self.bias = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(jnp.zeros(config.hidden_size, param_dtype))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        row = *[1] * (x.ndim - 1), -1
        scale = jnp.asarray(self.scale[...], wide).reshape(row)
        x = x.astype(wide)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps) * scale
        if self.bias is not None:
            x = x + jnp.asarray(self.bias[...], wide).reshape(row)
        return x.astype(self.dtype)


def by_pieces(function: Callable[[jax.Array], jax.Array], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """function(x) for a function of single tokens; on CPUs in a loop over pieces of about `PIECE_TOKENS` tokens.

    XLA allocates memory for the results between two matrix products in every layer: 50 MB for 4096 tokens. Touching it
    for the first time took a tenth of a Longformer's forward pass. The pieces of a loop reuse their memory.
    """
    B, T, D = x.shape
    pieces = -(-T // max(PIECE_TOKENS // B, MIN_PIECE_LENGTH))
    # Outside of `jit` every call would compile the loop.
    if pieces == 1 or jax.default_backend() != "cpu" or not isinstance(x, Tracer):
        return function(x)
    size = -(-T // pieces)
    x = jnp.pad(x, ((0, 0), (0, pieces * size - T), (0, 0))).reshape(B, pieces, size, D)
    return jax.lax.map(function, x.swapaxes(0, 1)).swapaxes(0, 1).reshape(B, -1, D)[:, :T]


def concatenated_linear(layers: Sequence[nnx.Linear], x: Float[Array, "B T D"]) -> list[jax.Array]:
    """[layer(x) for layer in layers], on a single CPU device as one matrix product, which packs its input once.

    Not on several devices: if kernels are sharded by columns, the concatenation would gather them.
    """
    plain = all(type(layer) is nnx.Linear and (layer.bias is None) == (layers[0].bias is None) for layer in layers)
    if not plain or jax.default_backend() != "cpu" or jax.device_count() > 1:
        return [layer(x) for layer in layers]
    dtype: Any = layers[0].dtype
    kernel = jnp.concatenate([layer.kernel[...].astype(dtype) for layer in layers], axis=1)
    y = x.astype(dtype) @ kernel
    biases = [layer.bias[...].astype(dtype) for layer in layers if layer.bias is not None]
    if biases:
        y = y + jnp.concatenate(biases)[None, None]
    ends = np.cumsum([layer.kernel[...].shape[1] for layer in layers[:-1]])
    return jnp.split(y, ends.tolist(), axis=-1)


def dropout(x: jax.Array, rate: float, key) -> jax.Array:
    """Drops a share `rate` of the values and scales the rest. Without a key nothing is dropped."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros((), x.dtype))
