"""Products of rows with one matrix per group: `jax.lax.ragged_dot`, which also reads a stack of layers in place.

On CPUs XLA expands `ragged_dot` to a product of all rows with the matrices of all groups, most of it multiplied by
zero. With 32 groups it took 50 to 100 times as long as one matrix product of the same rows. A loop over blocks of rows
of one group reads only the matrices of groups that have rows, and takes each one directly from the stack of layers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import statistics_dtype
from longspan.engines import multiply

MAX_BLOCK = 128  # rows of a block: with more, products are no faster
MAX_NATIVE = 4  # rows of a block up to which reading a matrix takes longer than the product
FEW_ROWS = 256  # accelerators read single groups for up to this number of rows, as in decode steps


class RowBlocks(NamedTuple):
    """The blocks that the rows of all groups are split into, in order."""

    size: int  # rows of a block; a group's last block may have fewer
    starts: jax.Array  # int32 [G]: the first row of each group
    stops: jax.Array  # int32 [G]: the row after the last one
    ends: jax.Array  # int32 [G]: the number of blocks up to the end of each group

    def place(self, number: Any) -> tuple[jax.Array, jax.Array]:
        """The group of a block, and its first row. Blocks after the last one are in the last group."""
        last = self.ends.shape[0] - 1
        group = jnp.minimum(jnp.sum(self.ends <= number, dtype=np.int32), np.int32(last))
        # Counted from the end of the group's blocks, so empty groups need no care.
        full = -(-(self.stops[group] - self.starts[group]) // self.size)
        return group, self.starts[group] + (number - (self.ends[group] - full)) * np.int32(self.size)


def grouped_products(
    x: jax.Array, matrices: Sequence[jax.Array], sizes: jax.Array, layer: Any = None, *, native: bool = False
) -> list[jax.Array]:
    """[ragged_dot(x, matrix[layer], sizes) for matrix in matrices].

    Args:
        x: [rows, inner], sorted by group.
        matrices: [groups, inner, outer] or, with `layer`, stacks [layers, groups, inner, outer].
        sizes: int32 [groups]: the number of rows of each group.
        layer: the index into the stacks, static or traced.
        native: whether blocks of few rows may use the native kernel, which runs on one CPU device only.

    Example:
        >>> x, matrices = jnp.ones((3, 2)), jnp.stack([jnp.ones((2, 1)), jnp.zeros((2, 1)), jnp.full((2, 1), 5.0)])
        >>> grouped_products(x, [matrices], jnp.array([2, 0, 1]))[0].ravel()
        Array([ 2.,  2., 10.], dtype=float32)
    """
    if jax.default_backend() != "cpu" and (layer is None or x.shape[0] > FEW_ROWS):
        own = [matrix if layer is None else matrix[layer] for matrix in matrices]
        return [jax.lax.ragged_dot(x, matrix.astype(x.dtype), sizes) for matrix in own]
    size = block_size(x.shape[0], sizes.shape[0])
    return list(_products(size, native, sizes, layer, x, tuple(matrices)))


def block_size(rows: int, groups: int) -> int:
    """The rows of a block: a power of two, so that most groups with an average number of rows are one block."""
    average = rows / groups
    return min(MAX_BLOCK, 1 << max(0, int(np.ceil(np.log2(max(1.4 * average, 1e-9))))))


def _blocks(size: int, sizes: jax.Array) -> RowBlocks:
    stops = jnp.cumsum(sizes, dtype=np.int32)
    return RowBlocks(size, stops - sizes, stops, jnp.cumsum(-(-sizes // np.int32(size)), dtype=np.int32))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _products(size: int, native: bool, sizes, layer, x, matrices):
    def multiply_block(group, rows):
        if native and size <= MAX_NATIVE:
            flat = [matrix.reshape(-1, *matrix.shape[-2:]) for matrix in matrices]
            products = multiply(rows, flat, group if layer is None else layer * sizes.shape[0] + group)
            return tuple(product.astype(x.dtype) for product in products)
        return tuple(rows @ _matrix_of(matrix, layer, group).astype(x.dtype) for matrix in matrices)

    return _map_blocks(multiply_block, _blocks(size, sizes), [x], [matrix.shape[-1] for matrix in matrices])


def _forward(size: int, native: bool, sizes, layer, x, matrices):
    return _products(size, native, sizes, layer, x, matrices), (sizes, layer, x, matrices)


def _backward(size: int, native: bool, operands, cotangents):
    sizes, layer, x, matrices = operands
    blocks = _blocks(size, sizes)

    def multiply_transposed(group, *rows):
        terms = [
            row @ _matrix_of(matrix, layer, group).astype(x.dtype).T for row, matrix in zip(rows, matrices, strict=True)
        ]
        return (sum(terms[1:], terms[0]),)

    (dx,) = _map_blocks(multiply_transposed, blocks, cotangents, [x.shape[-1]])
    return None, None, dx, _matrix_gradients(blocks, layer, x, cotangents, matrices)


_products.defvjp(_forward, _backward)


def _map_blocks(
    function: Callable, blocks: RowBlocks, operands: Sequence[jax.Array], widths: Sequence[int]
) -> tuple[jax.Array, ...]:
    """The results of function(group, *rows) for the rows of every block, each [rows, width]."""
    rows = operands[0].shape[0]
    padded = [_with_rows_of_zeros(x, blocks.size - 1) for x in operands]

    def step(number, results):
        group, first = blocks.place(number)
        new = function(group, *(jax.lax.dynamic_slice_in_dim(x, first, blocks.size) for x in padded))
        # The last block of a group also computes rows of the next group, whose own block writes them again.
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(y, part, first, 0) for y, part in zip(results, new, strict=True)
        )

    empty = tuple(jnp.zeros((rows + blocks.size - 1, width), operands[0].dtype) for width in widths)
    results = jax.lax.fori_loop(np.int32(0), blocks.ends[-1], step, empty)
    return tuple(y[:rows] for y in results)


def _matrix_gradients(
    blocks: RowBlocks, layer: Any, x: jax.Array, cotangents: Sequence[jax.Array], matrices: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """The gradients of the matrices: for each group, the sum of x · cotangent over its rows, at least in float32."""
    wide = statistics_dtype(x.dtype)
    padded = [_with_rows_of_zeros(rows, blocks.size - 1) for rows in (x, *cotangents)]

    def step(number, gradients):
        group, first = blocks.place(number)
        # Selected, not multiplied by zero: rows of the next group may hold NaN.
        own = (first + jnp.arange(blocks.size, dtype=np.int32) < blocks.stops[group])[:, None]
        masked = [
            jnp.where(own, jax.lax.dynamic_slice_in_dim(y, first, blocks.size), np.zeros((), y.dtype)) for y in padded
        ]
        index = (group,) if layer is None else (layer, group)
        new = [jnp.matmul(masked[0].T, part, preferred_element_type=wide) for part in masked[1:]]
        return tuple(gradient.at[index].add(part) for gradient, part in zip(gradients, new, strict=True))

    empty = tuple(jnp.zeros(matrix.shape, wide) for matrix in matrices)
    gradients = jax.lax.fori_loop(np.int32(0), blocks.ends[-1], step, empty)
    return tuple(gradient.astype(matrix.dtype) for gradient, matrix in zip(gradients, matrices, strict=True))


def _matrix_of(stack: jax.Array, layer: Any, group: Any) -> jax.Array:
    """One matrix of a stack, by one slice: two would copy all groups of the layer."""
    index = (group,) if layer is None else (jnp.asarray(layer, np.int32), group)
    zeros = (np.int32(0),) * 2
    return jax.lax.dynamic_slice(stack, (*index, *zeros), (*(1 for _ in index), *stack.shape[-2:])).reshape(
        stack.shape[-2:]
    )


def _with_rows_of_zeros(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, ((0, count), (0, 0)))
