"""Slots for lifetimes, as a compiler allocates registers: as few as there are keys alive at once."""

from typing import NamedTuple

import numpy as np

MOST_PINNED = 256  # keys with slots of their own that a plan names one by one; more need a table


class Slots(NamedTuple):
    """Which slot each key has. Without a table: pinned keys come first, the others go round a ring behind them."""

    capacity: int
    ring: int
    pinned: tuple[int, ...]
    table: np.ndarray | None  # int32 [length], -1: never stored


def allocate(end: np.ndarray) -> Slots:
    """The first form that needs no slot beyond the largest number of keys alive at once; `end` is -1 if never alive."""
    key = np.arange(len(end))
    alive = end >= key
    capacity = most_alive(key[alive], end[alive], len(end))
    pinned = key[alive][_outlives_a_later(end[alive])]
    for chosen in ((), pinned):
        ring = alive.copy()
        ring[list(chosen)] = False
        around = capacity - len(chosen)
        if len(chosen) <= MOST_PINNED and around >= 0 and _fits(key[ring], end[ring], around):
            return Slots(capacity, around, tuple(int(k) for k in chosen), None)
    return Slots(capacity, 0, (), _colouring(key, end, capacity))


def slot_of(slots: Slots, key: np.ndarray) -> np.ndarray:
    """Each key's slot, in NumPy; -1: none."""
    if slots.table is not None:
        return slots.table[key]
    place = np.searchsorted(slots.pinned, key) if slots.pinned else np.zeros_like(key)
    is_pinned = np.isin(key, slots.pinned)
    return np.where(is_pinned, place, len(slots.pinned) + key % max(slots.ring, 1))


def most_alive(birth: np.ndarray, end: np.ndarray, length: int) -> int:
    """The largest number of keys alive at once."""
    change = np.zeros(length + 1, np.int64)
    np.add.at(change, birth, 1)
    np.add.at(change, np.minimum(end, length - 1) + 1, -1)
    return int(np.cumsum(change).max(initial=0))


def _outlives_a_later(end: np.ndarray) -> np.ndarray:
    """Keys that are needed longer than some key after them."""
    later = np.minimum.accumulate(end[::-1])[::-1]
    return np.append(end[:-1] > later[1:], np.zeros(min(1, len(end)), bool))


def _fits(key: np.ndarray, end: np.ndarray, ring: int) -> bool:
    """Whether no two keys meet in slot key % ring."""
    if not ring:
        return not len(key)
    order = np.lexsort((key, key % ring))
    key, end = key[order], end[order]
    together = key[1:] % ring == key[:-1] % ring
    return not (together & (end[:-1] >= key[1:])).any()


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
