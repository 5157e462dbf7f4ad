"""Batch rows and heads may be computed apart: what `jit` over several devices is told of an engine's passes.

XLA cannot see it: the engines' loops go over rows and heads, and a foreign call is opaque. Both would be given every
row, gathered. Here a pass becomes one call whose axes have names (`array_axes` of what it reads), so that each device
runs it on its own rows and heads; gradients of what they share are summed. Inside `shard_map` all is local already,
and on one device there is nothing to say.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longspan.biases import partition_floats
from longspan.combine import Result
from longspan.engines.request import Request
from longspan.masks.pytree import axes_of


def forward_apart(run: Callable, request: Request) -> Result:
    """run(request, layout), a `Result` or (out, lse), on several devices by rows and heads."""
    if not on_several_devices():
        return Result(*run(request, request.layout))

    def told_apart(request: Request) -> Result:
        result = Result(*run(request, request.layout))
        return result if _by_row_and_head(result.residuals, request) else result._replace(residuals=None)

    given = _numbered(request)
    return _call(told_apart, (given,), axes_of(given), _axes_of_result)


def _by_row_and_head(residuals: Any, request: Request) -> bool:
    """Whether every array has all batch rows and query heads, and says so: of others devices would share a part."""
    named = zip(axes_of(residuals), jax.tree.leaves(residuals), strict=True)
    return all(
        letter in axes and x.shape[axes.index(letter)] == request.dims[letter] for axes, x in named for letter in "BN"
    )


def backward_apart(run: Callable, request: Request, result: Result, delta, dout) -> tuple[Any, ...]:
    """run(request, layout, result, delta, dout) -> (dq, dk, dv, dbias), on several devices by rows and heads."""
    if not on_several_devices():
        return tuple(run(request, request.layout, result, delta, dout))
    given = _numbered(request), result, delta, dout
    axes = [*axes_of(given[0]), *_axes_of_result(result), "BTN", "BTNH"]
    dbias = axes_of(partition_floats(request.bias)[0], request.array_axes["bias"])
    names = ["BTNH", "BSKH", "BSKH", *dbias]
    return _call(lambda request, *more: tuple(run(request, request.layout, *more)), given, axes, lambda _: names)


def _axes_of_result(result: Result) -> list[str]:
    given = (result.out, "BTNH"), (result.lse, "BTN"), (result.lse_residual, "BTN")
    return [*(names for x, names in given if x is not None), *axes_of(result.residuals)]


def on_several_devices() -> bool:
    """Whether the program being traced may run on more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    # A program may be compiled for devices that are not here.
    return max(jax.device_count(), mesh.size) > 1 and not mesh.manual_axes


def _numbered(request: Request) -> Request:
    """The request, whose layout has the numbers of all rows and heads, of which each device has its own."""
    layout = request.layout
    if layout is None or layout.rows is not None:
        return request
    rows, heads = (jnp.arange(request.dims[axis], dtype=np.int32) for axis in "BN")
    return replace(request, layout=replace(layout, rows=rows, heads=heads))


class Pass(NamedTuple):
    """A pass as a function of flat arrays; axes by letter: B rows, N heads, K kv heads, digits what `vmap` maps."""

    run: Callable
    axes: tuple[str, ...]  # of each operand; q and k are the first
    results: tuple[str, ...]


def _call(run: Callable, given: Any, axes: Sequence[str], names_of: Callable[[Any], Sequence[str]]) -> Any:
    """run(*given), told to be computed apart; `names_of` gives the axes of each array that it returns."""
    leaves, tree = jax.tree.flatten(given)
    assert len(leaves) == len(axes), "every operand has named axes"
    found = []

    def flat(*operands):
        results, tree_of_results = jax.tree.flatten(run(*tree.unflatten(operands)))
        found.append((tree_of_results, names_of(tree_of_results.unflatten(results))))
        return results

    closed = jax.make_jaxpr(flat)(*leaves)
    tree_of_results, names = found[0]
    return tree_of_results.unflatten(run_apart(Pass(flat, tuple(axes), tuple(names)), leaves, closed))


