"""Keeps XLA from constant-folding a mask's arrays, and moves small work outside of `jit` to NumPy.

A jitted function that closes over a mask's arrays holds them as constants. XLA would fold the planning of tiles at
compile time, in an interpreter that takes about 10 µs per element: 49 s for a bool mask of 1,024 x 1,024. Behind an
optimization barrier the same operations run with the program, in microseconds.

Outside of `jit`, JAX compiles each operation separately, in 10 to 30 ms per operation and shape. There NumPy plans the
tiles and computes small truth tables.
"""

from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from longspan.array_types import Namespace
from longspan.checks import is_known

Tree = TypeVar("Tree")
MAX_FOLDED = 64  # arrays of at most this many elements may be constant-folded by XLA


def unfolded(tree: Tree) -> Tree:
    """Returns the same arrays behind a barrier, so that XLA does not fold them even if they are constants."""
    if not in_a_program():
        return jax.device_put(tree)
    # One barrier per array: inside `shard_map` a barrier takes only arrays that vary along the same mesh axes.
    return jax.tree.map(jax.lax.optimization_barrier, tree)


def constant(xp: Namespace, array: Any) -> Any:
    """Returns `array` as an array of `xp`. A NumPy array becomes a constant that XLA does not fold."""
    if xp is np or not isinstance(array, np.ndarray):
        return xp.asarray(array)
    if not in_a_program():
        return jax.device_put(array)
    if array.size <= MAX_FOLDED:
        return xp.asarray(array)
    return unfolded(xp.asarray(array))


def in_a_program() -> bool:
    """Whether `jit` is tracing. While it is, even constants are tracers."""
    return isinstance(jax.device_put(np.False_), Tracer)


def on_host(tree: Tree) -> Tree | None:
    """Returns the tree with NumPy arrays, for work outside of `jit`.

    Returns None if `jit` is tracing, if this process cannot read a value, or if an array is on several devices.
    """
    if in_a_program() or not all(map(_is_readable, jax.tree.leaves(tree))):
        return None
    return jax.tree.map(np.asarray, tree)


def _is_readable(array: Any) -> bool:
    if isinstance(array, jax.Array):
        return is_known(array) and len(array.devices()) == 1
    return isinstance(array, np.ndarray)
