"""`Outline`: the positions that a plan visits. Where lifetimes repeat, one period represents all the others.

For a key k, `last(k)` is the last query that may attend to it. The mask's `periodicity` lists all that this depends on:
k and q modulo the period, which side of the distances k - q lies on, and which side of the places k and q lie on. Let
the *edges* be all places e, e + d and e - d, for the places e (0 and the length among them) and distances d. If no edge
is within two periods of k, no place is near a query at which the answer changes. Then last(k + period) is either
last(k) + period (the key *moves*) or last(k) (its end is *fixed*, near some place). So a few periods between two edges
are enough: the others are cut out, at a distance from the edges that no lifetime exceeds.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

MAX_LISTED = 2**25  # positions that a plan may visit one by one
BYTES_EACH = 128  # that planning takes for each of them, at most
CLOSE = 1024  # positions between two edges that are not worth a cut: a prefix of this many keys is pinned key by key

LifetimesAt = Callable[[np.ndarray], Sequence[np.ndarray]]


class Cut(NamedTuple):
    """Omitted positions: `count` of them from `start` on, represented by the period before `start`."""

    start: int
    count: int


# The digest of a long plan contains the repr of its outline: a renamed class or field would refuse caches saved before.
class Outline(NamedTuple):
    """Positions 0 to length - 1 without the runs of positions that repeat those before them."""

    length: int
    period: int = 1
    cuts: tuple[Cut, ...] = ()
    reach: int = 0  # a key next to a cut moves if its lifetime is at most this long, else its end is fixed
    margin: int = 0  # positions on both sides of each cut, at least, that continue the period before it

    @property
    def keys(self) -> np.ndarray:
        """The remaining positions, int64."""
        starts = [0, *(cut.start + cut.count for cut in self.cuts)]
        stops = [*(cut.start for cut in self.cuts), self.length]
        return np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in zip(starts, stops, strict=True)])

    def fold(self, place: Any, xp: Any = np) -> tuple[Any, Any]:
        """For each place, the position that represents it: (its index among `keys`, the position)."""
        if not self.cuts:
            return place, place
        dtype = place.dtype.type
        starts = np.array([cut.start for cut in self.cuts], dtype)
        counts = np.array([0, *(cut.count for cut in self.cuts)], dtype)
        options = {} if xp is np else dict(method="compare_all")
        cut = xp.searchsorted(xp.asarray(starts), place, side="right", **options)  # 0: before the first
        start = xp.asarray(np.append(dtype(0), starts))[cut]
        count = xp.asarray(counts)[cut]
        omitted = xp.asarray(counts.cumsum(dtype=dtype))[cut]
        inside = place < start + count
        period = dtype(self.period)
        represents = xp.where(inside, start - period + (place - start) % period, place)
        return xp.where(inside, represents - omitted + count, place - omitted), represents

    def ends_at(self, end: Any, place: Any, xp: Any = np) -> Any:
        """The entry of `end` [keys] for each place; of a key that moves, as much later as the place is."""
        index, represents = self.fold(place, xp)
        found = xp.asarray(end)[index]
        if not self.cuts:
            return found
        moves = xp.abs(found - represents) <= self.reach
        return found + xp.where(moves, place - represents, place * 0)

    def at(self, values: Any, place: Any, xp: Any = np) -> Any:
        """The entry of `values` [keys] for each place, where every period has the same entries."""
        return xp.asarray(values)[self.fold(place, xp)[0]]

    def before_cuts(self) -> list[tuple[int, int]]:
        """For each cut, the index among `keys` of the position after it, and the number of periods it omits."""
        found, omitted = [], 0
        for cut in self.cuts:
            found.append((cut.start - omitted, cut.count // self.period))
            omitted += cut.count
        return found

    def places_of(self, key: np.ndarray, value: np.ndarray) -> np.ndarray | None:
        """The indices among `keys` of positions `value`, one per key; None if a fixed one of them was cut out.

        Orders, and distances within the reach, are preserved, so that cuts change nothing for keys that move.
        """
        if not self.cuts:
            return value
        near = np.abs(value - key) <= self.reach
        far_value = np.where(near, 0, value)
        index, represents = self.fold(far_value)
        if (represents != far_value).any():
            return None
        return np.where(near, np.arange(len(key)) + value - key, index)


def every_position(length: int, mask: Any) -> Outline:
    """The outline without cuts."""
    if length > MAX_LISTED:
        raise ValueError(
            f"A plan of {mask!r} for {length:,} positions lists every position, which takes about "
            f"{length * BYTES_EACH:,} bytes. The limit is {MAX_LISTED:,} positions, which take "
            f"{MAX_LISTED * BYTES_EACH:,} bytes. Plan fewer positions, or use a mask that needs no such list: a "
            f"causal mask, a prefix, or a window or chunk of up to {MAX_LISTED // 16:,} positions."
        )
    return Outline(length)


def find_outline(
    length: int, period: int, edges: Sequence[int], slack: int, margin_factor: int, lifetimes_at: LifetimesAt
) -> Outline | None:
    """The outline for the lifetimes that `lifetimes_at` returns for some keys, each array from -1 (none) to `length`.

    The margins around cuts are `margin_factor` times the longest lifetime. None if the outline would have more than
    half of all positions, or if some lifetimes do not repeat after all.
    """
    width = 2 * period + 2
    zones = _merged([(edge - width, edge + width) for edge in edges], length, 8 * period + CLOSE)
    gaps = [(a[1], b[0]) for a, b in pairwise(zones)]
    max_kept = min(length // 2, MAX_LISTED)
    if sum(b - a for a, b in zones) + 3 * period * len(gaps) > max_kept:
        return None
    reach = 0
    for low, high in zones:
        key = np.arange(low, high, dtype=np.int64)
        reach = max([reach, *(_longest_from_edge(key, value, zones) for value in lifetimes_at(key))])
    for low, high in gaps:
        longest = _longest_that_moves(low, high, period, lifetimes_at)
        if longest is None:
            return None
        reach = max(reach, longest)
    reach += slack
    # Slack moves a fixed end away from its edge: so close to a cut, its key would be mistaken for one that moves.
    margin = margin_factor * reach + slack + width
    cuts = [Cut(a + margin, (b - a - 2 * margin) // period * period) for a, b in gaps]
    cuts = [cut for cut in cuts if cut.count > 0]
    if length - sum(cut.count for cut in cuts) > max_kept:
        return None
    return Outline(length, period, tuple(cuts), reach, margin)


def _merged(spans: list[tuple[int, int]], length: int, min_gap: int) -> list[tuple[int, int]]:
    """The spans within 0 to `length`, in order; those with a gap below `min_gap` are joined."""
    found: list[tuple[int, int]] = []
    for low, high in sorted((max(low, 0), min(high, length)) for low, high in spans):
        if low >= high:
            continue
        if found and low - found[-1][1] < min_gap:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return found


def _longest_from_edge(key: np.ndarray, value: np.ndarray, zones: list[tuple[int, int]]) -> int:
    """The longest lifetime of keys near an edge that does not itself end near an edge."""
    low = np.array([zone[0] for zone in zones])
    high = np.array([zone[1] for zone in zones])
    zone = np.clip(np.searchsorted(low, value, side="right") - 1, 0, None)
    inside = (value < 0) | ((value >= low[zone]) & (value < high[zone])) | (value >= high[-1])
    return int(np.abs(value - key)[~inside].max(initial=0))


def _longest_that_moves(low: int, high: int, period: int, lifetimes_at: LifetimesAt) -> int | None:
    """The longest lifetime of keys that move between two edges; None if some neither move nor have a fixed end."""
    key, count = np.arange(low, low + period, dtype=np.int64), (high - low) // period - 1
    reach = 0
    first, second, final = lifetimes_at(key), lifetimes_at(key + period), lifetimes_at(key + count * period)
    for one, two, far in zip(first, second, final, strict=True):
        moves = two != one
        if (two - one != moves * period).any() or (far - one != moves * (count * period)).any():
            return None
        reach = max(reach, int(np.abs(one - key)[moves].max(initial=0)))
    return reach
