"""Allocates slots to keys as a compiler allocates registers: as many as there are keys alive at the same time.

All functions work on the positions of an `Outline`. If it has cuts, their results hold for all positions all the same.
`None` means that the outline does not decide the question; the plan is then made from every position.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from longspan.cache.outline import Outline

MAX_PINNED = 256  # pinned keys, which a plan lists one by one; more need a table
MAX_TURNS = 1024  # turns of the ring in which the next key of a slot is searched for
NEVER_REUSED = 2**30  # `at_once` of a plan that reuses no slot, so that every key is kept forever


class SlotAllocation(NamedTuple):
    """The slot of each key. Without a table, pinned keys have the first slots and all others share a ring."""

    capacity: int
    ring: int
    pinned: tuple[int, ...]
    table: np.ndarray | None  # int32 [length], -1: never stored


def allocate(end: np.ndarray, outline: Outline) -> SlotAllocation | None:
    """The first of ring, pinned keys and ring, table that takes no more slots than keys are alive at the same time.

    `end` is the last step that needs each key, -1 if none does.
    """
    key, end_index = outline.keys, outline.places_of(outline.keys, end)
    if end_index is None:
        return None
    alive = end >= key
    index = np.arange(len(key))
    capacity = max_alive(index[alive], end_index[alive], outline)
    pinned = index[alive][_outlives_a_later_key(end_index[alive])]
    if capacity is None:
        return None
    for chosen in ((), pinned):
        if _represents_a_cut(chosen, outline):
            return None
        in_ring = alive.copy()
        in_ring[list(chosen)] = False
        ring = capacity - len(chosen)
        if len(chosen) > MAX_PINNED or ring < 0:
            continue
        fits = _fits(end, end_index, in_ring, ring, outline)
        if fits is None:
            return None
        if fits:
            return SlotAllocation(capacity, ring, tuple(int(k) for k in key[list(chosen)]), None)
    if outline.cuts:
        return None
    return SlotAllocation(capacity, 0, (), _table(key, end, capacity))


def slot_of(slots: SlotAllocation, key: np.ndarray) -> np.ndarray:
    """The slot of each key, in NumPy; -1: never stored."""
    if slots.table is not None:
        return slots.table[key]
    in_ring = len(slots.pinned) + key % max(slots.ring, 1)
    if not slots.pinned:
        return in_ring
    return np.where(np.isin(key, slots.pinned), np.searchsorted(slots.pinned, key), in_ring)


def max_alive(birth: np.ndarray, end: np.ndarray, outline: Outline) -> int | None:
    """The largest number of keys alive at the same time, given the first and last index of each in the outline."""
    count = len(outline.keys)
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, birth, 1)
    np.add.at(change, np.minimum(end, count - 1) + 1, -1)
    alive, period = np.cumsum(change), outline.period
    # Within a cut, the number grows by the same amount in every period: its maximum is at one of the ends.
    for at, periods in outline.before_cuts():
        grows = alive[at - 1] - alive[at - 1 - period]
        if (alive[at : at + period] - alive[at - period : at] != grows).any():
            return None
        alive[at:] += periods * grows
    return int(alive.max(initial=0))


def number_alive(alive: np.ndarray, outline: Outline) -> int:
    """The number of keys, of all positions, that are ever alive."""
    repeated = sum(periods * int(alive[at - outline.period : at].sum()) for at, periods in outline.before_cuts())
    return int(alive.sum()) + repeated


def at_once(last: np.ndarray, end: np.ndarray, slots: SlotAllocation, outline: Outline) -> int | None:
    """The largest number of new tokens after whose append the cache holds every key that their queries attend to."""
    key = outline.keys
    if ((last >= 0) & (end < key)).any():  # keys that only earlier queries attend to are never stored
        return 1
    alive = end >= key
    in_ring = alive & ~np.isin(key, slots.pinned)
    if _represents_a_cut(np.flatnonzero(in_ring), outline):
        return _at_once_in_ring(key, last, in_ring, slots.ring, outline)
    slot, key, last = slot_of(slots, key)[alive], key[alive], last[alive]
    order = np.lexsort((key, slot))
    slot, key, last = slot[order], key[order], last[order]
    reused = slot[1:] == slot[:-1]
    return int(np.min((key[1:] - last[:-1])[reused], initial=NEVER_REUSED))


def _at_once_in_ring(key: np.ndarray, last: np.ndarray, in_ring: np.ndarray, ring: int, outline: Outline) -> int | None:
    """`at_once` for keys in a ring: the fewest steps from a key's last query to the next key of its slot."""
    fewest, turns, lifetime = NEVER_REUSED, 0, last - key
    searching, final = np.flatnonzero(in_ring), key[in_ring].max()
    while searching.size:
        turns += 1
        if turns > MAX_TURNS:
            return None
        next_key = key[searching] + turns * ring
        searching, next_key = searching[next_key <= final], next_key[next_key <= final]
        found = in_ring[outline.fold(next_key)[0]]
        fewest = min(fewest, int((turns * ring - lifetime[searching])[found].min(initial=NEVER_REUSED)))
        searching = searching[~found & ((turns + 1) * ring - lifetime[searching] < fewest)]
    # The keys of a cut have the same next keys as the period before it, within the margin. If keys beyond the margin
    # could change the result, the outline does not decide it.
    turns_in_margin = outline.margin // ring
    for (at, _), cut in zip(outline.before_cuts(), outline.cuts, strict=True):
        before = np.arange(at - outline.period, at)
        before = before[in_ring[before]]
        if cut.start - outline.period + ring > final:  # no later key has these slots
            continue
        fixed = np.abs(lifetime[before]) > outline.reach
        if fixed.any() or ((turns_in_margin + 1) * ring - lifetime[before] < fewest).any():
            return None
    return fewest


