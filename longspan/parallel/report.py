"""What `explain` tells of devices that share a sequence."""

import math
from typing import Any

import numpy as np

from longspan.engines import Request
from longspan.parallel.call import check_call, chosen_plan
from longspan.parallel.plan import Plan, line
from longspan.parallel.specs import Axes, lettered
from longspan.parallel.traffic import Sizes, Traffic, traffic


def sending(request: Request, axes: Axes, order: str, global_capacity: int | None) -> dict[str, Any]:
    """The fields of an `Explanation` that are about devices."""
    check_call(axes, request, order)
    plan = chosen_plan(None, request, axes, order, global_capacity)
    bytes_of = traffic(plan, sizes_of(request, axes))
    lines = [_head(plan), *_lines(plan, bytes_of), *_arrays(request, axes)]
    if plan.fallback is not None:
        other = traffic(plan.fallback, sizes_of(request, axes))
        lines.append(
            f"depends on data: if {plan.beyond}, {other.forward:,} B forward, {other.backward:,} B backward"
        )
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
    return Sizes(B // axes.count(axes.batch), N // parts, kv_heads, H, Hv, request.q.dtype, devices)


def _arrays(request: Request, axes: Axes) -> list[str]:
    """What it takes to have the mask's arrays whole on every device."""
    along = [leaf for letters, leaf in lettered(request.mask) if letters[-1:] in ("T", "S")]
    along += [p for p in (request.q_positions, request.kv_positions) if p is not None]
    rows = [
        math.prod(x.shape) * np.dtype(x.dtype).itemsize // (axes.count(axes.batch) if x.shape[0] > 1 else 1)
        for x in along
    ]
    if not rows:
        return []
    share = sum(rows) * (axes.shards - 1) // axes.shards
    return [f"not counted: arrays of the mask and positions are whole on every device, {share:,} B if they come split"]


def _head(plan: Plan) -> str:
    load = "depends on data" if plan.load is None else f"{plan.load:.2f}"
    return f"{plan.shards} share the sequence, {plan.order}, {plan.rows:,} tokens each; load max/mean {load}"


def _lines(plan: Plan, bytes_of: Traffic) -> list[str]:
    most = "at most " if plan.data else ""
    lines = [
        f"{line(step)}: {most}{forward:,} B forward, {backward:,} B backward"
        for step, forward, backward in bytes_of.steps
    ]
    if plan.data:
        lines.append("depends on data: the ring goes as far as the mask's arrays say; this is the worst case")
    return lines or ["nothing"]
