"""Products of a few rows with matrices that are read in place, which take most of the time of decoding."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.engines.cpu import library

MAX_ROWS = 64  # kMaxRows in native/problem.h
WEIGHTS = ("float32", "bfloat16")


def can_multiply(rows: int, *dtypes) -> bool:
    """Whether `products` supports this number of rows, and matrices of these dtypes."""
    fits = 0 < rows <= MAX_ROWS and all(jnp.dtype(dtype).name in WEIGHTS for dtype in dtypes)
    return fits and library.missing() is None


def products(
    x: jax.Array, matrices: Sequence[jax.Array], layer: Any = 0, *, by_outer: bool = False
) -> tuple[jax.Array, ...]:
    """[x @ matrix[layer] for matrix in matrices], float32, for rows x [rows, inner].

    XLA would copy the matrices of a layer out of their stack first, which takes longer than the product.

    Args:
        x: float32 [rows, inner].
        matrices: stacks [layers, inner, outer], or single matrices [inner, outer].
        layer: the index into each stack, static or traced: a loop over layers copies nothing either.
        by_outer: whether the matrices are transposed, [layers, outer, inner].
    """
    found: Any = _products(by_outer, jnp.asarray(layer, np.int32), x, tuple(matrices))
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(by_outer: bool, layer, x, matrices):
    outer = -2 if by_outer else -1
    sizes = [matrix.shape[outer] for matrix in matrices]
    results = tuple(jax.ShapeDtypeStruct((x.shape[0], size), np.float32) for size in sizes)
    return tuple(library.call("longspan_product", results, (x, layer, *matrices), by_outer=np.int64(by_outer)))


def _products_in_jax(by_outer: bool, layer, x, matrices):
    selected = [(matrix[layer] if matrix.ndim == 3 else matrix).astype(x.dtype) for matrix in matrices]
    if by_outer:
        selected = [matrix.T for matrix in selected]
    return tuple(x @ matrix for matrix in selected)


def _forward(by_outer: bool, layer, x, matrices):
    return _products(by_outer, layer, x, matrices), (layer, x, matrices)


def _backward(by_outer: bool, operands, cotangents):
    layer, *floats = operands
    return None, *jax.vjp(partial(_products_in_jax, by_outer, layer), *floats)[1](cotangents)


_products.defvjp(_forward, _backward)
