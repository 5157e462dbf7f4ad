"""New keys or values of one layer into a stack of caches, in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.engines.cpu import library


def put(stack: jax.Array, layer: Any, slots: jax.Array, new: jax.Array) -> jax.Array:
    """The stack with stack[layer, b, slots[b, i]] = new[b, i]; slots that are not there take nothing.

    XLA does this in place for float32, but makes all of a 16-bit stack wider to scatter into it, and back.

    Args:
        stack: [layers, B, slots, ...].
        layer: which one, an int or a traced one.
        slots: int32 [B, n].
        new: [B, n, ...], of the stack's dtype.
    """
    operands = (stack, jnp.asarray(layer, np.int32), slots, new)
    return library.call("longspan_put", jax.ShapeDtypeStruct(stack.shape, stack.dtype), operands, in_place={0: 0})
