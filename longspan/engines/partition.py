"""Splits an engine's passes by batch rows and heads over the devices of a program that `jit` compiles.

XLA cannot do this itself: the loops of an engine run over rows and heads, and a foreign call is opaque, so XLA would
gather all rows on every device. Here a pass becomes one `custom_partitioning` call whose axes have names (`array_axes`
of its operands). Each device runs it on its own rows and heads, and gradients of shared operands are summed. Inside
`shard_map`, and on one device, the pass is called directly.
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


def partition_forward(run: Callable, request: Request) -> Result:
    """run(request, layout), a `Result` or (out, lse), split over devices by rows and heads."""
    if not may_run_on_several_devices():
        return Result(*run(request, request.layout))

    def run_with_kept_residuals(request: Request) -> Result:
        result = Result(*run(request, request.layout))
        if not _has_rows_and_heads(result.residuals, request):
            result = result._replace(residuals=None)
        return result

    request = _with_row_and_head_numbers(request)
    return _partition(run_with_kept_residuals, (request,), axes_of(request), _axes_of_result)


def _has_rows_and_heads(residuals: Any, request: Request) -> bool:
    """Whether every array names axes of all batch rows and query heads: devices would share parts of other arrays."""
    for axes, x in zip(axes_of(residuals), jax.tree.leaves(residuals), strict=True):
        for letter in "BN":
            if letter not in axes or x.shape[axes.index(letter)] != request.dims[letter]:
                return False
    return True


def partition_backward(run: Callable, request: Request, result: Result, delta, dout) -> tuple[Any, ...]:
    """run(request, layout, result, delta, dout) -> (dq, dk, dv, dbias), split over devices by rows and heads."""
    if not may_run_on_several_devices():
        return tuple(run(request, request.layout, result, delta, dout))

    def run_as_tuple(request: Request, *more):
        return tuple(run(request, request.layout, *more))

    request = _with_row_and_head_numbers(request)
    axes = [*axes_of(request), *_axes_of_result(result), "BTN", "BTNH"]
    dbias = axes_of(partition_floats(request.bias)[0], request.array_axes["bias"])
    result_axes = ["BTNH", "BSKH", "BSKH", *dbias]
    return _partition(run_as_tuple, (request, result, delta, dout), axes, lambda _: result_axes)


def _axes_of_result(result: Result) -> list[str]:
    given = (result.out, "BTNH"), (result.lse, "BTN"), (result.lse_residual, "BTN")
    return [*(names for x, names in given if x is not None), *axes_of(result.residuals)]


def may_run_on_several_devices() -> bool:
    """Whether the program being traced may run on more than one device, outside of `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    # The mesh counts too: a program may be compiled for devices that this process does not have.
    return max(jax.device_count(), mesh.size) > 1 and not mesh.manual_axes


def _with_row_and_head_numbers(request: Request) -> Request:
    """The request with the indices of all rows and heads in its layout; each device receives those of its own."""
    layout = request.layout
    if layout is None or layout.rows is not None:
        return request
    rows = jnp.arange(request.dims["B"], dtype=np.int32)
    heads = jnp.arange(request.dims["N"], dtype=np.int32)
    return replace(request, layout=replace(layout, rows=rows, heads=heads))


class _FlatPass(NamedTuple):
    """A pass as a function of flat arrays. Each axis has a letter: B rows, N heads, K kv heads, a digit per `vmap`."""

    run: Callable
    axes: tuple[str, ...]  # of each operand; q and k are the first two
    results: tuple[str, ...]  # of each result


def _partition(run: Callable, given: Any, axes: Sequence[str], result_axes: Callable[[Any], Sequence[str]]) -> Any:
    """run(*given) as a partitioned call; `axes` are those of the operands, `result_axes` maps the result to its own."""
    leaves, tree = jax.tree.flatten(given)
    assert len(leaves) == len(axes), "every operand has named axes"
    traced_results = []

    def flat(*operands):
        results, result_tree = jax.tree.flatten(run(*tree.unflatten(operands)))
        traced_results.append((result_tree, result_axes(result_tree.unflatten(results))))
        return results

    jaxpr = jax.make_jaxpr(flat)(*leaves)
    result_tree, names = traced_results[0]
    return result_tree.unflatten(_partition_flat(_FlatPass(flat, tuple(axes), tuple(names)), leaves, jaxpr))


def _partition_flat(of: _FlatPass, operands: Sequence[Any], jaxpr: Any = None) -> Any:
    """The results of a pass as a partitioned call. Arrays that the function closes over become operands of the call.

    `jaxpr` is the closed jaxpr of the pass, if it was traced before.
    """
    if jaxpr is None:
        jaxpr = jax.make_jaxpr(of.run)(*operands)
    fits = [x.ndim for x in jaxpr.out_avals] == [len(names) for names in of.results]
    # XLA traces the function again when it splits the call. Effects (a user's `jax.debug.print`) and tracers that the
    # function closes over do not survive that. Results of a wrong rank are an engine's mistake, reported by the caller.
    if not fits or jaxpr.effects or any(isinstance(constant, Tracer) for constant in jaxpr.consts):
        return of.run(*operands)
    count = len(operands)

    def run(*operands):
        return of.run(*operands[:count])

    def evaluate(*operands):
        return eval_jaxpr(jaxpr.jaxpr, operands[count:], *operands[:count])

    constant_axes = ["." * np.ndim(constant) for constant in jaxpr.consts]
    return _batched(_FlatPass(run, (*of.axes, *constant_axes), of.results), evaluate)(*operands, *jaxpr.consts)


def _batched(of: _FlatPass, evaluate: Callable) -> Callable:
    """The pass as a partitioned call with a rule for `vmap`, under which it is partitioned too."""
    call = custom_vmap(partial(_partitioned_call, of, evaluate))

    @call.def_vmap
    def _(size: int, mapped: Sequence[bool], *operands):
        digit = str(sum(letter.isdigit() for letter in of.results[0]))
        run = jax.vmap(of.run, [0 if each else None for each in mapped], axis_size=size)
        axes = tuple(digit * each + names for each, names in zip(mapped, of.axes, strict=True))
        out = _partition_flat(_FlatPass(run, axes, tuple(digit + names for names in of.results)), operands)
        return out, [True] * len(out)

    return call


def _partitioned_call(of: _FlatPass, evaluate: Callable, *operands):
    call = custom_partitioning(evaluate)
    # XLA traces the pass again when it splits the call, perhaps under other settings: these are restored then.
    config: Any = jax.config
    settings = config.jax_enable_x64, config.jax_default_matmul_precision
    call.def_partition(
        partition=partial(_lower_for_device, of, settings),
        infer_sharding_from_operands=partial(_infer_shardings, of),
        sharding_rule=partial(_sharding_rule, of),
    )
    return call(*operands)


def _sharding_rule(of: _FlatPass, mesh, operands, results):
    """Shardy's rule: the factors of rows, heads and mapped axes may be sharded; every other factor is replicated."""
    sizes = _axis_sizes(of, operands)
    heads, kv_heads = sizes["N"], sizes["K"]
    # The compound factor (kv heads, group) describes heads best, but on some meshes Shardy gives half of a mesh axis to
    # each of the two.
    compound = 1 < kv_heads < heads and not mesh.empty and kv_heads % mesh.size == 0
    factor = dict(B="b", N="n", K="k")
    if compound:
        factor["N"] = "(k g)"
    elif heads == kv_heads:
        factor["N"] = "k"
    replicated: list[str] = []

    def factors(x, names: str) -> str:
        found = []
        for size, name in zip(x.shape, names, strict=True):
            if size > 1 and _may_split(name):
                found.append(factor.get(name, f"m{name}"))
            else:
                replicated.append(f"x{len(replicated)}")
                found.append(replicated[-1])
        return " ".join(found)

    left = ", ".join(factors(*each) for each in zip(operands, of.axes, strict=True))
    right = ", ".join(factors(*each) for each in zip(results, of.results, strict=True))
    options: dict[str, Any] = dict(need_replication_factors=tuple(replicated))
    if compound:
        options["g"] = heads // kv_heads
    return f"{left} -> {right}", options


def _may_split(name: str) -> bool:
    return name in "BNK" or name.isdigit()


def _axis_sizes(of: _FlatPass, operands) -> dict[str, int]:
    """The numbers of rows, heads and kv heads."""
    sizes = dict(B=1, N=1, K=1)
    for x, names in zip(operands, of.axes, strict=True):
        for name, size in zip(names, x.shape, strict=True):
            if name in sizes:
                sizes[name] = max(sizes[name], size)
    return sizes


class _Placement(NamedTuple):
    """The mesh axes that a call is split over."""

    mesh_axes: dict[str, tuple[str, ...]]  # by letter
    heads_only: tuple[str, ...]  # mesh axes that split query heads, but not kv heads
    group: int  # query heads that share a kv head

    def sharding(self, mesh, shape, names: str) -> NamedSharding:
        entries = []
        for name, size in zip(names, shape, strict=True):
            axes = self.mesh_axes.get(name, ())
            entries.append(axes if axes and size > 1 else None)
        return NamedSharding(mesh, P(*entries))


def _lower_for_device(of: _FlatPass, settings, mesh, operands, results):
    """The pass of one device: its own rows and heads, with sums over devices where they share an operand."""
    placement, (x64, precision) = _placement(of, mesh, operands), settings
    shardings = [placement.sharding(mesh, x.shape, names) for x, names in zip(results, of.results, strict=True)]

    def lower(*local):
        with jax.enable_x64(x64), jax.default_matmul_precision(precision):
            heads = local[0].shape[of.axes[0].index("N")]
            kv_heads = local[1].shape[of.axes[1].index("K")]
            used = _used_kv_heads(placement, heads, kv_heads)
            out = of.run(*(_take_kv_heads(x, names, used) for x, names in zip(local, of.axes, strict=True)))
            out = [_put_back_kv_heads(x, names, used) for x, names in zip(out, of.results, strict=True)]
            return [_sum_shared(placement, x, sharding.spec) for x, sharding in zip(out, shardings, strict=True)]

    given = tuple(placement.sharding(mesh, x.shape, names) for x, names in zip(operands, of.axes, strict=True))
    return mesh, lower, shardings, given


def _infer_shardings(of: _FlatPass, mesh, operands, results):
    placement = _placement(of, mesh, operands)
    return [placement.sharding(mesh, x.shape, names) for x, names in zip(results, of.results, strict=True)]


def _placement(of: _FlatPass, mesh, operands) -> _Placement:
    """The mesh axes of each letter, from the sharding of the first operand that has it."""
    found: dict[str, tuple[str, ...]] = {}
    for x, names in zip(operands, of.axes, strict=True):
        entries = (*x.sharding.spec, *[None] * len(names))
        for name, size, entry in zip(names, x.shape, entries, strict=False):
            if size > 1 and _may_split(name) and name not in found:
                axes = _mesh_axes(entry)
                if name != "K":  # kv heads lie on the mesh axes of the query heads
                    taken = {axis for others in found.values() for axis in others}
                    axes = tuple(axis for axis in axes if axis not in taken)
                # XLA pads a size that the axes do not divide, and the padding would be added to shared gradients.
                found[name] = axes if size % _device_count(mesh, axes) == 0 else ()
    sizes = _axis_sizes(of, operands)
    heads, group = found.get("N", ()), sizes["N"] // sizes["K"]
    kv_heads = heads if group == 1 else found.get("K", ())
    if heads[: len(kv_heads)] != kv_heads:
        kv_heads = ()
    return _Placement(found | dict(N=heads, K=kv_heads), heads[len(kv_heads) :], group)


class _UsedKvHeads(NamedTuple):
    """The kv heads that the query heads of a device attend with, where the device holds more of them."""

    indices: Any
    total: int


def _used_kv_heads(placement: _Placement, heads: int, kv_heads: int) -> _UsedKvHeads | None:
    if not placement.heads_only or kv_heads == 1:
        return None
    # One kv head for all query heads of a device, one for each whole group, or one for each query head.
    step = next(n for n in (heads, placement.group, 1) if placement.group % n == 0 and heads % n == 0)
    first = jax.lax.axis_index(placement.heads_only) * heads
    return _UsedKvHeads((first + jnp.arange(0, heads, step)) // placement.group, kv_heads)


def _take_kv_heads(x, names: str, used: _UsedKvHeads | None):
    if used is None or "K" not in names:
        return x
    return jnp.take(x, used.indices, axis=names.index("K"))


def _put_back_kv_heads(x, names: str, used: _UsedKvHeads | None):
    """The gradient of all kv heads of a device, 0 for those that its query heads do not use."""
    if used is None or "K" not in names:
        return x
    axis = names.index("K")
    whole = jnp.zeros((*x.shape[:axis], used.total, *x.shape[axis + 1 :]), x.dtype)
    return whole.at[(slice(None),) * axis + (used.indices,)].add(x)


def _sum_shared(placement: _Placement, x, spec):
    """A gradient, summed over the devices that share its operand."""
    own = {axis for entry in spec for axis in _mesh_axes(entry)}
    shared = dict.fromkeys(axis for axes in placement.mesh_axes.values() for axis in axes if axis not in own)
    if not shared:
        return x
    return jax.lax.psum(x, tuple(shared))


def _device_count(mesh, axes: Sequence[str]) -> int:
    return prod(mesh.shape[axis] for axis in axes)


def _mesh_axes(entry) -> tuple[str, ...]:
    """The mesh axes of one entry of a `PartitionSpec`."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
