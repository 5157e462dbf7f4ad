"""Arrays whose numbers are known: constants of a program, kept from XLA's folding, and operands outside of programs.

A jitted function that closes over a mask's arrays holds them as constants. XLA would then plan the tiles while it
compiles, in an interpreter that takes about 10 µs per element: 49 s for a bool mask of 1,024 x 1,024. Behind a barrier
the same operations run with the program, in microseconds.

Outside of `jit` JAX compiles every operation alone, in 10 to 30 ms per operation and shape. There NumPy plans tiles and
computes small truth tables.
"""

from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from longspan.array_types import Namespace
from longspan.checks import is_known

Tree = TypeVar("Tree")
FEW = 64  # elements that XLA may fold


def unfolded(tree: Tree) -> Tree:
    """The same arrays, which XLA treats as data even if they are constants of the program."""
    if not in_a_program():
        return jax.device_put(tree)
    # One by one: inside `shard_map` a barrier takes only arrays that vary along the same mesh axes.
    return jax.tree.map(jax.lax.optimization_barrier, tree)


def constant(xp: Namespace, array: Any) -> Any:
    """An array in a namespace. One of NumPy's becomes a constant of a JAX program, which XLA does not fold."""
    if xp is np or not isinstance(array, np.ndarray):
        return xp.asarray(array)
    if not in_a_program():
        return jax.device_put(array)
    return xp.asarray(array) if array.size <= FEW else unfolded(xp.asarray(array))


def in_a_program() -> bool:
    """Whether `jit` is tracing: even a constant is a tracer then."""
    return isinstance(jax.device_put(np.False_), Tracer)


def on_host(tree: Tree) -> Tree | None:
    """The same tree with NumPy's arrays, for work outside of a program.

    None if `jit` is tracing, or if some numbers are not known here, or if several devices hold an array.
    """
    if in_a_program() or not all(map(_is_at_hand, jax.tree.leaves(tree))):
        return None
    return jax.tree.map(np.asarray, tree)


def _is_at_hand(array: Any) -> bool:
    if isinstance(array, jax.Array):
        return is_known(array) and len(array.devices()) == 1
    return isinstance(array, np.ndarray)
