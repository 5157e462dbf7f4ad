"""The blocks that each head of a device needs from every other device, for an all-to-all or a few permutes.

A table of random blocks makes a device need a few blocks of every device, different ones for each head. If the table is
static, the maximum number of blocks is known at plan time; otherwise it is estimated. Programs have static shapes, so
each device sends that many blocks to each other device. Which blocks these are, every device computes at run time from
the table, which all devices have: no indices are sent. Blocks that more than half of the devices need would waste most
of an all-to-all; an all-reduce sends them to all devices instead, if that is cheaper.
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
from longspan.parallel.needs import without_arrays

MAX_BLOCKS = 1 << 26  # triples (head, device, block) that are visited at plan time
MAX_SHIFTS = 20  # permutes in a program
MAX_SHIFTED_SHARE = 0.8  # permutes are used if they send less than this share of an all-to-all


class Exchange(NamedTuple):
    """The number of blocks that a device receives from each other device, for each key/value head."""

    unit: int  # rows of a block
    blocks: int  # the most blocks that any device needs of another one
    shifts: tuple[tuple[int, int], ...]  # (devices before, blocks), largest shift first; empty: an all-to-all
    shards: int
    heads: int  # heads with different blocks: all key/value heads, or 1
    bound: int  # rows that the device with the most missing blocks lacks
    data: bool  # the number of blocks is an estimate: there may be more
    popular: tuple[int, ...] = ()  # blocks that more than half of the devices need: an all-reduce sends them to all

    @property
    def rows(self) -> int:
        """The rows that a device receives, for each head."""
        blocks = self.blocks * (self.shards - 1)
        if self.shifts:
            blocks = sum(count for _, count in self.shifts)
        return self.unit * blocks

    def popular_tokens(self, length: int) -> set[int]:
        tokens = (block * self.unit + i for block in self.popular for i in range(self.unit))
        return {token for token in tokens if token < length}


def exchange(mask: Mask, length: int, shards: int, rows: int, kv_heads: int, positions: bool, data: bool):
    """The `Exchange` of a mask that lists blocks; None if it has no tables, or a dynamic one and `data` is False."""
    listings = [found for part in mask.walk() if (found := part.listing()) is not None]
    dynamic = [found for found in listings if found.unlisted is not None]
    if not listings or shards == 1 or (dynamic and not data):
        return None
    unit = math.gcd(rows, *(found.block_size for found in listings))
    known = _known(mask, positions, tables=False)
    if mask.heads * shards * -(-length // unit) > MAX_BLOCKS:
        return None
    heads = math.gcd(kv_heads, mask.heads)
    needed = _needed(known, length, shards, rows // unit, unit, heads)
    extra = sum(_estimated_blocks(found, mask, heads, rows, shards) * (found.block_size // unit) for found in dynamic)
    popular = needed.sum(1).mean(0) > shards / 2  # bool [owners, blocks]
    found = [_sized(needed, chosen, extra, unit, heads) for chosen in (np.zeros_like(popular), popular)]
    return min(found, key=lambda each: each.rows + 2 * each.unit * len(each.popular))


def _sized(needed: np.ndarray, popular: np.ndarray, extra: int, unit: int, heads: int) -> Exchange:
    """The exchange of the needed blocks that are not popular, with space for `extra` blocks of each device."""
    shards, blocks = needed.shape[1], needed.shape[3]
    counts = (needed & ~popular).sum(3)
    max_blocks = min(int(counts.max(initial=0)) + extra, blocks)
    shifts = _shifts(counts)
    shifted_blocks = sum(count for _, count in shifts)
    few = len(shifts) <= MAX_SHIFTS and shifted_blocks < MAX_SHIFTED_SHARE * max_blocks * (shards - 1)
    if extra or not few:
        shifts = ()
    bound = -(-int(needed.sum((0, 2, 3)).max(initial=0)) * unit // needed.shape[0])
    listed = tuple(int(block) for block in np.flatnonzero(popular))
    return Exchange(unit, max_blocks, shifts, shards, heads, bound, extra > 0, listed)


def _estimated_blocks(found: Listing, mask: Mask, heads: int, rows: int, shards: int) -> int:
    """An estimate of the blocks of one device that a dynamic table lists for another: mean + 3 standard deviations."""
    heads_per_group = mask.heads // heads if found.by_head else 1
    mean = mask.batch * heads_per_group * (rows // found.block_size + 1) * found.entries / shards
    return math.ceil(mean + 3 * math.sqrt(mean) + 2)


def _shifts(counts: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(shift, the most blocks that a device needs of the device `shift` before it), largest shift first."""
    shards = counts.shape[1]
    max_counts = {shift: int(counts.max(0).diagonal(-shift).max()) for shift in range(shards - 1, -shards, -1)}
    return tuple((shift, count) for shift, count in max_counts.items() if count)


