"""Activations by the names that `config.json` files use."""

import functools
from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

_tanh_gelu = functools.partial(jax.nn.gelu, approximate=True)


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
