"""`put`: writes new keys or values of one layer into a stack of caches, in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.engines.cpu import library


def put(stack: jax.Array, layer: Any, slots: jax.Array, new: jax.Array) -> jax.Array:
    """Returns the stack with stack[layer, b, slots[b, i]] = new[b, i]; slots out of range are skipped.

    XLA does this in place for float32, but converts a whole 16-bit stack to float32 and back.

    Args:
        stack: [layers, B, slots, ...].
        layer: the index into the stack, static or traced.
        slots: int32 [B, n].
        new: [B, n, ...], of the stack's dtype.
    """
    return _put(stack, jnp.asarray(layer, np.int32), slots, new)


@jax.custom_vjp
def _put(stack, layer, slots, new):
    result = jax.ShapeDtypeStruct(stack.shape, stack.dtype)
    return library.call("longspan_put", result, (stack, layer, slots, new), in_place={0: 0})


def _forward(stack, layer, slots, new):
    return _put(stack, layer, slots, new), (layer, slots)


def _backward(operands, cotangent):
    """Each new entry has the gradient of its slot; overwritten entries have none."""
    layer, slots = operands
    valid_or_end = jnp.where(slots < 0, cotangent.shape[2], slots)
    new = jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(cotangent[layer], valid_or_end)
    return _put(cotangent, layer, slots, jnp.zeros_like(new)), None, None, new


_put.defvjp(_forward, _backward)
