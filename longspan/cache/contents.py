"""What a cache of a plan can hold: files are checked against it, so that none is attended to that no append left."""

from typing import Any

import numpy as np

from longspan.array_types import FAR
from longspan.cache.plan import CachePlan
from longspan.cache.slots import Slots, slot_of


def check_contents(path: Any, plan: CachePlan, tensors: dict[str, np.ndarray]) -> None:
    """Lengths, positions and flags are those that appends and rollbacks of a cache of the plan leave."""
    if (tensors["overflowed"].view(np.uint8) > 1).any():
        _refuse(path, plan, "`overflowed` has bytes other than 0 and 1")
    for row, (length, furthest) in enumerate(zip(tensors["length"], tensors["furthest"], strict=True)):
        length, furthest = int(length), int(furthest)
        _check_lengths(path, plan, row, length, furthest)
        _check_positions(path, plan, row, length, furthest, tensors["positions"][row])


def _check_lengths(path: Any, plan: CachePlan, row: int, length: int, furthest: int) -> None:
    if not 0 <= length <= plan.length:
        _refuse(path, plan, f"`length` of row {row} is {length}, not between 0 and {plan.length}")
    most = min(plan.length, length + plan.slack) if plan.evicts else plan.length
    if not length <= furthest <= most:
        _refuse(path, plan, f"`furthest` of row {row} is {furthest}, not between its length {length} and {most}")
    if plan.tied is not None and length < plan.length and plan.outline.at(plan.tied, np.array([length])).any():
        _refuse(path, plan, f"`length` of row {row} is {length}, but positions {length - 1} and {length} come together")


def _check_positions(path: Any, plan: CachePlan, row: int, length: int, furthest: int, held: np.ndarray) -> None:
    slots, held = Slots(plan.capacity, plan.ring, plan.pinned, plan.table), held.astype(np.int64)
    used = np.flatnonzero(held != FAR)
    outside = used[(held[used] < 0) | (held[used] >= length)]
    if outside.size:
        slot = outside[0]
        _refuse(path, plan, f"`positions` of row {row} has {held[slot]} in slot {slot}, and its length is {length}")
    elsewhere = used[slot_of(slots, held[used]) != used]
    if elsewhere.size:
        slot = elsewhere[0]
        _refuse(path, plan, f"`positions` of row {row} has {held[slot]} in slot {slot}, which is not that key's slot")
    needed = _needed(plan, length, furthest)
    missing = needed[held[slot_of(slots, needed)] != needed]
    if missing.size:
        _refuse(path, plan, f"`positions` of row {row} lacks position {missing[0]}, which it still keeps at {length}")


def _needed(plan: CachePlan, length: int, furthest: int) -> np.ndarray:
    """The positions that a row of this length holds for certain: no key up to `furthest` has taken their slots."""
    now = furthest - 1
    if plan.steady:
        newest = np.arange(max(furthest - plan.ring, 0), length, dtype=np.int64)
        return np.union1d(newest, np.array([key for key in plan.pinned if key < length], np.int64))
    outline, end = plan.outline, plan.end
    key = outline.keys
    # Keys in cuts: those that move are needed if they are recent, and of those whose end is fixed there are no more
    # than slots, or they are dead.
    recent = [np.arange(max(now - outline.reach, 0), length, dtype=np.int64)] if outline.cuts else []
    fixed = [
        np.arange(cut.start, min(cut.start + cut.count, length), dtype=np.int64)
        for cut, (at, _) in zip(outline.cuts, outline.before_cuts(), strict=True)
        if end is not None and (end[at - outline.period : at] > key[at - outline.period : at] + outline.reach).any()
    ]
    key = np.unique(np.concatenate([key[key < length], *recent, *fixed]))
    stops = outline.ends_at(end, key).astype(np.int64)
    return key[(stops >= key) & (stops >= now)]


def _refuse(path: Any, plan: CachePlan, what: str) -> None:
    raise ValueError(f"{path} is damaged: {what}. No cache of {plan!r} holds this: save it again.")
