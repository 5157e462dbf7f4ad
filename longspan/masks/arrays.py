"""Rules that read arrays aligned with slots: lengths, segment ids, token types, global tokens, block tables, dense."""

from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan._checks import check_array, check_at_least, check_choice, check_indices, check_number
from longspan._types import Array, Namespace, Number
from longspan.masks.base import MOST_INTERVALS, Extent, Mask, Spans, rule, short, whole_or_nothing
from longspan.masks.numbers import Full

FOREVER = np.iinfo(np.int32).max


@rule
class KvLengths(Mask):
    """Allows kv slot < lengths[b]: the rest of each row of keys is padding.

    Args:
        lengths: int [B].

    Example:
        >>> print(KvLengths(np.array([2])).show(2, 4))
        ##..
        ##..
    """

    lengths: Number

    def __post_init__(self):
        check_number(self, "lengths")

    def allowed(self, q, kv):
        return Full().allowed(q, kv) & (kv.index < q.number(self.lengths))

    def classify(self, q, kv):
        length = q.number(self.lengths)
        return kv.start < length, kv.stop <= length

    def kv_spans(self, q, kv):
        xp, length = q.side.xp, q.number(self.lengths)
        high = xp.full((1, 1, 1, 1), length, np.int32) if isinstance(length, int) else length
        return Spans(xp.zeros_like(high), xp.clip(high, 0, kv.side.length))

    def q_spans(self, kv, q):
        return whole_or_nothing(kv.side.xp, kv.start < kv.number(self.lengths), q.side.length)

    def _arguments(self):
        return [short(self.lengths)]


class _EqualIds(Mask):
    """The part that `Segments` and `TokenTypes` share: ids are equal, and both are valid."""

    def _ids(self) -> tuple[Any, Any]:
        raise NotImplementedError

    def _valid(self, ids):
        raise NotImplementedError

    def allowed(self, q, kv):
        q_ids, kv_ids = (side.take(ids) for side, ids in zip((q, kv), self._ids(), strict=True))
        return (q_ids == kv_ids) & self._valid(q_ids)

    def classify(self, q, kv):
        (q_least, q_most, q_all), (kv_least, kv_most, kv_all) = (
            self._range(tiles, ids) for tiles, ids in zip((q, kv), self._ids(), strict=True)
        )
        may_any = (q_least <= kv_most) & (kv_least <= q_most)
        must_all = q_all & kv_all & (q_least == q_most) & (kv_least == kv_most) & (q_least == kv_least)
        return may_any, must_all

    def _range(self, tiles, ids):
        """The least and greatest valid id of each tile (least > greatest if there is none), and whether all are."""
        least, most = tiles.least(ids, self._valid), tiles.greatest(ids, self._valid)
        return least, most, (tiles.least(ids) >= least) & (tiles.greatest(ids) <= most) & (least <= most)

    def kv_spans(self, q, kv):
        q_ids, kv_ids = self._ids()
        return self._hull(q, q_ids, kv_ids)

    def q_spans(self, kv, q):
        q_ids, kv_ids = self._ids()
        return self._hull(kv, kv_ids, q_ids)

    def _hull(self, tiles, row_ids, other_ids) -> Spans:
        """From the first to the last slot of the other side whose id occurs in the tile."""
        xp = tiles.side.xp
        first, last = _occurrences(xp, xp.asarray(row_ids), xp.asarray(other_ids), self._valid)
        low, high = tiles.least(first), tiles.greatest(last) + 1
        return Spans(xp.where(low < high, low, np.int32(0)), xp.where(low < high, high, np.int32(0)))


