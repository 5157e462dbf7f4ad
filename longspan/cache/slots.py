"""Slots for lifetimes, as a compiler allocates registers: as few as there are keys alive at once.

All of it looks at the positions of an `Outline`. Where that has cuts, sums and orders are those of all positions, and
what cannot be known for certain is `None`: the plan is then made from every position.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from longspan.cache.outline import Outline

MOST_PINNED = 256  # keys with slots of their own that a plan names one by one; more need a table
MOST_ROUNDS = 1024  # turns of the ring that are searched for the next key of a slot
FOREVER = 2**30


class Slots(NamedTuple):
    """Which slot each key has. Without a table: pinned keys come first, the others go round a ring behind them."""

    capacity: int
    ring: int
    pinned: tuple[int, ...]
    table: np.ndarray | None  # int32 [length], -1: never stored


def allocate(end: np.ndarray, outline: Outline) -> Slots | None:
    """The first form that needs no slot beyond the largest number of keys alive at once; `end` is -1 if never alive."""
    key, end_place = outline.keys, outline.places_of(outline.keys, end)
    if end_place is None:
        return None
    alive = end >= key
    place = np.arange(len(key))
    capacity = most_alive(place[alive], end_place[alive], outline)
    pinned = place[alive][_outlives_a_later(end_place[alive])]
    if capacity is None:
        return None
    for chosen in ((), pinned):
        if _repeats(chosen, outline):
            return None
        ring = alive.copy()
        ring[list(chosen)] = False
        around = capacity - len(chosen)
        if len(chosen) > MOST_PINNED or around < 0:
            continue
        fits = _fits(end, end_place, ring, around, outline)
        if fits is None:
            return None
        if fits:
            return Slots(capacity, around, tuple(int(k) for k in key[list(chosen)]), None)
    return None if outline.cuts else Slots(capacity, 0, (), _colouring(key, end, capacity))


def slot_of(slots: Slots, key: np.ndarray) -> np.ndarray:
    """Each key's slot, in NumPy; -1: none."""
    if slots.table is not None:
        return slots.table[key]
    place = np.searchsorted(slots.pinned, key) if slots.pinned else np.zeros_like(key)
    is_pinned = np.isin(key, slots.pinned)
    return np.where(is_pinned, place, len(slots.pinned) + key % max(slots.ring, 1))


def most_alive(birth: np.ndarray, end: np.ndarray, outline: Outline) -> int | None:
    """The largest number of keys alive at once, of keys that are born and end at these places of the outline."""
    count = len(outline.keys)
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, birth, 1)
    np.add.at(change, np.minimum(end, count - 1) + 1, -1)
    alive, period = np.cumsum(change), outline.period
    # Within a cut the number grows by as much in every period: it is largest at one of the ends.
    for at, periods in outline.before_cuts():
        grows = alive[at - 1] - alive[at - 1 - period]
        if (alive[at : at + period] - alive[at - period : at] != grows).any():
            return None
        alive[at:] += periods * grows
    return int(alive.max(initial=0))


def number_alive(alive: np.ndarray, outline: Outline) -> int:
    """How many keys of all positions are ever alive."""
    repeated = sum(periods * int(alive[at - outline.period : at].sum()) for at, periods in outline.before_cuts())
    return int(alive.sum()) + repeated


def at_once(last: np.ndarray, end: np.ndarray, slots: Slots, outline: Outline) -> int | None:
    """How many tokens an append may have so that the cache itself shows all that its queries see."""
    key = outline.keys
    if ((last >= 0) & (end < key)).any():  # keys that only queries before them see are never stored
        return 1
    alive = end >= key
    ring = alive & ~np.isin(key, slots.pinned)
    if _repeats(np.flatnonzero(ring), outline):
        return _at_once_around(key, last, ring, slots.ring, outline)
    place, key, last = slot_of(slots, key)[alive], key[alive], last[alive]
    order = np.lexsort((key, place))
    place, key, last = place[order], key[order], last[order]
    reused = place[1:] == place[:-1]
    return int(np.min((key[1:] - last[:-1])[reused], initial=FOREVER))


