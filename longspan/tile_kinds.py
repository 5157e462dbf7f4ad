"""Counts visited tiles by kind (EMPTY, PARTIAL, FULL), and the allowed pairs inside PARTIAL tiles.

At a million tokens a mask may visit 67 million tiles. They are classified in rectangles that fit in the CPU cache,
where bounds per row and per column of tiles broadcast against each other. If too many pairs would have to be read, the
pairs are estimated from a sample of the PARTIAL tiles, and `Counts.sampled` holds the size of the sample.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from longspan.masks import Mask
from longspan.masks.sides import Slots, Tiles

READ_AT_ONCE = 1 << 20  # pairs
MAX_PAIRS_READ = 1 << 28  # more pairs take seconds to read, so they are estimated
SPLIT, LEAF = 4, 16  # a tile is split into SPLIT parts along each side, down to a size of LEAF slots
MAX_SPLIT_TILES = 1 << 16
SAMPLE = 1 << 11  # about how many PARTIAL tiles are read for an estimate


class Visits(NamedTuple):
    """Visited tiles, as tile indices that broadcast against each other: a list, or a rectangle of tiles.

    `seen` selects the visited tiles of a rectangle.
    """

    q: np.ndarray  # int32 [rows, 1]
    kv: np.ndarray  # int32 [rows, 1] or [1, columns]
    seen: np.ndarray | None = None  # bool [rows, columns]; None: all tiles

    @classmethod
    def listed(cls, rows: np.ndarray, tiles: np.ndarray) -> "Visits":
        """The visits (rows[i], tiles[i])."""
        return cls(rows.astype(np.int32).reshape(-1, 1), tiles.astype(np.int32).reshape(-1, 1))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.q), self.kv.shape[1]

    def at(self, which: np.ndarray) -> np.ndarray:
        """The tile indices [2, n] of the visits with these flat indices."""
        places = np.divmod(which, self.shape[1])
        return np.stack([np.broadcast_to(index, self.shape)[places] for index in self[:2]])


class Counts(NamedTuple):
    """The visited tiles of a concrete layout, summed over the batch rows and heads that it distinguishes."""

    empty: int  # visited tiles without an allowed pair
    partial: int
    full: int
    pairs: int  # allowed pairs of tokens; a pair that is visited twice counts twice
    sampled: int | None = None  # the number of PARTIAL tiles that `pairs` is estimated from; None: `pairs` is exact

    def plus(self, other: "Counts") -> "Counts":
        sampled = None
        if self.sampled is not None or other.sampled is not None:
            sampled = (self.sampled or 0) + (other.sampled or 0)
        return Counts(
            self.empty + other.empty,
            self.partial + other.partial,
            self.full + other.full,
            self.pairs + other.pairs,
            sampled,
        )


NONE = Counts(0, 0, 0, 0)


def count_kinds(mask: Mask, q: Tiles, kv: Tiles, looks: Iterable[Visits]) -> Counts:
    """Counts the visited tiles of one batch row and head by kind, without their pairs."""
    total = NONE
    for visits in looks:
        some, every = _classified(mask, q, kv, visits)
        total = total.plus(_kinds(visits, some, every))
    return total


def count_and_read(
    mask: Mask, q: Tiles, kv: Tiles, looks: Iterable[Visits], *, visits: int, max_pairs: int = MAX_PAIRS_READ
) -> Counts:
    """Counts tiles by kind, and allowed pairs: at most `max_pairs` pairs are read, more are estimated.

    `visits` is an upper bound on the number of tiles.
    """
    few, held, sampled, total = True, [np.zeros((2, 0), np.int32)], [], NONE
    for look in looks:
        some, every = _classified(mask, q, kv, look)
        total = total.plus(_kinds(look, some, every)._replace(pairs=_area(q, kv, look, every)))
        partial = np.flatnonzero(np.broadcast_to(some & ~every, look.shape))
        few = few and total.partial * q.size * kv.size <= SPLIT * max_pairs
        if few:
            held.append(look.at(partial))
        else:
            held = []
        if len(partial):
            sampled.append((len(partial), look.at(_spread(partial, every=max(1, visits // SAMPLE)))))
    if few:
        pairs = _read(mask, q, kv, np.concatenate(held, axis=1), max_pairs)
        if pairs is not None:
            return total._replace(pairs=total.pairs + pairs)
    # An estimate: each sampled tile stands for as many PARTIAL tiles as its look has per sampled tile.
    allowed = _allowed(mask, q, kv, np.concatenate([tiles for _, tiles in sampled], axis=1))
    weights = np.concatenate([np.full(tiles.shape[1], count / tiles.shape[1]) for count, tiles in sampled])
    return total._replace(pairs=total.pairs + round(float(weights @ allowed)), sampled=len(allowed))


def sample_partial(
    mask: Mask, q: Tiles, kv: Tiles, looks: Iterable[Visits], *, visits: int, max_tiles: int
) -> np.ndarray:  # fmt: skip
    """The indices [2, n] of about `max_tiles` PARTIAL tiles, spread over all visits."""
    sampled = [np.zeros((2, 0), np.int32)]
    for look in looks:
        some, every = _classified(mask, q, kv, look)
        partial = np.flatnonzero(np.broadcast_to(some & ~every, look.shape))
        if len(partial):
            sampled.append(look.at(_spread(partial, every=max(1, visits // max_tiles))))
    return np.concatenate(sampled, axis=1)


def read_tiles(mask: Mask, q: Tiles, kv: Tiles, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(some, every), bool [n]: whether a mask allows any, and all, pairs of each tile [2, n]. Reads the pairs."""
    allowed, visits = _allowed(mask, q, kv, tiles), Visits.listed(*tiles)
    rows, columns = _inside(q, visits.q), _inside(kv, visits.kv)
    return allowed > 0, allowed == (rows * columns)[:, 0]


