"""The arguments of a rule: slots (single tokens) and tiles (runs of slots) of the query and key sides.

Every array here has rank 4, [B or 1, N or 1, T or 1, S or 1], so rules are plain comparisons between the two sides that
broadcast. The arrays are NumPy arrays (planning on the host) or JAX arrays (inside a program), and cover all rows and
heads or one of each (inside an engine's loop).

Rules read their arrays and numbers only through these objects (`take`, `number`, `table`, …). The caller of a rule
therefore decides which part of an array the rule reads: one row, for example, or the block that a kernel has loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import FAR, Namespace, Number
from longspan.checks import to_int32
from longspan.constants import constant

QUERIES, KEYS = 2, 3  # the axis of rank-4 arrays that each side runs along
MAX_REMEMBERED = 64  # tile summaries kept in `Side.memory`


class Places(NamedTuple):
    """The places of the batch rows and heads in arrays, if they differ from their indices: on a shard, for example."""

    row: Any  # int [B,1,1,1]
    head: Any  # int [1,N,1,1]
    rows: int  # the number of rows in these arrays
    heads: int


@dataclass(frozen=True)
class Side:
    """One whole side of the attention matrix: its length, and the position of each slot (by default its index)."""

    axis: int
    length: int
    positions: Any  # int [B or 1, length], or None: position = slot index
    batch: Any  # int [B,1,1,1], the indices of the selected batch rows
    head: Any  # int [1,N,1,1], the indices of the selected query heads
    xp: Namespace
    whole: bool = True  # all batch rows and heads are selected, in order
    places: Places | None = None  # None: the place of a row or head in an array is its index
    memory: dict | None = field(default=None, compare=False, repr=False)  # a cache of tile summaries

    def along(self, vector):
        """A vector as an array of rank 4 along this side's axis."""
        if self.axis == QUERIES:
            return vector.reshape(1, 1, -1, 1)
        return vector.reshape(1, 1, 1, -1)

    def by_row(self, array):
        """An array [B or 1, X] or [B or 1, N or 1, X] as rank 4, with X along this side's axis.

        There is no gather: a sharded batch stays sharded.
        """
        rows, *heads, size = array.shape
        if self.axis == QUERIES:
            return array.reshape(rows, *(heads or [1]), size, 1)
        return array.reshape(rows, *(heads or [1]), 1, size)

    def at(self, *, batch=None, head=None) -> "Side":
        """The same side with some batch rows and heads selected, by their places in arrays."""
        if self.places is None:
            if batch is None:
                batch = self.batch
            if head is None:
                head = self.head
            return replace(self, batch=batch, head=head, whole=False)
        given = dict(row=batch, head=head)
        places = self.places._replace(**{name: at for name, at in given.items() if at is not None})
        numbers = dict(batch=self.batch.reshape(-1)[places.row], head=self.head.reshape(-1)[places.head])
        return replace(self, **numbers, whole=False, places=places)

    def remembering(self) -> "Side":
        """The same side with a cache: the summary of an array over tiles is computed once, not at every call."""
        return replace(self, memory={})

    def slots(self, start: Any = 0, size: int | None = None) -> "Slots":
        """`size` slots, beginning with `start`; by default all slots."""
        if size is None:
            size = self.length
        index = self.along(self.xp.arange(size, dtype=np.int32)) + start
        return Slots(self, index, whole=isinstance(start, int) and start == 0 and size == self.length)

    def tiles(self, size: int) -> "Tiles":
        """All tiles of `size` slots."""
        count = -(-self.length // size)
        return Tiles(self, size, self.along(self.xp.arange(count, dtype=np.int32)), whole=True)

    def run(self, start: Any, size: int) -> "Tiles":
        """One tile: the run of `size` slots that begins with `start`."""
        return Tiles(self, size, self.xp.asarray(start, dtype=np.int32).reshape(1, 1, 1, 1), unit=1)

    def number(self, value: Number):
        """A rule's number, ready to broadcast: a Python int unchanged, an array of shape () or [B] as rank 4."""
        if isinstance(value, int):
            return max(-FAR, min(FAR, value))
        numbers = self.xp.clip(self.xp.asarray(value).astype(np.int32), -FAR, FAR)
        if numbers.size == 1 or (self.whole and numbers.shape[0] == self.batch.size):
            return numbers.reshape(-1, 1, 1, 1)
        return numbers[self.rows_of(numbers)]

    def table(self, array):
        """A whole array of a rule, constant or data."""
        return constant(self.xp, array)

    def listed(self, table, blocks):
        """The entries of a table [N or 1, blocks, r] or [B or 1, N or 1, blocks, r] at some blocks, [..., r]."""
        table = self.table(table).astype(np.int32)
        table = table.reshape((1,) * (4 - table.ndim) + table.shape)
        if not table.shape[2]:  # the table has no blocks to read
            return self.xp.full((*table.shape[:2], *blocks.shape[2:], table.shape[3]), -1, np.int32)
        blocks = self.xp.clip(blocks, 0, table.shape[2] - 1)
        if self.holds(table) and blocks.shape[:2] == (1, 1):  # no gather along rows and heads: they stay sharded
            return self.xp.take(table, blocks[0, 0], axis=2)
        row, head, more = self.rows_of(table), self.heads_of(table.shape[1]), [1] * (blocks.ndim - 4)
        return table[row.reshape(*row.shape, *more), head.reshape(*head.shape, *more), blocks]

    def rows_of(self, array):
        """The places of the selected batch rows in an array [B or 1, ...]."""
        return self.rows_among(array.shape[0])

    def rows_among(self, count: int):
        """The places of the selected batch rows in an array of `count` rows: all rows, those of this shard, or one."""
        if count == 1:
            return self.xp.zeros_like(self.batch)
        if self.places is not None and count == self.places.rows:
            return self.places.row
        return self.batch  # an array of all rows is read at their global indices

    def heads_of(self, count: int):
        """The places of the selected heads in an array of `count` heads: all heads, those of this shard, or one."""
        if count == 1:
            return self.xp.zeros_like(self.head)
        if self.places is not None and count == self.places.heads:
            return self.places.head
        return self.head

    def holds(self, array) -> bool:
        """Whether an array [B or 1, X] or [B or 1, N or 1, ...] has exactly the selected rows and heads, in order."""
        if not self.whole or self.places is None:
            return self.whole
        heads = 1
        if array.ndim > 2:
            heads = array.shape[1]
        return array.shape[0] in (1, self.places.rows) and heads in (1, self.places.heads)

    def between(self, low, high):
        """A half-open interval of slots that contains every slot whose position is in [low, high]; None is no bound."""
        if self.positions is None:
            return slots_between(self.xp, self.length, low, high)
        return find_between(self.xp, self.xp.asarray(self.positions), low, high)


@dataclass(frozen=True)
class Slots:
    """Single slots of one side: the arguments of `Mask.allowed`."""

    side: Side
    index: Any
    whole: bool = False  # whether these are all slots of the side, in order

    @property
    def position(self):
        """The position of each slot, which rules by position (causal, window, ...) compare."""
        if self.side.positions is None:
            return self.index
        return self.take(self.side.positions)

    def take(self, array):
        """The entries of an array [B or 1, length] or [B or 1, N or 1, length] for these slots."""
        array = self.side.table(array)
        if self.whole and self.side.holds(array) and array.shape[-1] == self.side.length:
            return self.side.by_row(array)
        row, slot = self.side.rows_of(array), self._inside(array.shape[-1])
        if array.ndim == 2:
            return array[row, slot]
        return array[row, self.side.heads_of(array.shape[1]), slot]

    def number(self, value: Number):
        return self.side.number(value)

    def table(self, array):
        return self.side.table(array)

    def is_one_of(self, positions: tuple[int, ...]):
        """Whether each slot's position is one of these."""
        xp, listed = self.side.xp, self.side.table(_sorted(positions))
        at = xp.clip(xp.searchsorted(listed, self.position), 0, len(listed) - 1)
        return listed[at] == self.position

    def listed(self, table, unit: int) -> list[Any]:
        """The r entries of a table [.., blocks, r] for the block of `unit` slots that contains each slot: r arrays."""
        rows = self.side.listed(table, self.index // unit)
        return [rows[..., column] for column in range(rows.shape[-1])]

    def pairs(self, array, others: "Slots", offsets: tuple[Number | None, Number | None] = (None, None)):
        """The entries of an array [T, S] or [B or 1, N or 1, T or 1, S or 1] for these queries and the keys `others`.

        Along a side with an offset, the array begins at that slot; slots outside of the array read arbitrary entries.
        """
        array, side = self.side.table(array), self.side
        array = array.reshape((1,) * (4 - array.ndim) + array.shape)
        if self.whole and others.whole and side.holds(array) and all(offset is None for offset in offsets):
            return array
        if 0 in array.shape:  # there are no pairs
            return side.xp.ones((1, 1, 1, 1), array.dtype)
        q_index, kv_index = self._entry(offsets[0], array.shape[2]), others._entry(offsets[1], array.shape[3])
        return array[side.rows_of(array), side.heads_of(array.shape[1]), q_index, kv_index]

    def _entry(self, offset: Number | None, size: int):
        """The places of these slots in an array of `size` entries; an array of one entry applies to all slots."""
        if size == 1:
            return self.index * 0
        place = self.index
        if offset is not None:
            place = place - self.number(offset)
        return self.side.xp.clip(place, 0, size - 1)

    def _inside(self, length: int):
        # The last tile may have slots after the end: they read arbitrary entries, and engines drop them.
        return self.side.xp.clip(self.index, 0, max(length - 1, 0))


@dataclass(frozen=True)
class Tiles:
    """Runs of `size` slots of one side, one or many: the arguments of `Mask.classify`."""

    side: Side
    size: int
    index: Any  # the tile indices
    unit: int = 0  # the number of slots from one tile index to the next; 0: `size`
    whole: bool = False  # whether these are all tiles of the side, in order

    @property
    def solid(self) -> bool:
        """Whether a tile contains all slots from `start` to `stop`, not only some of them."""
        return True

    @property
    def start(self):
        return self.index * (self.unit or self.size)

    @property
    def stop(self):
        return self.side.xp.minimum(self.start + self.size, self.side.length)

    @property
    def first(self):
        """The least position in each tile."""
        if self.side.positions is None:
            return self.start
        return self.least(self.side.positions)

    @property
    def last(self):
        """The greatest position in each tile."""
        if self.side.positions is None:
            return self.stop - 1
        return self.greatest(self.side.positions)

    def number(self, value: Number):
        return self.side.number(value)

    def table(self, array):
        return self.side.table(array)

    def least(self, array, valid: Callable | None = None):
        """The least (valid) entry of an array [B or 1, length] or [B or 1, N or 1, length] within each tile."""
        return self._reduce(array, self.side.xp.min, np.iinfo(np.int32).max, valid)

    def greatest(self, array, valid: Callable | None = None):
        """The greatest (valid) entry of an array [B or 1, length] or [B or 1, N or 1, length] within each tile."""
        return self._reduce(array, self.side.xp.max, np.iinfo(np.int32).min, valid)

    def count_of(self, positions: tuple[int, ...]):
        """The number of these positions that lie between the first and the last position of each tile."""
        xp, listed = self.side.xp, self.side.table(_sorted(positions))
        before_first = xp.searchsorted(listed, self.first, side="left")
        to_last = xp.searchsorted(listed, self.last, side="right")
        return (to_last - before_first).astype(np.int32)

    def blocks(self, unit: int) -> tuple[Any, Any] | None:
        """The blocks of `unit` slots that overlap each tile, along a new last axis, and which entries are valid.

        None if there may be too many to list.
        """
        max_blocks = min((self.size - 1 + unit - 1) // unit + 1, max(-(-self.side.length // unit), 1))
        first, last = self.start // unit, (self.stop - 1) // unit
        blocks = first[..., None] + self.side.xp.arange(max_blocks, dtype=np.int32).reshape(1, 1, 1, 1, -1)
        return blocks, blocks <= last[..., None]

    def _reduce(self, array, reduce: Callable, neutral: int, valid: Callable | None):
        memory = self.side.memory
        if memory is None:
            return self._placed(self._summary(array, reduce, neutral, valid))
        key = (id(array), self.size, neutral, valid)
        if key not in memory:
            while len(memory) >= MAX_REMEMBERED:  # a rule may make new arrays at every call
                del memory[next(iter(memory))]
            # The array is kept too: as long as it exists, no other array has its id.
            memory[key] = array, self._summary(array, reduce, neutral, valid)
        return self._placed(memory[key][1])

    def _summary(self, array, reduce: Callable, neutral: int, valid: Callable | None):
        """One number per tile [B or 1, N or 1, tiles]."""
        xp, array = self.side.xp, self.side.table(array).astype(np.int32)
        if array.ndim == 2:
            array = array[:, None]
        entries = self._entries(array)
        if valid is not None:
            entries = xp.where(valid(entries), entries, np.int32(neutral))
        return reduce(entries, axis=-1)

    def _entries(self, array):
        """The entries [B or 1, N or 1, tiles, size] of an array [B or 1, N or 1, length], tile by tile.

        If the last tile is shorter, it repeats the last entry or includes entries before it: a bound on these entries
        is also a bound on the tile.
        """
        xp, length = self.side.xp, array.shape[-1]
        if self._is_single:
            # One tile, inside an engine's loop: read only the tile, not the whole row.
            size = min(self.size, length)
            return run(xp, array, xp.minimum(self.start.reshape(()), length - size), size)[..., None, :]
        assert not self.unit, "several tiles at a time are contiguous"
        size = min(self.size, max(length, 1))
        count = -(-length // size)
        more = count * size - length
        if more:
            last = xp.broadcast_to(array[..., -1:], (*array.shape[:-1], more))
            array = xp.concatenate([array, last], axis=-1)
        return array.reshape(*array.shape[:-1], count, size)

    def _placed(self, summary):
        """Selects from one number per tile [B or 1, N or 1, all tiles] those of the selected tiles, rows and heads."""
        if self.whole and self.side.holds(summary):
            return self.side.by_row(summary)
        tile = (self.index,)
        if self._is_single:
            summary, tile = summary[..., 0], ()
        if summary.shape[1] == 1:
            return summary[:, 0][self.side.rows_of(summary), *tile]
        return summary[self.side.rows_of(summary), self.side.heads_of(summary.shape[1]), *tile]

    @property
    def _is_single(self) -> bool:
        return self.index.size == 1 and not self.whole and self.side.memory is None


def two_sides(
    q_len: int,
    kv_len: int,
    *,
    batch: int = 1,
    heads: int = 1,
    q_positions=None,
    kv_positions=None,
    numbers: tuple[Any, Any] | None = None,
    xp: Namespace = jnp,
) -> tuple[Side, Side]:
    """Both sides of an attention matrix, for all batch rows and heads.

    `numbers` are the indices of the rows [B or more] and heads [N or more]; by default 0, 1, ….
    """
    rows = xp.arange(batch, dtype=np.int32).reshape(-1, 1, 1, 1)
    head = xp.arange(heads, dtype=np.int32).reshape(1, -1, 1, 1)
    places = None
    if numbers is not None:
        places = Places(rows, head, batch, heads)
        rows = numbers[0][:batch].reshape(rows.shape)
        head = numbers[1][:heads].reshape(head.shape)
    return (
        Side(QUERIES, q_len, as_positions(q_positions, xp), rows, head, xp, places=places),
        Side(KEYS, kv_len, as_positions(kv_positions, xp), rows, head, xp, places=places),
    )


def run(xp: Namespace, array, start, size: int):
    """`size` entries along the last axis of an array, beginning with `start`, which may be traced."""
    if xp is np:
        return array[..., int(start) : int(start) + size]
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis=array.ndim - 1)


def slots_between(xp: Namespace, length: int, low, high):
    """The slots in [low, high] as a half-open interval within [0, length); None is no bound."""
    start, stop = np.zeros((1, 1, 1, 1), np.int32), np.full((1, 1, 1, 1), length, np.int32)
    if low is not None:
        start = xp.clip(xp.asarray(low, dtype=np.int32), 0, length)
    if high is not None:
        stop = xp.clip(xp.asarray(high, dtype=np.int32), -1, length - 1) + 1
    return start, stop


def find_between(xp: Namespace, rows, low, high):
    """A half-open interval of columns that contains all numbers of a row [B or 1, L] within [low, high].

    None is no bound.
    """
    # The numbers may be in any order (rolling caches, packed rows). In sorted rows the interval is found by bisection;
    # in other rows it is the whole row.
    start, stop = np.zeros((1, 1, 1, 1), np.int32), np.full((1, 1, 1, 1), rows.shape[1], np.int32)
    grow = grows(rows).reshape(-1, 1, 1, 1)
    if low is not None:
        start = xp.where(grow, search_rows(xp, rows, low, "left"), start)
    if high is not None:
        stop = xp.where(grow, search_rows(xp, rows, high, "right"), stop)
    return start, stop


def grows(rows):
    """Whether the numbers of each row [B or 1, L] never decrease: [B or 1]."""
    return (rows[:, 1:] >= rows[:, :-1]).all(axis=1)


def search_rows(xp: Namespace, sorted_rows, values, side: Literal["left", "right"]):
    """`searchsorted` of rank-4 values, for each batch row."""
    rows = max(sorted_rows.shape[0], values.shape[0])
    sorted_rows = xp.broadcast_to(sorted_rows, (rows, sorted_rows.shape[1]))
    values = xp.broadcast_to(values, (rows, *values.shape[1:]))
    if xp is np:
        found = np.stack([np.searchsorted(s, v, side) for s, v in zip(sorted_rows, values, strict=True)])
        return found.astype(np.int32)
    return jax.vmap(lambda s, v: jnp.searchsorted(s, v, side=side).astype(np.int32))(sorted_rows, values)


def as_positions(positions, xp: Namespace):
    """Positions as int32 [B or 1, length] within ±FAR, or None."""
    if positions is None:
        return None
    positions = xp.clip(to_int32(positions, xp), -FAR, FAR)
    if positions.ndim == 1:
        return positions.reshape(1, -1)
    return positions


def _sorted(positions: tuple[int, ...]) -> np.ndarray:
    return np.unique(np.asarray(positions, np.int32))
