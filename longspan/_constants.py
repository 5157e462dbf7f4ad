"""Arrays that a program closes over, kept from XLA's constant folding.

A jitted function that closes over a mask's arrays holds them as constants. XLA would then plan the tiles while it
compiles, in an interpreter that takes about 10 µs per element: 49 s for a bool mask of 1,024 x 1,024. Behind a barrier
the same operations run with the program, in microseconds.
"""

from typing import Any, TypeVar

import jax
import numpy as np

from longspan._types import Namespace

Tree = TypeVar("Tree")
FEW = 64  # elements that XLA may fold


def unfolded(tree: Tree) -> Tree:
    """The same arrays, which XLA treats as data even if they are constants of the program."""
    # One by one: inside `shard_map` a barrier takes only arrays that vary along the same mesh axes.
    return jax.tree.map(jax.lax.optimization_barrier, tree)


def constant(xp: Namespace, array: Any) -> Any:
    """An array in a namespace. One of NumPy's becomes a constant of a JAX program, which XLA does not fold."""
    if xp is np or not isinstance(array, np.ndarray) or array.size <= FEW:
        return xp.asarray(array)
    return unfolded(xp.asarray(array))
