"""Attention with different keys for each key/value head: one head at a time, with the query heads that share it."""

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
    """The results of a function of a key/value head's number, stacked along a first axis."""
    return jax.lax.map(one, jnp.arange(heads, dtype=np.int32))


def merge_heads(stacked: Any) -> Any:
    """Arrays [heads, B, n, group, ...] as [B, n, heads · group, ...]."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:]), stacked)


def one_head(tree: Any, head: Any, heads: int) -> Any:
    """The part [B, n, group, ...] of one of `heads` key/value heads, from arrays [B, n, heads · group, ...]."""

    def part(x):
        group = x.shape[2] // heads
        return jax.lax.dynamic_slice_in_dim(x, head * np.int32(group), group, axis=2)

    return jax.tree.map(part, tree)


def of_head(call: Request, head: Any, heads: int) -> Request:
    """The call of one of a device's `heads` key/value heads: its queries, and their part of mask and bias."""
    batch, _, count, _ = call.q.shape
    group = count // heads
    rows = jnp.arange(batch, dtype=np.int32) if call.rows is None else call.rows
    numbers = jnp.arange(count, dtype=np.int32) if call.heads is None else call.heads
    first, dropout = head * np.int32(group), call.dropout
    if dropout is not None:
        dropout = replace(dropout, heads=jax.lax.dynamic_slice_in_dim(dropout.heads, first, group))
    return replace(
        call,
        q=one_head(call.q, head, heads),
        mask=_slice_heads(as_data(call.mask), first, group),
        bias=map_terms(lambda term: _slice_heads(_sliceable(term), first, group), call.bias),
        dropout=dropout,
        rows=rows,
        heads=jax.lax.dynamic_slice_in_dim(numbers, first, group),
    )


def bias_of_all(bias: Any, stacked: Any) -> Any:
    """The gradient of a bias from those of its heads: merged where it has an axis of heads, else summed."""
    if bias is None:
        return None
    found = []
    for term, part in zip(terms(bias), terms(stacked), strict=True):
        if isinstance(_sliceable(term), Whole):
            part = part.bias
        floats = partition_floats(term)[0]
        triples = zip(jax.tree.leaves(part), axes_of(floats, ARRAY), jax.tree.leaves(floats), strict=True)
        leaves = [_merged_or_summed(x, axes, like) for x, axes, like in triples]
        found.append(jax.tree.unflatten(jax.tree.structure(floats), leaves))
    return tuple(found) if isinstance(bias, tuple) else found[0]


def _merged_or_summed(stacked, axes: str, like):
    if not _has_heads(axes, like):
        return stacked.sum(0)
    axis = axes.index("N")
    return jnp.moveaxis(stacked, 0, axis).reshape(like.shape)


def _sliceable(term: Any) -> Any:
    """A term of the bias. One with arrays of unknown axes is not sliced by head, and is computed in JAX."""
    if isinstance(term, Bias) and not type(term).array_axes and term.by_distance() is not None:
        return Whole(term)
    return term


def _slice_heads(rule: Any, first: Any, count: int) -> Any:
    """A mask or a term of the bias, whose arrays with an axis of heads are sliced to some heads."""
    leaves = []
    for axes, leaf in zip(axes_of(rule, ARRAY), jax.tree.leaves(rule), strict=True):
        if _has_heads(axes, leaf):
            leaf = jax.lax.dynamic_slice_in_dim(leaf, first, count, axis=axes.index("N"))
        leaves.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(rule), leaves)


def _has_heads(axes: str, array: Any) -> bool:
    return "N" in axes and array.shape[axes.index("N")] > 1
