"""Masks inside kernels: a rule's questions are answered outside of the kernel, and the kernel replays the answers.

A rule asks its two sides for numbers: the entries of an array for some slots, the least entry in a tile, a number of
the batch row. A kernel cannot gather these from whole arrays. So `record` runs the rule once outside of the kernel. Its
sides pass every question on to the real `Side`, about all slots or all tiles, and keep the answer as an array. In the
kernel, `RecordedMask` runs the same rule again, and the n-th question gets the loaded part of the n-th answer. A kernel
therefore loads five kinds of arrays, and has no code for any rule.

Inside a kernel, slots have rank 2, [n, 1] for queries and [1, n] for keys or the reverse, and tiles are scalars.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import FAR
from longspan.layout import BlockLayout
from longspan.masks import Mask
from longspan.masks.sides import QUERIES, Side, Slots, Tiles

# The kinds of answers, and the shape of each.
ENTRIES = "entries"  # one number per slot of a side: [B or 1, N or 1, length]
SUMMARY = "summary"  # one number per tile of a side: int32 [B or 1, N or 1, tiles]
NUMBER = "number"  # one number per batch row: int32 [B or 1]
PAIRS = "pairs"  # one bool per pair: int8 [B or 1, N or 1, T, S]
TABLE = "table"  # a whole array, as it is

FEW_POSITIONS = 8  # up to this many positions are compared one by one in the kernel


class Answer(NamedTuple):
    """One array that a rule reads: its kind, the side that it runs along, and whether it holds bools."""

    kind: str
    axis: int  # QUERIES or KEYS; 0 where the kind belongs to no side
    array: jax.Array
    is_bool: bool


@dataclass
class Recording:
    """Keeps the answers to a rule's questions, and returns small stand-ins of the right shape."""

    answers: list[Answer] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # for each question, in order, which answer it has
    _known: dict[Any, int] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)  # arrays are recognised by `id`, so none may be freed meanwhile

    def ask(self, kind: str, axis: int, key: Any, subject: Any, answer: Callable[[], jax.Array]) -> jax.Array:
        """A stand-in for the answer. `subject` is the array asked about; the same (kind, axis, key) is kept once."""
        place = self._known.get((kind, axis, key))
        if place is None:
            place = self._known[kind, axis, key] = len(self.answers)
            self._kept.append(subject)
            array = jnp.asarray(answer())
            is_bool = array.dtype == np.bool_
            if is_bool and kind != TABLE:
                array = array.astype(np.int8 if kind == PAIRS else np.int32)
            self.answers.append(Answer(kind, axis, array, bool(is_bool)))
        self.order.append(place)
        return _stand_in(self.answers[place])

    def questions(self, run: Callable[[], Any]) -> tuple[int, ...]:
        """Runs a rule's method, and returns which answer each of its questions has."""
        self.order = []
        run()
        return tuple(self.order)


@dataclass
class Replay:
    """Answers a rule's questions in the kernel, in the order in which they were recorded."""

    answers: list[Answer]
    order: tuple[int, ...]
    load: Callable[[int], Any]  # the part of an answer that the kernel has loaded
    _asked: int = 0

    def ask(self, kind: str, axis: int, key: Any, subject: Any, answer: Callable[[], jax.Array]) -> Any:
        """The loaded part of the next answer."""
        place = self.order[self._asked]
        self._asked += 1
        value = self.load(place)
        return value != 0 if self.answers[place].is_bool and kind != TABLE else value


class KernelNamespace:
    """`jax.numpy` for rules inside a kernel: constants of one entry are scalars, which need no vector registers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    def full(self, shape, value, dtype=None):
        if set(shape) == {1}:
            return jnp.asarray(value, dtype)
        return jnp.full(shape, value, dtype)

    def zeros(self, shape, dtype=None):
        return self.full(shape, 0, dtype)

    def broadcast_to(self, array, shape):
        # A kernel's arrays have rank 2 or 0, and broadcast in the comparison that uses them.
        return array


@dataclass(frozen=True)
class KernelSide(Side):
    """One side as a rule sees it in a kernel: one batch row and one head, whose numbers are scalars."""

    xp: Any  # a `KernelNamespace`
    _: KW_ONLY
    real: Side  # all rows, heads and slots, outside of the kernel
    tape: Recording | Replay
    tile: int  # slots per tile

    @classmethod
    def of(cls, real: Side, tape: Recording | Replay, batch: Any, head: Any, tile: int) -> "KernelSide":
        """The side of one batch row and one head."""
        return cls(
            real.axis,
            real.length,
            real.positions,
            batch,
            head,
            KernelNamespace(),
            whole=False,
            real=real,
            tape=tape,
            tile=tile,
        )

    def number(self, value: Any) -> Any:
        """A number of a rule, for this batch row."""
        if isinstance(value, int):
            return max(-FAR, min(FAR, value))
        return self.tape.ask(NUMBER, 0, id(value), value, lambda: jnp.asarray(self.real.number(value)).reshape(-1))

    def table(self, array: Any) -> Any:
        """A whole array: only rules with a function of the user's ask for one."""
        return self.tape.ask(TABLE, 0, id(array), array, lambda: self.real.table(array))

    def rows_among(self, count: int) -> Any:
        """The number of the batch row, or 0 if a rule does not tell rows apart."""
        return self.batch if count > 1 else jnp.int32(0)

    def heads_of(self, count: int) -> Any:
        """The number of the head, or 0 if a rule does not tell heads apart."""
        return self.head if count > 1 else jnp.int32(0)


