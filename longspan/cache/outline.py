"""`Outline`: the positions that a plan looks at. Where lifetimes repeat, one period stands for all of them.

For a key k, `last(k)` is the last query that may see it. The mask's `periodicity` says on what that depends: k and q
modulo the period, which side of the distances k - q lies on, which side of the places k and q lie on. So let the
*edges* be all places e, e + d and e - d, for the places e (0 and the length among them) and distances d. Where no edge
is within two periods of k, no place is near a query at which the answer changes, and last(k + period) is either
last(k) + period (the key *moves*) or last(k) (its end is *fixed*, near some place). Between edges it is therefore
enough to look at a few periods: the others are cut out, as far from the edges as lifetimes reach.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

MOST_LISTED = 2**25  # positions that a plan may look at one by one
BYTES_EACH = 128  # that planning takes for each of them, at most
CLOSE = 1024  # positions between two edges that are not worth a cut: a prefix of so many keys is pinned one by one


class Cut(NamedTuple):
    """Positions that are left out: from `start`, `count` of them, which the period before `start` stands for."""

    start: int
    count: int


class Outline(NamedTuple):
    """Positions 0 to length - 1 without some runs of them that repeat what is before."""

    length: int
    period: int = 1
    cuts: tuple[Cut, ...] = ()
    reach: int = 0  # keys beside a cut move if their lifetime is no longer, else their end is fixed
    margin: int = 0  # positions around each cut, at least, that go on as the period before it

    @property
    def keys(self) -> np.ndarray:
        """The positions that are left, int64."""
        ends = [0, *(cut.start + cut.count for cut in self.cuts)]
        starts = [*(cut.start for cut in self.cuts), self.length]
        return np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in zip(ends, starts, strict=True)])

    def fold(self, place: Any, xp: Any = np) -> tuple[Any, Any]:
        """The index among `keys` of the position that stands for each place, and that position."""
        if not self.cuts:
            return place, place
        dtype = place.dtype.type
        starts = np.array([cut.start for cut in self.cuts], dtype)
        counts = np.array([0, *(cut.count for cut in self.cuts)], dtype)
        how = {} if xp is np else dict(method="compare_all")
        cut = xp.searchsorted(xp.asarray(starts), place, side="right", **how)  # 0: before the first
        columns = np.append(dtype(0), starts), counts, counts.cumsum(dtype=dtype)
        start, count, gone = (xp.asarray(column)[cut] for column in columns)
        inside = place < start + count
        period = dtype(self.period)
        stands = xp.where(inside, start - period + (place - start) % period, place)
        return xp.where(inside, stands - gone + count, place - gone), stands

    def ends_at(self, end: Any, place: Any, xp: Any = np) -> Any:
        """What `end` [keys] says of each place: where keys move, as much later as the place is."""
        index, stands = self.fold(place, xp)
        found = xp.asarray(end)[index]
        if not self.cuts:
            return found
        moves = xp.abs(found - stands) <= self.reach
        return found + xp.where(moves, place - stands, place * 0)

    def at(self, said: Any, place: Any, xp: Any = np) -> Any:
        """What `said` [keys] says of each place, where the same is said of every period."""
        return xp.asarray(said)[self.fold(place, xp)[0]]

    def before_cuts(self) -> list[tuple[int, int]]:
        """Of each cut, the index among `keys` that follows it, and how many periods are left out."""
        found, gone = [], 0
        for cut in self.cuts:
            found.append((cut.start - gone, cut.count // self.period))
            gone += cut.count
        return found

    def places_of(self, key: np.ndarray, value: np.ndarray) -> np.ndarray | None:
        """Of values at the keys that are left, their places among them; None if one was left out, though it is fixed.

        Orders and distances within the reach stay, so that cuts change nothing for keys that move.
        """
        if not self.cuts:
            return value
        near = np.abs(value - key) <= self.reach
        place, stands = self.fold(np.where(near, 0, value))
        if (stands != np.where(near, 0, value)).any():
            return None
        return np.where(near, np.arange(len(key)) + value - key, place)


def listed(length: int, mask: Any) -> Outline:
    """Every position, one by one."""
    if length > MOST_LISTED:
        raise ValueError(
            f"A plan of {mask!r} for {length:,} positions lists each of them, which takes about "
            f"{length * BYTES_EACH:,} bytes. At most {MOST_LISTED:,} positions are listed, which takes "
            f"{MOST_LISTED * BYTES_EACH:,} bytes: plan fewer. Rings need no list: those of causal masks, of prefixes, "
            f"and of windows and chunks of up to {MOST_LISTED // 16:,} positions."
        )
    return Outline(length)


def outlined(
    length: int,
    period: int,
    edges: Sequence[int],
    slack: int,
    room: int,
    ask: Callable[[np.ndarray], Sequence[np.ndarray]],
) -> Outline | None:
    """The outline of lifetimes that `ask` gives for some keys, each array between -1 (nobody) and the length.

    Around cuts, there are `room` of the longest lifetimes. None where it would not be shorter than half of all
    positions, or where something does not repeat after all.
    """
    width = 2 * period + 2
    zones = _merged([(edge - width, edge + width) for edge in edges], length, 8 * period + CLOSE)
    gaps = [(a[1], b[0]) for a, b in pairwise(zones)]
    if sum(b - a for a, b in zones) + 3 * period * len(gaps) > min(length // 2, MOST_LISTED):
        return None
    reach = 0
    for low, high in zones:
        key = np.arange(low, high, dtype=np.int64)
        reach = max([reach, *(_strays(key, value, zones) for value in ask(key))])
    for low, high in gaps:
        found = _moves(low, high, period, ask)
        if found is None:
            return None
        reach = max(reach, found)
    reach += slack
    # With slack, a fixed end is as much after its edge: not so near a cut that its keys would seem to move.
    margin = room * reach + slack + width
    cuts = [Cut(a + margin, (b - a - 2 * margin) // period * period) for a, b in gaps]
    cuts = [cut for cut in cuts if cut.count > 0]
    left = length - sum(cut.count for cut in cuts)
    return Outline(length, period, tuple(cuts), reach, margin) if left <= min(length // 2, MOST_LISTED) else None


def _merged(spans: list[tuple[int, int]], length: int, apart: int) -> list[tuple[int, int]]:
    """Spans within the positions, in order; those that are not so far apart are one."""
    found: list[tuple[int, int]] = []
    for low, high in sorted((max(low, 0), min(high, length)) for low, high in spans):
        if low >= high:
            continue
        if found and low - found[-1][1] < apart:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return found


def _strays(key: np.ndarray, value: np.ndarray, zones: list[tuple[int, int]]) -> int:
    """The longest lifetime of keys near edges that does not end near an edge."""
    low, high = (np.array(ends) for ends in zip(*zones, strict=True))
    zone = np.clip(np.searchsorted(low, value, side="right") - 1, 0, None)
    inside = (value < 0) | ((value >= low[zone]) & (value < high[zone])) | (value >= high[-1])
    return int(np.abs(value - key)[~inside].max(initial=0))


def _moves(low: int, high: int, period: int, ask: Callable[[np.ndarray], Sequence[np.ndarray]]) -> int | None:
    """The longest lifetime of keys that move, between two edges; None if some neither move nor have a fixed end."""
    key, count = np.arange(low, low + period, dtype=np.int64), (high - low) // period - 1
    reach = 0
    first, second, final = ask(key), ask(key + period), ask(key + count * period)
    for one, two, far in zip(first, second, final, strict=True):
        moves = two != one
        if (two - one != moves * period).any() or (far - one != moves * (count * period)).any():
            return None
        reach = max(reach, int(np.abs(one - key)[moves].max(initial=0)))
    return reach
