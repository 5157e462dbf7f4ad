"""Spans found by asking: for a rule that bounds tiles, but cannot name the intervals in which its keys lie.

Every row of tiles is asked about few, long runs of the other side first, then about shorter ones where what it sees
begins and ends. So the number of questions grows with the rows, and the table of all pairs of tiles is never made.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from longspan.array_types import Namespace
from longspan.masks.sides import KEYS, Tiles
from longspan.masks.spans import Spans, everything, running_max

FIRST_RUNS = 128  # that each row is asked about first, at most
PARTS = 64  # that a run is cut into next, at most
INTERVALS = 4  # that a row may have; what lies between them are the widest gaps
MOST_QUESTIONS = 1 << 24  # asked at once: where it would be more, as for a million single queries, nothing is asked


def search_spans(ask: Callable[[Tiles], Any], rows: Tiles, others: Tiles) -> Spans:
    """Intervals that cover all tiles of the other side of which `ask` says that a row may see something in them."""
    xp, side, along_keys = rows.side.xp, others.side, others.side.axis == KEYS
    count, count_rows = -(-side.length // others.size), rows.index.shape[rows.side.axis]
    if not others.whole or not count or rows.index.size * min(count, FIRST_RUNS) > MOST_QUESTIONS:
        return everything(xp, side.length)

    def seen(index, unit: int, whole: bool = False):
        """Whether each row may see the runs of `unit` tiles with these numbers, [1, 1, 1 or rows, runs]."""
        runs = Tiles(side, others.size * unit, index if along_keys else index.swapaxes(2, 3), whole=whole)
        answer = ask(runs) if along_keys else ask(runs).swapaxes(2, 3)
        return xp.broadcast_to(answer, np.broadcast_shapes(answer.shape, (1, 1, count_rows, index.shape[3])))

    unit = _power_of_two(-(-count // FIRST_RUNS))
    runs = xp.arange(-(-count // unit), dtype=np.int32).reshape(1, 1, 1, -1)
    low, high = _intervals(xp, seen(runs, unit, whole=True))
    if unit > 1:
        while unit > 1:
            parts = min(unit, PARTS)
            unit //= parts
            low, high = _sharpened(xp, low, high, parts, -(-count // unit), lambda index, unit=unit: seen(index, unit))
        low, high = _searched_again(xp, low, high, count, lambda index: seen(index, 1))
    low, high = (xp.minimum(end * others.size, side.length).astype(np.int32) for end in (low, high))
    return Spans(low, high) if along_keys else Spans(low.swapaxes(2, 3), high.swapaxes(2, 3))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _intervals(xp: Namespace, seen):
    """The runs that are `seen` [..., runs], as a few half-open intervals (low, high) [..., INTERVALS] or fewer."""
    count = seen.shape[-1]
    place = xp.broadcast_to(xp.arange(count, dtype=np.int32), seen.shape)
    latest = running_max(xp, xp.where(seen, place, np.int32(-1)))
    before = xp.concatenate([xp.full_like(latest[..., :1], -1), latest[..., :-1]], axis=-1)  # the one seen before
    first = xp.argmax(seen, axis=-1, keepdims=True).astype(np.int32)
    last = latest[..., -1:]
    gap = xp.where(seen & (before >= 0), place - before - 1, np.int32(0))
    widest = xp.argsort(-gap, axis=-1, stable=True)[..., : min(INTERVALS, (count + 1) // 2) - 1]
    widest = xp.where(xp.take_along_axis(gap, widest, axis=-1) > 0, widest, count).astype(np.int32)
    after = xp.sort(widest, axis=-1)  # where a gap ends; `count`: there are fewer
    ends = xp.take_along_axis(before, xp.minimum(after, count - 1), axis=-1)
    ends = xp.where(after < count, ends, last)
    return xp.concatenate([first, after], axis=-1), xp.concatenate([ends, last], axis=-1) + 1


def _sharpened(xp: Namespace, low, high, parts: int, count: int, seen: Callable):
    """The same intervals in runs of which `parts` were one before, without those at both ends that are not seen."""

    def look(run):
        part = xp.arange(parts, dtype=np.int32).reshape(*[1] * run.ndim, -1)
        index = xp.clip(run[..., None] * parts + part, 0, count - 1)
        answer = seen(index.reshape(*index.shape[:3], -1))
        return answer.reshape(*answer.shape[:3], -1, parts)

    empty, first, last = low >= high, look(low), look(high - 1)[..., ::-1]
    before, after = (
        xp.where(xp.any(end, axis=-1), xp.argmax(end, axis=-1), parts).astype(np.int32) for end in (first, last)
    )
    low, high = low * parts + before, high * parts - after
    return xp.where(empty, np.int32(0), low), xp.where(empty, np.int32(0), high)


def _searched_again(xp: Namespace, low, high, count: int, seen: Callable):
    """The same intervals; those of rows that see little are found anew, tile by tile, with gaps too short for runs."""
    empty = low >= high
    first = xp.min(xp.where(empty, np.int32(count), low), axis=-1, keepdims=True)
    last = xp.max(xp.where(empty, np.int32(0), high), axis=-1, keepdims=True)
    index = first + xp.arange(FIRST_RUNS, dtype=np.int32).reshape(1, 1, 1, -1)
    again = _intervals(xp, seen(xp.clip(index, 0, count - 1)) & (index < last))
    return tuple(xp.where(last - first <= FIRST_RUNS, a + first, b) for a, b in zip(again, (low, high), strict=True))