def _outlives_a_later_key(end: np.ndarray) -> np.ndarray:
    """Which keys are needed longer than some key after them."""
    min_later_end = np.minimum.accumulate(end[::-1])[::-1]
    return np.append(end[:-1] > min_later_end[1:], np.zeros(min(1, len(end)), bool))


def _represents_a_cut(indices: Sequence[int] | np.ndarray, outline: Outline) -> bool:
    """Whether some of these indices represent positions of a cut."""
    index = np.array(indices, np.int64)
    return any(((index >= at - outline.period) & (index < at)).any() for at, _ in outline.before_cuts())


def _fits(end: np.ndarray, end_index: np.ndarray, in_ring: np.ndarray, ring: int, outline: Outline) -> bool | None:
    """Whether slot = key % ring works: no key overwrites another one that is still needed."""
    key, index = outline.keys, np.arange(len(in_ring))
    if not ring:
        return not in_ring.any()
    if not _represents_a_cut(index[in_ring], outline):
        return not _overwrites(key[in_ring], end[in_ring], ring)
    # Cuts do not change which keys that move share a slot. Keys with a fixed end live across cuts: they are checked
    # separately, at their positions instead of their indices.
    fixed = in_ring & (end - key > outline.reach)
    fixed_overwritten = _fixed_are_overwritten(end, fixed, in_ring, ring, outline)
    if fixed_overwritten is None:
        return None
    if fixed_overwritten:
        return False
    return not _overwrites(index[in_ring], np.where(fixed, index, end_index)[in_ring], ring)


def _overwrites(key: np.ndarray, end: np.ndarray, ring: int) -> bool:
    """Whether some key is still needed when the next key of its slot comes."""
    order = np.lexsort((key, key % ring))
    key, end = key[order], end[order]
    same_slot = key[1:] % ring == key[:-1] % ring
    return bool((same_slot & (end[:-1] >= key[1:])).any())


def _fixed_are_overwritten(
    end: np.ndarray, fixed: np.ndarray, in_ring: np.ndarray, ring: int, outline: Outline
) -> bool | None:
    """Whether a key with a fixed end is overwritten while it is needed; None: the outline does not decide it."""
    end = np.minimum(end, outline.keys[in_ring].max())  # no key comes after it
    key, last = outline.keys[fixed], end[fixed]
    for turns in range(1, MAX_TURNS):
        searching = key + turns * ring <= last
        key, last = key[searching], last[searching]
        if not key.size:
            break
        if in_ring[outline.fold(key + turns * ring)[0]].any():
            return True
    # Keys of a cut come later than the period before it and have its ends: if that is not overwritten, they are not.
    before = np.concatenate([np.arange(at - outline.period, at) for at, _ in outline.before_cuts()])
    before = before[fixed[before]]
    if key.size or (outline.keys[before] + ring <= end[before]).any():
        return None
    return False


def _table(key: np.ndarray, end: np.ndarray, capacity: int) -> np.ndarray:
    """Slots for keys in order: the i-th key inherits the slot of the (i - capacity)-th key to be evicted."""
    table, alive = np.full(len(end), -1, np.int32), end >= key
    count = int(alive.sum())
    by_eviction = np.argsort(end[alive], kind="stable")
    # `inherits_from[i]` is the key whose slot the i-th key takes; the first `capacity` keys have slots 0, 1, ...
    # Pointer doubling follows each chain of inheritance to one of these.
    inherits_from = np.arange(count)
    inherits_from[capacity:] = by_eviction[: max(count - capacity, 0)]
    while (inherits_from >= capacity).any():
        inherits_from = inherits_from[inherits_from]
    table[alive] = inherits_from
    return table