def _needed(mask: Mask, length: int, shards: int, blocks: int, unit: int, heads: int) -> np.ndarray:
    """Which blocks of an owner a device needs: bool [heads or 1, devices, owners, blocks]."""
    q, kv = two_sides(length, length, batch=mask.batch, heads=mask.heads, xp=np)
    low, high, common = _intervals(mask, q, kv, shards, blocks, unit)
    heads = min(heads, low.shape[0])
    needed = np.zeros((heads, shards, shards, blocks), bool)
    for device in range(shards):
        marks = _covered(np, low[:, device], high[:, device], shards * blocks) | common
        needed[:, device] = marks.reshape(heads, -1, shards, blocks).any(1)
        needed[:, device, device] = False
    return needed


class BlockLists(NamedTuple):
    """The blocks that a device sends and receives, in order, as indices into the owner's shard."""

    sent: Any  # int32 [heads, n]; the number of blocks in a shard: no block
    received: Any  # int32 [heads, n], likewise
    source: Any  # int32 [n]: the device that each received block comes from
    beyond: Any  # int32 []: the number of needed blocks for which there is no space


def block_lists(
    mask: Mask, of: Exchange, device: Any, numbers: Any, blocks: int, length: int, heads: int
) -> BlockLists:
    """The `BlockLists` of one device, computed at run time; shards have `blocks` blocks.

    The mask's arrays must be tables only, as in the result of `tables_only`. Every device computes the intervals of all
    devices: its own row gives the blocks that it receives, its column those that it sends.
    """
    q, kv = sides_of(mask, length, length, numbers=numbers)
    low, high, common = _intervals(mask, q, kv, of.shards, blocks, of.unit)
    shape = (min(heads, low.shape[0]), -1, of.shards, blocks)
    others = (np.arange(of.shards, dtype=np.int32) != device).reshape(1, -1, 1)
    popular = np.zeros((1, of.shards, blocks), bool)
    popular.reshape(-1)[list(of.popular)] = True

    # Blocks of this device that others need.
    first = device * np.int32(blocks)
    own_low = jnp.clip(low - first, 0, blocks).reshape(-1, low.shape[2])
    own_high = jnp.clip(high - first, 0, blocks).reshape(-1, high.shape[2])
    wanted = _covered(jnp, own_low, own_high, blocks).reshape(-1, of.shards, blocks)
    wanted = wanted | jnp.take(common.reshape(-1, of.shards, blocks), device, axis=1)[:, None]
    wanted = wanted.reshape(shape).any(1) & others
    wanted = wanted & ~jnp.take(popular, device, axis=1)[:, None]

    # Blocks of others that this device needs.
    needed = _covered(jnp, jnp.take(low, device, axis=1), jnp.take(high, device, axis=1), of.shards * blocks) | common
    needed = needed.reshape(shape).any(1) & others
    needed = needed & ~popular

    beyond = jnp.maximum(needed.sum(2, dtype=np.int32).max() - np.int32(of.blocks), 0)
    if not of.shifts:
        source = np.arange(of.shards, dtype=np.int32).repeat(of.blocks)
        sent = _first(wanted, of.blocks).reshape(shape[0], -1)
        received = _first(needed, of.blocks).reshape(shape[0], -1)
        return BlockLists(sent, received, source, beyond)
    sent = [_first(_of_device(wanted, device + np.int32(shift)), count) for shift, count in of.shifts]
    received = [_first(_of_device(needed, device - np.int32(shift)), count) for shift, count in of.shifts]
    source = jnp.concatenate([jnp.full(count, device - np.int32(shift)) for shift, count in of.shifts])
    return BlockLists(jnp.concatenate(sent, axis=1), jnp.concatenate(received, axis=1), source, beyond)


