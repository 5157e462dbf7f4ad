"""Meshes whose axes are part of types (`AxisType.Explicit`): computing where XLA places values by itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from longspan._programs import jit_by_function


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
