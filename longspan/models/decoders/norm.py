"""The root mean square norm, as each family rounds it."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from longspan._types import statistics_dtype
from longspan.models.decoders._family import DecoderConfig


class RMSNorm(nnx.Module):
    """x / √(mean(x²) + eps) · scale over the last axis, in float32 at least.

    The quotient is rounded to the dtype of `x`, and then multiplied; or multiplied by 1 + scale, and then rounded.
    """

    def __init__(self, config: DecoderConfig, size: int, *, dtype, param_dtype):
        self.eps, self.dtype, self.adds_one = config.rms_norm_eps, jnp.dtype(dtype), config.family.norm_adds_one
        self.scale = nnx.Param((jnp.zeros if self.adds_one else jnp.ones)(size, param_dtype))

    def __call__(self, x: Float[Array, "... D"], at: Any = None) -> Float[Array, "... D"]:
        """The norm; if it is a stack of them, that of layer `at`."""
        wide = statistics_dtype(x.dtype)
        y, scale = x.astype(wide), self.scale[... if at is None else at].reshape(*[1] * (x.ndim - 1), -1)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        if self.adds_one:
            return (y * (1 + scale.astype(wide))).astype(self.dtype)
        return y.astype(self.dtype) * scale.astype(self.dtype)
