"""Which keys of other devices a device lacks, found from a mask's spans alone."""

from typing import NamedTuple

import jax
import numpy as np

from longspan.masks import Full, Mask
from longspan.masks.base import POSITION
from longspan.masks.sides import two_sides
from longspan.parallel.order import owner_of, padded, runs_of

MOST_TOUCHES = 1 << 22  # pairs of a chunk and an interval that are looked at one by one


class Needs(NamedTuple):
    """What devices lack."""

    hulls: dict[tuple[int, int], tuple[int, int]] | None  # (shift, run) -> rows [start, stop); None: too many to tell
    reach: tuple[int, int]  # how many shards before and after
    bound: int  # rows that the device which needs most lacks


def needs_of(mask: Mask, length: int, shards: int, order: str) -> Needs:
    """Spans at chunks, met with the chunks that other devices hold."""
    size = padded(length, shards, order) // (shards * runs_of(order))
    tile, low, high = _spans(mask, length, size)
    first, last = low // size, (high - 1) // size
    device, _ = owner_of(order, shards, tile)
    widths = high - low - np.clip(np.minimum(high, (tile + 1) * size) - np.maximum(low, tile * size), 0, None)
    bound = int(np.bincount(device, widths, minlength=shards).max(initial=0))
    touches = int((last - first + 1).sum())
    if touches > MOST_TOUCHES:
        before = int((tile - first).max(initial=0)), int((last - tile).max(initial=0))
        return Needs(None, before if order == "contiguous" else (shards - 1, 0), bound)
    which = np.arange(len(tile)).repeat(last - first + 1)
    ends = np.cumsum(last - first + 1)
    chunk = first[which] + np.arange(touches) - (ends - (last - first + 1))[which]
    mine = device[which]
    theirs, run = owner_of(order, shards, chunk)
    start = np.maximum(low[which] - chunk * size, 0)
    stop = np.minimum(high[which] - chunk * size, size)
    foreign = theirs != mine
    return _hulls(mine[foreign], theirs[foreign], run[foreign], start[foreign], stop[foreign], shards)


def _hulls(mine, theirs, run, start, stop, shards: int) -> Needs:
    """What each shift must bring so that every device has what it needs."""
    shift = mine - theirs
    hulls = {}
    keys = (shift + shards) * 2 + run
    for key in np.unique(keys)[::-1]:  # from the furthest before to the furthest after
        here = keys == key
        hulls[int(key // 2) - shards, int(key % 2)] = int(start[here].min()), int(stop[here].max())
    # Of one device's needs in one run of a neighbour, the hull too: intervals may overlap.
    pairs = (mine * shards + theirs) * 2 + run
    _, group = np.unique(pairs, return_inverse=True)
    count = int(group.max(initial=-1)) + 1
    least, most, device = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.minimum.at(least, group, start)
    np.maximum.at(most, group, stop)
    device[group] = mine
    bound = int(np.bincount(device, most - least, minlength=shards).max(initial=0))
    return Needs(hulls, (int(shift.max(initial=0)), int((-shift).max(initial=0))), bound)


def _spans(mask: Mask, length: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The intervals of keys that each chunk of queries may see, one after the other: (chunk, low, high)."""
    q, kv = two_sides(length, length, batch=mask.batch, heads=mask.heads, xp=np)
    spans = mask.kv_spans(q.tiles(size), kv.tiles(size))
    tiles = -(-length // size)
    low, high = np.broadcast_arrays(spans.low, spans.high)
    low, high = (np.broadcast_to(a, (*a.shape[:2], tiles, a.shape[3])) for a in (low, high))
    low, high = (np.clip(a.astype(np.int64), 0, length).swapaxes(0, 2).reshape(tiles, -1) for a in (low, high))
    tile = np.broadcast_to(np.arange(tiles)[:, None], low.shape)
    found = [a.reshape(-1) for a in (tile, low, high)]
    if spans.common is not None:
        common = np.flatnonzero(np.asarray(spans.common).any((0, 1, 2)) & np.ones(tiles, bool))
        rows = np.arange(tiles).repeat(len(common))
        starts = np.tile(common, tiles) * size
        more = rows, starts, np.minimum(starts + size, length)
        found = [np.concatenate(pair) for pair in zip(found, more, strict=True)]
    some = found[1] < found[2]
    return found[0][some], found[1][some], found[2][some]


def without_arrays(mask: Mask, positions: bool = True) -> Mask:
    """The mask, where rules that cannot be known before the data come allow everything."""
    parts = mask.parts()
    if parts:
        return mask.with_parts([without_arrays(part, positions) for part in parts])
    unknown = holds_arrays(mask) or (not positions and POSITION in mask.reads)
    return Full() if unknown else mask


def holds_arrays(mask: Mask) -> bool:
    """Whether a mask depends on data."""
    return bool(jax.tree.leaves(mask))
