"""The matrix products of a layer, also of one in a stack.

Layers are stacked, so that compiling them takes no longer the more there are. For one new token nearly all of the time
goes into reading matrices, and XLA would copy each out of its stack first.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from longspan.engines import multiply


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
    ys = [y.astype(x.dtype) for y in multiply(x, [layer.kernel[...] for layer in layers], at)]
    return [y if layer.bias is None else y + _row(layer.bias[at], y) for y, layer in zip(ys, layers, strict=True)]


def _of_stack(layer: Any, at: Any) -> Any:
    graph, state = nnx.split(layer)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[at], state))


def _row(bias: jax.Array, like: jax.Array) -> jax.Array:
    return bias.astype(like.dtype).reshape(*[1] * (like.ndim - 1), -1)
