"""The bias of a visit of the `xla` engine, and the contribution of a visit to its gradient."""

from typing import Any

import jax
import jax.numpy as jnp

from longspan.biases import Bias, combine_floats, partition_floats
from longspan.engines.xla.parts import ZERO, Tensors, TilePlan, TileRun, add_at, sides


def bias_tile(plan: TilePlan, x: Tensors, at: TileRun, dtype):
    """The sum of all bias terms for the scores [1, group, queries, keys] of a visit; axes may have size 1."""
    parts = [_values(plan, x, at, term, dtype) for term in x.biases]
    return sum(parts[1:], start=parts[0])


def _values(plan: TilePlan, x: Tensors, at: TileRun, term, dtype):
    if isinstance(term, Bias):
        return term.at(*_slots(plan, x, at), dtype)
    return jax.lax.dynamic_slice(term, *_window(plan, x, at, term.shape)).astype(dtype)


def _slots(plan: TilePlan, x: Tensors, at: TileRun):
    (q_side, kv_side), size = sides(plan, x, at), x.layout.q_tile
    return q_side.slots(at.i * size, size), kv_side.slots(at.start, at.width)


def _window(plan: TilePlan, x: Tensors, at: TileRun, shape):
    """The start indices and sizes of a visit's slice of a bias array."""
    full = ((at.b, 1), (at.h * plan.group, plan.group), (at.i * x.layout.q_tile, x.layout.q_tile), (at.start, at.width))
    window = [(ZERO, 1) if n == 1 else place for n, place in zip(shape, full, strict=True)]
    return tuple(start for start, _ in window), tuple(size for _, size in window)


def no_gradients(biases: tuple[Any, ...], dtype) -> tuple[Any, ...]:
    """Zeros for the gradient of every float array in the terms."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, dtype), partition_floats(biases)[0])


def bias_gradients(plan: TilePlan, x: Tensors, at: TileRun, dscores) -> tuple[Any, ...]:
    """The contribution of a visit to the gradient of each term: a slice for an array, all float arrays of a `Bias`."""
    full = dscores.reshape(1, plan.group, x.layout.q_tile, at.width)

    def one(term):
        if not isinstance(term, Bias):
            _, sizes = _window(plan, x, at, term.shape)
            return full.sum(tuple(axis for axis, n in enumerate(sizes) if n == 1), keepdims=True)
        floats, integers = partition_floats(term)

        def values(floats):
            return jnp.broadcast_to(_values(plan, x, at, combine_floats(floats, integers), full.dtype), full.shape)

        wide = jax.tree.map(lambda a: a.astype(full.dtype), floats)  # gradients are summed in the dtype of the scores
        return jax.vjp(values, wide)[1](full)[0]

    return tuple(map(one, x.biases))


def add_bias_gradients(plan: TilePlan, x: Tensors, at: TileRun, sums: tuple[Any, ...], new: tuple[Any, ...]):
    """The gradients of all terms, with the contribution of a visit added."""

    def one(term, whole, part):
        if isinstance(term, Bias):
            return jax.tree.map(jnp.add, whole, part)
        return add_at(whole, part, _window(plan, x, at, term.shape)[0])

    return tuple(one(*each) for each in zip(x.biases, sums, new, strict=True))


def unpad_biases(sums: tuple[Any, ...], biases: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients of all terms, without padding."""

    def one(term, gradient):
        if isinstance(term, Bias):
            return gradient
        return gradient[:, :, : term.shape[2], : term.shape[3]]

    return tuple(one(*each) for each in zip(biases, sums, strict=True))
