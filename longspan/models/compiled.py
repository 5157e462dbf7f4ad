"""`compiled`: a model's call as one jitted program that takes the parameters as arguments and does not return them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

import jax
from flax import nnx

from longspan.axes import axis_names
from longspan.models.encoders.encoder import Encoder
from longspan.models.encoders.inputs import check_inputs
from longspan.models.encoders.tasks import Model
from longspan.models.graph import HashedGraph, SplitModel
from longspan.models.output import Output
from longspan.models.rngs import check_call_rngs, dropout_stream

P = ParamSpec("P")
# The static arguments of a call: every combination of their values is a program.
OPTIONS = ("deterministic", "attention_type", "remat", "mesh", "axis", "order", "batch_axes", "head_axis")


def compiled(model: Callable[P, Output]) -> Callable[P, Output]:
    """The model's call under `jit`, with the same arguments and results, for inference.

    `nnx.jit(model)` returns all parameters from its program at each call, in case the call changed them. Here they are
    arguments only. Each call reads the model's current parameters, so training and `nnx.update` take effect. A change
    of the structure, such as `model.train()`, compiles a new program. Models of one structure share their programs,
    also if they were loaded from different directories. Each call checks the ids before it runs the program. Ids
    outside of their tables raise an error, as they do without `jit`.

    Args:
        model: an `Encoder` or a model with a head.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> config = models.BertConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> run = models.compiled(models.SequenceClassifier(config, rngs=nnx.Rngs(0)))
        >>> run(jnp.array([[0, 7, 5, 2]]), attention_mask=jnp.array([[1, 1, 1, 0]])).logits.shape
        (1, 2)
    """
    if not isinstance(model, Encoder | Model):
        raise TypeError(
            f"`compiled` takes an encoder of longspan.models, with or without a head, got {type(model).__name__}. "
            "Use `nnx.jit` for other models."
        )
    encoder: Any = model
    signature, split_model = inspect.signature(encoder.__call__), SplitModel(encoder)

    @functools.wraps(encoder.__call__)
    def call(*args: P.args, **kwargs: P.kwargs) -> Output:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        given["batch_axes"] = axis_names("batch_axes", given["batch_axes"])  # a tuple: a list does not hash
        rngs = given.pop("rngs")
        options = tuple(given.pop(name) for name in OPTIONS)
        check_inputs(encoder.config, **given)
        check_call_rngs(rngs)
        return _call(split_model, options, {name: x for name, x in given.items() if x is not None}, rngs)

    return call


def _call(split_model: SplitModel, options: tuple, arrays: dict[str, Any], rngs: Any) -> Output:
    graph, state = split_model.current()
    deterministic = options[0]
    if deterministic is None:
        deterministic = split_model.model.deterministic
    if deterministic or rngs is None:
        return _call_model(graph, None, options, state, None, arrays)[0]
    stream: Any = dropout_stream(rngs)
    stream_graph, stream_state = nnx.split(stream)
    output, count = _call_model(graph, stream_graph, options, state, stream_state, arrays)
    stream.count[...] = count
    return output


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _call_model(structure: HashedGraph, stream_graph, options: tuple, state, stream_state, arrays: dict[str, Any]):
    """The output, and the stream's counter after the call."""
    stream = None
    if stream_graph is not None:
        stream = nnx.merge(stream_graph, stream_state)
    output = nnx.merge(structure.graph, state)(**arrays, **dict(zip(OPTIONS, options, strict=True)), rngs=stream)
    if stream is None:
        return output, None
    return output, stream.count[...]
