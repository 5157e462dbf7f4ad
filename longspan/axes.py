"""Mesh axes: which split batch rows and heads; and those that are part of types (`AxisType.Explicit`)."""

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

BATCH_AXES, HEAD_AXIS = ("dp", "fsdp"), "tp"  # the mesh axes that split rows and heads, as `parallel.mesh` has them


def axis_names(argument: str, given: Any) -> tuple[str, ...]:
    """The mesh axes that an argument names: one, several or, if it is None, no one."""
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, tuple | list) else given
    if names is None:
        return ()
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"`{argument}` must be the name of a mesh axis or several of them, got {given!r}.")
    return names


class Numbers(NamedTuple):
    """Which batch rows and heads of a whole a call has, inside of a `shard_map` that splits them."""

    rows: Any  # int32 [B]
    heads: Any  # int32 [N]
    all_rows: int  # how many there are
    all_heads: int


def numbers_of(q: Any, batch_axes: Any, head_axis: Any) -> Numbers | None:
    """The numbers of the rows and heads of queries [B, T, N, H]; None if no axis of such a name splits them here."""
    named = axis_names("batch_axes", batch_axes), axis_names("head_axis", head_axis)
    twice = sorted(name for name in {*named[0], *named[1]} if (*named[0], *named[1]).count(name) > 1)
    if twice:
        raise ValueError(f"The mesh axis {twice[0]!r} is named twice, as `batch_axes` or `head_axis`.")
    mesh = jax.sharding.get_abstract_mesh()
    here = [tuple(name for name in names if name in mesh.manual_axes and _differs(q, name)) for names in named]
    if not any(here):
        return None
    sizes = q.shape[0], q.shape[2]
    rows, heads = (_counted(names, size) for names, size in zip(here, sizes, strict=True))
    whole = [size * prod(mesh.shape[name] for name in names) for names, size in zip(here, sizes, strict=True)]
    return Numbers(rows, heads, *whole)


def _counted(names: tuple[str, ...], size: int) -> Any:
    """The numbers of `size` things of which every device of some axes has as many others."""
    first = jax.lax.axis_index(names).astype(np.int32) * np.int32(size) if names else np.int32(0)
    return first + jnp.arange(size, dtype=np.int32)


def _differs(x: Any, axis: str) -> bool:
    """Whether an array is another on every device of a manual axis; where JAX keeps no track of it, taken to be."""
    tracked = axis in jax.typeof(jax.lax.axis_index(axis)).mat.varying
    return not tracked or isinstance(x, jax.ShapeDtypeStruct) or axis in jax.typeof(x).mat.varying


def explicit_mesh(*trees: Any) -> AbstractMesh | None:
    """The mesh of an array whose type says how it lies; None if no array's does."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(trees) if isinstance(x, jax.Array))
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def on_auto_axes(run: Callable, specs: Callable, static: tuple, operands: tuple) -> Any:
    """run(*static, *operands), where XLA places what is in between, also if the mesh of an operand has explicit axes.

    Args:
        run: a function of arrays.
        specs: specs(*static, operands, results): how results are to lie on explicit axes, a tree of `PartitionSpec`.
        static: arguments that hash.
        operands: arguments that are trees of arrays.
    """
    return run(*static, *operands) if explicit_mesh(operands) is None else _on_auto_axes(run, specs, static, operands)


# Jitted, or outside of `jit` what is made on the way would lie on one device.
@partial(jit_by_function, static_argnums=(0, 1, 2))
def _on_auto_axes(run: Callable, specs: Callable, static: tuple, operands: tuple) -> Any:
    mesh: Any = explicit_mesh(operands)
    with jax.sharding.use_abstract_mesh(auto_mesh(mesh)):
        results = run(*static, *jax.tree.map(lambda x: reshard(x, P(*[None] * x.ndim)), operands))
    with jax.sharding.use_abstract_mesh(mesh):
        placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(*static, operands, results))
        return jax.tree.map(reshard, results, placed)


def auto_mesh(mesh: Any) -> Any:
    """The same devices, with Auto in the place of Explicit axes."""
    kinds = tuple(AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    return mesh.update_axis_types(dict(zip(mesh.axis_names, kinds, strict=True)))


def on_auto_mesh(tree: Any) -> Any:
    """The same arrays where they lie, of types that do not say so. Not inside of `jit`."""

    def moved(x: Any) -> Any:
        there = x.sharding if isinstance(x, jax.Array) else None
        if not isinstance(there, NamedSharding) or AxisType.Explicit not in there.mesh.axis_types:
            return x
        return jax.device_put(x, NamedSharding(auto_mesh(there.mesh), there.spec))

    return jax.tree.map(moved, tree)


def entries(x: Any) -> tuple[Any, ...]:
    """The mesh axes that each axis of an array is split over, as far as its type says."""
    known = jax.typeof(x).sharding.spec if isinstance(x, jax.Array) else ()
    return (*known, *[None] * (x.ndim - len(known)))


def once(*entries: Any) -> P:
    """A spec of such entries, in which no mesh axis comes twice: the first keeps it."""
    taken: set[str] = set()
    kept = []
    for entry in entries:
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        kept.append(tuple(name for name in names if name not in taken) or None)
        taken.update(names)
    return P(*kept)
