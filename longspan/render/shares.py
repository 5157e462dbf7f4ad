"""The share of allowed pairs in each cell: the shade of a picture. Kinds alone would show strides as flat areas.

FULL tiles count with all their pairs. If there are few PARTIAL tiles, all their pairs are evaluated. If there are many,
some queries and keys of each tile are sampled.
"""

from math import isqrt
from typing import NamedTuple, Unpack

import numpy as np

from longspan.masks import Mask
from longspan.render.grid import Parts, Plane, Search, classified, edges, start, truths, within

MAX_READ = 1 << 22  # pairs
MIN_SAMPLES = 4  # queries, and keys, per tile
READ_AT_ONCE = 1 << 19  # pairs


class Shares(NamedTuple):
    """The number of allowed pairs in each cell [rows, columns], and whether all of them were counted."""

    pairs: np.ndarray
    exact: bool


def shares_of(mask: Mask, q_len: int, kv_len: int, q_cell: int, kv_cell: int, **plane: Unpack[Plane]) -> Shares:
    """The allowed pairs of the cells of one batch row and head (host only)."""
    search = start(mask, q_len, kv_len, q_cell, kv_cell, **plane)
    pairs, partial = np.zeros(search.allowed.size), []
    for parts in search.layout_parts():
        some, every = classified(search, parts)
        full = parts.take(every)
        pairs += np.bincount(full.cell, _areas(search, full), minlength=pairs.size)
        partial.append(parts.take(some & ~every))
    exact = _count_partial(search, partial, pairs)
    return Shares(pairs.reshape(search.shape), exact)


def _count_partial(search: Search, partial: list[Parts], pairs: np.ndarray) -> bool:
    """Adds the allowed pairs of PARTIAL parts to their cells; returns whether all pairs were evaluated."""
    partial = [parts for parts in partial if len(parts.cell)]
    if not partial:
        return True
    side = max(MIN_SAMPLES, isqrt(MAX_READ // sum(len(parts.cell) for parts in partial)))
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
    """The number of allowed pairs of each part, from `sizes` of its queries and keys; exact if these are all."""
    (q_start, q_stop), (kv_start, kv_stop) = edges(search, parts)
    q, q_real = _samples(q_start, q_stop, sizes[0], parts.q_size, random)
    kv, kv_real = _samples(kv_start, kv_stop, sizes[1], parts.kv_size, random)
    truth = truths(search, q, kv) & q_real[:, :, None] & kv_real[:, None, :]
    read = q_real.sum(axis=1) * kv_real.sum(axis=1)
    return np.count_nonzero(truth, axis=(1, 2)) * (_areas(search, parts) / read)


def _samples(
    start: np.ndarray, stop: np.ndarray, count: int, size: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """`count` slots of each part [parts, count], and whether each is real: a short part repeats its last slot."""
    if count == size:
        return within(start, stop, size), start[:, None] + np.arange(size) < stop[:, None]
    # One random slot in each of `count` equal stretches: a regular step could coincide with a stride of the mask.
    places = (np.arange(count) + random.random((len(start), count))) / count
    slots = start[:, None] + (places * (stop - start)[:, None]).astype(np.int64)
    return slots, np.ones(slots.shape, bool)


def _areas(search: Search, parts: Parts) -> np.ndarray:
    """The number of pairs of each part."""
    (q_start, q_stop), (kv_start, kv_stop) = edges(search, parts)
    return (q_stop - q_start) * (kv_stop - kv_start)
