"""The matrix products of a layer: XLA's, or for a few tokens on a CPU those with matrices as they lie in their stack.

Layers are stacked, so that compiling them takes no longer the more there are. For one new token nearly all of the time
goes into reading matrices, and XLA would copy each out of its stack first.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from longspan.engines.cpu.product import can_multiply, products


def is_native(rows: int, dtype: Any, param_dtype: Any) -> bool:
    """Whether so many tokens are multiplied by the native library."""
    exact = jnp.dtype(dtype) in (jnp.dtype(param_dtype), jnp.dtype(jnp.float32))
    return jax.default_backend() == "cpu" and exact and can_multiply(rows, dtype, param_dtype)


def is_plain(layer: Any, x: jax.Array) -> bool:
    """Whether a layer is Flax's own, which multiplies with its matrix; another one, as LoRA's, does more with x."""
    own = type(layer) in (nnx.Linear, nnx.Embed)
    return own and layer.dtype is not None and jnp.dtype(layer.dtype) == x.dtype


def linear_each(layers: Sequence[Any], x: jax.Array, at: Any) -> list[jax.Array]:
    """[layer(x) for layer in layers]; if they are stacks, of the layer `at`."""
    if at is None:
        return [layer(x) for layer in layers]
    if not all(is_plain(layer, x) for layer in layers):
        return [_of_stack(layer, at)(x) for layer in layers]
    ys = [y.astype(x.dtype) for y in times(x, [layer.kernel[...] for layer in layers], at)]
    return [y if layer.bias is None else y + _row(layer.bias[at], y) for y, layer in zip(ys, layers, strict=True)]


def times(x: jax.Array, matrices: Sequence[jax.Array], at: Any = 0, *, by_outer: bool = False) -> list[jax.Array]:
    """[x @ matrix[at] for matrix in matrices] for stacks or single matrices, transposed if they lie by outputs."""
    rows = x.reshape(-1, x.shape[-1])
    if not all(is_native(rows.shape[0], x.dtype, matrix.dtype) for matrix in matrices):
        ours = [matrix[at] if matrix.ndim == 3 else matrix for matrix in matrices]
        return [x @ (matrix.T if by_outer else matrix).astype(x.dtype) for matrix in ours]
    ys: Any = _products(by_outer, at, rows.astype(jnp.float32), tuple(matrices))
    return [y.reshape(*x.shape[:-1], -1) for y in ys]


def _of_stack(layer: Any, at: Any) -> Any:
    graph, state = nnx.split(layer)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[at], state))


def _row(bias: jax.Array, like: jax.Array) -> jax.Array:
    return bias.astype(like.dtype).reshape(*[1] * (like.ndim - 1), -1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(by_outer: bool, at, x, matrices):
    return products(x, matrices, at, by_outer=by_outer)


def _plain(by_outer: bool, at, x, matrices):
    ours = [(matrix[at] if matrix.ndim == 3 else matrix).astype(x.dtype) for matrix in matrices]
    return tuple(x @ (matrix.T if by_outer else matrix) for matrix in ours)


def _forward(by_outer: bool, at, x, matrices):
    return _products(by_outer, at, x, matrices), (at, x, matrices)


def _backward(by_outer: bool, operands, cotangents):
    at, *floats = operands
    return None, *jax.vjp(partial(_plain, by_outer, at), *floats)[1](cotangents)


_products.defvjp(_forward, _backward)
