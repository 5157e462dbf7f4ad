"""A model's structure as a static argument of `jit`."""

import copy
from typing import Any


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
