"""Masks by slot given as tables: `Blocks`, a list of key blocks per query block, and `Dense`, one bool per pair."""

from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from longspan.array_types import FAR, Array, Namespace, Number, no_type_check
from longspan.checks import is_known
from longspan.constants import unfolded
from longspan.masks.base import NO_QUERY, Extent, Listing, Mask, rule
from longspan.masks.by_position import Empty, Full
from longspan.masks.by_slot import BySlot
from longspan.masks.checks import check_array, check_at_least, check_block_bools, check_listing, check_number
from longspan.masks.count_pieces import CountPiece
from longspan.masks.cut import gather
from longspan.masks.pytree import short
from longspan.masks.sides import KEYS, QUERIES
from longspan.masks.spans import MAX_INTERVALS, NO_SLOT, Spans, nothing


@rule
class Blocks(BySlot):
    """Allows the block pairs listed in a table. A block listed twice counts once; negative entries are ignored.

    For a table of bools, one per pair of blocks, use `Blocks.from_bool`.

    Args:
        table: int [N or 1, nq, r] or [B or 1, N or 1, nq, r]: the kv blocks that each q block attends to, per head, or
            per batch row and head. A NumPy table is static. A JAX array is data, for example blocks chosen by scores.
        block_size: the number of slots in a block, on both sides; at most 2**30 - 1.

    Example:
        >>> print(Blocks(np.array([[[1], [0]]]), 2).show(4, 4))
        ..##
        ..##
        ##..
        ##..
    """

    static = ("table",)

    array_axes: ClassVar = {"table": "BNT."}

    table: Array
    block_size: int

    def __post_init__(self):
        check_listing(self, "table")
        check_array(self, "table", "int", "NQr or BNQr")
        check_at_least(self, "block_size", 1, static=True)

    @classmethod
    @no_type_check
    def from_bool(
        cls,
        table: Bool[Array, "N_or_1 q_blocks kv_blocks"] | Bool[Array, "B_or_1 N_or_1 q_blocks kv_blocks"],
        block_size: int,
        max_blocks: int | None = None,
    ) -> Mask:
        """`Blocks` that allow the block pairs for which a table of bools is True.

        `max_blocks` limits the length of the lists, which makes planning faster. It never changes the allowed pairs. If
        the table's values are known and a row has more than `max_blocks` True entries, `from_bool` raises a ValueError.
        If the table is traced, a second list keeps the further blocks: the result is `Blocks | Blocks`, and all tiles
        from the first to the last block of the second list are visited.

        Args:
            table: bool [N or 1, q blocks, kv blocks] or [B or 1, N or 1, q blocks, kv blocks]. A NumPy table is static,
                and its lists are as long as its longest row. A JAX array is data, and may be traced. Keys after the
                last kv block are not allowed.
            block_size: the number of slots in a block, on both sides.
            max_blocks: the maximum number of kv blocks per q block; by default all.

        Example:
            >>> near = np.array([[[True, False, False], [True, True, False], [False, True, True]]])
            >>> print(Blocks.from_bool(near, 1).show(3, 3))
            #..
            ##.
            .##
        """
        table, max_blocks = check_block_bools(table, max_blocks)
        if isinstance(table, np.ndarray):
            return cls(_list_blocks(np, table)[..., : max(int(table.sum(-1).max(initial=0)), 1)], block_size)
        if isinstance(table, jax.ShapeDtypeStruct):
            listed: Any = jax.ShapeDtypeStruct((*table.shape[:-1], max_blocks), np.int32)
            return cls(listed, block_size)
        listed = _list_blocks(jnp, unfolded(table))
        if max_blocks == table.shape[-1] or is_known(table):
            return cls(listed[..., :max_blocks], block_size)
        return cls(listed[..., :max_blocks], block_size) | cls(listed[..., max_blocks:], block_size)

    def allowed(self, q, kv):
        truth, block = Full().allowed(q, kv) & False, kv.index // self.block_size
        for listed in q.listed(self.table, self.block_size):
            truth = truth | (listed == block)
        return truth

    def classify(self, q, kv):
        xp, mine, theirs = q.side.xp, q.blocks(self.block_size), kv.blocks(self.block_size)
        if mine is None or theirs is None:
            return super().classify(q, kv)
        (q_blocks, q_real), (kv_blocks, kv_real) = mine, theirs
        rows = q.side.listed(self.table, q_blocks)[..., None]  # [b, n, q, kv, q block, r, 1]
        listed = xp.any(rows == kv_blocks[..., None, None, :], axis=-2)  # [b, n, q, kv, q block, kv block]
        real = q_real[..., :, None] & kv_real[..., None, :]
        return xp.any(listed & real, axis=(-2, -1)), xp.all(listed | ~real, axis=(-2, -1))

    def kv_spans(self, q, kv):
        xp, size, mine = q.side.xp, self.block_size, q.blocks(self.block_size)
        if mine is None:
            return super().kv_spans(q, kv)
        blocks, real = mine
        rows = xp.where(real[..., None], q.side.listed(self.table, blocks), np.int32(-1))  # [b, n, q, 1, q block, r]
        flat = rows.reshape(*rows.shape[:3], rows.shape[4] * rows.shape[5])
        low = xp.where(flat < 0, np.int32(0), flat * size)
        high = xp.where(flat < 0, np.int32(0), xp.minimum((flat + 1) * size, kv.side.length))
        if 0 < flat.shape[3] <= MAX_INTERVALS:
            return Spans(low, high)
        least = xp.min(xp.where(flat < 0, NO_SLOT, flat * size), axis=3, keepdims=True, initial=NO_SLOT)
        return Spans(least, xp.max(high, axis=3, keepdims=True, initial=0))

    def q_spans(self, kv, q):
        """From the first to the last q block that lists each kv block."""
        xp, size, length = kv.side.xp, self.block_size, kv.side.length
        if length == FAR:  # not known: a table of its blocks cannot be built
            return super().q_spans(kv, q)
        first, last = _listed_by(xp, _rank4(kv.table(self.table)).astype(np.int32), -(-length // size))
        low = xp.where(first <= last, first * size, NO_SLOT)
        high = xp.where(first <= last, xp.minimum((last + 1) * size, q.side.length), np.int32(0))
        repeats = min(size, max(length, 1))  # from one entry per block to one entry per slot
        low, high = xp.repeat(low, repeats, axis=2)[..., :length], xp.repeat(high, repeats, axis=2)[..., :length]
        return Spans(kv.least(low), kv.greatest(high))

    def nearest_query(self, key, at, step):
        if self.inexact():
            return at
        size, (listings, count) = self.block_size, self._listings
        wanted = key // size * count + np.clip(at // size, -1, count - 2)
        # Neighbouring keys mostly need the same pair of blocks: each run of equal pairs is searched once.
        starts = np.flatnonzero(np.diff(wanted, prepend=-NO_QUERY))
        runs, pair = np.diff(starts, append=len(wanted)), wanted[starts]
        if step < 0:
            found = listings[np.searchsorted(listings, pair, side="right") - 1]
            edge = found % count * size + size - 1
        else:
            found = listings[np.searchsorted(listings, pair)]
            edge = found % count * size
        query = np.where(found // count == key[starts] // size, edge, NO_QUERY * step)
        return np.where(np.repeat(found == pair, runs), at, np.repeat(query, runs))

    def inexact(self):
        if isinstance(self.table, np.ndarray):
            return ()
        return (self,)

    def listing(self):
        unlisted = None
        if not isinstance(self.table, np.ndarray):
            unlisted = replace(self, table=np.full((1, self.table.shape[-2], 1), -1, np.int32))
        return Listing(self.block_size, self.table.shape[-1], self.table.shape[-3] > 1, unlisted)

    def of_head(self, head):
        if self.table.shape[-3] == 1 or self.inexact():  # the heads of a table that is data have the same bounds
            return self
        return replace(self, table=self.table[..., head : head + 1, :, :])

    @cached_property
    def _listings(self) -> tuple[np.ndarray, int]:
        """The sorted numbers kv block · count + q block of all entries of a head's table, and `count`.

        -NO_QUERY and NO_QUERY are the first and the last entry.
        """
        # The batch rows are merged: a cache keeps a key for all of them.
        table = np.asarray(_rank4(self.table)[:, 0].swapaxes(0, 1).reshape(self.table.shape[-2], -1))
        rows, entries = np.nonzero(table >= 0)
        count = len(table) + 2
        listings = np.unique(table[rows, entries].astype(np.int64) * count + rows)
        return np.concatenate([[-NO_QUERY], listings, [NO_QUERY]]), count

    def _count_pieces(self, q, kv):
        if kv.positions is not None:  # keys are sorted by position, where a block is no longer an interval
            return None
        size, rows = self.block_size, self.table.shape[-2]
        blocks = np.arange(rows, dtype=np.int32).reshape(1, 1, -1, 1)
        columns = list(q.listed(self.table, blocks).reshape(rows, -1).T)
        repeats = min(size, max(q.length, 1))  # from one entry per block to one entry per query
        pieces = []
        for i, listed in enumerate(columns):
            counts = (listed >= 0) & ~np.any([listed == other for other in columns[:i]], axis=0)
            low, high = np.where(counts, listed, 0).repeat(repeats), np.where(counts, listed + 1, 0).repeat(repeats)
            pieces.append(CountPiece(low[: q.length] * size, high[: q.length] * size))
        return pieces

    def extents(self):
        *rows_and_heads, q_blocks, _ = self.table.shape
        for axis, size in zip("BN"[-len(rows_and_heads) :], rows_and_heads, strict=True):
            yield Extent("Blocks.table", axis, size)
        yield Extent("Blocks.table", "T", q_blocks, self.block_size)

    def _arguments(self):
        return [short(self.table), repr(self.block_size)]


@rule
class Dense(BySlot):
    """Allows the pairs for which a bool array is True. It takes T×S memory: use it as the last resort.

    Without offsets the array covers all slots of the call; an axis of size 1 broadcasts. Along a side with an offset,
    also with an offset of 0, entry i is for slot offset + i, and the array may have any size. Pairs outside of the
    array are not allowed. With a small array after a long prefix, only the tiles of the array are visited.

    Args:
        array: bool, rank 2 [T, S] or broadcastable rank 4 [B, N, T, S].
        q_offset: the query slot of the array's first entry, an int or an int array of shape () or [B]; by default the
            array covers all queries.
        kv_offset: the key slot of the array's first entry, likewise.

    Example:
        >>> print(Dense(np.array([[True, False], [False, True]])).show(2, 2))
        #.
        .#

        A tree of drafted tokens, each of which attends to its ancestors and to a prefix of 3 tokens:

        >>> from longspan import Prefix
        >>> tree = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
        >>> print((Prefix(3) | Dense(tree, kv_offset=3)).show(3, 6))
        ####..
        #####.
        ####.#
    """

    array_axes: ClassVar = {"array": "BNTS", "q_offset": "B", "kv_offset": "B"}

    array: Array
    q_offset: Number | None = None
    kv_offset: Number | None = None

    def __post_init__(self):
        check_array(self, "array", "bool", "BNTS or TS")
        for name in ("q_offset", "kv_offset"):
            if getattr(self, name) is not None:
                check_number(self, name)

    @property
    def reads_q_place(self):
        return self.q_offset is not None

    def allowed(self, q, kv):
        truth = Full().allowed(q, kv) & q.pairs(self.array, kv, (self.q_offset, self.kv_offset))
        for slots, offset, size in self._sides_at(q, kv):
            if offset is not None:
                truth = truth & (slots.index >= offset) & (slots.index < offset + size)
        return truth

    def classify(self, q, kv):
        if not (q.solid and kv.solid):
            return super().classify(q, kv)
        xp, array = q.side.xp, _rank4(q.table(self.array))
        offsets = [offset for _, offset, _ in self._sides_at(q, kv)]
        single = all(getattr(n, "size", 1) == 1 for n in (q.index, kv.index, *offsets))
        if single and xp is not np:
            return self._one_tile(array, q, kv)
        if any(offset is not None for offset in offsets):
            return self._counted(array, q, kv)
        some, every = _tile_kinds(kv, *_tile_kinds(q, array, array, QUERIES), KEYS)
        if q.whole and kv.whole and q.side.holds(array):
            return some, every
        place = [q.side.rows_of(array), q.side.heads_of(array.shape[1]), q.index, kv.index]
        for axis in (QUERIES, KEYS):
            if array.shape[axis] <= 1:
                place[axis] = place[axis] * 0
        return some[tuple(place)], every[tuple(place)]

    def kv_spans(self, q, kv):
        if not (q.solid and kv.solid):
            return super().kv_spans(q, kv)
        return self._hull(q, kv)

    def q_spans(self, kv, q):
        if not (q.solid and kv.solid):
            return super().q_spans(kv, q)
        return self._hull(kv, q)

    def extents(self):
        for name in ("q_offset", "kv_offset"):
            if getattr(getattr(self, name), "ndim", 0) == 1:
                yield Extent(f"Dense.{name}", "B", getattr(self, name).shape[0])
        offsets = dict(T=self.q_offset, S=self.kv_offset)
        for axis, size in zip("BNTS", (1,) * (4 - self.array.ndim) + tuple(self.array.shape), strict=True):
            if size != 1 and offsets.get(axis) is None:  # an axis of size 1 fits any size
                yield Extent("Dense.array", axis, size)

    def _cut(self, q, kv, q_len, kv_len):
        array, offsets = _rank4(self.array), {}
        for name, kept, axis in (("q_offset", q, QUERIES), ("kv_offset", kv, KEYS)):
            offset, size = getattr(self, name), array.shape[axis]
            if isinstance(offset, int):
                offset = max(-FAR, min(FAR, offset))
            if kept is None or (offset is None and size == 1):
                continue
            if offset is None:
                array = _gather(array, kept, axis)
            elif _is_run(kept):  # only the offset changes, and the array stays as small as it is
                offsets[name] = _less(offset, kept[:, 0])
            elif size == 0:
                return Empty()
            else:
                if not isinstance(offset, int):
                    offset = offset.reshape(-1, 1)
                place = kept - offset
                inside = ((place >= 0) & (place < size))[:, None, None]
                if axis == QUERIES:
                    inside = inside.swapaxes(2, 3)
                array = _gather(array, place, axis) & inside
                offsets[name] = None
        return replace(self, array=array, **offsets)

    def _sides_at(self, q, kv):
        """For each side: the side, its offset ready to broadcast (or None), and the array's size along it."""
        q_offset, kv_offset = self.q_offset, self.kv_offset
        if q_offset is not None:
            q_offset = q.number(q_offset)
        if kv_offset is not None:
            kv_offset = q.number(kv_offset)
        *_, q_size, kv_size = _rank4_shape(self.array)
        return [(q, q_offset, q_size), (kv, kv_offset, kv_size)]

    def _one_tile(self, array, q, kv):
        """(any, all) of a single tile: a slice of the array of the tile's size is read."""
        starts, sizes = [], []
        for n, place in ((array.shape[0], q.side.rows_of(array)), (array.shape[1], q.side.heads_of(array.shape[1]))):
            if n == 1 or place.size >= n:
                starts.append(jnp.zeros((), np.int32))
                sizes.append(n)
            else:
                starts.append(place.reshape(-1)[0])
                sizes.append(place.size)
        inside, covered = jnp.ones((1, 1, 1, 1), bool), jnp.ones((), bool)
        for tiles, offset, n in self._sides_at(q, kv):
            if offset is None and n == 1:
                starts.append(jnp.zeros((), np.int32))
                sizes.append(1)
                continue
            if offset is None:
                offset = 0
            begin, end = (tiles.start - offset).reshape(-1)[0], (tiles.stop - offset).reshape(-1)[0]
            size = min(tiles.size, n)
            first = jnp.clip(begin, 0, n - size)
            entry = tiles.side.along(first + jnp.arange(size, dtype=np.int32))
            starts.append(first)
            sizes.append(size)
            inside, covered = inside & (entry >= begin) & (entry < end), covered & (begin >= 0) & (end <= n)
        tile = jax.lax.dynamic_slice(array, starts, sizes)
        some = jnp.any(tile & inside, axis=(2, 3), keepdims=True)
        return some, jnp.all(tile | ~inside, axis=(2, 3), keepdims=True) & covered

    def _counted(self, array, q, kv):
        """(any, all) of any tiles, from a summed-area table: the number of True entries above and left of a corner."""
        xp = q.side.xp
        table = xp.pad(array.astype(np.int32), ((0, 0), (0, 0), (1, 0), (1, 0))).cumsum(2).cumsum(3).astype(np.int32)
        ends, area = [], np.int32(1)
        for tiles, offset, n in self._sides_at(q, kv):
            if offset is None and n == 1:
                ends.append((tiles.index * 0, tiles.index * 0 + 1))
                continue
            if offset is None:
                offset = 0
            ends.append((xp.clip(tiles.start - offset, 0, n), xp.clip(tiles.stop - offset, 0, n)))
            area = area * (tiles.stop - tiles.start)
        rows, head = q.side.rows_of(array), q.side.heads_of(array.shape[1])
        (top, bottom), (left, right) = ends
        inside = table[rows, head, bottom, right] - table[rows, head, top, right]
        inside = inside - table[rows, head, bottom, left] + table[rows, head, top, left]
        return inside > 0, inside == area

    def _hull(self, rows, others) -> Spans:
        """From the first to the last slot of the other side that any token of each tile sees."""
        array, xp, length = _rank4(rows.table(self.array)), rows.side.xp, others.side.length
        if rows.side.axis == QUERIES:
            (_, mine, size), (_, theirs, n) = self._sides_at(rows, others)
        else:
            (_, theirs, n), (_, mine, size) = self._sides_at(others, rows)
        if 0 in array.shape[2:]:
            return nothing(xp)
        shift = 0
        if theirs is not None:
            slot = others.side.along(xp.arange(n, dtype=np.int32)) + theirs
            array = array & (slot >= 0) & (slot < length)
            shift = theirs
            if not isinstance(shift, int):
                shift = shift[..., 0]
        low, high = _first_and_last(xp, array, others.side.axis)  # [B or 1, N or 1, size], in entries of the array
        none = low >= high
        if theirs is None and n == 1:
            high = high * length
        else:
            high = high + shift
        low, high = xp.where(none, np.int32(NO_SLOT), low + shift), xp.where(none, np.int32(0), high)
        if mine is None and size == 1:
            return Spans(xp.minimum(low, high)[..., None], high[..., None])
        if mine is not None:
            if not isinstance(mine, int):
                mine = mine[..., 0, 0]
            place = xp.arange(rows.side.length, dtype=np.int32).reshape(1, -1) - mine
            outside = ((place < 0) | (place >= size))[:, None]
            low = xp.where(outside, np.int32(NO_SLOT), gather(low, place))
            high = xp.where(outside, np.int32(0), gather(high, place))
        low, high = rows.least(low), rows.greatest(high)
        return Spans(xp.minimum(low, high), high)

    def _arguments(self):
        names = [n for n in ("q_offset", "kv_offset") if getattr(self, n) is not None]
        return [short(self.array), *(f"{name}={short(getattr(self, name))}" for name in names)]


def _list_blocks(xp: Namespace, table):
    """The indices of the True entries of each row, in order, followed by -1: int32, of the same shape."""
    order = xp.argsort(~table, axis=-1, stable=True).astype(np.int32)
    return xp.where(xp.take_along_axis(table, order, axis=-1), order, np.int32(-1))


def _listed_by(xp: Namespace, table, count: int):
    """For each kv block below `count`, the first and the last q block whose row lists it: [B or 1, N or 1, count]."""
    rows, heads, q_blocks, _ = table.shape
    planes = rows * heads
    place = xp.broadcast_to(xp.arange(q_blocks, dtype=np.int32).reshape(1, 1, -1, 1), table.shape).reshape(planes, -1)
    listed = table.reshape(planes, -1)
    plane = xp.broadcast_to(xp.arange(planes, dtype=np.int32).reshape(-1, 1), listed.shape)
    slot = xp.where((listed >= 0) & (listed < count), listed, np.int32(count))
    first = xp.full((planes, count + 1), NO_SLOT, np.int32)
    last = xp.full((planes, count + 1), -1, np.int32)
    if xp is np:
        np.minimum.at(first, (plane, slot), place)
        np.maximum.at(last, (plane, slot), place)
    else:
        first, last = first.at[plane, slot].min(place), last.at[plane, slot].max(place)
    return first[:, :count].reshape(rows, heads, count), last[:, :count].reshape(rows, heads, count)


def _rank4(array):
    return array.reshape(_rank4_shape(array))


def _rank4_shape(array) -> tuple[int, ...]:
    return (1,) * (4 - array.ndim) + tuple(array.shape)


def _gather(array, slots, axis: int):
    """The entries of a rank-4 array at some slots of the axis of one side."""
    if axis == KEYS:
        return gather(array, slots)
    return gather(array.swapaxes(2, 3), slots).swapaxes(2, 3)


def _is_run(slots) -> bool:
    """Whether slots [B or 1, n] are known and consecutive."""
    return isinstance(slots, np.ndarray) and slots.shape[1] > 0 and bool((np.diff(slots, axis=1) == 1).all())


def _less(offset: Number, first: np.ndarray) -> Number:
    """An offset, counted from the first kept slot of each batch row, [B or 1]."""
    if first.size == 1 and isinstance(offset, int):
        return offset - int(first[0])
    return offset - first.reshape(-1)


def _first_and_last(xp: Namespace, array, axis: int):
    """The interval [first, last + 1) of the True entries along an axis; (0, 0) without any."""
    size = array.shape[axis]
    some = xp.any(array, axis=axis).astype(np.int32)
    low = xp.argmax(array, axis=axis).astype(np.int32)
    high = size - xp.argmax(xp.flip(array, axis), axis=axis).astype(np.int32)
    return low * some, high * some


def _tile_kinds(tiles, some, every, axis: int):
    """(any, all) of bool arrays over each tile of one axis; an axis of size 1 is unchanged."""
    xp, length = tiles.side.xp, some.shape[axis]
    if length == 1:
        return some, every
    size = max(min(tiles.size, length), 1)
    count = -(-length // size)
    pads = [(0, 0)] * 4
    pads[axis] = (0, count * size - length)
    shape = (*some.shape[:axis], count, size, *some.shape[axis + 1 :])
    some = xp.any(xp.pad(some, pads, constant_values=False).reshape(shape), axis=axis + 1)
    every = xp.all(xp.pad(every, pads, constant_values=True).reshape(shape), axis=axis + 1)
    return some, every
