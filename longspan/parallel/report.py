"""What `explain` tells of devices that share a sequence."""

import math
from typing import Any

import jax
import numpy as np

from longspan.engines import Request
from longspan.parallel.arrays import lettered
from longspan.parallel.call import check_call, chosen_plan
from longspan.parallel.plan import ParallelPlan, line
from longspan.parallel.specs import Axes
from longspan.parallel.traffic import Sizes, Traffic, traffic


def sending(request: Request, axes: Axes, order: str, global_capacity: int | None) -> dict[str, Any]:
    """The fields of an `Explanation` that are about devices."""
    check_call(axes, request, order)
    plan = chosen_plan(None, request, axes, order, global_capacity)
    bytes_of = traffic(plan, sizes_of(request, axes))
    lines = [_head(plan), *_lines(plan, bytes_of), *_arrays(request, axes, bytes_of)]
    lines += _not_counted(request, axes, plan)
    if plan.fallback is not None:
        other = traffic(plan.fallback, sizes_of(request, axes))
        lines.append(f"depends on data: if {plan.beyond}, {other.forward:,} B forward, {other.backward:,} B backward")
    return dict(
        sent_bytes=bytes_of.forward,
        sent_bytes_backward=bytes_of.backward,
        bound_bytes=bytes_of.bound,
        gather_bytes=bytes_of.gather,
        sending=tuple(lines),
    )


def sizes_of(request: Request, axes: Axes) -> Sizes:
    """What one device holds of a call."""
    B, _, _, N, K, H, Hv = request.dims.values()
    parts = axes.count(axes.heads)
    kv_heads = K * axes.repeats(K) // parts
    devices = axes.count(tuple(axes.mesh.axis_names))
    arrays = _by_token(request, axes)
    return Sizes(B // axes.count(axes.batch), N // parts, kv_heads, H, Hv, request.q.dtype, devices, arrays)


def _arrays(request: Request, axes: Axes, bytes_of: Traffic) -> list[str]:
    """What the mask's arrays and positions take, besides the keys."""
    sent = int(bytes_of.arrays)
    lines = [f"ids, flags and positions of tokens that come: {sent:,} B forward"] if sent else []
    pairs = [x for letters, x in lettered(_known(request), request.dims["T"]) if letters[-1:] != "t" and x.ndim > 1]
    size = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in pairs)
    if size:
        share = size * (axes.shards - 1) // axes.shards
        lines.append(f"not counted: the mask's tables are whole on every device, {share:,} B if they come split")
    return lines


def _not_counted(request: Request, axes: Axes, plan: ParallelPlan) -> list[str]:
    """What XLA sends besides, before and after what devices run together."""
    T, repeats = request.dims["T"], axes.repeats(request.dims["K"])
    lines = []
    if plan.rows * plan.shards != T:
        lines.append(
            f"not counted: arrays of {T} tokens cannot be split over {plan.shards} devices, so the output is whole on "
            "each of them. `ls.parallel.shard_batch` pads the arrays, and the output then stays split"
        )
    if repeats > 1:
        lines.append(f"not counted: the sum of gradients of key/value heads, which are repeated {repeats} times")
    learnt = [name for name, given in (("sinks", request.sinks), ("bias", request.bias)) if given is not None]
    if learnt:
        lines.append(f"not counted: the sum of gradients of {' and '.join(learnt)}, where they are asked for")
    return lines


def _known(request: Request) -> Any:
    T = request.dims["T"]
    return request.mask, *(_rows(p, T) for p in (request.q_positions, request.kv_positions))


def _rows(positions: Any, length: int) -> Any:
    if positions is None:
        return None
    return jax.ShapeDtypeStruct((math.prod(positions.shape) // length, length), positions.dtype)


def _by_token(request: Request, axes: Axes) -> tuple[tuple[int, int], ...]:
    """(entries per token on one device, bytes of one) of each array that is laid out as the tokens are."""
    T, found = request.dims["T"], []
    for letters, x in lettered(_known(request), T):
        if letters[-1:] == "t":
            parts = [axes.count(names or ()) for names in axes.spec(letters, x.shape)[:-1]]
            found.append((math.prod(x.shape[:-1]) // math.prod(parts), np.dtype(x.dtype).itemsize))
    return tuple(found)


def _head(plan: ParallelPlan) -> str:
    load = "depends on data" if plan.load is None else f"{plan.load:.2f}"
    return f"{plan.shards} share the sequence, {plan.order}, {plan.rows:,} tokens each; load max/mean {load}"


def _lines(plan: ParallelPlan, bytes_of: Traffic) -> list[str]:
    most = "at most " if plan.data else ""
    lines = [
        f"{line(step)}: {most}{int(forward):,} B forward, {int(backward):,} B backward"
        for step, forward, backward in bytes_of.steps
    ]
    if plan.data:
        lines.append("depends on data: the ring goes as far as the mask's arrays say; this is the worst case")
    return lines or ["nothing"]
