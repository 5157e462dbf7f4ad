"""Checks that the contents of a cache file are possible: that appends and rollbacks of its plan can produce them."""

from typing import Any

import numpy as np

from longspan.array_types import FAR
from longspan.cache.plan import CachePlan
from longspan.cache.slots import SlotAllocation, slot_of


def check_contents(path: Any, plan: CachePlan, tensors: dict[str, np.ndarray]) -> None:
    """Refuses lengths, positions and flags that no cache of the plan can have."""
    if (tensors["overflowed"].view(np.uint8) > 1).any():
        _refuse(path, plan, "`overflowed` has bytes other than 0 and 1")
    for row, (length, furthest) in enumerate(zip(tensors["length"], tensors["furthest"], strict=True)):
        length, furthest = int(length), int(furthest)
        _check_lengths(path, plan, row, length, furthest)
        _check_positions(path, plan, row, length, furthest, tensors["positions"][row])


def _check_lengths(path: Any, plan: CachePlan, row: int, length: int, furthest: int) -> None:
    if not 0 <= length <= plan.length:
        _refuse(path, plan, f"`length` of row {row} is {length}, not between 0 and {plan.length}")
    max_furthest = plan.length
    if plan.evicts:
        max_furthest = min(plan.length, length + plan.slack)
    if not length <= furthest <= max_furthest:
        limits = f"the length {length} of the row and {max_furthest}"
        _refuse(path, plan, f"`furthest` of row {row} is {furthest}, not between {limits}")
    if plan.tied is not None and length < plan.length and plan.outline.at(plan.tied, np.array([length])).any():
        pair = f"positions {length - 1} and {length} must be appended together"
        _refuse(path, plan, f"`length` of row {row} is {length}, but {pair}")


def _check_positions(path: Any, plan: CachePlan, row: int, length: int, furthest: int, stored: np.ndarray) -> None:
    slots = SlotAllocation(plan.capacity, plan.ring, plan.pinned, plan.table)
    stored = stored.astype(np.int64)
    used = np.flatnonzero(stored != FAR)
    outside = used[(stored[used] < 0) | (stored[used] >= length)]
    if outside.size:
        slot = outside[0]
        _refuse(
            path, plan, f"`positions` of row {row} has {stored[slot]} in slot {slot}, but the row has {length} tokens"
        )
    misplaced = used[slot_of(slots, stored[used]) != used]
    if misplaced.size:
        slot = misplaced[0]
        _refuse(
            path, plan, f"`positions` of row {row} has {stored[slot]} in slot {slot}, which is reserved for other keys"
        )
    needed = _needed(plan, length, furthest)
    missing = needed[stored[slot_of(slots, needed)] != needed]
    if missing.size:
        _refuse(path, plan, f"`positions` of row {row} lacks position {missing[0]}, which later queries need")


def _needed(plan: CachePlan, length: int, furthest: int) -> np.ndarray:
    """The positions that a row of this length must hold: no key up to `furthest` has overwritten them."""
    step = furthest - 1
    if plan.steady:
        newest = np.arange(max(furthest - plan.ring, 0), length, dtype=np.int64)
        return np.union1d(newest, np.array([key for key in plan.pinned if key < length], np.int64))
    outline, end = plan.outline, plan.end
    key = outline.keys
    candidates = [key[key < length]]
    # The outline omits the keys of cuts. Of those, moving keys can be needed only if they are recent. Keys with a fixed
    # end are listed one by one: there are no more of them than slots, or none of them is alive.
    if outline.cuts:
        candidates.append(np.arange(max(step - outline.reach, 0), length, dtype=np.int64))
    for cut, (at, _) in zip(outline.cuts, outline.before_cuts(), strict=True):
        period = slice(at - outline.period, at)
        if end is not None and (end[period] > key[period] + outline.reach).any():
            candidates.append(np.arange(cut.start, min(cut.start + cut.count, length), dtype=np.int64))
    key = np.unique(np.concatenate(candidates))
    stops = outline.ends_at(end, key).astype(np.int64)
    return key[(stops >= key) & (stops >= step)]


def _refuse(path: Any, plan: CachePlan, fault: str) -> None:
    raise ValueError(f"{path} is damaged: {fault}. No cache of {plan!r} can hold this. Save the cache again.")
