"""The bias of a request in the form of the native kernel: one array, one table by distance and one slope per head."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import statistics_dtype
from longspan.biases import Bias, combine_floats, partition_floats, terms
from longspan.engines.request import Request
from longspan.layout import BlockLayout


class KernelBiases(NamedTuple):
    """The terms that the kernel adds to the scores. Table and slopes have the dtype of softmax statistics."""

    array: Any = None  # floats [B or 1, N or 1, T or 1, S or 1]
    table: Any = None  # [N, 2·reach + 1], by distance
    slopes: Any = None  # [N]


def unsupported_bias(request: Request) -> str | None:
    """The reason why the kernel cannot compute a request's bias; None if it can."""
    for term in terms(request.bias):
        if isinstance(term, Bias) and jax.eval_shape(lambda t: t.by_distance(), term) is None:
            return (
                "its native kernel adds arrays and functions of the distance (`alibi`, `relative_bias`), but "
                f"{term!r} is a function that only JAX can call"
            )
    shapes = [term.shape for term in terms(request.bias) if not isinstance(term, Bias)]
    if shapes:
        sum_shape = np.broadcast_shapes(*shapes)
        largest = max(shapes, key=np.prod)
        if np.prod(sum_shape) > np.prod(largest):
            return (
                f"its native kernel adds only one array to the scores. The sum of the biases of shapes "
                f"{', '.join(map(str, shapes))} would have the larger shape {sum_shape}. Use engine='xla', which adds "
                "the biases one by one"
            )
    return None


def kernel_biases(request: Request, layout: BlockLayout) -> KernelBiases:
    """The terms of a request's bias, summed by kind."""
    return _sum_by_kind(request.bias, request, layout)


def differentiable_biases(request: Request, layout: BlockLayout) -> tuple[KernelBiases, Callable[[KernelBiases], Any]]:
    """`kernel_biases`, and the function from their gradients to the gradient of the request's bias."""
    if request.bias is None:
        return KernelBiases(), lambda _: None
    floats, integers = partition_floats(request.bias)
    biases, vjp = jax.vjp(lambda floats: _sum_by_kind(combine_floats(floats, integers), request, layout), floats)

    def to_gradient(gradients: KernelBiases):
        return vjp(jax.tree.map(lambda g, of: g.astype(of.dtype), gradients, biases))[0]

    return biases, to_gradient


def _sum_by_kind(bias, request: Request, layout: BlockLayout) -> KernelBiases:
    dtype, heads = statistics_dtype(request.q.dtype), request.dims["N"]
    arrays = [term for term in terms(bias) if not isinstance(term, Bias)]
    if len(arrays) > 1:
        arrays = [array.astype(dtype) for array in arrays]
    distances: list[Any] = [term.by_distance() for term in terms(bias) if isinstance(term, Bias)]

    def for_heads(by_head):
        """An array over all heads, cut to the heads of the request if these are a shard."""
        by_head = jnp.asarray(by_head)
        if by_head.shape[0] != heads:
            by_head = jnp.take(by_head, layout.heads, axis=0)
        return by_head.astype(dtype)

    slopes = [for_heads(d.slopes) for d in distances if d.slopes is not None]
    tables = [for_heads(d.table) for d in distances if d.table is not None]
    widest = max((table.shape[1] for table in tables), default=0)
    return KernelBiases(_sum(arrays), _sum([_widened(table, widest) for table in tables]), _sum(slopes))


def _widened(table, width: int):
    """The table by distance with its first and last entries repeated, up to `width` entries."""
    more = (width - table.shape[1]) // 2
    if not more:
        return table
    return jnp.pad(table, ((0, 0), (more, more)), mode="edge")


def _sum(parts: list[Any]):
    if not parts:
        return None
    return sum(parts[1:], start=parts[0])
