"""`SequenceSharding`: which devices share a sequence, as a model's layers are told."""

from dataclasses import dataclass, replace
from typing import Any

import jax

from longspan.attend import attention
from longspan.axes import auto_mesh
from longspan.parallel.call import attention as shared_attention
from longspan.parallel.order import check_length, check_mesh, stored
from longspan.parallel.specs import Axes


@jax.tree_util.register_static
@dataclass(frozen=True)
class SequenceSharding:
    """A mesh, its axis and the order of tokens: part of what is compiled, so it may go where arrays go."""

    mesh: Any = None  # None: one device has it all
    axis: str = "sp"
    order: str = "contiguous"

    def __post_init__(self):
        check_mesh(self.order, self.mesh)

    @property
    def options(self) -> dict[str, Any]:
        """What a call of attention is told."""
        return {} if self.mesh is None else dict(mesh=self.mesh, axis=self.axis, order=self.order)

    def on_auto_axes(self) -> "SequenceSharding":
        """The same, for layers that are computed where types do not say how arrays lie."""
        return self if self.mesh is None else replace(self, mesh=auto_mesh(self.mesh))

    def attention(self, *operands: Any, **given: Any) -> Any:
        """`ls.attention`, or `ls.parallel.attention` with a mesh."""
        call: Any = attention if self.mesh is None else shared_attention
        return call(*operands, **given, **self.options)

    def tokens(self, length: int) -> Any:
        """Which token lies in each slot, int32 [length]; None where it is the slot's own."""
        if self.mesh is None or self.order == "contiguous":
            return None
        shards = Axes.of(self.mesh, self.axis, (), ()).shards
        check_length(length, shards, self.order)
        return stored(length, shards, self.order)


UNSHARDED = SequenceSharding()