def run_apart(of: Pass, operands: Sequence[Any], closed: Any = None) -> Any:
    """The results of a pass, told to be computed apart; constants that it holds become operands of the call.

    `closed` is its jaxpr, if it was traced already.
    """
    closed = jax.make_jaxpr(of.run)(*operands) if closed is None else closed
    results = of.results
    fits = [x.ndim for x in closed.out_avals] == [len(names) for names in results]
    # What a user's function prints, or a tracer that it closes over, cannot be traced again when XLA splits the call.
    # Results of another form are an engine's mistake, which is told where they are checked.
    if not fits or closed.effects or any(isinstance(constant, Tracer) for constant in closed.consts):
        return of.run(*operands)
    count, whole = len(operands), ("." * np.ndim(constant) for constant in closed.consts)

    def run(*operands):
        return of.run(*operands[:count])

    def traced(*operands):
        return eval_jaxpr(closed.jaxpr, operands[count:], *operands[:count])

    return _batched(Pass(run, (*of.axes, *whole), results), traced)(*operands, *closed.consts)


def _batched(of: Pass, traced: Callable) -> Callable:
    """The pass as a partitioned call that knows `vmap`: mapped passes may be computed apart as well."""
    call = custom_vmap(partial(_partitioned, of, traced))

    @call.def_vmap
    def _(size: int, mapped: Sequence[bool], *operands):
        name = str(sum(letter.isdigit() for letter in of.results[0]))
        run = jax.vmap(of.run, [0 if each else None for each in mapped], axis_size=size)
        axes = tuple(name + names if each else names for each, names in zip(mapped, of.axes, strict=True))
        out = run_apart(Pass(run, axes, tuple(name + names for names in of.results)), operands)
        return out, [True] * len(out)

    return call


def _partitioned(of: Pass, traced: Callable, *operands):
    call = custom_partitioning(traced)
    # As they are now: the pass is traced once more when XLA splits it.
    config: Any = jax.config
    settings = config.jax_enable_x64, config.jax_default_matmul_precision
    call.def_partition(
        partition=partial(_partition, of, settings),
        infer_sharding_from_operands=partial(_infer, of),
        sharding_rule=partial(_sharding_rule, of),
    )
    return call(*operands)


