"""The plain layers: Flax's, with the initial values and the precision that these models use."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float

from longspan.nn.nnx import RMSNorm

# A layer reads a few numbers of a config, whichever family's it is.
Config: TypeAlias = Any
PIECE, LEAST = 1024, 256  # tokens of all rows of a batch together, but at least so many of each row


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
    adds_one = config.family.norm_adds_one
    kinds: dict[str, Any] = dict(dtype=jnp.dtype(dtype), param_dtype=param_dtype)
    return RMSNorm(size, config.rms_norm_eps, **kinds, adds_one=adds_one, rounds_first=not adds_one)


class LayerNorm(nnx.Module):
    """(x − mean) / √(variance + eps) · scale + bias over the last axis, in float32 at least.

    Flax's own mixes dtypes, which strict promotion refuses, and its default variance, E[x²] − E[x]², loses digits.
    """

    def __init__(self, config: Config, *, dtype, param_dtype, rngs: nnx.Rngs):
        self.eps, self.dtype = config.layer_norm_eps, jnp.dtype(dtype)
        self.scale = nnx.Param(jnp.ones(config.hidden_size, param_dtype))
        self.bias = nnx.Param(jnp.zeros(config.hidden_size, param_dtype))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        scale, bias = (jnp.asarray(p[...], wide).reshape(*[1] * (x.ndim - 1), -1) for p in (self.scale, self.bias))
        x = x.astype(wide)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return (x * scale + bias).astype(self.dtype)


def by_pieces(function: Callable[[jax.Array], jax.Array], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """function(x) for a function of single tokens, on CPUs about `PIECE` tokens after others.

    XLA takes new memory for what is between two matrix products, in every layer: 50 MB for 4096 tokens, whose first
    touch took a tenth of a Longformer's forward pass. Pieces of it stay in memory, if not in the cache.
    """
    B, T, D = x.shape
    pieces = -(-T // max(PIECE // B, LEAST))
    # Outside of `jit` the loop would be compiled in every call.
    if pieces == 1 or jax.default_backend() != "cpu" or not isinstance(x, Tracer):
        return function(x)
    size = -(-T // pieces)
    x = jnp.pad(x, ((0, 0), (0, pieces * size - T), (0, 0))).reshape(B, pieces, size, D)
    return jax.lax.map(function, x.swapaxes(0, 1)).swapaxes(0, 1).reshape(B, -1, D)[:, :T]


def side_by_side(layers: Sequence[nnx.Linear], x: Float[Array, "B T D"]) -> list[jax.Array]:
    """[layer(x) for layer in layers], on a CPU by one matrix product: three of them pack the same input three times.

    Not on several: of kernels that are split by columns, each device would have to fetch others' columns.
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
    return jnp.split(y, len(layers), axis=-1)


def dropout(x: jax.Array, rate: float, key) -> jax.Array:
    """Drops a share `rate` of the values and scales the rest; no key, no dropout."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros((), x.dtype))
