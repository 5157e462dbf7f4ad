"""A model's structure as a static argument of `jit`, and its parameters as another argument."""

import copy
from typing import Any

import jax
from flax import nnx


class HashedGraph:
    """A model's graph definition, hashed once: `jit` asks for the hash at every call."""

    def __init__(self, graph: Any):
        self.graph, self._hash = graph, hash(graph)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, HashedGraph) and self.graph == other.graph)

    def __hash__(self) -> int:
        return self._hash


def without_source(model: Any) -> Any:
    """A copy with the same parameters and no `source`, so that checkpoints of one structure share their programs."""
    bare = copy.copy(model)
    # `vars`, not an assignment: Flax refuses to assign to a model from outside of a transformation.
    vars(bare).update(source=None)
    if hasattr(model, "encoder"):
        vars(bare).update(encoder=without_source(model.encoder))
    return bare


class SplitModel:
    """A model's graph definition and its parameters.

    `nnx.split` takes as long as encoding a short text, and comparing attributes does not. So the model is split again
    only after an attribute of one of its modules changed.
    """

    def __init__(self, model: Any):
        self.model = model
        self._attributes = None  # of each module, when the model was split

    def current(self) -> tuple[HashedGraph, Any]:
        if self._attributes is None or not all(_is_same(vars(x), before) for x, before in self._attributes):
            self._split()
        return self._graph, jax.tree.unflatten(self._tree, [x.get_raw_value() for x in self._variables])

    def _split(self) -> None:
        graph, state = nnx.split(without_source(self.model))
        self._graph, self._tree = HashedGraph(graph), jax.tree.structure(state)
        nodes = dict(nnx.iter_graph(self.model))
        self._variables = [nodes[path] for path, _ in nnx.to_flat_state(state)]
        values = [x.get_raw_value() for x in self._variables]
        assert all(a is b for a, b in zip(jax.tree.leaves(state), values, strict=True)), "parameters out of order"
        self._attributes = [(x, dict(vars(x))) for x in nodes.values() if isinstance(x, nnx.Pytree)]


def _is_same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(now) == len(before) and all(name in now and now[name] is value for name, value in before.items())
