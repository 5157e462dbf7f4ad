"""The plain layers: Flax's, with the initial values and the precision that these encoders use."""

import jax
import jax.numpy as jnp
from flax import nnx

from longspan.models.config import BertConfig


def linear(
    config: BertConfig, inputs: int, outputs: int, *, use_bias: bool = True, dtype, param_dtype, rngs: nnx.Rngs
) -> nnx.Linear:
    init = nnx.initializers.normal(config.initializer_range)
    return nnx.Linear(
        inputs, outputs, use_bias=use_bias, kernel_init=init, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )


def embed(config: BertConfig, rows: int, *, dtype, param_dtype, rngs: nnx.Rngs) -> nnx.Embed:
    init = nnx.initializers.normal(config.initializer_range)
    return nnx.Embed(rows, config.hidden_size, embedding_init=init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


def layer_norm(config: BertConfig, *, dtype, param_dtype, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # The fast variance, E[x²] − E[x]², loses what 2e-5 of parity needs when the mean is large.
    return nnx.LayerNorm(
        config.hidden_size,
        epsilon=config.layer_norm_eps,
        use_fast_variance=False,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=rngs,
    )


def dropout(x: jax.Array, rate: float, key) -> jax.Array:
    """Drops a share `rate` of the values and scales the rest; no key, no dropout."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros((), x.dtype))
