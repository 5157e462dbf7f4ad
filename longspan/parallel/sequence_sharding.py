"""`SequenceSharding`: how the layers of a model share a sequence among devices."""

from dataclasses import dataclass, replace
from typing import Any

import jax

from longspan.attend import attention
from longspan.axes import BATCH_AXES, HEAD_AXIS, auto_mesh, axis_names
from longspan.parallel.call import attention as parallel_attention
from longspan.parallel.order import check_length, check_mesh, stored
from longspan.parallel.specs import Axes


@jax.tree_util.register_static
@dataclass(frozen=True)
class SequenceSharding:
    """A mesh, its axes and the order of tokens. Static, so a pytree of arrays may contain one."""

    mesh: Any = None  # None: every device has the whole sequence
    axis: str = "sp"
    order: str = "contiguous"
    batch_axes: Any = BATCH_AXES
    head_axis: str | None = HEAD_AXIS

    def __post_init__(self):
        check_mesh(self.order, self.mesh)
        # A tuple: a list does not hash.
        object.__setattr__(self, "batch_axes", axis_names("batch_axes", self.batch_axes))

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that an attention function takes for this sharding."""
        axes = dict(batch_axes=self.batch_axes, head_axis=self.head_axis)
        if self.mesh is None:
            return axes
        return dict(mesh=self.mesh, axis=self.axis, order=self.order, **axes)

    def on_auto_axes(self) -> "SequenceSharding":
        """The same sharding on a mesh whose explicit axes are automatic ones."""
        if self.mesh is None:
            return self
        return replace(self, mesh=auto_mesh(self.mesh))

    def attention(self, *operands: Any, **given: Any) -> Any:
        """`ls.attention` without a mesh, `ls.parallel.attention` with one."""
        function: Any = attention if self.mesh is None else parallel_attention
        return function(*operands, **given, **self.options)

    def positions(self, length: int) -> Any:
        """The position of the token in each slot, int32 [length]; None if slots and positions are equal."""
        if self.mesh is None or self.order == "contiguous":
            return None
        shards = Axes.of(self.mesh, self.axis, (), ()).shards
        check_length(length, shards, self.order)
        return stored(length, shards, self.order)


UNSHARDED = SequenceSharding()
