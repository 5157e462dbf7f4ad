"""The cache plan of a document: the keys that a cache holds after each step.

```
{length, capacity, form, why, text: [lines], pinned: [keys], ring, slot_bytes, full_bytes, steps, runs, kept}
```

`slot_bytes` are the bytes of a slot, its key and value, with the document's `sizes`; `full_bytes` those of a cache of
all positions. If `runs` is not null, every step is known: `[start, stop, evicted, moves]` are the keys [start, stop)
that are all overwritten at step `evicted`, or each `evicted` steps after its own position if `moves` is 1. Keys that
are kept to the end have `evicted` = `length`, keys that are never stored -1.

Where that would be too long, `runs` is null: `steps` lists the sampled steps, and `kept[i]` has the spans
`[start, stop, start, stop, ...]` of the keys that are kept after `steps[i]`.
"""

import json
from typing import Any

import numpy as np

from longspan import cache
from longspan.cache.picture import eviction_steps
from longspan.masks import Mask

MAX_CHARACTERS = 120_000  # of the runs, or of the kept spans, as JSON
MAX_LISTED = 1 << 22  # positions whose eviction is listed one by one
MAX_STEPS = 64  # that are sampled


def cache_plan(mask: Mask, q_len: int, kv_len: int, has_positions: bool, sizes: dict[str, Any]) -> dict[str, Any]:
    """The cache plan of a mask, or the reason why there is none."""
    if has_positions:
        return dict(error="There is no cache plan: the positions of the tokens differ from their slots.")
    if q_len != kv_len or not kv_len:
        return dict(error="There is no cache plan: a cache needs as many queries as keys, and at least one.")
    try:
        plan = cache.plan(mask, kv_len)
    except ValueError as error:
        return dict(error=f"There is no cache plan: {error}")
    call = (sizes["batch"], sizes["kv_heads"], sizes["head_dim"], np.float16)
    assert np.dtype(np.float16).itemsize == sizes["itemsize"]
    found = dict(
        length=plan.length,
        capacity=plan.capacity,
        form=plan.form,
        why=plan.why,
        text=str(plan).splitlines(),
        pinned=list(plan.pinned),
        ring=plan.ring,
        slot_bytes=plan.full_nbytes(*call) // plan.length,
        full_bytes=plan.full_nbytes(*call),
        steps=None,
        runs=None,
        kept=None,
    )
    return found | _kept(plan)


def _kept(plan: cache.CachePlan) -> dict[str, Any]:
    """The keys that are kept: as runs if these are few, else at sampled steps."""
    if plan.table is None and plan.end is None:
        return dict(runs=_steady_runs(plan))
    if plan.length > MAX_LISTED:
        reason = f"The plan lists the slot of every position, and {plan.length:,} are too many for a page."
        return dict(error=f"{reason} Explore at most {MAX_LISTED:,} positions.")
    evicted_at = eviction_steps(plan)
    runs = _runs(evicted_at)
    if len(json.dumps(runs)) <= MAX_CHARACTERS:
        return dict(runs=runs)
    steps = np.unique(np.linspace(0, plan.length - 1, MAX_STEPS).astype(int)).tolist()
    kept = [_spans(np.flatnonzero(evicted_at[: step + 1] > step)) for step in steps]
    while len(json.dumps(kept)) > MAX_CHARACTERS and len(steps) > 2:
        steps, kept = steps[::2], kept[::2]
    if len(json.dumps(kept)) > MAX_CHARACTERS:
        return dict(error="The kept keys are in too many pieces for a page. Explore fewer positions.")
    return dict(steps=steps, kept=kept)


def _steady_runs(plan: cache.CachePlan) -> list[list[int]]:
    """The runs of a plan in which every key of the ring is kept until its slot is reused."""
    pinned, runs, start = frozenset(plan.pinned), [], 0
    # The next key of a slot is `ring` positions later, unless that one is pinned or beyond the end.
    blocked = {key - plan.ring for key in pinned if key >= plan.ring > 0} - pinned
    for key in (*sorted(pinned | blocked), plan.length):
        if start < key:
            runs += _ring_runs(start, key, plan)
        if key in pinned:
            runs.append([key, key + 1, plan.length, 0])
        elif key < plan.length:
            later = range(key + 2 * plan.ring, plan.length, plan.ring)
            runs.append([key, key + 1, next((k for k in later if k not in pinned), plan.length), 0])
        start = key + 1
    return runs


def _ring_runs(start: int, stop: int, plan: cache.CachePlan) -> list[list[int]]:
    if not plan.ring:
        return [[start, stop, -1, 0]]
    last = max(start, min(stop, plan.length - plan.ring))
    found = [[start, last, plan.ring, 1], [last, stop, plan.length, 0]]
    return [run for run in found if run[0] < run[1]]


def _runs(evicted_at: np.ndarray) -> list[list[int]]:
    """Runs of keys that are evicted at the same step, or after the same number of steps; the longer of both."""
    runs, key, count = [], 0, len(evicted_at)
    same_end = _ends(evicted_at)
    moving_end = _ends(evicted_at - np.arange(count))
    while key < count:
        moves = int(moving_end[key] > same_end[key])
        stop = int(moving_end[key] if moves else same_end[key])
        runs.append([key, stop, int(evicted_at[key]) - key * moves, moves])
        key = stop
        if len(runs) * 8 > MAX_CHARACTERS:
            break
    return runs


def _ends(values: np.ndarray) -> np.ndarray:
    """For each entry, the end of the run of equal entries that it is in."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    stops = np.append(starts[1:], len(values))
    return np.repeat(stops, stops - starts)


def _spans(keys: np.ndarray) -> list[int]:
    """The spans of consecutive keys: start, stop, start, stop, and so on."""
    first = np.flatnonzero(np.diff(keys, prepend=-2) != 1)
    last = np.append(first[1:], len(keys)) - 1
    return np.stack([keys[first], keys[last] + 1], axis=1).reshape(-1).tolist() if len(keys) else []