@rule
class Segments(_EqualIds):
    """Allows equal ids, both >= 0: packed documents that do not see each other. Negative ids are padding.

    Args:
        q_ids: int [B or 1, T].
        kv_ids: int [B or 1, S]; by default the same as `q_ids`.

    Example:
        >>> print(Segments(np.array([[0, 0, 1, -1]])).show(4, 4))
        ##..
        ##..
        ..#.
        ....
    """

    q_ids: Array
    kv_ids: Array | None = None

    def __post_init__(self):
        check_array(self, "q_ids", "int", "BT")
        check_array(self, "kv_ids", "int", "BS", optional=True)

    def _ids(self):
        return self.q_ids, self.q_ids if self.kv_ids is None else self.kv_ids

    def _valid(self, ids):
        return ids >= 0

    def extents(self):
        yield from _extents(self, "q_ids", self.q_ids, "BT")
        yield from _extents(self, "kv_ids", self._ids()[1], "BS")

    def _arguments(self):
        return [short(self.q_ids)] + ([] if self.kv_ids is None else [short(self.kv_ids)])


@rule
class TokenTypes(_EqualIds):
    """Allows equal token types. Type 0 never attends, unless `zero="none"`.

    Args:
        q_types: int [B or 1, T].
        kv_types: int [B or 1, S]; by default the same as `q_types`.
        zero: which side's type 0 is disabled: "q", "kv", "both", or "none" (0 is a type like any other). As the rule
            asks for equal types, the first three allow the same pairs.

    Example:
        >>> print(TokenTypes(np.array([[1, 0, 2, 2]])).show(4, 4))
        #...
        ....
        ..##
        ..##
    """

    q_types: Array
    kv_types: Array | None = None
    zero: str = "q"

    def __post_init__(self):
        check_array(self, "q_types", "int", "BT")
        check_array(self, "kv_types", "int", "BS", optional=True)
        check_choice("zero", self.zero, ("q", "kv", "both", "none"))

    def _ids(self):
        return self.q_types, self.q_types if self.kv_types is None else self.kv_types

    def _valid(self, ids):
        return ids == ids if self.zero == "none" else ids != 0

    def extents(self):
        yield from _extents(self, "q_types", self.q_types, "BT")
        yield from _extents(self, "kv_types", self._ids()[1], "BS")

    def _arguments(self):
        types = [short(self.q_types)] + ([] if self.kv_types is None else [short(self.kv_types)])
        return types + ([] if self.zero == "q" else [f"zero={self.zero!r}"])


@rule
class Global(Mask):
    """Allows a pair if its key is global (columns) or its query is (rows).

    Args:
        indices: positions that are global, a tuple of ints.
        q_flags: bool [B or 1, T]: further queries that are global.
        kv_flags: bool [B or 1, S]: further keys that are global.
        rows: whether global queries see every key.
        columns: whether every query sees global keys.

    Example:
        >>> print(Global((0,)).show(3, 3))
        ###
        #..
        #..
    """

    indices: tuple[int, ...] = ()
    _: KW_ONLY
    q_flags: Array | None = None
    kv_flags: Array | None = None
    rows: bool = True
    columns: bool = True

    def __post_init__(self):
        check_indices(self, "indices")
        check_array(self, "q_flags", "bool", "BT", optional=True)
        check_array(self, "kv_flags", "bool", "BS", optional=True)

    def allowed(self, q, kv):
        truth = Full().allowed(q, kv) & False
        if self.rows:
            truth = truth | self._is_global(q, self.q_flags)
        if self.columns:
            truth = truth | self._is_global(kv, self.kv_flags)
        return truth

    def classify(self, q, kv):
        (q_any, q_all), (kv_any, kv_all) = self._any_all(q, self.q_flags), self._any_all(kv, self.kv_flags)
        rows, columns = np.bool_(self.rows), np.bool_(self.columns)
        return (q_any & rows) | (kv_any & columns), (q_all & rows) | (kv_all & columns)

    def kv_spans(self, q, kv):
        return self._spans(q, self.q_flags, self.rows, kv, self.kv_flags, self.columns)

    def q_spans(self, kv, q):
        return self._spans(kv, self.kv_flags, self.columns, q, self.q_flags, self.rows)

    def extents(self):
        if self.q_flags is not None:
            yield from _extents(self, "q_flags", self.q_flags, "BT")
        if self.kv_flags is not None:
            yield from _extents(self, "kv_flags", self.kv_flags, "BS")

    def _spans(self, mine, my_flags, i_see_all, others, other_flags, all_see) -> Spans:
        sees_all, _ = self._any_all(mine, my_flags)
        common, _ = self._any_all(others, other_flags)
        spans = whole_or_nothing(mine.side.xp, sees_all & np.bool_(i_see_all), others.side.length)
        return spans._replace(common=common if all_see else None)

    def _is_global(self, slots, flags):
        xp, truth = slots.side.xp, slots.index < 0
        if self.indices:
            found, listed = self._search(xp, slots.position)
            truth = truth | (listed == found)
        return truth if flags is None else truth | slots.take(flags)

    def _any_all(self, tiles, flags):
        """Whether any, and whether all, of a tile's tokens are global."""
        xp = tiles.side.xp
        some, every = tiles.start < 0, tiles.start < 0
        if self.indices:
            listed = xp.asarray(self._sorted())
            before_first = xp.searchsorted(listed, tiles.first, side="left")
            to_last = xp.searchsorted(listed, tiles.last, side="right")
            inside = (to_last - before_first).astype(np.int32)
            some, every = some | (inside > 0), every | (inside == tiles.last - tiles.first + 1)
        if flags is not None:
            some, every = some | (tiles.greatest(flags) > 0), every | (tiles.least(flags) > 0)
        return some, every

    def _search(self, xp: Namespace, positions):
        listed = xp.asarray(self._sorted())
        at = xp.clip(xp.searchsorted(listed, positions), 0, len(listed) - 1)
        return positions, listed[at]

    def _sorted(self):
        return np.unique(np.asarray(self.indices, np.int32))

    def _arguments(self):
        arguments = [repr(self.indices)] if self.indices else []
        for name in ("q_flags", "kv_flags"):
            if getattr(self, name) is not None:
                arguments.append(f"{name}={short(getattr(self, name))}")
        return arguments + [f"{name}=False" for name in ("rows", "columns") if not getattr(self, name)]


