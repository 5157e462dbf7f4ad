"""The part of `explain` about devices that share a sequence."""

import math
from typing import Any

import jax
import numpy as np

from longspan.engines import Request
from longspan.parallel.arrays import lettered
from longspan.parallel.call import check_call, chosen_plan
from longspan.parallel.plan import ParallelPlan, describe
from longspan.parallel.specs import Axes
from longspan.parallel.traffic import DeviceSizes, Traffic, traffic


def sending(request: Request, axes: Axes, order: str, global_capacity: int | None) -> dict[str, Any]:
    """The fields of an `Explanation` that are about devices."""
    check_call(axes, request, order)
    plan = chosen_plan(None, request, axes, order, global_capacity)
    bytes_of = traffic(plan, sizes_of(request, axes))
    lines = [_head(plan), *_transfers(plan, bytes_of), *_arrays(request, axes, bytes_of)]
    lines += _not_counted(request, axes, plan)
    if plan.fallback is not None:
        other = traffic(plan.fallback, sizes_of(request, axes))
        lines.append(f"if {plan.beyond}: {other.forward:,} B forward, {other.backward:,} B backward")
    return dict(
        sent_bytes=bytes_of.forward,
        sent_bytes_backward=bytes_of.backward,
        sent_is_worst_case=plan.data,
        bound_bytes=bytes_of.bound,
        bound_is_worst_case=plan.bound_is_worst_case,
        gather_bytes=bytes_of.gather,
        sending=tuple(lines),
    )


def sizes_of(request: Request, axes: Axes) -> DeviceSizes:
    """The sizes of a call's arrays on one device."""
    B, _, _, N, K, H, Hv = request.dims.values()
    parts = axes.count(axes.heads)
    kv_heads = K * axes.repeats(K) // parts
    devices = axes.count(tuple(axes.mesh.axis_names))
    arrays = _by_token(request, axes)
    return DeviceSizes(B // axes.count(axes.batch), N // parts, kv_heads, H, Hv, request.q.dtype, devices, arrays)


def _arrays(request: Request, axes: Axes, bytes_of: Traffic) -> list[str]:
    """The bytes of the mask's arrays and of positions."""
    sent = int(bytes_of.arrays)
    lines = []
    if sent:
        lines.append(f"ids, flags and positions of the received tokens: {sent:,} B forward")
    pairs = [x for letters, x in lettered(_known(request), request.dims["T"]) if letters[-1:] != "t" and x.ndim > 1]
    size = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in pairs)
    if size:
        share = size * (axes.shards - 1) // axes.shards
        lines.append(
            f"not counted: the mask's tables are replicated, which sends {share:,} B if they are sharded before the "
            "call"
        )
    return lines


def _not_counted(request: Request, axes: Axes, plan: ParallelPlan) -> list[str]:
    """The bytes that XLA sends before and after the program, in words."""
    T, repeats = request.dims["T"], axes.repeats(request.dims["K"])
    lines = []
    if plan.rows * plan.shards != T:
        lines.append(
            f"not counted: replicating the output, because arrays of {T} tokens cannot be split evenly over "
            f"{plan.shards} devices. If you pad the arrays with `ls.parallel.shard_batch`, the output stays sharded"
        )
    if repeats > 1:
        lines.append(f"not counted: summing the gradients of key/value heads, which are repeated {repeats} times")
    trainable = [name for name, given in (("sinks", request.sinks), ("bias", request.bias)) if given is not None]
    if trainable:
        lines.append(f"not counted: summing the gradients of {' and '.join(trainable)}, if they are computed")
    return lines


def _known(request: Request) -> Any:
    T = request.dims["T"]
    return request.mask, _rows(request.q_positions, T), _rows(request.kv_positions, T)


def _rows(positions: Any, length: int) -> Any:
    if positions is None:
        return None
    return jax.ShapeDtypeStruct((math.prod(positions.shape) // length, length), positions.dtype)


def _by_token(request: Request, axes: Axes) -> tuple[tuple[int, int], ...]:
    """(entries per token on one device, bytes per entry) of each array that is sharded like the tokens."""
    T, found = request.dims["T"], []
    for letters, x in lettered(_known(request), T):
        if letters[-1:] == "t":
            parts = [axes.count(names or ()) for names in axes.spec(letters, x.shape)[:-1]]
            found.append((math.prod(x.shape[:-1]) // math.prod(parts), np.dtype(x.dtype).itemsize))
    return tuple(found)


def _head(plan: ParallelPlan) -> str:
    load = "depends on the mask's arrays or the given positions" if plan.load is None else f"{plan.load:.2f}"
    return f"{plan.shards} share the sequence, {plan.order}, {plan.rows:,} tokens each; load max/mean {load}"


def _transfers(plan: ParallelPlan, bytes_of: Traffic) -> list[str]:
    at_most = "at most " if plan.data else ""
    lines = []
    for step, forward, backward in bytes_of.steps:
        lines.append(f"{describe(step)}: {at_most}{int(forward):,} B forward, {int(backward):,} B backward")
    return lines or ["nothing"]
