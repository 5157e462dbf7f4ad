"""Thin Flax modules: `longspan.nn.linen` and `longspan.nn.nnx` have the same names, arguments and parameter trees.

Flax is an optional dependency (`pip install longspan[flax]`). Each of the two modules is imported at first use.

Example:
    >>> from flax import nnx
    >>> layer = ls.nn.nnx.SelfAttention(num_heads=4, in_features=16, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 8, 16)), mask=ls.Causal()).shape
    (1, 8, 16)
"""

import importlib as _importlib
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING

from longspan.optional import needs as _needs

_needs("longspan.nn", "flax", "flax")

if TYPE_CHECKING:
    from longspan.nn import linen as linen
    from longspan.nn import nnx as nnx

_LAZY = ("linen", "nnx")


if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept any name

    def __getattr__(name: str) -> _ModuleType:
        if name in _LAZY:
            return _importlib.import_module(f"longspan.nn.{name}")
        raise AttributeError(f"module 'longspan.nn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(_LAZY)