@rule
class Blocks(Mask):
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
        truth = Full().allowed(q, kv) & False
        rows = self._rows(q.side, q.index // self.block_size)
        for column in range(self.table.shape[2]):
            truth = truth | (rows[..., column] == kv.index // self.block_size)
        return truth

    def classify(self, q, kv):
        xp, size = q.side.xp, self.block_size
        q_blocks, q_real = self._blocks_in(q)
        kv_blocks, kv_real = self._blocks_in(kv)
        rows = self._rows(q.side, q_blocks)[..., None]  # [b, n, q, kv, q block, r, 1]
        wanted = kv_blocks[..., None, None, :]
        listed = xp.any(rows == wanted, axis=-2)  # [b, n, q, kv, q block, kv block]
        real = q_real[..., :, None] & kv_real[..., None, :]
        return xp.any(listed & real, axis=(-2, -1)), xp.all(listed | ~real, axis=(-2, -1)) & (size > 0)

    def kv_spans(self, q, kv):
        xp, size = q.side.xp, self.block_size
        blocks, real = self._blocks_in(q)
        rows = self._rows(q.side, blocks)
        rows = xp.where(real[..., None], rows, np.int32(-1))  # [b, n, q, 1, q block, r]
        flat = rows.reshape(*rows.shape[:3], -1)
        low = xp.where(flat < 0, np.int32(0), flat * size)
        high = xp.where(flat < 0, np.int32(0), xp.minimum((flat + 1) * size, kv.side.length))
        if 0 < flat.shape[3] <= MOST_INTERVALS:
            return Spans(low, high)
        least = xp.min(xp.where(flat < 0, FOREVER, flat * size), axis=3, keepdims=True, initial=FOREVER)
        return Spans(least, xp.max(high, axis=3, keepdims=True, initial=0))

    def q_spans(self, kv, q):
        """The hull of the q blocks that list each kv block."""
        xp, size = kv.side.xp, self.block_size
        table = self._table(xp)
        count = -(-kv.side.length // size)
        heads, q_blocks, r = table.shape
        listed = table.reshape(heads, q_blocks * r)
        place = xp.broadcast_to(xp.arange(q_blocks, dtype=np.int32).reshape(1, -1, 1), table.shape).reshape(heads, -1)
        first, last = _scatter_hull(xp, listed, place, count)
        low = xp.where(first <= last, first * size, FOREVER)
        high = xp.where(first <= last, xp.minimum((last + 1) * size, q.side.length), np.int32(0))
        low, high = (xp.repeat(a, size, axis=1)[:, : kv.side.length] for a in (low, high))
        low, high = _tile_min(kv, low, xp.min, FOREVER), _tile_min(kv, high, xp.max, 0)
        return Spans(low, high)

    def extents(self):
        yield from _extents(self, "table", self.table, "N")
        yield Extent("Blocks.table", "T", self.table.shape[1], self.block_size)

    def _table(self, xp: Namespace):
        return xp.asarray(self.table).astype(np.int32)

    def _rows(self, side, blocks):
        """The listed kv blocks of some q blocks, one more axis."""
        table = self._table(side.xp)
        head = side.head if table.shape[0] > 1 else side.xp.zeros_like(side.head)
        head = head.reshape(*head.shape, *([1] * (blocks.ndim - 4)))
        return table[head, side.xp.clip(blocks, 0, table.shape[1] - 1)]

    def _blocks_in(self, tiles):
        """The blocks that each tile touches, on one more axis, and which of those entries are real."""
        xp, size = tiles.side.xp, self.block_size
        most = (tiles.size - 1 + size - 1) // size + 1
        first, last = tiles.start // size, (tiles.stop - 1) // size
        blocks = first[..., None] + xp.arange(most, dtype=np.int32).reshape(1, 1, 1, 1, -1)
        return blocks, blocks <= last[..., None]

    def _arguments(self):
        return [short(self.table), repr(self.block_size)]


@rule
class Dense(Mask):
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
        array = self._rank4(q.side.xp)
        _, _, q_len, kv_len = array.shape
        if q.whole and kv.whole and q.side.whole:
            return Full().allowed(q, kv) & array
        index = (q.index if q_len > 1 else q.index * 0, kv.index if kv_len > 1 else kv.index * 0)
        index = tuple(q.side.xp.clip(i, 0, max(n - 1, 0)) for i, n in zip(index, (q_len, kv_len), strict=True))
        if 0 in (q_len, kv_len):
            return Full().allowed(q, kv)
        head = q.side.head if array.shape[1] > 1 else q.side.xp.zeros_like(q.side.head)
        return Full().allowed(q, kv) & array[q.side.rows_of(array), head, *index]

    def classify(self, q, kv):
        xp, array = q.side.xp, self._rank4(q.side.xp)
        if q.index.size == kv.index.size == 1 and xp is jnp:
            tile = self._one_tile(array, q, kv)
            return xp.any(tile, axis=(2, 3), keepdims=True), xp.all(tile, axis=(2, 3), keepdims=True)
        some, every = _tile_kinds(kv, *_tile_kinds(q, array, array, 2), 3)
        if q.whole and kv.whole and q.side.whole:
            return some, every
        rows, head = q.side.rows_of(array), q.side.head if array.shape[1] > 1 else xp.zeros_like(q.side.head)
        place = [t.index if n > 1 else t.index * 0 for t, n in zip((q, kv), array.shape[2:], strict=True)]
        return some[rows, head, *place], every[rows, head, *place]

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

    def kv_spans(self, q, kv):
        return self._hull(q, kv, 2)

    def q_spans(self, kv, q):
        return self._hull(kv, q, 3)

    def extents(self):
        for axis, size in zip("BNTS", (1,) * (4 - self.array.ndim) + tuple(self.array.shape), strict=True):
            if size != 1 or axis in "TS":
                yield Extent("Dense.array", axis, size)

    def _rank4(self, xp: Namespace):
        array = xp.asarray(self.array)
        return array.reshape((1,) * (4 - array.ndim) + array.shape)

    def _hull(self, rows, others, axis: int) -> Spans:
        """From the first to the last slot that any token of the tile sees."""
        xp, array = rows.side.xp, self._rank4(rows.side.xp)
        array = xp.broadcast_to(array, (*array.shape[:2], *_lengths(rows, others, axis)))
        some, _ = _tile_kinds(rows, array, array, axis) if rows.side.length != 1 else (array, array)
        other = 5 - axis
        index = xp.arange(others.side.length, dtype=np.int32)
        index = index.reshape((1, 1, -1, 1) if other == 2 else (1, 1, 1, -1))
        low = xp.min(xp.where(some, index, FOREVER), axis=other, keepdims=True, initial=FOREVER)
        high = xp.max(xp.where(some, index + 1, np.int32(0)), axis=other, keepdims=True, initial=0)
        return Spans(xp.minimum(low, high), high)

    def _arguments(self):
        return [short(self.array)]


def _extents(mask: Mask, name: str, array, axes: str):
    for axis, size in zip(axes, array.shape, strict=False):
        yield Extent(f"{type(mask).__name__}.{name}", axis, size)


def _occurrences(xp: Namespace, ids, others, valid):
    """For each id [B, T], the first and last slot of an equal, valid id among `others` [B, S]; else (FOREVER, -1)."""
    rows = max(ids.shape[0], others.shape[0])
    ids = xp.broadcast_to(ids.astype(np.int32), (rows, ids.shape[1]))
    others = xp.broadcast_to(others.astype(np.int32), (rows, others.shape[1]))
    if 0 in (ids.shape[1], others.shape[1]):
        return xp.full(ids.shape, FOREVER, np.int32), xp.full(ids.shape, -1, np.int32)
    if xp is np:
        found = [_occurrences_in_row(np, a, b, valid) for a, b in zip(ids, others, strict=True)]
        return tuple(np.stack(part) for part in zip(*found, strict=True))
    return jax.vmap(lambda a, b: _occurrences_in_row(jnp, a, b, valid))(ids, others)


def _occurrences_in_row(xp: Namespace, ids, others, valid):
    # A stable sort keeps equal ids in slot order: each run's ends are its first and last occurrence.
    order = xp.argsort(others, stable=True).astype(np.int32)
    ranked = others[order]
    left = xp.searchsorted(ranked, ids, side="left")
    right = xp.searchsorted(ranked, ids, side="right") - 1
    found = valid(ids) & (left <= right)
    last = len(others) - 1
    first_slot, last_slot = order[xp.clip(left, 0, last)], order[xp.clip(right, 0, last)]
    return xp.where(found, first_slot, np.int32(FOREVER)), xp.where(found, last_slot, np.int32(-1))


def _scatter_hull(xp: Namespace, listed, place, count: int):
    """For each value below `count`, the least and greatest `place` where it is listed, by head."""
    heads = listed.shape[0]
    keep = (listed >= 0) & (listed < count)
    head = xp.broadcast_to(xp.arange(heads, dtype=np.int32).reshape(-1, 1), listed.shape)
    slot = xp.where(keep, listed, np.int32(count))
    first = xp.full((heads, count + 1), FOREVER, np.int32)
    last = xp.full((heads, count + 1), -1, np.int32)
    if xp is np:
        np.minimum.at(first, (head, slot), place)
        np.maximum.at(last, (head, slot), place)
        return first[:, :count], last[:, :count]
    return first.at[head, slot].min(place)[:, :count], last.at[head, slot].max(place)[:, :count]


def _tile_min(tiles, array, reduce, neutral: int):
    """Reduces an array [N or 1, length] over each tile: [1, N or 1, 1, tiles]."""
    xp, (heads, length) = tiles.side.xp, array.shape
    count = -(-length // tiles.size)
    padded = xp.pad(array, ((0, 0), (0, count * tiles.size - length)), constant_values=neutral)
    return reduce(padded.reshape(heads, count, tiles.size), axis=2).reshape(1, heads, 1, count)


def _lengths(rows, others, axis: int) -> tuple[int, int]:
    mine, theirs = rows.side.length, others.side.length
    return (mine, theirs) if axis == 2 else (theirs, mine)


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
