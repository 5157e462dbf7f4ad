"""The biases of a visit of the `xla` engine, and what it adds to their gradients."""

from typing import Any

import jax
import jax.numpy as jnp

from longspan.biases import Bias, combine_floats, partition_floats
from longspan.engines.xla.parts import ZERO, Plan, Run, Tensors, add_at, sides


def bias_tile(plan: Plan, x: Tensors, at: Run, dtype):
    """What a visit adds to its scores [1, group, queries, keys], or 1 for any of these: all terms, summed."""
    parts = [_values(plan, x, at, term, dtype) for term in x.biases]
    return sum(parts[1:], start=parts[0])


def _values(plan: Plan, x: Tensors, at: Run, term, dtype):
    if isinstance(term, Bias):
        return term.at(*_slots(plan, x, at), dtype)
    return jax.lax.dynamic_slice(term, *_window(plan, x, at, term.shape)).astype(dtype)


def _slots(plan: Plan, x: Tensors, at: Run):
    (q_side, kv_side), size = sides(plan, x, at), x.layout.q_tile
    return q_side.slots(at.i * size, size), kv_side.slots(at.start, at.width)


def _window(plan: Plan, x: Tensors, at: Run, shape):
    """Where a visit's part of an array starts, and its size."""
    full = ((at.b, 1), (at.h * plan.group, plan.group), (at.i * x.layout.q_tile, x.layout.q_tile), (at.start, at.width))
    window = [(ZERO, 1) if n == 1 else place for n, place in zip(shape, full, strict=True)]
    return tuple(start for start, _ in window), tuple(size for _, size in window)


def no_gradients(biases: tuple[Any, ...], dtype) -> tuple[Any, ...]:
    """Zeros for the gradient of every array of floats in some terms."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, dtype), partition_floats(biases)[0])


def bias_gradients(plan: Plan, x: Tensors, at: Run, dscores) -> tuple[Any, ...]:
    """What a visit adds to the gradient of each term: of an array its own part, else all of the term's arrays."""
    full = dscores.reshape(1, plan.group, x.layout.q_tile, at.width)

    def one(term):
        if not isinstance(term, Bias):
            _, sizes = _window(plan, x, at, term.shape)
            return full.sum(tuple(axis for axis, n in enumerate(sizes) if n == 1), keepdims=True)
        floats, integers = partition_floats(term)

        def values(floats):
            return jnp.broadcast_to(_values(plan, x, at, combine_floats(floats, integers), full.dtype), full.shape)

        wide = jax.tree.map(lambda a: a.astype(full.dtype), floats)  # summed in what scores are computed in
        return jax.vjp(values, wide)[1](full)[0]

    return tuple(map(one, x.biases))


def add_bias_gradients(plan: Plan, x: Tensors, at: Run, sums: tuple[Any, ...], new: tuple[Any, ...]):
    """The gradients of all terms with those of a visit added."""

    def one(term, whole, part):
        if isinstance(term, Bias):
            return jax.tree.map(jnp.add, whole, part)
        return add_at(whole, part, _window(plan, x, at, term.shape)[0])

    return tuple(one(*each) for each in zip(x.biases, sums, new, strict=True))


def unpad_biases(sums: tuple[Any, ...], biases: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients of all terms in the shapes of the terms themselves."""
    return tuple(
        a if isinstance(term, Bias) else a[:, :, : term.shape[2], : term.shape[3]]
        for a, term in zip(sums, biases, strict=True)
    )
