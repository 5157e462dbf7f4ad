"""The biases of a request as the native kernel reads them: one array, one table by distance, one slope per head."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import statistics_dtype
from longspan.biases import Bias, combine_floats, partition_floats, terms
from longspan.engines.request import Request
from longspan.layout import BlockLayout


class Biases(NamedTuple):
    """What the kernel adds to the scores; None: nothing."""

    array: Any = None  # floats [B or 1, N or 1, T or 1, S or 1]
    table: Any = None  # [N, 2·reach + 1], in the dtype of statistics, as slopes [N]
    slopes: Any = None


def unknown_bias(request: Request) -> str | None:
    """Why the kernel cannot compute a request's bias, if so."""
    for term in terms(request.bias):
        if isinstance(term, Bias) and jax.eval_shape(lambda t: t.by_distance(), term) is None:
            return (
                "its kernel adds arrays and what depends on the distance alone (`alibi`, `relative_bias`), and "
                f"{term!r} is a function that only JAX can call"
            )
    shapes = [term.shape for term in terms(request.bias) if not isinstance(term, Bias)]
    if shapes:
        joint = np.broadcast_shapes(*shapes)
        largest = max(shapes, key=np.prod)
        if np.prod(joint) > np.prod(largest):
            return (
                f"its kernel adds one array, and the sum of biases of shapes {', '.join(map(str, shapes))} would be as "
                f"large as {joint}. `xla` keeps them apart"
            )
    return None


def biases_of(request: Request, layout: BlockLayout) -> Biases:
    """The terms of a request's bias, those of a kind summed."""
    return _joined(request.bias, request, layout)


def differentiable_biases(request: Request, layout: BlockLayout) -> tuple[Biases, Callable[[Biases], Any]]:
    """The same, and the function from their gradients to that of the request's bias."""
    if request.bias is None:
        return Biases(), lambda _: None
    floats, integers = partition_floats(request.bias)
    biases, pull = jax.vjp(lambda floats: _joined(combine_floats(floats, integers), request, layout), floats)

    def to_gradient(gradients: Biases):
        return pull(jax.tree.map(lambda g, of: g.astype(of.dtype), gradients, biases))[0]

    return biases, to_gradient


def _joined(bias, request: Request, layout: BlockLayout) -> Biases:
    dtype, heads = statistics_dtype(request.q.dtype), request.dims["N"]
    arrays = [term for term in terms(bias) if not isinstance(term, Bias)]
    if len(arrays) > 1:
        arrays = [array.astype(dtype) for array in arrays]
    distances = [term.by_distance() for term in terms(bias) if isinstance(term, Bias)]

    def of_heads(a):  # of all heads, of which only some may be here
        return a if a.shape[0] == heads else jnp.take(a, layout.heads, axis=0)

    slopes, tables = ([of_heads(jnp.asarray(a)).astype(dtype) for d in distances if (a := getattr(d, part)) is not None]
                      for part in ("slopes", "table"))  # fmt: skip
    widest = max((table.shape[1] for table in tables), default=0)
    return Biases(_sum(arrays), _sum([_widened(table, widest) for table in tables]), _sum(slopes))


def _widened(table, width: int):
    """A table by distance that reaches further: beyond its ends it goes on with them."""
    more = (width - table.shape[1]) // 2
    return jnp.pad(table, ((0, 0), (more, more)), mode="edge") if more else table


def _sum(parts: list[Any]):
    return sum(parts[1:], start=parts[0]) if parts else None
