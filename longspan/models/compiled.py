"""`compiled`: a model's call as one program, whose parameters are arguments and never results."""

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
from longspan.models.graph import Graph, without_source
from longspan.models.output import Output
from longspan.models.rngs import check_call_rngs, dropout_stream

P = ParamSpec("P")
# The static arguments of a call: each value of one is a program.
OPTIONS = ("deterministic", "attention_type", "remat", "mesh", "axis", "order", "batch_axes", "head_axis")


def compiled(model: Callable[P, Output]) -> Callable[P, Output]:
    """The model's call under `jit`, with the same arguments and the same outputs: for inference.

    `nnx.jit(model)` returns every parameter from its program at each call, in case the call changed it. Here they only
    go in. Each call reads the model anew, so it sees what training or `nnx.update` did to the parameters; a change of
    the structure, such as `model.train()`, is compiled anew. Models of one structure share their programs, whatever
    directories they were loaded from. Ids outside of their tables are an error, as they are without `jit`.

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
            f"`compiled` takes one of longspan.models' encoders, with a head or without, got {type(model).__name__}. "
            "Use `nnx.jit`."
        )
    known: Any = model
    signature, parts = inspect.signature(known.__call__), _Parts(known)

    @functools.wraps(known.__call__)
    def call(*args: P.args, **kwargs: P.kwargs) -> Output:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        given["batch_axes"] = axis_names("batch_axes", given["batch_axes"])  # a tuple: a list does not hash
        rngs, options = given.pop("rngs"), tuple(given.pop(name) for name in OPTIONS)
        check_inputs(known.config, **given)
        check_call_rngs(rngs)
        return _call(parts, options, {name: x for name, x in given.items() if x is not None}, rngs)

    return call


def _call(parts: "_Parts", options: tuple, arrays: dict[str, Any], rngs: Any) -> Output:
    graph, state = parts.now()
    drops = rngs is not None and not (parts.model.deterministic if options[0] is None else options[0])
    if not drops:
        return _call_model(graph, None, options, state, None, arrays)[0]
    stream: Any = dropout_stream(rngs)
    stream_graph, stream_state = nnx.split(stream)
    output, count = _call_model(graph, stream_graph, options, state, stream_state, arrays)
    stream.count[...] = count
    return output


class _Parts:
    """A model's structure and its parameters.

    Splitting a model takes as long as a short text, looking for a change of its attributes does not: only after one is
    it split anew.
    """

    def __init__(self, model: Any):
        self.model, self._before = model, None

    def now(self) -> tuple[Graph, Any]:
        if self._before is None or not all(_same(vars(x), then) for x, then in self._before):
            self._split()
        return self._graph, jax.tree.unflatten(self._tree, [x.get_raw_value() for x in self._variables])

    def _split(self) -> None:
        graph, state = nnx.split(without_source(self.model))
        self._graph, self._tree = Graph(graph), jax.tree.structure(state)
        nodes = dict(nnx.iter_graph(self.model))
        self._variables = [nodes[path] for path, _ in nnx.to_flat_state(state)]
        values = [x.get_raw_value() for x in self._variables]
        assert all(a is b for a, b in zip(jax.tree.leaves(state), values, strict=True)), "parameters out of order"
        self._before = [(x, dict(vars(x))) for x in nodes.values() if isinstance(x, nnx.Pytree)]


def _same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return len(now) == len(then) and all(name in now and now[name] is value for name, value in then.items())


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _call_model(structure: Graph, stream_graph, options: tuple, state, stream_state, arrays: dict[str, Any]):
    """The output, and how far the stream has counted."""
    stream = None if stream_graph is None else nnx.merge(stream_graph, stream_state)
    output = nnx.merge(structure.graph, state)(**arrays, **dict(zip(OPTIONS, options, strict=True)), rngs=stream)
    return output, None if stream is None else stream.count[...]
