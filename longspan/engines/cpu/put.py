"""`put`: writes new keys or values of one layer into a stack of caches, in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.engines.cpu import library


def put(stack: jax.Array, layer: Any, slots: jax.Array, new: jax.Array, *, heads_first: bool = False) -> jax.Array:
    """Returns the stack with stack[layer, b, slots[b, i]] = new[b, i]; slots out of range are skipped.

    XLA does this in place for float32, but converts a whole 16-bit stack to float32 and back.

    Args:
        stack: [layers, B, slots, ...]; with `heads_first` [layers, B, K, slots, H].
        layer: the index into the stack, static or traced.
        slots: int32 [B, n].
        new: [B, n, ...], of the stack's dtype; with `heads_first` [B, n, K, H].
        heads_first: whether the stack's heads come before its slots.
    """
    layer = jnp.asarray(layer, np.int32)
    if not heads_first:
        return _put(stack, layer, slots, new)
    # Each head of a row becomes a row: merging the two axes copies nothing.
    layers, B, K, capacity, H = stack.shape
    by_head = jnp.swapaxes(new, 1, 2).reshape(B * K, -1, H)
    rows = stack.reshape(layers, B * K, capacity, H)
    return _put(rows, layer, jnp.repeat(slots, K, axis=0), by_head).reshape(stack.shape)


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