@dataclass(frozen=True)
class KernelSlots(Slots):
    """Single slots of a side, as `Mask.allowed` sees them. `index` is int32 [n, 1] or [1, n]."""

    side: KernelSide

    def take(self, array: Any) -> Any:
        """The entries of an array [B or 1, length] or [B or 1, N or 1, length] for these slots."""
        return self._entries(id(array), array, lambda slots: slots.take(array))

    def is_one_of(self, positions: tuple[int, ...]) -> Any:
        """Whether each slot's position is one of these."""
        if len(positions) > FEW_POSITIONS:
            return self._entries(("one of", positions), positions, lambda slots: slots.is_one_of(positions))
        found = self.position == positions[0]
        for other in positions[1:]:
            found = found | (self.position == other)
        return found

    def listed(self, table: Any, unit: int) -> list[Any]:
        """The columns of a table [.., blocks, r] for the block of `unit` slots that each slot is in."""
        return [self._column(table, unit, column) for column in range(table.shape[-1])]

    def pairs(self, array: Any, others: "KernelSlots", offsets: tuple[Any, Any] = (None, None)) -> Any:
        """The entries of an array of pairs, which begins at the offsets."""

        def answer():
            mine, theirs = self.side.real, others.side.real
            truth = mine.slots().pairs(array, theirs.slots(), offsets)
            return jnp.broadcast_to(truth, (*truth.shape[:2], mine.length, theirs.length))

        key = id(array), *(id(offset) for offset in offsets)
        return self.side.tape.ask(PAIRS, 0, key, (array, offsets), answer)

    def _column(self, table: Any, unit: int, column: int) -> Any:
        return self._entries((id(table), unit, column), table, lambda slots: slots.listed(table, unit)[column])

    def _entries(self, key: Any, subject: Any, of: Callable[[Any], Any]) -> Any:
        """One number for each slot, from a function of the real side's slots."""

        def answer():
            found = of(self.side.real.slots())  # rank 4
            along = [self.side.length, 1] if self.side.axis == QUERIES else [1, self.side.length]
            return jnp.broadcast_to(found, (*found.shape[:2], *along)).reshape(*found.shape[:2], self.side.length)

        return self.side.tape.ask(ENTRIES, self.side.axis, key, subject, answer)


@dataclass(frozen=True)
class KernelTile(Tiles):
    """One tile of a side, as `Mask.classify` sees it. All its numbers are scalars, and `index` is its first slot."""

    side: KernelSide

    @classmethod
    def of(cls, side: KernelSide, start: Any) -> "KernelTile":
        """The tile that begins at a slot."""
        return cls(side, side.tile, start, unit=1)

    @property
    def solid(self) -> bool:
        return False  # its slots cannot be read one by one

    @property
    def start(self) -> Any:
        return self.index

    @property
    def first(self) -> Any:
        """The least position."""
        if self.side.positions is None:
            return self.start
        return self._summary("first", None, lambda tiles: tiles.first)

    @property
    def last(self) -> Any:
        """The greatest position."""
        if self.side.positions is None:
            return self.stop - 1
        return self._summary("last", None, lambda tiles: tiles.last)

    def least(self, array: Any, valid: Callable | None = None) -> Any:
        """The least (valid) entry of an array within the tile."""
        return self._summary(("least", id(array), valid), (array, valid), lambda tiles: tiles.least(array, valid))

    def greatest(self, array: Any, valid: Callable | None = None) -> Any:
        """The greatest (valid) entry of an array within the tile."""
        return self._summary(("greatest", id(array), valid), (array, valid), lambda tiles: tiles.greatest(array, valid))

    def count_of(self, positions: tuple[int, ...]) -> Any:
        """How many of these positions lie between the first and the last of the tile."""
        return self._summary(("count", positions), positions, lambda tiles: tiles.count_of(positions))

    def blocks(self, unit: int) -> None:
        """None: a kernel does not list a tile's blocks, so a visited tile of `Blocks` is always PARTIAL."""
        return

    def _summary(self, key: Any, subject: Any, of: Callable[[Any], Any]) -> Any:
        """One number for the tile, from a function of all tiles of the real side."""

        def answer():
            found = of(self.side.real.tiles(self.side.tile))  # rank 4
            return found.reshape(*found.shape[:2], -1).astype(np.int32)

        return self.side.tape.ask(SUMMARY, self.side.axis, key, subject, answer)


