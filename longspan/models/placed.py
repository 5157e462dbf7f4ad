"""A model's call where types say how its parameters or inputs lie: on a mesh with explicit axes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from longspan.axes import explicit_mesh, on_auto_axes, spec_entries, unique_spec
from longspan.models.output import Output
from longspan.parallel.sequence_sharding import SequenceSharding


def placed(call: Callable[..., Output]) -> Callable[..., Output]:
    """A model's method `call(self, **arrays, **options)` as one that is called with `arrays` as a dict.

    XLA places what is in between, as on all other meshes. Results lie like the inputs, by rows and by tokens; logits
    of tokens also by the model's `_columns`, as the matrix does that makes them; a cache like the one that was given.
    """

    @functools.wraps(call)
    def method(model: Any, arrays: dict[str, Any], *, sharding: SequenceSharding, **options: Any) -> Output:
        graph, state = nnx.split(model)
        if explicit_mesh(state, arrays) is None:
            return call(model, **arrays, sharding=sharding, **options)
        options = options | dict(sharding=sharding.on_auto_axes())
        return on_auto_axes(
            _call_model_on_auto_axes, _specs, (call, graph, model._columns, tuple(options.items())), (state, arrays)
        )

    return method


def _call_model_on_auto_axes(
    call: Callable[..., Output], graph: Any, columns: Any, options: tuple, state: Any, arrays: Any
) -> Output:
    return call(nnx.merge(graph, state), **arrays, **dict(options))


def columns_of(head: Any, table: Any) -> Any:
    """The mesh axes that a head is split over by outputs, or without one the table that stands in for it."""
    # Of layers that were replaced, as LoRA's, nothing is known.
    weights = getattr(table, "embedding", None) if head is None else getattr(head, "kernel", None)
    return None if weights is None else spec_entries(weights[...])[0 if head is None else -1]


def _specs(call: Any, graph: Any, columns: Any, options: tuple, operands: tuple, output: Output) -> Output:
    arrays = operands[1]
    tokens = [spec_entries(x)[:2] for name, x in arrays.items() if name not in ("cache", "keys") and x is not None]
    rows, length = (next((entry[axis] for entry in tokens if entry[axis]), None) for axis in (0, 1))

    def spec(name: str, x: Any) -> Any:
        if name == "cache":
            return jax.tree.map(lambda x: P(*spec_entries(x)), arrays["cache"])
        if name == "logits":
            return P(rows, None) if x.ndim == 2 else unique_spec(rows, length, columns)
        return P(rows, None) if name == "pooler_output" else P(rows, length, *[None] * (x.ndim - 2))

    return Output(**{name: None if x is None else spec(name, x) for name, x in vars(output).items()})
