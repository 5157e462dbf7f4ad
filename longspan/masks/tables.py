"""Rules by slot whose arrays say who sees whom: `Blocks`, a table of block pairs, and `Dense`, one bool per pair."""

from dataclasses import replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from longspan._types import FAR, Array, Namespace
from longspan.masks.base import NOBODY, Extent, rule
from longspan.masks.by_position import Full
from longspan.masks.by_slot import FOREVER, BySlot
from longspan.masks.checks import check_array, check_at_least
from longspan.masks.cut import gather
from longspan.masks.pieces import Piece
from longspan.masks.pytree import short
from longspan.masks.sides import KEYS, QUERIES
from longspan.masks.spans import MOST_INTERVALS, Spans


@rule
class Blocks(BySlot):
    """Allows the block pairs listed in a table; a block listed twice counts once, a negative entry is none.

    Args:
        table: int [N or 1, nq, r]: the kv blocks that each q block sees. A NumPy table is static, a JAX array is data.
        block_size: slots in a block, on both sides.

    Example:
        >>> print(Blocks(np.array([[[1], [0]]]), 2).show(4, 4))
        ..##
        ..##
        ##..
        ##..
    """

    static = ("table",)

    table: Array
    block_size: int

    def __post_init__(self):
        check_array(self, "table", "int", "NQr")
        check_at_least(self, "block_size", 1, static=True)

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
        if 0 < flat.shape[3] <= MOST_INTERVALS:
            return Spans(low, high)
        least = xp.min(xp.where(flat < 0, FOREVER, flat * size), axis=3, keepdims=True, initial=FOREVER)
        return Spans(least, xp.max(high, axis=3, keepdims=True, initial=0))

    def q_spans(self, kv, q):
        """The hull of the q blocks that list each kv block."""
        xp, size, length = kv.side.xp, self.block_size, kv.side.length
        if length == FAR:  # nobody knows it: no table of its blocks
            return super().q_spans(kv, q)
        first, last = _listed_by(xp, kv.table(self.table).astype(np.int32), -(-length // size))
        low = xp.where(first <= last, first * size, FOREVER)
        high = xp.where(first <= last, xp.minimum((last + 1) * size, q.side.length), np.int32(0))
        low, high = (xp.repeat(a, size, axis=1)[None, :, :length] for a in (low, high))
        return Spans(kv.least(low), kv.greatest(high))

    def nearest_query(self, key, at, step):
        if self.loose():
            return at
        size, (listings, count) = self.block_size, self._listings
        wanted = key // size * count + np.clip(at // size, -1, count - 2)
        # Neighbours mostly ask for the same pair of blocks: each run of them is looked up once.
        starts = np.flatnonzero(np.diff(wanted, prepend=-NOBODY))
        runs, pair = np.diff(starts, append=len(wanted)), wanted[starts]
        place = np.searchsorted(listings, pair, side="right") - 1 if step < 0 else np.searchsorted(listings, pair)
        found = listings[place]
        edge = found % count * size + (size - 1 if step < 0 else 0)
        query = np.where(found // count == key[starts] // size, edge, NOBODY * step)
        return np.where(np.repeat(found == pair, runs), at, np.repeat(query, runs))

    def loose(self):
        return () if isinstance(self.table, np.ndarray) else (self,)

    def of_head(self, head):
        alike = self.table.shape[0] == 1 or self.loose()  # of a table that is data only its bounds are known
        return self if alike else replace(self, table=self.table[head : head + 1])

    @cached_property
    def _listings(self) -> tuple[np.ndarray, int]:
        """One number for each listing of a head's table, by kv block and then by q block, between two fences."""
        table = self.table[0]
        rows, entries = np.nonzero(table >= 0)
        count = len(table) + 2
        listings = np.unique(table[rows, entries].astype(np.int64) * count + rows)
        return np.concatenate([[-NOBODY], listings, [NOBODY]]), count

    def _pieces(self, q, kv):
        if kv.positions is not None:  # keys are then taken in the order of their positions, where blocks fall apart
            return None
        size, rows = self.block_size, self.table.shape[1]
        blocks = np.arange(rows, dtype=np.int32).reshape(1, 1, -1, 1)
        columns = list(q.listed(self.table, blocks).reshape(rows, -1).T)
        pieces = []
        for i, listed in enumerate(columns):
            counts = (listed >= 0) & ~np.any([listed == other for other in columns[:i]], axis=0)
            low, high = (np.where(counts, listed + i, 0).repeat(size)[: q.length] * size for i in (0, 1))
            pieces.append(Piece(low, high))
        return pieces

    def extents(self):
        yield Extent("Blocks.table", "N", self.table.shape[0])
        yield Extent("Blocks.table", "T", self.table.shape[1], self.block_size)

    def _arguments(self):
        return [short(self.table), repr(self.block_size)]


@rule
class Dense(BySlot):
    """Allows what a bool array says; T×S memory, so the last resort.

    Args:
        array: bool, rank 2 [T, S] or broadcastable rank 4 [B, N, T, S].

    Example:
        >>> print(Dense(np.array([[True, False], [False, True]])).show(2, 2))
        #.
        .#
    """

    array: Array

    def __post_init__(self):
        check_array(self, "array", "bool", "BNTS or TS")

    def allowed(self, q, kv):
        return Full().allowed(q, kv) & q.pairs(self.array, kv)

    def classify(self, q, kv):
        if not (q.solid and kv.solid):
            return super().classify(q, kv)
        xp, array = q.side.xp, _rank4(q.table(self.array))
        if q.index.size == kv.index.size == 1 and xp is not np:
            tile = self._one_tile(array, q, kv)
            return xp.any(tile, axis=(2, 3), keepdims=True), xp.all(tile, axis=(2, 3), keepdims=True)
        some, every = _tile_kinds(kv, *_tile_kinds(q, array, array, QUERIES), KEYS)
        if q.whole and kv.whole and q.side.whole:
            return some, every
        rows, head = q.side.rows_of(array), q.side.heads_of(array.shape[1])
        place = [t.index if n > 1 else t.index * 0 for t, n in zip((q, kv), array.shape[2:], strict=True)]
        return some[rows, head, *place], every[rows, head, *place]

    def kv_spans(self, q, kv):
        return self._hull(q, kv, QUERIES) if q.solid and kv.solid else super().kv_spans(q, kv)

    def q_spans(self, kv, q):
        return self._hull(kv, q, KEYS) if q.solid and kv.solid else super().q_spans(kv, q)

    def extents(self):
        for axis, size in zip("BNTS", (1,) * (4 - self.array.ndim) + tuple(self.array.shape), strict=True):
            if size != 1:  # one entry stands for all
                yield Extent("Dense.array", axis, size)

    def _cut(self, q, kv, q_len, kv_len):
        array = _rank4(self.array)
        if kv is not None and array.shape[KEYS] > 1:
            array = gather(array, kv)
        if q is not None and array.shape[QUERIES] > 1:
            array = gather(array.swapaxes(QUERIES, KEYS), q).swapaxes(QUERIES, KEYS)
        return replace(self, array=array)

    def _one_tile(self, array, q, kv):
        """The entries of a single tile; past a ragged end it is moved back, which keeps the bound sound."""
        wanted = zip(
            array.shape,
            (q.side.batch, q.side.head, q.start, kv.start),
            (q.side.batch.size, q.side.head.size, q.size, kv.size),
            strict=True,
        )
        windows = [
            (jnp.zeros((), np.int32), n) if n == 1 or size >= n else (start.reshape(-1)[0], size)
            for n, start, size in wanted
        ]
        return jax.lax.dynamic_slice(array, [start for start, _ in windows], [size for _, size in windows])

    def _hull(self, rows, others, axis: int) -> Spans:
        """From the first to the last slot that any token of the tile sees."""
        xp, array = rows.side.xp, _rank4(rows.table(self.array))
        mine, theirs = rows.side.length, others.side.length
        array = xp.broadcast_to(array, (*array.shape[:2], *((mine, theirs) if axis == QUERIES else (theirs, mine))))
        some, _ = _tile_kinds(rows, array, array, axis) if mine != 1 else (array, array)
        other = KEYS if axis == QUERIES else QUERIES
        index = others.side.along(xp.arange(theirs, dtype=np.int32))
        low = xp.min(xp.where(some, index, FOREVER), axis=other, keepdims=True, initial=FOREVER)
        high = xp.max(xp.where(some, index + 1, np.int32(0)), axis=other, keepdims=True, initial=0)
        return Spans(xp.minimum(low, high), high)

    def _arguments(self):
        return [short(self.array)]


def _listed_by(xp: Namespace, table, count: int):
    """For each kv block below `count`, the first and the last q block whose row lists it, by head: [N or 1, count]."""
    heads, q_blocks, _ = table.shape
    listed = table.reshape(heads, -1)
    place = xp.arange(q_blocks, dtype=np.int32).reshape(1, -1, 1)
    place = xp.broadcast_to(place, table.shape).reshape(heads, -1)
    head = xp.broadcast_to(xp.arange(heads, dtype=np.int32).reshape(-1, 1), listed.shape)
    slot = xp.where((listed >= 0) & (listed < count), listed, np.int32(count))
    first = xp.full((heads, count + 1), FOREVER, np.int32)
    last = xp.full((heads, count + 1), -1, np.int32)
    if xp is np:
        np.minimum.at(first, (head, slot), place)
        np.maximum.at(last, (head, slot), place)
        return first[:, :count], last[:, :count]
    return first.at[head, slot].min(place)[:, :count], last.at[head, slot].max(place)[:, :count]


def _rank4(array):
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _tile_kinds(tiles, some, every, axis: int):
    """(any, all) of bool arrays over each tile of one axis; an axis of size 1 stays."""
    xp, length = tiles.side.xp, some.shape[axis]
    if length == 1:
        return some, every
    count = -(-length // tiles.size)
    pads = [(0, count * tiles.size - length) if i == axis else (0, 0) for i in range(4)]
    shape = (*some.shape[:axis], count, tiles.size, *some.shape[axis + 1 :])
    some = xp.any(xp.pad(some, pads, constant_values=False).reshape(shape), axis=axis + 1)
    every = xp.all(xp.pad(every, pads, constant_values=True).reshape(shape), axis=axis + 1)
    return some, every