def _at_once_around(key: np.ndarray, last: np.ndarray, ring: np.ndarray, around: int, outline: Outline) -> int | None:
    """The same of keys in a ring: the least number of steps from a key's last query to the next key of its slot."""
    least, turns, lives = FOREVER, 0, last - key
    searching, final = np.flatnonzero(ring), key[ring].max()
    while searching.size:
        turns += 1
        if turns > MOST_ROUNDS:
            return None
        after = key[searching] + turns * around
        searching, after = searching[after <= final], after[after <= final]
        met = ring[outline.fold(after)[0]]
        least = min(least, int((turns * around - lives[searching])[met].min(initial=FOREVER)))
        searching = searching[~met & ((turns + 1) * around - lives[searching] < least)]
    # The keys of a cut meet what the period before it meets, as far as its margin; beyond, they must not matter.
    known = outline.margin // around
    for (at, _), cut in zip(outline.before_cuts(), outline.cuts, strict=True):
        before = np.arange(at - outline.period, at)
        before = before[ring[before]]
        if cut.start - outline.period + around > final:  # there is nothing to meet
            continue
        fixed = np.abs(lives[before]) > outline.reach
        if fixed.any() or ((known + 1) * around - lives[before] < least).any():
            return None
    return least


def _outlives_a_later(end: np.ndarray) -> np.ndarray:
    """Keys that are needed longer than some key after them."""
    later = np.minimum.accumulate(end[::-1])[::-1]
    return np.append(end[:-1] > later[1:], np.zeros(min(1, len(end)), bool))


def _repeats(places: Sequence[int] | np.ndarray, outline: Outline) -> bool:
    """Whether some of these places stand for positions in a cut."""
    place = np.array(places, np.int64)
    return any(((place >= at - outline.period) & (place < at)).any() for at, _ in outline.before_cuts())


def _fits(end: np.ndarray, end_place: np.ndarray, ring: np.ndarray, around: int, outline: Outline) -> bool | None:
    """Whether no two keys meet in slot key % around."""
    key, place = outline.keys, np.arange(len(ring))
    if not around:
        return not ring.any()
    if not _repeats(place[ring], outline):
        return not _meet(key[ring], end[ring], around)
    # Keys that move meet each other the same way with cuts and without; those whose end is fixed pass over cuts.
    fixed = ring & (end - key > outline.reach)
    passes = _meet_beyond(end, fixed, ring, around, outline)
    if passes is not False:
        return None if passes is None else False
    return not _meet(place[ring], np.where(fixed, place, end_place)[ring], around)


def _meet(key: np.ndarray, end: np.ndarray, around: int) -> bool:
    """Whether a key ends after the next one that has its slot is born."""
    order = np.lexsort((key, key % around))
    key, end = key[order], end[order]
    together = key[1:] % around == key[:-1] % around
    return bool((together & (end[:-1] >= key[1:])).any())


def _meet_beyond(end: np.ndarray, fixed: np.ndarray, ring: np.ndarray, around: int, outline: Outline) -> bool | None:
    """Whether keys whose end is fixed meet another one in their slot before; None: not known."""
    end = np.minimum(end, outline.keys[ring].max())  # there is nothing to meet after it
    key, last = outline.keys[fixed], end[fixed]
    for turns in range(1, MOST_ROUNDS):
        searched = key + turns * around <= last
        key, last = key[searched], last[searched]
        if not key.size:
            break
        if ring[outline.fold(key + turns * around)[0]].any():
            return True
    # Those in a cut come later than the period before it, and have its ends: if that meets nothing, they do not.
    before = np.concatenate([np.arange(at - outline.period, at) for at, _ in outline.before_cuts()])
    before = before[fixed[before]]
    alone = not key.size and (outline.keys[before] + around > end[before]).all()
    return False if alone else None


def _colouring(key: np.ndarray, end: np.ndarray, capacity: int) -> np.ndarray:
    """Slots handed out in turn: the key that is born i-th takes what the (i - capacity)-th to die leaves behind."""
    table, alive = np.full(len(end), -1, np.int32), end >= key
    count = int(alive.sum())
    by_death = np.argsort(end[alive], kind="stable")
    # Whose slot each inherits; the first ones have slots of their own. Followed up to them by doubling.
    heir_of = np.arange(count)
    heir_of[capacity:] = by_death[: max(count - capacity, 0)]
    while (heir_of >= capacity).any():
        heir_of = heir_of[heir_of]
    table[alive] = heir_of
    return table