def _of_device(marks, device):
    """The marks [heads, shards, blocks] of one device; none if there is no such device."""
    exists = (device >= 0) & (device < marks.shape[1])
    return jnp.take(marks, jnp.clip(device, 0, marks.shape[1] - 1), axis=1) & exists


def tables_only(mask: Mask, positions: bool) -> Mask:
    """The mask in which other rules that depend on data allow everything; tables are kept."""
    return _known(mask, positions, tables=True)


def _known(mask: Mask, positions: bool, tables: bool) -> Mask:
    """The mask in which rules that depend on data allow everything; dynamic tables are kept, or list no block."""
    if not mask.is_monotone:  # of a negation, a part must not allow more
        return without_arrays(mask, positions)
    parts = mask.parts()
    if parts:
        return mask.with_parts([_known(part, positions, tables) for part in parts])
    found = mask.listing()
    if found is not None and found.unlisted is not None:
        return mask if tables else found.unlisted
    if jax.tree.leaves(mask) or (not positions and POSITION in mask.reads):
        return Full()
    return mask


def _intervals(mask: Mask, q: Side, kv: Side, shards: int, blocks: int, unit: int) -> tuple[Any, Any, Any]:
    """The intervals of blocks that each device may attend to, and the blocks that all devices may attend to.

    Returns low and high, int [heads, shards, n], and a bool [heads, blocks].
    """
    xp, tiles = q.xp, -(-q.length // unit)
    spans = mask.kv_spans(q.tiles(unit), kv.tiles(unit))
    shape = np.broadcast_shapes(spans.low.shape, spans.high.shape, (1, 1, tiles, 1))
    if spans.common is not None:
        shape = (shape[0], max(shape[1], spans.common.shape[1]), *shape[2:])
    padding = [(0, 0), (0, 0), (0, shards * blocks - tiles), (0, 0)]

    def by_device(end):
        end = xp.broadcast_to(xp.clip(end, 0, shards * blocks), shape).astype(np.int32)
        end = xp.moveaxis(xp.pad(end, padding), 0, 3)  # [heads, tiles, intervals, batch]
        return end.reshape(shape[1], shards, -1)

    low = spans.low // unit
    high = xp.where(spans.high > spans.low, -(-spans.high // unit), low)
    common = xp.zeros((1, shards * blocks), bool)
    if spans.common is not None:
        seen = xp.broadcast_to(spans.common, (*spans.common.shape[:3], tiles)).any((0, 2))
        common = xp.pad(seen, [(0, 0), (0, shards * blocks - tiles)])
    return by_device(low), by_device(high), common


def _covered(xp: Namespace, low, high, size: int):
    """Which of the numbers below `size` lie in one of a row's intervals [rows, n]: bool [rows, size]."""
    row = np.arange(low.shape[0], dtype=np.int32)[:, None]
    if xp is np:
        steps = np.zeros((low.shape[0], size + 1), np.int32)
        np.add.at(steps, (row, low), 1)
        np.add.at(steps, (row, high), -1)
    else:
        steps = jnp.zeros((low.shape[0], size + 1), np.int32).at[row, low].add(1).at[row, high].add(-1)
    return xp.cumsum(steps, axis=1)[:, :size] > 0


def _first(marks, count: int):
    """The indices of the first `count` marks along the last axis, int32 [..., count]; its size if there are fewer."""
    size = marks.shape[-1]
    index = np.arange(size, dtype=np.int32).reshape(*[1] * (marks.ndim - 1), size)
    indices = jnp.where(marks, index, np.int32(size))
    return jnp.sort(indices, axis=-1)[..., :count]
