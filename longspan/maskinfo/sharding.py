"""How the arrays of a mask are sharded over a mesh."""

from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from longspan.array_types import no_type_check
from longspan.axes import BATCH_AXES
from longspan.maskinfo.bound import KVHEADS_AXIS, QHEADS_AXIS, SEQUENCE_AXIS, BoundMask

DEFAULTS = {
    "batch_axis_name": BATCH_AXES,
    "qheads_axis_name": QHEADS_AXIS,
    "kvheads_axis_name": KVHEADS_AXIS,
    "sequence_axis_name": SEQUENCE_AXIS,
}


class MaskSharding(NamedTuple):
    """One `PartitionSpec` for each array of a `MaskInfo`.

    Example:
        >>> MaskSharding(*[jax.P()] * 7).q_segment_ids
        P()
    """

    attention_mask: P | None
    q_segment_ids: P | None
    kv_segment_ids: P | None
    cu_seqlens_q: P | None
    cu_seqlens_kv: P | None
    q_positions: P | None
    kv_positions: P | None


class Shardings(BoundMask):
    """The methods that return partition specs."""

    @no_type_check
    def get_shardings(self, sequence_parallel: bool = False, *, mesh: Mesh | AbstractMesh) -> MaskSharding:
        """The partition specs of this mask's arrays on a mesh; `cu_seqlens_q` and `cu_seqlens_kv` are replicated.

        A default axis name that the mesh lacks is dropped: the dimension is replicated. A given name that the mesh
        lacks is an error. An axis that does not divide its dimension is dropped.

        The specs are for `jit`, where arrays are global. Do not use those of `sequence_parallel=True` as `in_specs` of
        a `shard_map` around `attention`: each device would attend only to its own keys, and no check can detect it.
        First gather keys, values and their ids, and give the queries their positions. Without `sequence_parallel`, a
        `MaskInfo` can be split by batch rows in `shard_map`, with `in_specs=P("dp")`.

        Args:
            sequence_parallel: whether to shard queries, ids and positions along the sequence axis.
            mesh: a `jax.sharding.Mesh`, with axes of any type.

        Example:
            >>> mesh = jax.make_mesh((4, 2), ("dp", "sp"))
            >>> info = ls.MaskInfo.from_segments(np.zeros((4, 6), int))
            >>> info.get_shardings(sequence_parallel=True, mesh=mesh).q_segment_ids
            P('dp', 'sp')
        """
        names = {field: _axes_in(field, getattr(self, field), mesh) for field in DEFAULTS}
        along = names["sequence_axis_name"] if sequence_parallel else ()
        batch, heads = names["batch_axis_name"], names["qheads_axis_name"]
        rows, queries, keys = self.shape

        def spec(*dimensions: tuple[int, tuple[str, ...]]) -> P:
            return P(*(_dividing(size, axes, mesh) for size, axes in dimensions))

        q, kv = spec((rows, batch), (queries, along)), spec((rows, batch), (keys, along))
        dense = spec((rows, batch), (self.mask.heads, heads), (queries, along), (keys, ()))
        return MaskSharding(dense, q, kv, P(), P(), q, kv)

    @staticmethod
    def get_empty_sharding() -> MaskSharding:
        """A `MaskSharding` in which every field is None.

        Example:
            >>> ls.MaskInfo.get_empty_sharding().q_segment_ids is None
            True
        """
        return MaskSharding(*[None] * len(MaskSharding._fields))


def _axes_in(field: str, name: Any, mesh: Any) -> tuple[str, ...]:
    """The mesh axes of a field, without default names that the mesh lacks."""
    names = name if isinstance(name, tuple) else (name,)
    axes = tuple(a for a in names if a is not None)
    missing = [a for a in axes if a not in mesh.axis_names]
    if missing and name != DEFAULTS[field]:
        listed = ", ".join(repr(a) for a in mesh.axis_names)
        raise ValueError(
            f"{field}={name!r} names {missing[0]!r}, which the mesh lacks: its axes are {listed}. "
            f"Rename it with `info.replace({field}=...)`, or give None to replicate."
        )
    return tuple(a for a in axes if a in mesh.axis_names)


def _dividing(size: int, axes: tuple[str, ...], mesh: Any) -> Any:
    """The axes whose product divides a dimension, as an entry of a `PartitionSpec`."""
    kept: list[str] = []
    shards = 1
    for axis in axes:
        if size % (shards * mesh.shape[axis]) == 0:
            kept.append(axis)
            shards *= mesh.shape[axis]
    if not kept:
        return None
    if len(kept) == 1:
        return kept[0]
    return tuple(kept)
