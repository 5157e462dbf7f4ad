"""Activations by the names that `config.json` files use."""

import functools
from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np


def _in_float32(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """16 bits are too few for a GELU's 1 + erf(x), which cancels where x is negative."""

    @functools.wraps(function)
    def wide(x: jax.Array) -> jax.Array:
        return function(x.astype(jnp.float32)).astype(x.dtype) if x.dtype.itemsize == 2 else function(x)

    return wide


@_in_float32
def _tanh_gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


@_in_float32
def _exact_gelu(x: jax.Array) -> jax.Array:
    """As PyTorch writes it; `jax.nn.gelu` goes through erfc, which takes longer."""
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
