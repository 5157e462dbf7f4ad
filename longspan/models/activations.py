"""Activations by the names that `config.json` files use."""

import functools
from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np


def _in_float32(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Computes 16-bit inputs in float32: a GELU's 1 + erf(x) cancels where x is negative."""

    @functools.wraps(function)
    def wide(x: jax.Array) -> jax.Array:
        if x.dtype.itemsize != 2:
            return function(x)
        return function(x.astype(jnp.float32)).astype(x.dtype)

    return wide


@_in_float32
def _tanh_gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


@_in_float32
def _exact_gelu(x: jax.Array) -> jax.Array:
    """PyTorch's formula; `jax.nn.gelu` computes erfc, which is slower."""
    return 0.5 * x * (1 + jax.lax.erf(x * np.asarray(0.5**0.5, x.dtype)))


ACTIVATIONS: MappingProxyType[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "gelu": _exact_gelu,
        "gelu_python": _exact_gelu,
        "gelu_new": _tanh_gelu,
        "gelu_fast": _tanh_gelu,
        "gelu_accurate": _tanh_gelu,
        "gelu_pytorch_tanh": _tanh_gelu,
        "gelu_python_tanh": _tanh_gelu,
        "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
        "relu": jax.nn.relu,
        "silu": jax.nn.silu,
        "swish": jax.nn.silu,
        "tanh": jnp.tanh,
    }
)
