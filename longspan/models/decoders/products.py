"""The matrix products of a layer, or of one layer of a stack.

The parameters of layers are stacked, so that the time to compile does not grow with their number. A decode step of one
token spends nearly all of its time on reading matrices. `multiply` reads them from the stack, where XLA would first
copy each one out of it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from longspan.engines import multiply


def is_plain(layer: Any, x: jax.Array) -> bool:
    """Whether a layer is Flax's own in x's dtype, so that its output is a matrix product. LoRA's layers are not."""
    if type(layer) not in (nnx.Linear, nnx.Embed):
        return False
    return layer.dtype is not None and jnp.dtype(layer.dtype) == x.dtype


def linear_each(layers: Sequence[Any], x: jax.Array, at: Any) -> list[jax.Array]:
    """[layer(x) for layer in layers]; if they are stacks, with the parameters at index `at`."""
    if at is None:
        return [layer(x) for layer in layers]
    if not all(is_plain(layer, x) for layer in layers):
        return [_layer_of_stack(layer, at)(x) for layer in layers]
    products = multiply(x, [layer.kernel[...] for layer in layers], at)
    outputs = []
    for product, layer in zip(products, layers, strict=True):
        y = product.astype(x.dtype)
        if layer.bias is not None:
            y = y + layer.bias[at].astype(y.dtype).reshape(*[1] * (y.ndim - 1), -1)
        outputs.append(y)
    return outputs


def _layer_of_stack(layer: Any, at: Any) -> Any:
    graph, state = nnx.split(layer)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[at], state))
