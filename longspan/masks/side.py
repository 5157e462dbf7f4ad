"""How a rule sees the tokens of a tile: slots (single tokens) and tiles (runs of slots), on either side.

Every array here has rank 4, [B or 1, N or 1, T or 1, S or 1], so that rules are written as plain comparisons between
the two sides and broadcast without surprises. The same objects are made of NumPy arrays (planning on the host) or of
JAX arrays (inside a program), and may stand for all rows and heads or for one of each (inside an engine's loop).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from longspan._types import FAR, Namespace, Number

QUERIES, KEYS = 2, 3  # the axis of rank-4 arrays that each side runs along


@dataclass(frozen=True)
class Side:
    """One whole side of the attention matrix: how many slots, and the position of each (by default its index)."""

    axis: int
    length: int
    positions: Any  # int [B or 1, length], or None: position = slot index
    batch: Any  # int [B,1,1,1], the batch rows looked at
    head: Any  # int [1,N,1,1], the query heads looked at
    xp: Namespace
    whole: bool = True  # all batch rows and heads are looked at, in order

    def along(self, vector):
        """A vector, laid along this side's axis."""
        return vector.reshape((1, 1, -1, 1) if self.axis == QUERIES else (1, 1, 1, -1))

    def by_row(self, array):
        """An array [B or 1, X], laid along the batch and this side's axis. No gather: a sharded batch stays sharded."""
        rows = array.shape[0]
        return array.reshape((rows, 1, -1, 1) if self.axis == QUERIES else (rows, 1, 1, -1))

    def at(self, *, batch=None, head=None) -> "Side":
        """The same side, looked at for some batch rows and heads only."""
        batch, head = self.batch if batch is None else batch, self.head if head is None else head
        return replace(self, batch=batch, head=head, whole=False)

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
        if value.ndim == 4:
            return value
        value = self.xp.clip(self.xp.asarray(value).astype(np.int32), -FAR, FAR)
        if value.size == 1 or (self.whole and value.shape[0] == self.batch.size):
            return value.reshape(-1, 1, 1, 1)
        return value[self.batch]

    def rows_of(self, array):
        """Which rows of an array [B or 1, ...] belong to the batch rows looked at."""
        return self.batch if array.shape[0] > 1 else self.xp.zeros_like(self.batch)

    def between(self, low, high):
        """The slots, as a half-open interval, that hold every position in [low, high]."""
        xp = self.xp
        if self.positions is None:
            low, high = xp.asarray(low, dtype=np.int32), xp.asarray(high, dtype=np.int32)
            return xp.clip(low, 0, self.length), xp.clip(high + 1, 0, self.length)
        positions = xp.asarray(self.positions)
        # Positions may come in any order (rolling caches, packed rows). Only where they grow with the slots can an
        # interval of positions be found by bisection; elsewhere every slot may hold one.
        grows = xp.all(positions[:, 1:] >= positions[:, :-1], axis=1).reshape(-1, 1, 1, 1)
        start = search_rows(xp, positions, low, "left")
        stop = search_rows(xp, positions, high, "right")
        return xp.where(grows, start, np.int32(0)), xp.where(grows, stop, np.int32(self.length))


@dataclass(frozen=True)
class Slots:
    """Single slots of one side, as `Mask.allowed` sees them."""

    side: Side
    index: Any
    whole: bool = False  # all slots of the side, in order

    @property
    def position(self):
        """The position of each slot: what number rules (causal, window, ...) compare."""
        if self.side.positions is None:
            return self.index
        return self.take(self.side.positions)

    def take(self, array):
        """The entries of an array [B or 1, length] for these slots."""
        array = self.side.xp.asarray(array)
        if self.whole and self.side.whole and array.shape[1] == self.side.length:
            return self.side.by_row(array)
        return array[self.side.rows_of(array), self._inside(array.shape[1])]

    def number(self, value: Number):
        return self.side.number(value)

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

    def least(self, array, valid: Callable | None = None):
        """The least (valid) entry of an array [B or 1, length] within each tile."""
        return self._reduce(array, self.side.xp.min, np.iinfo(np.int32).max, valid)

    def greatest(self, array, valid: Callable | None = None):
        """The greatest (valid) entry of an array [B or 1, length] within each tile."""
        return self._reduce(array, self.side.xp.max, np.iinfo(np.int32).min, valid)

    def _reduce(self, array, reduce: Callable, neutral: int, valid: Callable | None):
        xp = self.side.xp
        if valid is not None:
            plain = reduce
            reduce = lambda entries, axis: plain(xp.where(valid(entries), entries, np.int32(neutral)), axis=axis)  # noqa: E731
        return self._reduce_runs(array, reduce, neutral)

    def _reduce_runs(self, array, reduce: Callable, neutral: int):
        xp, (_, length) = self.side.xp, array.shape
        array = xp.asarray(array).astype(np.int32)
        rows = self.side.rows_of(array)
        if self.index.size == 1 and not self.whole:
            # One tile, inside an engine's loop: read the tile, not the whole row. Past a ragged end the window is
            # moved back, so the bound covers more slots than the tile: looser, still sound.
            size = min(self.size, length)
            start = xp.minimum(self.start.reshape(()), length - size)
            return reduce(run(xp, array, start, size), axis=1)[rows]
        assert not self.unit, "many runs at once stand side by side"
        count = -(-length // self.size)
        padded = xp.pad(array, ((0, 0), (0, count * self.size - length)), constant_values=neutral)
        summary = reduce(padded.reshape(array.shape[0], count, self.size), axis=2)
        return self.side.by_row(summary) if self.whole and self.side.whole else summary[rows, self.index]


def two_sides(
    q_len: int,
    kv_len: int,
    *,
    batch: int = 1,
    heads: int = 1,
    q_positions=None,
    kv_positions=None,
    xp: Namespace = jnp,
) -> tuple[Side, Side]:
    """Both sides of an attention matrix, for all batch rows and heads."""
    rows = xp.arange(batch, dtype=np.int32).reshape(-1, 1, 1, 1)
    head = xp.arange(heads, dtype=np.int32).reshape(1, -1, 1, 1)
    q_positions, kv_positions = (_as_positions(p, xp) for p in (q_positions, kv_positions))
    return (
        Side(QUERIES, q_len, q_positions, rows, head, xp),
        Side(KEYS, kv_len, kv_positions, rows, head, xp),
    )


def run(xp: Namespace, array, start, size: int):
    """`size` columns of an array [B, L] from a start that may be traced."""
    if xp is np:
        return array[:, int(start) : int(start) + size]
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis=1)


def search_rows(xp: Namespace, sorted_rows, values, side: Literal["left", "right"]):
    """`searchsorted` of rank-4 values, row by row of a batch."""
    rows = max(sorted_rows.shape[0], values.shape[0])
    sorted_rows = xp.broadcast_to(sorted_rows, (rows, sorted_rows.shape[1]))
    values = xp.broadcast_to(values, (rows, *values.shape[1:]))
    if xp is np:
        found = np.stack([np.searchsorted(s, v, side) for s, v in zip(sorted_rows, values, strict=True)])
        return found.astype(np.int32)
    return jax.vmap(lambda s, v: jnp.searchsorted(s, v, side=side).astype(np.int32))(sorted_rows, values)


def _as_positions(positions, xp: Namespace):
    if positions is None:
        return None
    positions = xp.clip(xp.asarray(positions).astype(np.int32), -FAR, FAR)
    return positions.reshape(1, -1) if positions.ndim == 1 else positions
