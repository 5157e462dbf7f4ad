"""Mesh axes: those that split batch rows and heads, and explicit axes, which are part of array types."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from longspan.programs import jit_by_function

BATCH_AXES, HEAD_AXIS = ("dp", "fsdp"), "tp"  # the mesh axes of `parallel.mesh` that split batch rows and heads


def axis_names(argument: str, given: Any) -> tuple[str, ...]:
    """The mesh axes that an argument names: a string, a tuple or list of strings, or None for no axis."""
    if given is None:
        return ()
    names = given
    if isinstance(given, str):
        names = (given,)
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"`{argument}` must be the name of a mesh axis, a tuple or list of such names, or None, got {given!r}."
        )
    return tuple(names)


class ShardIndices(NamedTuple):
    """The global indices of the batch rows and heads of one call inside a `shard_map` that splits them."""

    rows: Any  # int32 [B]
    heads: Any  # int32 [N]
    all_rows: int  # number of batch rows over all shards
    all_heads: int


def shard_indices(q: Any, batch_axes: Any, head_axis: Any) -> ShardIndices | None:
    """The global indices of the rows and heads of `q` [B, T, N, H]; None if no named manual axis splits `q`."""
    batch_names, head_names = axis_names("batch_axes", batch_axes), axis_names("head_axis", head_axis)
    named = (*batch_names, *head_names)
    repeated = sorted(name for name in set(named) if named.count(name) > 1)
    if repeated:
        raise ValueError(f"The mesh axis {repeated[0]!r} is named twice in `batch_axes` and `head_axis`. Name it once.")
    mesh = jax.sharding.get_abstract_mesh()
    batch_names = tuple(name for name in batch_names if name in mesh.manual_axes and _varies(q, name))
    head_names = tuple(name for name in head_names if name in mesh.manual_axes and _varies(q, name))
    if not batch_names and not head_names:
        return None
    rows, heads = q.shape[0], q.shape[2]
    return ShardIndices(
        _indices_on_device(batch_names, rows),
        _indices_on_device(head_names, heads),
        rows * prod(mesh.shape[name] for name in batch_names),
        heads * prod(mesh.shape[name] for name in head_names),
    )


def _indices_on_device(names: tuple[str, ...], size: int) -> Any:
    """The global indices of this device's `size` rows (or heads); devices along the axes `names` hold `size` each."""
    first = np.int32(0)
    if names:
        first = jax.lax.axis_index(names).astype(np.int32) * np.int32(size)
    return first + jnp.arange(size, dtype=np.int32)


def _varies(x: Any, axis: str) -> bool:
    """Whether an array differs between the devices of a manual axis; True where JAX does not track this."""
    tracked = axis in jax.typeof(jax.lax.axis_index(axis)).mat.varying
    return not tracked or isinstance(x, jax.ShapeDtypeStruct) or axis in jax.typeof(x).mat.varying


def explicit_mesh(*trees: Any) -> AbstractMesh | None:
    """The mesh of an array whose type includes its sharding; None if there is no such array."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(trees) if isinstance(x, jax.Array))
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def on_auto_axes(run: Callable, specs: Callable, static: tuple, operands: tuple) -> Any:
    """Calls run(*static, *operands) on auto mesh axes, where XLA shards intermediate arrays.

    The mesh of an operand may have explicit axes: results are then resharded to `specs`.

    Args:
        run: a function of arrays.
        specs: specs(*static, operands, results): the sharding of the results on explicit axes, a tree of
            `PartitionSpec`.
        static: hashable arguments.
        operands: arguments that are trees of arrays.
    """
    if explicit_mesh(operands) is None:
        return run(*static, *operands)
    return _on_auto_axes(run, specs, static, operands)


# Jitted: outside of `jit` the intermediate arrays would be on one device.
@partial(jit_by_function, static_argnums=(0, 1, 2))
def _on_auto_axes(run: Callable, specs: Callable, static: tuple, operands: tuple) -> Any:
    mesh: Any = explicit_mesh(operands)
    with jax.sharding.use_abstract_mesh(auto_mesh(mesh)):
        results = run(*static, *jax.tree.map(lambda x: reshard(x, P(*[None] * x.ndim)), operands))
    with jax.sharding.use_abstract_mesh(mesh):
        placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(*static, operands, results))
        return jax.tree.map(reshard, results, placed)


def auto_mesh(mesh: Any) -> Any:
    """The same devices, with Auto axes instead of Explicit ones."""
    kinds = [AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types]
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=tuple(kinds))
    return mesh.update_axis_types(dict(zip(mesh.axis_names, kinds, strict=True)))


def on_auto_mesh(tree: Any) -> Any:
    """The same arrays with the same sharding, on a mesh with Auto axes instead of Explicit ones. Not inside `jit`."""

    def moved(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
            return x
        if AxisType.Explicit not in x.sharding.mesh.axis_types:
            return x
        return jax.device_put(x, NamedSharding(auto_mesh(x.sharding.mesh), x.sharding.spec))

    return jax.tree.map(moved, tree)


def spec_entries(x: Any) -> tuple[Any, ...]:
    """The mesh axes that each axis of an array is split over, if its type includes them; else None per axis."""
    known: Any = ()
    if isinstance(x, jax.Array):
        known = jax.typeof(x).sharding.spec
    return (*known, *[None] * (x.ndim - len(known)))


def unique_spec(*entries: Any) -> P:
    """A `PartitionSpec` of these entries in which each mesh axis occurs once: its first occurrence is kept."""
    taken: set[str] = set()
    kept = []
    for entry in entries:
        names = entry
        if entry is None:
            names = ()
        elif not isinstance(entry, tuple):
            names = (entry,)
        kept.append(tuple(name for name in names if name not in taken) or None)
        taken.update(names)
    return P(*kept)
