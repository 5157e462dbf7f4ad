"""Calls of models whose parameters or inputs lie on a mesh with explicit axes (`AxisType.Explicit`)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from longspan.axes import explicit_mesh, on_auto_axes, spec_entries, unique_spec
from longspan.models.output import Output
from longspan.parallel.sequence_sharding import SequenceSharding


def accepts_explicit_axes(call: Callable[..., Output]) -> Callable[..., Output]:
    """Wraps a method call(self, **arrays, **options) into one that takes `arrays` as a dict.

    On explicit axes the method runs with automatic ones, so XLA shards the intermediate results, as on other meshes.
    The results are then resharded: rows and tokens like the inputs, the vocabulary axis of logits by the model's
    `_vocab_axes`, and a cache like the given one.
    """

    @functools.wraps(call)
    def method(model: Any, arrays: dict[str, Any], *, sharding: SequenceSharding, **options: Any) -> Output:
        graph, state = nnx.split(model)
        if explicit_mesh(state, arrays) is None:
            return call(model, **arrays, sharding=sharding, **options)
        options = options | dict(sharding=sharding.on_auto_axes())
        static = call, graph, model._vocab_axes, tuple(options.items())
        return on_auto_axes(_call_merged, _output_specs, static, (state, arrays))

    return method


def vocab_axes_of(head: Any, embeddings: Any) -> Any:
    """The mesh axes that shard the outputs of a head or, without one, the rows of the embeddings."""
    # A layer that replaced Flax's, such as LoRA's, may lack these attributes: then nothing is known.
    weights, vocab_axis = getattr(head, "kernel", None), -1
    if head is None:
        weights, vocab_axis = getattr(embeddings, "embedding", None), 0
    if weights is None:
        return None
    return spec_entries(weights[...])[vocab_axis]


def _call_merged(
    call: Callable[..., Output], graph: Any, vocab_axes: Any, options: tuple, state: Any, arrays: Any
) -> Output:
    return call(nnx.merge(graph, state), **arrays, **dict(options))


def _output_specs(call: Any, graph: Any, vocab_axes: Any, options: tuple, operands: tuple, output: Output) -> Output:
    _, arrays = operands
    row_axes, token_axes = _input_axes(arrays)

    def spec(name: str, x: Any) -> Any:
        if x is None:
            return None
        if name == "cache":
            return jax.tree.map(lambda x: P(*spec_entries(x)), arrays["cache"])
        if name == "pooler_output":
            return P(row_axes, None)
        if name == "logits" and x.ndim == 2:
            return P(row_axes, None)
        if name == "logits":
            return unique_spec(row_axes, token_axes, vocab_axes)
        return P(row_axes, token_axes, *[None] * (x.ndim - 2))

    return Output(**{name: spec(name, x) for name, x in vars(output).items()})


def _input_axes(arrays: dict[str, Any]) -> tuple[Any, Any]:
    """The mesh axes that shard rows and tokens: those of the first input that is sharded along each."""
    inputs = [x for name, x in arrays.items() if name not in ("cache", "keys") and x is not None]
    specs = [spec_entries(x)[:2] for x in inputs]
    row_axes = next((rows for rows, _ in specs if rows), None)
    token_axes = next((tokens for _, tokens in specs if tokens), None)
    return row_axes, token_axes
