"""Keys that differ from head to head: each key/value head is computed by itself, with the query heads that share it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.biases import Bias, Whole, map_terms, partition_floats, terms
from longspan.engines import Request
from longspan.masks.pytree import axes_of
from longspan.parallel.specs import as_data

ARRAY = "BNTS"  # the axes of a bias that is an array


def over_heads(one: Callable[[Any], Any], heads: int) -> Any:
    """What a function of a key/value head's number gives for each of them, stacked along a first axis."""
    return jax.lax.map(one, jnp.arange(heads, dtype=np.int32))


def side_by_side(stacked: Any) -> Any:
    """Arrays [heads, B, n, group, ...] as [B, n, heads · group, ...]."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:]), stacked)


def one_head(tree: Any, head: Any, heads: int) -> Any:
    """Of arrays [B, n, heads · group, ...] the part [B, n, group, ...] of one of `heads` key/value heads."""

    def part(x):
        group = x.shape[2] // heads
        return jax.lax.dynamic_slice_in_dim(x, head * np.int32(group), group, axis=2)

    return jax.tree.map(part, tree)


def of_head(call: Request, head: Any, heads: int) -> Request:
    """The call of one of a device's `heads` key/value heads: its queries, with their own part of mask and bias."""
    batch, _, count, _ = call.q.shape
    group = count // heads
    rows, numbers = (
        jnp.arange(size, dtype=np.int32) if given is None else given
        for given, size in ((call.rows, batch), (call.heads, count))
    )
    first, dropout = head * np.int32(group), call.dropout
    if dropout is not None:
        dropout = replace(dropout, heads=jax.lax.dynamic_slice_in_dim(dropout.heads, first, group))
    return replace(
        call,
        q=one_head(call.q, head, heads),
        mask=_some_heads(as_data(call.mask), first, group),
        bias=map_terms(lambda term: _some_heads(_ready(term), first, group), call.bias),
        dropout=dropout,
        rows=rows,
        heads=jax.lax.dynamic_slice_in_dim(numbers, first, group),
    )


def bias_of_all(bias: Any, stacked: Any) -> Any:
    """The gradient of a bias, from those of its heads: side by side where heads are told apart, else summed."""
    if bias is None:
        return None
    found = []
    for term, part in zip(terms(bias), terms(stacked), strict=True):
        part = part.bias if isinstance(_ready(term), Whole) else part
        floats = partition_floats(term)[0]
        leaves = [
            _joined(x, axes, like)
            for x, axes, like in zip(
                jax.tree.leaves(part), axes_of(floats, ARRAY), jax.tree.leaves(floats), strict=True
            )
        ]
        found.append(jax.tree.unflatten(jax.tree.structure(floats), leaves))
    return tuple(found) if isinstance(bias, tuple) else found[0]


def _joined(stacked, axes: str, like):
    if not _tells_heads(axes, like):
        return stacked.sum(0)
    axis = axes.index("N")
    return jnp.moveaxis(stacked, 0, axis).reshape(like.shape)


def _ready(term: Any) -> Any:
    """A term of the bias: kernels want what tells heads apart cut to them; whose axes nobody knows stays whole."""
    unnamed = isinstance(term, Bias) and not type(term).array_axes and term.by_distance() is not None
    return Whole(term) if unnamed else term


def _some_heads(rule: Any, first: Any, count: int) -> Any:
    """A rule, or an array of a bias, whose arrays that tell heads apart are cut to some of them."""
    leaves = [
        jax.lax.dynamic_slice_in_dim(leaf, first, count, axis=axes.index("N")) if _tells_heads(axes, leaf) else leaf
        for axes, leaf in zip(axes_of(rule, ARRAY), jax.tree.leaves(rule), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(rule), leaves)


def _tells_heads(axes: str, array: Any) -> bool:
    return "N" in axes and array.shape[axes.index("N")] > 1
