"""Which blocks each head of a device needs of every other device: what an all-to-all brings, or a few permutes.

A table of random blocks makes a device need a few blocks of everybody, others for every head. How many they are at most
is known beforehand if the table is, else reckoned with; which ones, every device finds out when it runs, from the
table that all of them have.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import Namespace
from longspan.layout import sides_of
from longspan.masks import Full, Mask
from longspan.masks.base import POSITION, Listing
from longspan.masks.sides import Side, two_sides

MOST_BLOCKS = 1 << 26  # (head, device, block) that are looked at beforehand
MOST_SHIFTS = 20  # permutes that are written out
WORTH = 0.8  # and which part of an all-to-all they may send at most to be worth it


class Exchange(NamedTuple):
    """How many blocks come of each device, for each key/value head."""

    unit: int  # rows of a block
    blocks: int  # the most that come of any device
    shifts: tuple[tuple[int, int], ...]  # (how many devices before, blocks), furthest first; none: all to all, alike
    shards: int
    heads: int  # that are told apart: all key/value heads, or 1
    bound: int  # rows that the device which needs most lacks
    data: bool  # there may be more
    popular: tuple[int, ...] = ()  # blocks that more than half of the devices need: they come to all by themselves

    @property
    def rows(self) -> int:
        """What a device receives, for each head."""
        blocks = sum(count for _, count in self.shifts) if self.shifts else self.blocks * (self.shards - 1)
        return self.unit * blocks

    def popular_tokens(self, length: int) -> set[int]:
        tokens = (block * self.unit + i for block in self.popular for i in range(self.unit))
        return {token for token in tokens if token < length}


def exchange(mask: Mask, length: int, shards: int, rows: int, kv_heads: int, positions: bool, data: bool):
    """The `Exchange` of a mask that lists blocks; None if it lists none, or only (unless `data`) as data."""
    listings = [found for part in mask.walk() if (found := part.listing()) is not None]
    unknown = [found for found in listings if found.unlisted is not None]
    if not listings or shards == 1 or (unknown and not data):
        return None
    unit = math.gcd(rows, *(found.block_size for found in listings))
    known = _known(mask, positions, tables=False)
    if mask.heads * shards * -(-length // unit) > MOST_BLOCKS:
        return None
    heads = math.gcd(kv_heads, mask.heads)
    needed = _needed(known, length, shards, rows // unit, unit, heads)
    more = sum(_reckoned(found, mask, heads, rows, shards) * (found.block_size // unit) for found in unknown)
    many = needed.sum(1).mean(0) > shards / 2  # [who has, blocks]: more than half of the devices need it
    found = [_sized(needed, popular, more, unit, heads) for popular in (np.zeros_like(many), many)]
    return min(found, key=lambda each: each.rows + 2 * each.unit * len(each.popular))


def _sized(needed: np.ndarray, popular: np.ndarray, more: int, unit: int, heads: int) -> Exchange:
    """What must be exchanged if the popular blocks come by themselves, and so many of each device besides."""
    shards, blocks = needed.shape[1], needed.shape[3]
    counts = (needed & ~popular).sum(3)
    most, shifts = min(int(counts.max(initial=0)) + more, blocks), _shifts(counts)
    few = not more and len(shifts) <= MOST_SHIFTS and sum(n for _, n in shifts) < WORTH * most * (shards - 1)
    bound = -(-int(needed.sum((0, 2, 3)).max(initial=0)) * unit // needed.shape[0])
    listed = tuple(int(block) for block in np.flatnonzero(popular))
    return Exchange(unit, most, shifts if few else (), shards, heads, bound, more > 0, listed)


def _reckoned(found: Listing, mask: Mask, heads: int, rows: int, shards: int) -> int:
    """How many blocks of one device a table that is data may list for another: hardly ever are there more."""
    together = mask.heads // heads if found.by_head else 1
    mean = mask.batch * together * (rows // found.block_size + 1) * found.entries / shards
    return math.ceil(mean + 3 * math.sqrt(mean) + 2)


def _shifts(counts: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(how many devices before, the most blocks that any device needs of that one), furthest first."""
    shards = counts.shape[1]
    most = {shift: int(counts.max(0).diagonal(-shift).max()) for shift in range(shards - 1, -shards, -1)}
    return tuple((shift, count) for shift, count in most.items() if count)


def _needed(mask: Mask, length: int, shards: int, blocks: int, unit: int, heads: int) -> np.ndarray:
    """Which blocks of each device another one needs: bool [heads or 1, who needs, who has, blocks]."""
    q, kv = two_sides(length, length, batch=mask.batch, heads=mask.heads, xp=np)
    low, high, common = _intervals(mask, q, kv, shards, blocks, unit)
    heads = min(heads, low.shape[0])
    needed = np.zeros((heads, shards, shards, blocks), bool)
    for device in range(shards):
        marks = _covered(np, low[:, device], high[:, device], shards * blocks) | common
        needed[:, device] = marks.reshape(heads, -1, shards, blocks).any(1)
        needed[:, device, device] = False
    return needed


class Lists(NamedTuple):
    """The blocks that a device sends and receives, one after the other, by their places in the owner's shard."""

    sent: Any  # int32 [heads, n]; as many as a shard has blocks: none
    received: Any
    source: Any  # int32 [n]: of which device they come
    beyond: Any  # int32 []: how many there are too many


