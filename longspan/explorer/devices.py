"""The device plans of a document: who holds, computes and receives which tokens.

```
{"2": {"contiguous": plan, "zigzag": plan}, "4": ..., "8": ..., "16": ...}
plan = {error} or {text: [lines], rows, load, data, sent_rows, sent_rows_backward, bound_rows, gather_rows,
                   steps: [{kind, rows, text}], devices: [device, ...]}
device = {device, holds: [[start, stop], ...], pairs, load, received,
          receives: [[kind, start, stop, [sources], [steps]], ...], others: [[step, rows, [sources]], ...]}
```

`pairs` and `load` are null if they depend on the mask's arrays. `received` counts the received tokens; `receives` lists
at most MAX_SPANS spans of them. `others` are rows whose tokens are known only at run time.
"""

from typing import Any

from longspan import parallel
from longspan.masks import Mask
from longspan.parallel.order import ORDERS
from longspan.parallel.picture import device_tokens
from longspan.parallel.plan import ParallelPlan, describe

DEVICES = (2, 4, 8, 16)
MAX_SPANS = 12  # of received tokens that are listed for one device


def device_plans(mask: Mask, q_len: int, kv_len: int, has_positions: bool) -> dict[str, Any]:
    """The plans for every number of devices and both orders, or the reason why there is none."""
    if has_positions:
        return dict(error="There are no device plans: the positions of the tokens differ from their slots.")
    if q_len != kv_len:
        return dict(error="There are no device plans: devices share a sequence with as many queries as keys.")
    return {str(count): {order: _plan(mask, q_len, count, order) for order in ORDERS} for count in DEVICES}


def _plan(mask: Mask, length: int, devices: int, order: Any) -> dict[str, Any]:
    try:
        plan = parallel.plan(mask, length, devices, order)
    except ValueError as error:
        return dict(error=str(error))
    return dict(
        text=str(plan).splitlines(),
        rows=plan.rows,
        load=plan.load,
        data=plan.data,
        sent_rows=plan.sent_rows,
        sent_rows_backward=plan.sent_rows_backward,
        bound_rows=plan.bound_rows,
        gather_rows=plan.gather_rows,
        steps=[dict(kind=step.kind, rows=step.rows, text=describe(step)) for step in plan.steps],
        devices=[_device(plan, device) for device in range(devices)],
    )


def _device(plan: ParallelPlan, device: int) -> dict[str, Any]:
    tokens = device_tokens(plan, device)
    pairs = load = None
    if plan.pairs is not None:
        pairs, mean = plan.pairs[device], sum(plan.pairs) / plan.shards
        load = 1.0 if not mean else round(pairs / mean, 4)
    return dict(
        device=device,
        holds=[list(run) for run in tokens.runs if run[0] < run[1]],
        pairs=pairs,
        load=load,
        received=sum(piece.stop - piece.start for piece in tokens.pieces),
        receives=[
            [piece.kind, piece.start, piece.stop, list(piece.sources), list(piece.steps)]
            for piece in tokens.pieces[:MAX_SPANS]
        ],
        others=[[other.step, other.rows, list(other.sources)] for other in tokens.others],
    )
