"""The keys of other devices that each device lacks, found from a mask's spans.

The mask bounds the keys of each chunk of queries by intervals. An interval is split at chunk boundaries into parts, and
each part lies on one device. All devices run the same program, so for each shift between devices one permute brings the
*hull* of the rows that any device needs from that distance: the smallest interval of rows that covers them.
"""

from typing import NamedTuple

import jax
import numpy as np

from longspan.masks import Full, Mask
from longspan.masks.base import POSITION
from longspan.masks.sides import two_sides
from longspan.parallel.order import owner_of, padded, runs_of

MAX_PARTS = 1 << 22  # parts of intervals that are visited one by one


class MissingKeys(NamedTuple):
    """The keys that devices lack."""

    hulls: dict[tuple[int, int], tuple[int, int]] | None  # (shift, run) -> rows [start, stop); None: too many parts
    reach: tuple[int, int]  # the number of shards before, and after, that some device needs
    bound: int  # rows that the device with the most missing keys lacks


def missing_keys(mask: Mask, length: int, shards: int, order: str) -> MissingKeys:
    """The keys that devices lack, for a mask without arrays."""
    size = padded(length, shards, order) // (shards * runs_of(order))
    q_chunk, low, high = _spans(mask, length, size)
    first, last = low // size, (high - 1) // size
    device, _ = owner_of(order, shards, q_chunk)
    counts = last - first + 1
    parts = int(counts.sum())
    if parts > MAX_PARTS:
        own = np.clip(np.minimum(high, (q_chunk + 1) * size) - np.maximum(low, q_chunk * size), 0, None)
        bound = int(np.bincount(device, high - low - own, minlength=shards).max(initial=0))
        reach = (shards - 1, 0)
        if order == "contiguous":
            reach = int((q_chunk - first).max(initial=0)), int((last - q_chunk).max(initial=0))
        return MissingKeys(None, reach, bound)
    # One entry per part: the interval it belongs to, and its chunk of keys.
    interval = np.arange(len(q_chunk)).repeat(counts)
    kv_chunk = first[interval] + np.arange(parts) - (np.cumsum(counts) - counts)[interval]
    needing = device[interval]
    owner, run = owner_of(order, shards, kv_chunk)
    start = np.maximum(low[interval] - kv_chunk * size, 0)
    stop = np.minimum(high[interval] - kv_chunk * size, size)
    foreign = owner != needing
    return _hulls(needing[foreign], owner[foreign], run[foreign], start[foreign], stop[foreign], shards)


def _hulls(needing, owner, run, start, stop, shards: int) -> MissingKeys:
    """The hulls by shift and run, from parts: rows [start, stop) of an owner's run that a device needs."""
    shift = needing - owner
    hulls = {}
    keys = (shift + shards) * 2 + run
    for key in np.unique(keys)[::-1]:  # from the largest shift down
        here = keys == key
        hulls[int(key // 2) - shards, int(key % 2)] = int(start[here].min()), int(stop[here].max())
    # The lower bound counts hulls too, one for each device and run that it needs rows of: intervals may overlap.
    pairs = (needing * shards + owner) * 2 + run
    _, group = np.unique(pairs, return_inverse=True)
    count = int(group.max(initial=-1)) + 1
    group_start, group_stop = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    group_device = np.zeros(count, np.int64)
    np.minimum.at(group_start, group, start)
    np.maximum.at(group_stop, group, stop)
    group_device[group] = needing
    bound = int(np.bincount(group_device, group_stop - group_start, minlength=shards).max(initial=0))
    return MissingKeys(hulls, (int(shift.max(initial=0)), int((-shift).max(initial=0))), bound)


def _spans(mask: Mask, length: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The intervals of keys that each chunk of queries may attend to, as a flat list: (chunk, low, high)."""
    q, kv = two_sides(length, length, batch=mask.batch, heads=mask.heads, xp=np)
    spans = mask.kv_spans(q.tiles(size), kv.tiles(size))
    chunks = -(-length // size)
    shape = np.broadcast_shapes(spans.low.shape, spans.high.shape, (1, 1, chunks, 1))

    def by_chunk(ends: np.ndarray) -> np.ndarray:
        clipped = np.clip(ends.astype(np.int64), 0, length)
        return np.broadcast_to(clipped, shape).swapaxes(0, 2).reshape(chunks, -1)

    low, high = by_chunk(spans.low), by_chunk(spans.high)
    chunk = np.broadcast_to(np.arange(chunks)[:, None], low.shape)
    chunk, low, high = chunk.reshape(-1), low.reshape(-1), high.reshape(-1)
    if spans.common is not None:
        common = np.flatnonzero(np.asarray(spans.common).any((0, 1, 2)) & np.ones(chunks, bool))
        starts = np.tile(common, chunks) * size
        chunk = np.concatenate([chunk, np.arange(chunks).repeat(len(common))])
        low = np.concatenate([low, starts])
        high = np.concatenate([high, np.minimum(starts + size, length)])
    some = low < high
    return chunk[some], low[some], high[some]


def without_arrays(mask: Mask, positions: bool = True) -> Mask:
    """A mask without data that allows at least the pairs of `mask`: rules that depend on data allow everything.

    Rules depend on data because of arrays or, if `positions` is False, because positions are given.
    """
    depends = holds_arrays(mask) or (not positions and POSITION in mask.reads)
    if not depends:
        return mask
    if not mask.is_monotone:  # of a negation, a part must not allow more
        lowered = mask.atoms()
        return without_arrays(lowered, positions) if lowered.is_monotone else Full()
    parts = mask.parts()
    if parts:
        return mask.with_parts([without_arrays(part, positions) for part in parts])
    return Full()


def holds_arrays(mask: Mask) -> bool:
    """Whether a mask depends on data."""
    return bool(jax.tree.leaves(mask))
