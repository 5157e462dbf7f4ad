"""How much of each cell is allowed: the shade of a picture, where kinds alone would show strides as flat areas.

FULL tiles are counted by their area. PARTIAL ones are read pair by pair where they are few; of many, each is read at
some queries and keys, which stand for the others.
"""

from math import isqrt
from typing import NamedTuple, Unpack

import numpy as np

from longspan.masks import Mask
from longspan.render.grid import Parts, Search, Which, classified, edges, start, truths, within

MOST_READ = 1 << 22  # pairs
FEWEST = 4  # queries, and keys, that are looked at in a tile
READ_AT_ONCE = 1 << 19  # pairs


class Shares(NamedTuple):
    """The allowed pairs of each cell [rows, columns], and whether all of them were counted."""

    pairs: np.ndarray
    exact: bool


def shares_of(mask: Mask, q_len: int, kv_len: int, q_cell: int, kv_cell: int, **which: Unpack[Which]) -> Shares:
    """The allowed pairs of the cells of one batch row and head (host only)."""
    search = start(mask, q_len, kv_len, q_cell, kv_cell, **which)
    pairs, partial = np.zeros(search.allowed.size), []
    for parts in search.looks():
        some, every = classified(search, parts)
        full = parts.take(every)
        pairs += np.bincount(full.cell, _areas(search, full), minlength=pairs.size)
        partial.append(parts.take(some & ~every))
    exact = _read(search, partial, pairs)
    return Shares(pairs.reshape(search.shape), exact)


def _read(search: Search, partial: list[Parts], pairs: np.ndarray) -> bool:
    """Adds what PARTIAL parts allow to the pairs of their cells; whether all of them were read."""
    partial = [parts for parts in partial if len(parts.cell)]
    if not partial:
        return True
    side = max(FEWEST, isqrt(MOST_READ // sum(len(parts.cell) for parts in partial)))
    random, exact = np.random.default_rng(0), True
    for parts in partial:
        sizes = min(side, parts.q_size), min(side, parts.kv_size)
        exact = exact and sizes == (parts.q_size, parts.kv_size)
        step = max(1, READ_AT_ONCE // (sizes[0] * sizes[1]))
        for at in range(0, len(parts.cell), step):
            some = parts.take(slice(at, at + step))
            pairs += np.bincount(some.cell, _allowed(search, some, sizes, random), minlength=pairs.size)
    return exact


def _allowed(search: Search, parts: Parts, sizes: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """How many pairs of each part are allowed, or about, from so many of its queries and keys."""
    looks = []
    for (first, stop), size, whole in zip(edges(search, parts), sizes, (parts.q_size, parts.kv_size), strict=True):
        if size == whole:
            slots = within(first, stop, size)
            looks.append((slots, first[:, None] + np.arange(size) < stop[:, None]))
        else:  # one anywhere in each stretch, so that strides are not met in step
            places = (np.arange(size) + random.random((len(first), size))) / size
            looks.append((first[:, None] + (places * (stop - first)[:, None]).astype(np.int64), None))
    (q, q_real), (kv, kv_real) = looks
    truth = truths(search, q, kv)
    for real, axis in ((q_real, 2), (kv_real, 1)):
        if real is not None:
            truth = truth & np.expand_dims(real, axis)
    seen = [size if real is None else real.sum(axis=1) for (_, real), size in zip(looks, sizes, strict=True)]
    return np.count_nonzero(truth, axis=(1, 2)) * (_areas(search, parts) / (seen[0] * seen[1]))


def _areas(search: Search, parts: Parts) -> np.ndarray:
    """The pairs of each part."""
    (q_start, q_stop), (kv_start, kv_stop) = edges(search, parts)
    return (q_stop - q_start) * (kv_stop - kv_start)
