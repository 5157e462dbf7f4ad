"""Activations by the names that `config.json` files use."""

import functools
from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp

_tanh_gelu = functools.partial(jax.nn.gelu, approximate=True)
_exact_gelu = functools.partial(jax.nn.gelu, approximate=False)

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
