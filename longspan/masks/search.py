"""Spans for rules that can bound tiles but cannot compute the intervals of their keys.

The search is coarse to fine. Each row of tiles is first tested against at most FIRST_RUNS long runs of tiles of the
other side. The runs in which a row's keys begin and end are then split into shorter runs, down to single tiles. The
number of tests grows with the number of rows; the table of all pairs of tiles is never built.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from longspan.array_types import Namespace
from longspan.masks.sides import KEYS, Tiles
from longspan.masks.spans import Spans, everything, running_max

FIRST_RUNS = 128  # the maximum number of runs that each row is first tested against
PARTS = 64  # the maximum number of parts that a run is then split into
INTERVALS = 4  # the maximum number of intervals per row: the widest gaps separate them
MAX_TESTS = 1 << 24  # tests at a time: with more, such as for a million single queries, the span is the whole side


def search_spans(may_any: Callable[[Tiles], Any], rows: Tiles, others: Tiles) -> Spans:
    """Intervals that cover all tiles of the other side in which a row may see a token.

    `may_any(tiles)` tests the rows against tiles of the other side: bools of rank 4, True if a pair may be allowed.
    """
    xp, side, along_keys = rows.side.xp, others.side, others.side.axis == KEYS
    count, count_rows = -(-side.length // others.size), rows.index.shape[rows.side.axis]
    if not others.whole or not count or rows.index.size * min(count, FIRST_RUNS) > MAX_TESTS:
        return everything(xp, side.length)

    def seen(index, unit: int, whole: bool = False):
        """Tests each row against the runs of `unit` tiles with these indices, [1, 1, 1 or rows, runs]."""
        shape = (1, 1, count_rows, index.shape[3])
        if not along_keys:
            index = index.swapaxes(2, 3)
        answer = may_any(Tiles(side, others.size * unit, index, whole=whole))
        if not along_keys:
            answer = answer.swapaxes(2, 3)
        return xp.broadcast_to(answer, np.broadcast_shapes(answer.shape, shape))

    unit = _power_of_two(-(-count // FIRST_RUNS))
    runs = xp.arange(-(-count // unit), dtype=np.int32).reshape(1, 1, 1, -1)
    low, high = _intervals(xp, seen(runs, unit, whole=True))
    if unit > 1:
        while unit > 1:
            parts = min(unit, PARTS)
            unit //= parts
            low, high = _split_ends(xp, low, high, parts, -(-count // unit), lambda index, unit=unit: seen(index, unit))
        low, high = _search_short_rows(xp, low, high, count, lambda index: seen(index, 1))
    low = xp.minimum(low * others.size, side.length).astype(np.int32)
    high = xp.minimum(high * others.size, side.length).astype(np.int32)
    if along_keys:
        return Spans(low, high)
    return Spans(low.swapaxes(2, 3), high.swapaxes(2, 3))


def _power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def _intervals(xp: Namespace, seen):
    """Covers the runs that are `seen` [..., runs] by half-open intervals (low, high) [..., up to INTERVALS].

    The intervals are separated by the widest gaps between seen runs.
    """
    count = seen.shape[-1]
    place = xp.broadcast_to(xp.arange(count, dtype=np.int32), seen.shape)
    latest = running_max(xp, xp.where(seen, place, np.int32(-1)))
    before = xp.concatenate([xp.full_like(latest[..., :1], -1), latest[..., :-1]], axis=-1)  # the last run seen before
    first = xp.argmax(seen, axis=-1, keepdims=True).astype(np.int32)
    last = latest[..., -1:]
    gap = xp.where(seen & (before >= 0), place - before - 1, np.int32(0))
    widest = xp.argsort(-gap, axis=-1, stable=True)[..., : min(INTERVALS, (count + 1) // 2) - 1]
    widest = xp.where(xp.take_along_axis(gap, widest, axis=-1) > 0, widest, count).astype(np.int32)
    after = xp.sort(widest, axis=-1)  # the first run after each gap; `count` if there are fewer gaps
    ends = xp.take_along_axis(before, xp.minimum(after, count - 1), axis=-1)
    ends = xp.where(after < count, ends, last)
    return xp.concatenate([first, after], axis=-1), xp.concatenate([ends, last], axis=-1) + 1


def _split_ends(xp: Namespace, low, high, parts: int, count: int, seen: Callable):
    """Splits each run into `parts` runs, and drops the runs at both ends of an interval that are not seen.

    `count` is the number of runs after the split.
    """

    def parts_seen(run):
        part = xp.arange(parts, dtype=np.int32).reshape(*[1] * run.ndim, -1)
        index = xp.clip(run[..., None] * parts + part, 0, count - 1)
        answer = seen(index.reshape(*index.shape[:3], -1))
        return answer.reshape(*answer.shape[:3], -1, parts)

    def unseen_before(flags):
        """The number of parts before the first one that is seen."""
        return xp.where(xp.any(flags, axis=-1), xp.argmax(flags, axis=-1), parts).astype(np.int32)

    empty, first, last = low >= high, parts_seen(low), parts_seen(high - 1)
    low, high = low * parts + unseen_before(first), high * parts - unseen_before(last[..., ::-1])
    return xp.where(empty, np.int32(0), low), xp.where(empty, np.int32(0), high)


def _search_short_rows(xp: Namespace, low, high, count: int, seen: Callable):
    """Searches rows whose intervals span at most FIRST_RUNS tiles again, tile by tile, to find short gaps."""
    empty = low >= high
    first = xp.min(xp.where(empty, np.int32(count), low), axis=-1, keepdims=True)
    last = xp.max(xp.where(empty, np.int32(0), high), axis=-1, keepdims=True)
    index = first + xp.arange(FIRST_RUNS, dtype=np.int32).reshape(1, 1, 1, -1)
    new_low, new_high = _intervals(xp, seen(xp.clip(index, 0, count - 1)) & (index < last))
    short = last - first <= FIRST_RUNS
    return xp.where(short, new_low + first, low), xp.where(short, new_high + first, high)
