"""`put`: writes new keys or values of one layer into a stack of caches, in place."""

from functools import partial
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
    return _put(heads_first, stack, jnp.asarray(layer, np.int32), slots, new)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _put(heads_first: bool, stack, layer, slots, new):
    result = jax.ShapeDtypeStruct(stack.shape, stack.dtype)
    attributes = {}
    if heads_first:
        attributes["heads_first"] = np.int64(1)
    return library.call("longspan_put", result, (stack, layer, slots, new), in_place={0: 0}, **attributes)


def _forward(heads_first: bool, stack, layer, slots, new):
    return _put(heads_first, stack, layer, slots, new), (layer, slots)


def _backward(heads_first: bool, operands, cotangent):
    """Each new entry has the gradient of its slot; overwritten entries have none."""
    layer, slots = operands
    valid_or_end = jnp.where(slots < 0, cotangent.shape[3 if heads_first else 2], slots)
    rows = cotangent[layer]
    if heads_first:
        rows = jnp.swapaxes(rows, 1, 2)
    new = jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(rows, valid_or_end)
    return _put(heads_first, cotangent, layer, slots, jnp.zeros_like(new)), None, None, new


_put.defvjp(_forward, _backward)