def classify_tiles(mask: Mask, q: Tiles, kv: Tiles, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(some, every), bool [n]: the mask's bounds on each tile [2, n]. Does not read the pairs."""
    visits = Visits.listed(*tiles)
    some, every = _classified(mask, q, kv, visits)
    return np.broadcast_to(some, visits.shape)[:, 0], np.broadcast_to(every, visits.shape)[:, 0]


def _read(mask: Mask, q: Tiles, kv: Tiles, tiles: np.ndarray, max_pairs: int) -> int | None:
    """The number of allowed pairs in PARTIAL tiles [2, n]; None if more than `max_pairs` would have to be read.

    Tiles are split as long as possible: the smaller tiles that are EMPTY or FULL need not be read.
    """
    pairs = 0
    while _can_split(q, kv) and tiles.shape[1] <= MAX_SPLIT_TILES:
        parts = np.stack(np.meshgrid(*[np.arange(SPLIT, dtype=np.int32)] * 2)).reshape(2, 1, -1)
        visits = Visits.listed(*(SPLIT * tiles[:, :, None] + parts).reshape(2, -1))
        q, kv = q.side.tiles(q.size // SPLIT), kv.side.tiles(kv.size // SPLIT)
        inside = (visits.q * q.size < q.side.length) & (visits.kv * kv.size < kv.side.length)
        visits = Visits(visits.q[inside[:, 0]], visits.kv[inside[:, 0]])
        some, every = _classified(mask, q, kv, visits)
        some, every = np.broadcast_to(some, visits.shape), np.broadcast_to(every, visits.shape)
        pairs += _area(q, kv, visits, every)
        tiles = visits.at(np.flatnonzero(some & ~every))
    if tiles.shape[1] * q.size * kv.size > max_pairs:
        return None
    return pairs + int(_allowed(mask, q, kv, tiles).sum())


def _can_split(q: Tiles, kv: Tiles) -> bool:
    return q.size % SPLIT == 0 and kv.size % SPLIT == 0 and min(q.size, kv.size) > LEAF


def _classified(mask: Mask, q: Tiles, kv: Tiles, visits: Visits) -> tuple[np.ndarray, np.ndarray]:
    """(some, every): bools that broadcast to the shape of the visits, False for tiles that are not seen."""
    q_tiles = Tiles(q.side, q.size, visits.q[None, None])
    kv_tiles = Tiles(kv.side, kv.size, visits.kv[None, None])
    may_any, must_all = mask.classify(q_tiles, kv_tiles)
    some = np.array(may_any, bool, ndmin=4, copy=None)[0, 0]
    every = np.array(must_all, bool, ndmin=4, copy=None)[0, 0]
    if visits.seen is None:
        return some, every
    return some & visits.seen, every & visits.seen


def _kinds(visits: Visits, some: np.ndarray, every: np.ndarray) -> Counts:
    seen = visits.shape[0] * visits.shape[1]
    if visits.seen is not None:
        seen = int(np.count_nonzero(visits.seen))
    not_empty, full = _count(some, visits), _count(every, visits)
    partial = not_empty
    if full:
        partial -= _count(some & every, visits)
    return Counts(seen - not_empty, partial, full, 0)


def _count(kind: np.ndarray, visits: Visits) -> int:
    """The number of True entries after `kind` is broadcast to the shape of the visits."""
    copies = visits.shape[0] * visits.shape[1] // max(kind.size, 1)
    return int(np.count_nonzero(kind)) * copies


def _area(q: Tiles, kv: Tiles, visits: Visits, every: np.ndarray) -> int:
    """The number of pairs in the tiles that are FULL."""
    if not every.any():
        return 0
    rows, columns = _inside(q, visits.q), _inside(kv, visits.kv)
    return int(np.sum(rows * columns, where=np.broadcast_to(every, visits.shape)))


def _inside(tiles: Tiles, index: np.ndarray) -> np.ndarray:
    """The number of slots of each tile; the last tile of a side may have fewer."""
    return np.minimum(tiles.size, tiles.side.length - index.astype(np.int64) * tiles.size)


def _spread(entries: np.ndarray, *, every: int) -> np.ndarray:
    """About one of `every` entries, at least one: a random entry per stretch, so that periods cause no bias."""
    count = -(-len(entries) // every)
    places = (np.arange(count) + np.random.default_rng(len(entries)).random(count)) * (len(entries) / count)
    return entries[places.astype(np.int64)]


def _allowed(mask: Mask, q: Tiles, kv: Tiles, tiles: np.ndarray) -> np.ndarray:
    """The number of allowed pairs in each tile [2, n]. The head axis of the arrays runs over the tiles."""
    count, step = tiles.shape[1], max(1, READ_AT_ONCE // (q.size * kv.size))
    found = [np.zeros(0, np.int64)]
    for at in range(0, count, step):
        i = _padded(tiles[0, at : at + step], step).reshape(1, -1, 1, 1)
        j = _padded(tiles[1, at : at + step], step).reshape(1, -1, 1, 1)
        q_slots = Slots(q.side, q.side.along(np.arange(q.size, dtype=np.int32)) + i * q.size)
        kv_slots = Slots(kv.side, kv.side.along(np.arange(kv.size, dtype=np.int32)) + j * kv.size)
        real = (q_slots.index < q.side.length) & (kv_slots.index < kv.side.length)
        truth = np.asarray(mask.allowed(q_slots, kv_slots)) & real
        found.append(np.count_nonzero(truth, axis=(0, 2, 3)))
    return np.concatenate([f[: count - at] for f, at in zip(found, [0, *range(0, count, step)], strict=True)])


def _padded(index: np.ndarray, max_size: int) -> np.ndarray:
    """Repeats the last entry up to a power of two, or `max_size`: rules in jax.numpy compile once per size."""
    wanted = min(max_size, 1 << (len(index) - 1).bit_length())
    return np.pad(index, (0, wanted - len(index)), mode="edge")
