"""Visited tiles by kind, as a mask classifies them, and the allowed pairs that have to be read in PARTIAL ones.

At a million tokens a mask may visit 67 million tiles. They are looked at as rectangles that fit in a cache, where what
a rule says of rows and of columns of tiles is broadcast. Where too many pairs would have to be read, some tiles stand
for the others, and the counts say so.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from longspan.masks import Mask
from longspan.masks.sides import Slots, Tiles

READ_AT_ONCE = 1 << 20  # pairs
MOST_READ = 1 << 28  # pairs: more take seconds, and are estimated
SPLIT, LEAF = 4, 16  # parts of a tile along each side, down to which size
MOST_SPLIT = 1 << 16  # tiles
SAMPLE = 1 << 11  # tiles that then stand for all PARTIAL ones, about


class Visits(NamedTuple):
    """Some visits, by tile numbers that broadcast together: a list, or a rectangle of which some tiles are seen."""

    q: np.ndarray  # int32 [rows, 1]
    kv: np.ndarray  # int32 [rows, 1] or [1, columns]
    seen: np.ndarray | None = None  # bool [rows, columns]; None: all

    @classmethod
    def listed(cls, rows: np.ndarray, tiles: np.ndarray) -> "Visits":
        return cls(*(numbers.astype(np.int32).reshape(-1, 1) for numbers in (rows, tiles)))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.q), self.kv.shape[1]

    def at(self, which: np.ndarray) -> np.ndarray:
        """The tile numbers [2, n] of some visits, by their flat index."""
        places = np.divmod(which, self.shape[1])
        return np.stack([np.broadcast_to(numbers, self.shape)[places] for numbers in self[:2]])


class Counts(NamedTuple):
    """What a concrete layout visits, over all batch rows and heads told apart."""

    empty: int  # visited, but nothing in it is allowed
    partial: int
    full: int
    pairs: int  # allowed pairs of tokens, each as often as it counts
    read: int | None = None  # how many PARTIAL tiles `pairs` is estimated from; None: it is exact

    def plus(self, other: "Counts") -> "Counts":
        read = None if self.read is None and other.read is None else (self.read or 0) + (other.read or 0)
        empty, partial, full, pairs = (a + b for a, b in zip(self[:4], other[:4], strict=True))
        return Counts(empty, partial, full, pairs, read)


NONE = Counts(0, 0, 0, 0)


def count_kinds(mask: Mask, q: Tiles, kv: Tiles, looks: Iterable[Visits]) -> Counts:
    """The visited tiles of one batch row and head by kind; their pairs are not counted."""
    total = NONE
    for visits in looks:
        some, every = _classified(mask, q, kv, visits)
        total = total.plus(_kinds(visits, some, every))
    return total


def count_and_read(
    mask: Mask, q: Tiles, kv: Tiles, looks: Iterable[Visits], *, visits: int, most: int = MOST_READ
) -> Counts:
    """The same with their allowed pairs, of which `most` may be read; `visits` bounds how many tiles there are."""
    few, held, sampled, total = True, [np.zeros((2, 0), np.int32)], [], NONE
    for look in looks:
        some, every = _classified(mask, q, kv, look)
        total = total.plus(_kinds(look, some, every)._replace(pairs=_area(q, kv, look, every)))
        partial = np.flatnonzero(np.broadcast_to(some & ~every, look.shape))
        few = few and total.partial * q.size * kv.size <= SPLIT * most
        held = [*held, look.at(partial)] if few else []
        if len(partial):
            sampled.append((len(partial), look.at(_spread(partial, every=max(1, visits // SAMPLE)))))
    if few and (pairs := _read(mask, q, kv, np.concatenate(held, axis=1), most)) is not None:
        return total._replace(pairs=total.pairs + pairs)
    counts, samples = zip(*sampled, strict=True)
    allowed = _allowed(mask, q, kv, np.concatenate(samples, axis=1))
    stands_for = [count / tiles.shape[1] for count, tiles in zip(counts, samples, strict=True)]
    weights = np.repeat(stands_for, [tiles.shape[1] for tiles in samples])
    return total._replace(pairs=total.pairs + round(float(weights @ allowed)), read=len(allowed))


def sample_partial(
    mask: Mask, q: Tiles, kv: Tiles, looks: Iterable[Visits], *, visits: int, most: int
) -> np.ndarray:  # fmt: skip
    """The numbers [2, n] of PARTIAL tiles, about `most` of them, spread over all visits."""
    sampled = [np.zeros((2, 0), np.int32)]
    for look in looks:
        some, every = _classified(mask, q, kv, look)
        partial = np.flatnonzero(np.broadcast_to(some & ~every, look.shape))
        if len(partial):
            sampled.append(look.at(_spread(partial, every=max(1, visits // most))))
    return np.concatenate(sampled, axis=1)


def read_tiles(mask: Mask, q: Tiles, kv: Tiles, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(some, every), bool [n]: whether a mask allows any, and all, of the pairs in some tiles [2, n]. It reads them."""
    allowed, visits = _allowed(mask, q, kv, tiles), Visits.listed(*tiles)
    rows, columns = _inside(q, visits.q), _inside(kv, visits.kv)
    return allowed > 0, allowed == (rows * columns)[:, 0]


