"""A model's structure as what jit compiles by."""

import copy
from typing import Any


class Graph:
    """A model's structure, hashed once: jit asks for the hash at every call."""

    def __init__(self, graph: Any):
        self.graph, self._hash = graph, hash(graph)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Graph) and self.graph == other.graph)

    def __hash__(self) -> int:
        return self._hash


def without_source(model: Any) -> Any:
    """The same parameters without the directory they come from, or each checkpoint would have programs of its own."""
    bare = copy.copy(model)
    # Not by assignment, which Flax refuses where the model comes from outside of a transformation: this is a copy.
    vars(bare).update(source=None)
    if hasattr(model, "encoder"):
        vars(bare).update(encoder=without_source(model.encoder))
    return bare
