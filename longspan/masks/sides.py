"""How a rule sees the tokens of a tile: slots (single tokens) and tiles (runs of slots), on either side.

Every array here has rank 4, [B or 1, N or 1, T or 1, S or 1], so that rules are written as plain comparisons between
the two sides and broadcast without surprises. The same objects are made of NumPy arrays (planning on the host) or of
JAX arrays (inside a program), and may stand for all rows and heads or for one of each (inside an engine's loop).

Rules read their arrays and numbers only through these objects (`take`, `number`, `table` and what is made of them), so
that whoever runs a rule decides what is handed to it: a row of an array, or the block that a kernel has just loaded.
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
MOST_REMEMBERED = 64


class Places(NamedTuple):
    """Where arrays hold the batch rows and heads looked at, if those are numbered otherwise: a shard's, say."""

    row: Any  # int [B,1,1,1]
    head: Any  # int [1,N,1,1]
    rows: int  # how many rows and heads such arrays have
    heads: int


@dataclass(frozen=True)
class Side:
    """One whole side of the attention matrix: how many slots, and the position of each (by default its index)."""

    axis: int
    length: int
    positions: Any  # int [B or 1, length], or None: position = slot index
    batch: Any  # int [B,1,1,1], the numbers of the batch rows looked at
    head: Any  # int [1,N,1,1], the numbers of the query heads looked at
    xp: Namespace
    whole: bool = True  # all batch rows and heads are looked at, in order
    places: Places | None = None  # None: arrays hold rows and heads at their numbers
    memory: dict | None = field(default=None, compare=False, repr=False)  # what tiles were found to hold

    def along(self, vector):
        """A vector, laid along this side's axis."""
        return vector.reshape((1, 1, -1, 1) if self.axis == QUERIES else (1, 1, 1, -1))

    def by_row(self, array):
        """An array [B or 1, X] or [B or 1, N or 1, X], laid along the batch, heads and this side's axis.

        No gather: a sharded batch stays sharded.
        """
        rows, *heads, size = array.shape
        tail = (size, 1) if self.axis == QUERIES else (1, size)
        return array.reshape(rows, *(heads or [1]), *tail)

    def at(self, *, batch=None, head=None) -> "Side":
        """The same whole side, looked at for some batch rows and heads only, by their places in arrays."""
        if self.places is None:
            batch, head = self.batch if batch is None else batch, self.head if head is None else head
            return replace(self, batch=batch, head=head, whole=False)
        given = dict(row=batch, head=head)
        places = self.places._replace(**{name: at for name, at in given.items() if at is not None})
        numbers = dict(batch=self.batch.reshape(-1)[places.row], head=self.head.reshape(-1)[places.head])
        return replace(self, **numbers, whole=False, places=places)

    def remembering(self) -> "Side":
        """The same side, for many looks at tiles: what an array holds in each is found once, not for every look."""
        return replace(self, memory={})

    def slots(self, start: Any = 0, size: int | None = None) -> "Slots":
        """`size` slots from `start` on (all by default)."""
        size = self.length if size is None else size
        index = self.along(self.xp.arange(size, dtype=np.int32)) + start
        return Slots(self, index, whole=isinstance(start, int) and start == 0 and size == self.length)

    def tiles(self, size: int) -> "Tiles":
        """All tiles of `size` slots."""
        count = -(-self.length // size)
        return Tiles(self, size, self.along(self.xp.arange(count, dtype=np.int32)), whole=True)

    def run(self, start: Any, size: int) -> "Tiles":
        """The one run of `size` slots from `start` on, as a tile."""
        return Tiles(self, size, self.xp.asarray(start, dtype=np.int32).reshape(1, 1, 1, 1), unit=1)

    def number(self, value: Number):
        """A rule's number, ready to broadcast: a Python int as it is, an array of shape () or [B] as rank 4."""
        if isinstance(value, int):
            return max(-FAR, min(FAR, value))
        numbers = self.xp.clip(self.xp.asarray(value).astype(np.int32), -FAR, FAR)
        if numbers.size == 1 or (self.whole and numbers.shape[0] == self.batch.size):
            return numbers.reshape(-1, 1, 1, 1)
        return numbers[self.rows_of(numbers)]

    def table(self, array):
        """A whole array of a rule, be it a constant or a leaf."""
        return constant(self.xp, array)

    def listed(self, table, blocks):
        """What a table [N or 1, blocks, r] or [B or 1, N or 1, blocks, r] lists for some blocks, on one more axis."""
        table = self.table(table).astype(np.int32)
        table = table.reshape((1,) * (4 - table.ndim) + table.shape)
        if not table.shape[2]:  # nothing to take from
            return self.xp.full((*table.shape[:2], *blocks.shape[2:], table.shape[3]), -1, np.int32)
        blocks = self.xp.clip(blocks, 0, table.shape[2] - 1)
        if self.holds(table) and blocks.shape[:2] == (1, 1):  # no gather along rows and heads: what is sharded stays so
            return self.xp.take(table, blocks[0, 0], axis=2)
        row, head = (
            number.reshape(*number.shape, *([1] * (blocks.ndim - 4)))
            for number in (self.rows_of(table), self.heads_of(table.shape[1]))
        )
        return table[row, head, blocks]

    def rows_of(self, array):
        """Which rows of an array [B or 1, ...] belong to the batch rows looked at."""
        return self.rows_among(array.shape[0])

    def rows_among(self, count: int):
        """Which of `count` batch rows (all, those here, or one for all) are looked at."""
        if count == 1:
            return self.xp.zeros_like(self.batch)
        # Of all rows, of which only some are here, these are found by their numbers.
        return self.places.row if self.places is not None and count == self.places.rows else self.batch

    def heads_of(self, count: int):
        """Which of `count` heads (all, those here, or one for all) are looked at."""
        if count == 1:
            return self.xp.zeros_like(self.head)
        return self.places.head if self.places is not None and count == self.places.heads else self.head

    def holds(self, array) -> bool:
        """Whether an array [B or 1, ..., X] or [B or 1, N or 1, ...] has the rows and heads looked at, in order."""
        if not self.whole or self.places is None:
            return self.whole
        heads = 1 if array.ndim == 2 else array.shape[1]
        return array.shape[0] in (1, self.places.rows) and heads in (1, self.places.heads)

    def between(self, low, high):
        """The slots, as a half-open interval, that hold every position in [low, high]. None leaves an end open."""
        if self.positions is None:
            return slots_between(self.xp, self.length, low, high)
        return find_between(self.xp, self.xp.asarray(self.positions), low, high)


@dataclass(frozen=True)
class Slots:
    """Single slots of one side, as `Mask.allowed` sees them."""

    side: Side
    index: Any
    whole: bool = False  # all slots of the side, in order

    @property
    def position(self):
        """The position of each slot: what rules by position (causal, window, ...) compare."""
        if self.side.positions is None:
            return self.index
        return self.take(self.side.positions)

    def take(self, array):
        """The entries of an array [B or 1, length] or [B or 1, N or 1, length] for these slots."""
        array = self.side.table(array)
        if self.whole and self.side.holds(array) and array.shape[-1] == self.side.length:
            return self.side.by_row(array)
        head = () if array.ndim == 2 else (self.side.heads_of(array.shape[1]),)
        return array[self.side.rows_of(array), *head, self._inside(array.shape[-1])]

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
        """What a table [.., blocks, r] lists for the block of `unit` slots that each slot is in: r arrays."""
        rows = self.side.listed(table, self.index // unit)
        return [rows[..., column] for column in range(rows.shape[-1])]

    def pairs(self, array, others: "Slots", offsets: tuple[Number | None, Number | None] = (None, None)):
        """The entries of an array [T, S] or [B or 1, N or 1, T or 1, S or 1] for these queries and those keys.

        Along a side with an offset, the array begins at that slot, and slots outside of it read any of its entries.
        """
        array, side = self.side.table(array), self.side
        array = array.reshape((1,) * (4 - array.ndim) + array.shape)
        if self.whole and others.whole and side.holds(array) and all(offset is None for offset in offsets):
            return array
        if 0 in array.shape:  # nothing to read, and no such pair
            return side.xp.ones((1, 1, 1, 1), array.dtype)
        q_index, kv_index = (
            slots._entry(offset, size)
            for slots, offset, size in zip((self, others), offsets, array.shape[2:], strict=True)
        )
        return array[side.rows_of(array), side.heads_of(array.shape[1]), q_index, kv_index]

    def _entry(self, offset: Number | None, size: int):
        """Where these slots are in an array along the side, which one entry may stand for."""
        if size == 1:
            return self.index * 0
        place = self.index if offset is None else self.index - self.number(offset)
        return self.side.xp.clip(place, 0, size - 1)

    def _inside(self, length: int):
        # The last tile of a ragged length has slots past the end: engines drop them, whatever is read here.
        return self.side.xp.clip(self.index, 0, max(length - 1, 0))


@dataclass(frozen=True)
class Tiles:
    """Runs of `size` slots of one side, many at once or a single one, as `Mask.classify` sees them."""

    side: Side
    size: int
    index: Any  # the tile numbers
    unit: int = 0  # the slots from one tile number to the next; 0: tiles stand side by side
    whole: bool = False  # all tiles of the side, in order

    @property
    def solid(self) -> bool:
        """Whether a tile is all of its slots from `start` to `stop`, and not only some that lie in between."""
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
        return self.start if self.side.positions is None else self.least(self.side.positions)

    @property
    def last(self):
        """The greatest position in each tile."""
        return self.stop - 1 if self.side.positions is None else self.greatest(self.side.positions)

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
        """How many of these positions lie between the first and the last of each tile."""
        xp, listed = self.side.xp, self.side.table(_sorted(positions))
        before_first = xp.searchsorted(listed, self.first, side="left")
        to_last = xp.searchsorted(listed, self.last, side="right")
        return (to_last - before_first).astype(np.int32)

    def blocks(self, unit: int) -> tuple[Any, Any] | None:
        """The blocks of `unit` slots that each tile touches, on one more axis, and which of those entries are real.

        None if there may be too many to list.
        """
        most = min((self.size - 1 + unit - 1) // unit + 1, max(-(-self.side.length // unit), 1))
        first, last = self.start // unit, (self.stop - 1) // unit
        blocks = first[..., None] + self.side.xp.arange(most, dtype=np.int32).reshape(1, 1, 1, 1, -1)
        return blocks, blocks <= last[..., None]

    def _reduce(self, array, reduce: Callable, neutral: int, valid: Callable | None):
        memory = self.side.memory
        if memory is None:
            return self._placed(self._summary(array, reduce, neutral, valid))
        key = (id(array), self.size, neutral, valid)
        if key not in memory:
            while len(memory) >= MOST_REMEMBERED:  # a rule may make new arrays for every look
                del memory[next(iter(memory))]
            memory[key] = array, self._summary(array, reduce, neutral, valid)  # an array that is kept keeps its id
        return self._placed(memory[key][1])

    def _summary(self, array, reduce: Callable, neutral: int, valid: Callable | None):
        """One number per tile [B or 1, N or 1, tiles]."""
        xp, array = self.side.xp, self.side.table(array).astype(np.int32)
        entries = self._entries(array if array.ndim == 3 else array[:, None])
        if valid is not None:
            entries = xp.where(valid(entries), entries, np.int32(neutral))
        return reduce(entries, axis=-1)

    def _entries(self, array):
        """The entries [B or 1, N or 1, tiles, size] of an array [B or 1, N or 1, length], tile by tile.

        The last tile of a ragged length repeats the last entry, or has some from before it: a bound on these covers
        the tile.
        """
        xp, length = self.side.xp, array.shape[-1]
        if self._is_single:
            # One tile, inside an engine's loop: read the tile, not the whole row.
            size = min(self.size, length)
            return run(xp, array, xp.minimum(self.start.reshape(()), length - size), size)[..., None, :]
        assert not self.unit, "many runs at once stand side by side"
        size = min(self.size, max(length, 1))
        count = -(-length // size)
        more = count * size - length
        if more:
            last = xp.broadcast_to(array[..., -1:], (*array.shape[:-1], more))
            array = xp.concatenate([array, last], axis=-1)
        return array.reshape(*array.shape[:-1], count, size)

    def _placed(self, summary):
        """One number per tile [B or 1, N or 1, tiles] of all tiles, for the tiles, rows and heads looked at."""
        if self.whole and self.side.holds(summary):
            return self.side.by_row(summary)
        summary, tile = (summary[..., 0], ()) if self._is_single else (summary, (self.index,))
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
    """Both sides of an attention matrix, for all batch rows and heads; `numbers` are theirs, [B or more], [N or more].

    By default rows and heads are counted from 0.
    """
    rows = xp.arange(batch, dtype=np.int32).reshape(-1, 1, 1, 1)
    head = xp.arange(heads, dtype=np.int32).reshape(1, -1, 1, 1)
    places = None
    if numbers is not None:
        places = Places(rows, head, batch, heads)
        rows, head = (n[: at.size].reshape(at.shape) for n, at in zip(numbers, (rows, head), strict=True))
    q_positions, kv_positions = (as_positions(p, xp) for p in (q_positions, kv_positions))
    return (
        Side(QUERIES, q_len, q_positions, rows, head, xp, places=places),
        Side(KEYS, kv_len, kv_positions, rows, head, xp, places=places),
    )


def run(xp: Namespace, array, start, size: int):
    """`size` entries along the last axis of an array, from a start that may be traced."""
    if xp is np:
        return array[..., int(start) : int(start) + size]
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis=array.ndim - 1)


def slots_between(xp: Namespace, length: int, low, high):
    """The slots in [low, high] as a half-open interval within [0, length). None leaves an end open."""
    start, stop = np.zeros((1, 1, 1, 1), np.int32), np.full((1, 1, 1, 1), length, np.int32)
    if low is not None:
        start = xp.clip(xp.asarray(low, dtype=np.int32), 0, length)
    if high is not None:
        stop = xp.clip(xp.asarray(high, dtype=np.int32), -1, length - 1) + 1
    return start, stop


def find_between(xp: Namespace, rows, low, high):
    """The columns, as a half-open interval, that hold all numbers of a row [B or 1, L] within [low, high]."""
    # Numbers may come in any order (rolling caches, packed rows). Only where they grow can bisection find an interval
    # of them; elsewhere every column may hold one.
    start, stop = np.zeros((1, 1, 1, 1), np.int32), np.full((1, 1, 1, 1), rows.shape[1], np.int32)
    grow = grows(rows).reshape(-1, 1, 1, 1)
    if low is not None:
        start = xp.where(grow, search_rows(xp, rows, low, "left"), start)
    if high is not None:
        stop = xp.where(grow, search_rows(xp, rows, high, "right"), stop)
    return start, stop


def grows(rows):
    """Whether the numbers of each row [B or 1, L] never fall: [B or 1]."""
    return (rows[:, 1:] >= rows[:, :-1]).all(axis=1)


def search_rows(xp: Namespace, sorted_rows, values, side: Literal["left", "right"]):
    """`searchsorted` of rank-4 values, row by row of a batch."""
    rows = max(sorted_rows.shape[0], values.shape[0])
    sorted_rows = xp.broadcast_to(sorted_rows, (rows, sorted_rows.shape[1]))
    values = xp.broadcast_to(values, (rows, *values.shape[1:]))
    if xp is np:
        found = np.stack([np.searchsorted(s, v, side) for s, v in zip(sorted_rows, values, strict=True)])
        return found.astype(np.int32)
    return jax.vmap(lambda s, v: jnp.searchsorted(s, v, side=side).astype(np.int32))(sorted_rows, values)


def as_positions(positions, xp: Namespace):
    """Positions as sides hold them: int32 [B or 1, length] within ±FAR, or None."""
    if positions is None:
        return None
    positions = xp.clip(to_int32(positions, xp), -FAR, FAR)
    return positions.reshape(1, -1) if positions.ndim == 1 else positions


def _sorted(positions: tuple[int, ...]) -> np.ndarray:
    return np.unique(np.asarray(positions, np.int32))