def classify_tiles(mask: Mask, q: Tiles, kv: Tiles, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(some, every), bool [n]: what a mask says of some tiles [2, n] without reading their pairs."""
    visits = Visits.listed(*tiles)
    some, every = (np.broadcast_to(kind, visits.shape)[:, 0] for kind in _classified(mask, q, kv, visits))
    return some, every


def _read(mask: Mask, q: Tiles, kv: Tiles, tiles: np.ndarray, most: int) -> int | None:
    """The allowed pairs of some PARTIAL tiles [2, n]; None if more than `most` would have to be read.

    Tiles are split while they can be: what smaller ones are known to be needs not be read.
    """
    pairs = 0
    while not (q.size % SPLIT or kv.size % SPLIT) and min(q.size, kv.size) > LEAF and tiles.shape[1] <= MOST_SPLIT:
        parts = np.stack(np.meshgrid(*[np.arange(SPLIT, dtype=np.int32)] * 2)).reshape(2, 1, -1)
        visits = Visits.listed(*(SPLIT * tiles[:, :, None] + parts).reshape(2, -1))
        q, kv = q.side.tiles(q.size // SPLIT), kv.side.tiles(kv.size // SPLIT)
        inside = (visits.q * q.size < q.side.length) & (visits.kv * kv.size < kv.side.length)
        visits = Visits(visits.q[inside[:, 0]], visits.kv[inside[:, 0]])
        some, every = (np.broadcast_to(kind, visits.shape) for kind in _classified(mask, q, kv, visits))
        pairs += _area(q, kv, visits, every)
        tiles = visits.at(np.flatnonzero(some & ~every))
    if tiles.shape[1] * q.size * kv.size > most:
        return None
    return pairs + int(_allowed(mask, q, kv, tiles).sum())


def _classified(mask: Mask, q: Tiles, kv: Tiles, visits: Visits) -> tuple[np.ndarray, np.ndarray]:
    """(some, every), bools that broadcast to the shape of the visits: false where a tile is not seen."""
    at = (Tiles(tiles.side, tiles.size, n[None, None]) for tiles, n in zip((q, kv), visits[:2], strict=True))
    some, every = (np.array(kind, bool, ndmin=4, copy=None)[0, 0] for kind in mask.classify(*at))
    if visits.seen is None:
        return some, every
    return some & visits.seen, every & visits.seen


def _kinds(visits: Visits, some: np.ndarray, every: np.ndarray) -> Counts:
    seen = visits.shape[0] * visits.shape[1] if visits.seen is None else int(np.count_nonzero(visits.seen))
    some_count, full = (_count(kind, visits) for kind in (some, every))
    partial = some_count - (_count(some & every, visits) if full else 0)
    return Counts(seen - some_count, partial, full, 0)


def _count(kind: np.ndarray, visits: Visits) -> int:
    """How many are true once broadcast to the shape of the visits."""
    copies = visits.shape[0] * visits.shape[1] // max(kind.size, 1)
    return int(np.count_nonzero(kind)) * copies


def _area(q: Tiles, kv: Tiles, visits: Visits, every: np.ndarray) -> int:
    """The pairs of the tiles that are FULL."""
    if not every.any():
        return 0
    rows, columns = _inside(q, visits.q), _inside(kv, visits.kv)
    return int(np.sum(rows * columns, where=np.broadcast_to(every, visits.shape)))


def _inside(tiles: Tiles, numbers: np.ndarray) -> np.ndarray:
    """How many slots each tile has: the last one may be cut off."""
    return np.minimum(tiles.size, tiles.side.length - numbers.astype(np.int64) * tiles.size)


def _spread(numbers: np.ndarray, *, every: int) -> np.ndarray:
    """About one of `every` numbers, at least one: one anywhere in each stretch, so that no pattern is met in step."""
    count = -(-len(numbers) // every)
    places = (np.arange(count) + np.random.default_rng(len(numbers)).random(count)) * (len(numbers) / count)
    return numbers[places.astype(np.int64)]


def _allowed(mask: Mask, q: Tiles, kv: Tiles, tiles: np.ndarray) -> np.ndarray:
    """The allowed pairs of each of some tiles [2, n]; the head axis runs over the tiles."""
    count, step = tiles.shape[1], max(1, READ_AT_ONCE // (q.size * kv.size))
    found = [np.zeros(0, np.int64)]
    for at in range(0, count, step):
        i, j = (_padded(numbers[at : at + step], step).reshape(1, -1, 1, 1) for numbers in tiles)
        q_slots = Slots(q.side, q.side.along(np.arange(q.size, dtype=np.int32)) + i * q.size)
        kv_slots = Slots(kv.side, kv.side.along(np.arange(kv.size, dtype=np.int32)) + j * kv.size)
        real = (q_slots.index < q.side.length) & (kv_slots.index < kv.side.length)
        truth = np.asarray(mask.allowed(q_slots, kv_slots)) & real
        found.append(np.count_nonzero(truth, axis=(0, 2, 3)))
    return np.concatenate([f[: count - at] for f, at in zip(found, [0, *range(0, count, step)], strict=True)])


def _padded(numbers: np.ndarray, most: int) -> np.ndarray:
    """Up to `most` numbers with the last one repeated: of few sizes, as rules in jax.numpy compile for each."""
    wanted = min(most, 1 << (len(numbers) - 1).bit_length())
    return np.pad(numbers, (0, wanted - len(numbers)), mode="edge")
