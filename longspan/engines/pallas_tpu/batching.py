"""`vmap` of a pass: the mapped axis becomes part of the batch, so that one kernel computes all examples."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from longspan.layout import BlockLayout
from longspan.masks.pytree import axes_of


def folding_vmap(run: Callable[[Any, Any, BlockLayout], Any], *, folds: bool = True) -> Callable[..., Any]:
    """run(operands, bias, layout) with a rule for `vmap`. Every result has the batch as its first axis.

    `operands` is a tree with named axes (`array_axes`), whose q is [B, T, N, H]. Its arrays have all batch rows. Arrays
    of the bias and the layout have all rows, or one row that applies to all. If `folds` is False, or a mapped array has
    no batch axis, the examples are computed one after the other.
    """
    call = custom_vmap(run)

    @call.def_vmap
    def _(size: int, mapped: Any, operands: Any, bias: Any, layout: BlockLayout) -> tuple[Any, Any]:
        given = operands, bias, layout
        leaves, flags, axes = jax.tree.leaves(given), jax.tree.leaves(mapped), _axes(given)
        has_batch = all(names[:1] == "B" for names, is_mapped in zip(axes, flags, strict=True) if is_mapped)
        if folds and has_batch:
            rows = operands.q.shape[1 if flags[0] else 0]
            must_fold = [True] * len(jax.tree.leaves(operands)) + [False] * len(jax.tree.leaves((bias, layout)))
            parts = zip(leaves, flags, axes, must_fold, strict=True)
            operands, bias, layout = jax.tree.structure(given).unflatten([_fold(size, rows, *part) for part in parts])
            out = call(operands, bias, _with_row_numbers(layout, size, rows, operands.q.shape[2]))
            out = jax.tree.map(lambda x: x.reshape(size, rows, *x.shape[1:]), out)
        else:
            out = _one_by_one(call, given, flags)
        return out, jax.tree.map(lambda _: True, out)

    return call


def _axes(given: tuple[Any, Any, BlockLayout]) -> list[str]:
    operands, bias, layout = given
    return [*axes_of(operands), *axes_of(bias, "BNTS"), *axes_of(layout)]


def _fold(size: int, rows: int, x: Any, is_mapped: bool, names: str, must_fold: bool) -> Any:
    """An operand with the rows of all examples. An array of one row that applies to all rows stays as it is."""
    applies_to_all = not is_mapped and x.shape[:1] == (1,) and len(names) > 1 and not must_fold
    if names[:1] != "B" or applies_to_all:
        return x
    if not is_mapped:
        x = x[None]
    return jnp.broadcast_to(x, (size, rows, *x.shape[2:])).reshape(size * rows, *x.shape[2:])


def _with_row_numbers(layout: BlockLayout, size: int, rows: int, heads: int) -> BlockLayout:
    """The layout with the number that each row has in its own example."""
    if layout.rows is not None:
        return layout
    numbers = jnp.tile(jnp.arange(rows, dtype=np.int32), size)
    return replace(layout, rows=numbers, heads=jnp.arange(heads, dtype=np.int32))


def _one_by_one(call: Callable, given: Any, flags: list[bool]) -> Any:
    """Calls the pass for one example after the other."""
    leaves, tree = jax.tree.flatten(given)
    mapped = [x for x, is_mapped in zip(leaves, flags, strict=True) if is_mapped]

    def call_one(elements):
        elements = iter(elements)
        return call(*tree.unflatten([next(elements) if b else x for x, b in zip(leaves, flags, strict=True)]))

    return jax.lax.map(call_one, mapped)