def _sharding_rule(of: Pass, mesh, operands, results):
    """Shardy's rule: factors of rows, heads and mapped axes may be sharded, every other factor must not be."""
    sizes = _sizes(of, operands)
    heads, kv_heads = sizes["N"], sizes["K"]
    # Heads as (kv heads, group) tell more, but on some meshes half of an axis would go to each of the two.
    compound = 1 < kv_heads < heads and not mesh.empty and kv_heads % mesh.size == 0
    factor = dict(B="b", N="(k g)" if compound else "k" if heads == kv_heads else "n", K="k")
    fixed: list[str] = []

    def factors(x, names: str) -> str:
        found = []
        for size, name in zip(x.shape, names, strict=True):
            if size == 1 or not _may_split(name):
                fixed.append(f"x{len(fixed)}")
            found.append(fixed[-1] if size == 1 or not _may_split(name) else factor.get(name, f"m{name}"))
        return " ".join(found)

    left = ", ".join(factors(*each) for each in zip(operands, of.axes, strict=True))
    right = ", ".join(factors(*each) for each in zip(results, of.results, strict=True))
    options: dict[str, Any] = dict(need_replication_factors=tuple(fixed))
    return f"{left} -> {right}", options | (dict(g=heads // kv_heads) if compound else {})


def _may_split(name: str) -> bool:
    return name in "BNK" or name.isdigit()


def _sizes(of: Pass, operands) -> dict[str, int]:
    """How many rows, heads and kv heads there are."""
    sizes = dict(B=1, N=1, K=1)
    for x, names in zip(operands, of.axes, strict=True):
        for name, size in zip(names, x.shape, strict=True):
            if name in sizes:
                sizes[name] = max(sizes[name], size)
    return sizes


class Placement(NamedTuple):
    """Which mesh axes a call is split over."""

    of: dict[str, tuple[str, ...]]  # by letter
    torn: tuple[str, ...]  # those that split heads and not kv heads
    group: int  # heads that share a kv head

    def spec(self, mesh, shape, names: str) -> NamedSharding:
        parts = ((self.of.get(name) or None) if n > 1 else None for name, n in zip(names, shape, strict=True))
        return NamedSharding(mesh, P(*parts))


def _partition(of: Pass, settings, mesh, operands, results):
    """The pass of one device: its own rows and heads, with sums over devices where a gradient is shared."""
    place, (wide, precision) = _placement(of, mesh, operands), settings
    specs = [place.spec(mesh, x.shape, names) for x, names in zip(results, of.results, strict=True)]

    def lower(*local):
        with jax.enable_x64(wide), jax.default_matmul_precision(precision):
            seen = _seen_kv_heads(place, *(local[i].shape[of.axes[i].index(name)] for i, name in enumerate("NK")))
            out = of.run(*(_cut(x, names, seen) for x, names in zip(local, of.axes, strict=True)))
            parts = zip(out, of.results, specs, strict=True)
            return [_summed(place, _uncut(x, names, seen), spec.spec) for x, names, spec in parts]

    given = tuple(place.spec(mesh, x.shape, names) for x, names in zip(operands, of.axes, strict=True))
    return mesh, lower, specs, given


def _infer(of: Pass, mesh, operands, results):
    place = _placement(of, mesh, operands)
    return [place.spec(mesh, x.shape, names) for x, names in zip(results, of.results, strict=True)]


def _placement(of: Pass, mesh, operands) -> Placement:
    """What the operands' shardings say, each letter's by the first operand that has it."""
    found: dict[str, tuple[str, ...]] = {}
    for x, names in zip(operands, of.axes, strict=True):
        entries = (*x.sharding.spec, *[None] * len(names))
        for name, size, entry in zip(names, x.shape, entries, strict=False):
            if size > 1 and _may_split(name) and name not in found:
                taken = () if name == "K" else [axis for axes in found.values() for axis in axes]
                axes = tuple(axis for axis in _names(entry) if axis not in taken)
                # XLA pads what an axis does not divide, and padding would be added to shared gradients.
                found[name] = axes if size % _count(mesh, axes) == 0 else ()
    sizes = _sizes(of, operands)
    heads, group = found.get("N", ()), sizes["N"] // sizes["K"]
    kv_heads = heads if group == 1 else found.get("K", ())
    if heads[: len(kv_heads)] != kv_heads:
        kv_heads = ()
    return Placement(found | dict(N=heads, K=kv_heads), heads[len(kv_heads) :], group)


class Seen(NamedTuple):
    """The kv heads that a device's queries see, if those are not all that it has: their places, of how many."""

    at: Any
    of: int


def _seen_kv_heads(place: Placement, heads: int, kv_heads: int) -> Seen | None:
    if not place.torn or kv_heads == 1:
        return None
    # One kv head for all of a device's queries, several for whole groups of them, or else one for each query.
    step = next(n for n in (heads, place.group, 1) if place.group % n == 0 and heads % n == 0)
    first = jax.lax.axis_index(place.torn) * heads
    return Seen((first + jnp.arange(0, heads, step)) // place.group, kv_heads)


def _cut(x, names: str, seen: Seen | None):
    return x if seen is None or "K" not in names else jnp.take(x, seen.at, axis=names.index("K"))


def _uncut(x, names: str, seen: Seen | None):
    """The gradient of all kv heads of a device, 0 for those that its queries do not see."""
    if seen is None or "K" not in names:
        return x
    axis = names.index("K")
    whole = jnp.zeros((*x.shape[:axis], seen.of, *x.shape[axis + 1 :]), x.dtype)
    return whole.at[(slice(None),) * axis + (seen.at,)].add(x)


def _summed(place: Placement, x, spec):
    """A gradient summed over the devices whose rows or heads share what it is of."""
    own = {axis for entry in spec for axis in _names(entry)}
    shared = dict.fromkeys(axis for axes in place.of.values() for axis in axes if axis not in own)
    return jax.lax.psum(x, tuple(shared)) if shared else x


def _count(mesh, axes: Sequence[str]) -> int:
    return prod(mesh.shape[axis] for axis in axes)


def _names(entry) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