def lists(mask: Mask, of: Exchange, device: Any, numbers: Any, blocks: int, length: int, heads: int) -> Lists:
    """The `Lists` of one device, whose shard has so many blocks; the mask's arrays are tables and nothing else."""
    q, kv = sides_of(mask, length, length, numbers=numbers)
    low, high, common = _intervals(mask, q, kv, of.shards, blocks, of.unit)
    shape = (min(heads, low.shape[0]), -1, of.shards, blocks)
    mine = device * np.int32(blocks)
    flat = [jnp.clip(end - mine, 0, blocks).reshape(-1, end.shape[2]) for end in (low, high)]
    wanted = _covered(jnp, flat[0], flat[1], blocks).reshape(-1, of.shards, blocks)
    wanted = wanted | jnp.take(common.reshape(-1, of.shards, blocks), device, axis=1)[:, None]
    low, high = (jnp.take(end, device, axis=1) for end in (low, high))
    needed = _covered(jnp, low, high, of.shards * blocks) | common
    popular = np.zeros((1, of.shards, blocks), bool)
    popular.reshape(-1)[list(of.popular)] = True
    others = (np.arange(of.shards, dtype=np.int32) != device).reshape(1, -1, 1)
    wanted, needed = (marks.reshape(shape).any(1) & others for marks in (wanted, needed))
    wanted, needed = wanted & ~jnp.take(popular, device, axis=1)[:, None], needed & ~popular
    beyond = jnp.maximum(needed.sum(2, dtype=np.int32).max() - np.int32(of.blocks), 0)
    if not of.shifts:
        source = np.arange(of.shards, dtype=np.int32).repeat(of.blocks)
        sent, received = (_first(marks, of.blocks).reshape(shape[0], -1) for marks in (wanted, needed))
        return Lists(sent, received, source, beyond)
    sent, received = (
        jnp.concatenate([_first(_of(marks, device + np.int32(way * s)), n) for s, n in of.shifts], axis=1)
        for marks, way in ((wanted, 1), (needed, -1))
    )
    source = jnp.concatenate([jnp.full(n, device - np.int32(s)) for s, n in of.shifts])
    return Lists(sent, received, source, beyond)


def _of(marks, device):
    """The marks [heads, shards, blocks] of one device, none if there is no such device."""
    there = (device >= 0) & (device < marks.shape[1])
    return jnp.take(marks, jnp.clip(device, 0, marks.shape[1] - 1), axis=1) & there


def tables_only(mask: Mask, positions: bool) -> Mask:
    """The mask, where tables list what they do, and all else that only data tell allows everything."""
    return _known(mask, positions, tables=True)


def _known(mask: Mask, positions: bool, tables: bool) -> Mask:
    """The mask, where rules that only data tell allow everything; tables that are data list what they do, or none."""
    parts = mask.parts()
    if parts:
        return mask.with_parts([_known(part, positions, tables) for part in parts])
    found = mask.listing()
    if found is not None and found.unlisted is not None:
        return mask if tables else found.unlisted
    return Full() if jax.tree.leaves(mask) or (not positions and POSITION in mask.reads) else mask


def _intervals(mask: Mask, q: Side, kv: Side, shards: int, blocks: int, unit: int) -> tuple[Any, Any, Any]:
    """The intervals of blocks that devices may see, int [heads, shards, n], and bool [heads, blocks]: what all see."""
    xp, tiles = q.xp, -(-q.length // unit)
    spans = mask.kv_spans(q.tiles(unit), kv.tiles(unit))
    shape = np.broadcast_shapes(spans.low.shape, spans.high.shape, (1, 1, tiles, 1))
    ends = spans.low // unit, xp.where(spans.high > spans.low, -(-spans.high // unit), spans.low // unit)
    if spans.common is not None:
        shape = (shape[0], max(shape[1], spans.common.shape[1]), *shape[2:])
    missing = [(0, 0), (0, 0), (0, shards * blocks - tiles), (0, 0)]
    found = []
    for end in ends:
        end = xp.pad(xp.broadcast_to(xp.clip(end, 0, shards * blocks), shape).astype(np.int32), missing)
        end = xp.moveaxis(end, 0, 3)  # [heads, tiles, intervals, batch]
        found.append(end.reshape(shape[1], shards, -1))
    common = xp.zeros((1, shards * blocks), bool)
    if spans.common is not None:
        seen = xp.broadcast_to(spans.common, (*spans.common.shape[:3], tiles)).any((0, 2))
        common = xp.pad(seen, [(0, 0), (0, shards * blocks - tiles)])
    return found[0], found[1], common


def _covered(xp: Namespace, low, high, size: int):
    """Which of `size` numbers lie in any of a row's intervals [rows, n]: bool [rows, size]."""
    row = np.arange(low.shape[0], dtype=np.int32)[:, None]
    if xp is np:
        steps = np.zeros((low.shape[0], size + 1), np.int32)
        np.add.at(steps, (row, low), 1)
        np.add.at(steps, (row, high), -1)
    else:
        steps = jnp.zeros((low.shape[0], size + 1), np.int32).at[row, low].add(1).at[row, high].add(-1)
    return xp.cumsum(steps, axis=1)[:, :size] > 0


def _first(marks, count: int):
    """The places of the first marks along the last axis, int32 [..., count]; its size where there are no more."""
    size = marks.shape[-1]
    place = np.arange(size, dtype=np.int32).reshape(*[1] * (marks.ndim - 1), size)
    places = jnp.where(marks, place, np.int32(size))
    return jnp.sort(places, axis=-1)[..., :count]