@dataclass(frozen=True)
class RecordedMask:
    """A layout's mask as a kernel runs it. `answers` are the arrays that the kernel loads parts of."""

    mask: Mask
    sides: tuple[Side, Side]
    tiles: tuple[int, int]
    answers: list[Answer]
    allowed_order: tuple[int, ...]
    classify_order: tuple[int, ...]

    def allowed(self, load: Callable[[int], Any], batch: Any, head: Any, q_index: Any, kv_index: Any) -> Any:
        """The truth for each pair of slots. `load(n)` returns the loaded part of `answers[n]`."""
        q, kv = self._sides(Replay(self.answers, self.allowed_order, load), batch, head)
        return self.mask.allowed(KernelSlots(q, q_index), KernelSlots(kv, kv_index))

    def classify(self, load: Callable[[int], Any], batch: Any, head: Any, q_start: Any, kv_start: Any) -> tuple:
        """(may_any, must_all) of one tile, as scalars."""
        q, kv = self._sides(Replay(self.answers, self.classify_order, load), batch, head)
        bounds = self.mask.classify(KernelTile.of(q, q_start), KernelTile.of(kv, kv_start))
        return tuple(_scalar(bound) for bound in bounds)

    def _sides(self, tape: Recording | Replay, batch: Any, head: Any) -> tuple[KernelSide, KernelSide]:
        return _kernel_sides(self.sides, self.tiles, tape, batch, head)


@dataclass(frozen=True)
class RecordedValues:
    """A function of the queries' and the keys' slots, such as a bias, as a kernel runs it."""

    values: Callable[[Any, Any], Any]
    sides: tuple[Side, Side]
    tiles: tuple[int, int]
    answers: list[Answer]
    order: tuple[int, ...]

    def at(self, load: Callable[[int], Any], batch: Any, head: Any, q_index: Any, kv_index: Any) -> Any:
        """The values for each pair of slots. `load(n)` returns the loaded part of `answers[n]`."""
        q, kv = _kernel_sides(self.sides, self.tiles, Replay(self.answers, self.order, load), batch, head)
        return self.values(KernelSlots(q, q_index), KernelSlots(kv, kv_index))


def record_values(layout: BlockLayout, batch: int, heads: int, values: Callable[[Any, Any], Any]) -> RecordedValues:
    """Runs values(q, kv) once, outside of a kernel, and keeps the arrays that it reads."""
    tape = Recording()
    sides, tiles = layout.sides(batch=batch, heads=heads), (layout.q_tile, layout.kv_tile)
    q, kv = _kernel_sides(sides, tiles, tape, jnp.int32(0), jnp.int32(0))
    q_slots, kv_slots = KernelSlots(q, jnp.zeros((8, 1), np.int32)), KernelSlots(kv, jnp.zeros((1, 8), np.int32))
    order = tape.questions(lambda: values(q_slots, kv_slots))
    return RecordedValues(values, sides, tiles, tape.answers, order)


def record(layout: BlockLayout, batch: int, heads: int) -> RecordedMask:
    """Runs a layout's mask once, outside of a kernel, and keeps the arrays that it reads."""
    mask, tape = layout.lowered().mask, Recording()
    sides, tiles = layout.sides(batch=batch, heads=heads), (layout.q_tile, layout.kv_tile)
    q, kv = _kernel_sides(sides, tiles, tape, jnp.int32(0), jnp.int32(0))
    q_slots, kv_slots = KernelSlots(q, jnp.zeros((8, 1), np.int32)), KernelSlots(kv, jnp.zeros((1, 8), np.int32))
    q_tile, kv_tile = KernelTile.of(q, jnp.int32(0)), KernelTile.of(kv, jnp.int32(0))
    allowed = tape.questions(lambda: mask.allowed(q_slots, kv_slots))
    classify = tape.questions(lambda: mask.classify(q_tile, kv_tile))
    return RecordedMask(mask, sides, tiles, tape.answers, allowed, classify)


def _kernel_sides(
    sides: tuple[Side, Side], tiles: tuple[int, int], tape: Recording | Replay, batch: Any, head: Any
) -> tuple[KernelSide, KernelSide]:
    q, kv = sides
    return KernelSide.of(q, tape, batch, head, tiles[0]), KernelSide.of(kv, tape, batch, head, tiles[1])


def _stand_in(answer: Answer) -> jax.Array:
    """A value like the one that a kernel loads, of 8 slots."""
    if answer.kind in (NUMBER, SUMMARY):
        return jnp.int32(1)
    if answer.kind == TABLE:
        return answer.array
    dtype = np.bool_ if answer.is_bool else answer.array.dtype
    if answer.kind == PAIRS:
        return jnp.zeros((8, 8), dtype)
    return jnp.zeros((8, 1) if answer.axis == QUERIES else (1, 8), dtype)


def _scalar(bound: Any) -> Any:
    # A scalar must not be reshaped: Mosaic rejects a reshape to rank 0 of what already has it.
    bound = jnp.asarray(bound)
    return bound if bound.ndim == 0 else bound.reshape(())
