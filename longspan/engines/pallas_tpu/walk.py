"""The walk of one row of the grid over the tiles that it visits, with two buffers for what each visit copies.

While a visit computes, the next visit's copies run. The last visit of a row starts the first copies of the next row. A
buffer to which visits add (`Stream.is_sum`) is copied back after each visit; that copy too runs during the next visit.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from longspan.engines.door import ENTRIES, NUMBER, PAIRS, SUMMARY
from longspan.engines.pallas_tpu.operands import Operands
from longspan.engines.pallas_tpu.places import Visit
from longspan.engines.pallas_tpu.prepared import loaded_places
from longspan.engines.pallas_tpu.refs import smem
from longspan.masks.sides import QUERIES

SLOT, PENDING, IS_READY = 0, 1, 2  # the places in the scalars that stay from one row to the next
NOTHING_PENDING = -1


def add_buffers(operands: Operands) -> None:
    """Adds the semaphores and scalars of a walk; call it after all streams were added."""
    streams = max(len(operands.streams), 1)
    operands.refs.keep("copied in", pltpu.SemaphoreType.DMA((streams, 2)))
    operands.refs.keep("copied out", pltpu.SemaphoreType.DMA((streams, 2)))
    operands.refs.keep("walk", smem((3,)))


class Walk:
    """The walk of the current grid step. Its methods answer what a visit needs to know of the mask."""

    def __init__(self, operands: Operands, refs: dict[str, Any]) -> None:
        self.operands, self.refs = operands, refs
        self.b, self.h, self.i = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        self.layer = self.row("layer") if "layer" in operands.row.places else None
        self.batch_number, self.head_number = self.b, self.h
        if "batch number" in operands.row.places:
            self.batch_number, self.head_number = self.row("batch number"), self.row("head number")
        for place in operands.row_entries:
            spread_along_lanes(refs[f"answer {place}"][...], refs[f"answer {place} column"])

    def row(self, name: Any, offset: Any = 0) -> Any:
        """A number of this row."""
        return self.refs["row"][0, 0, 0, 0, self.operands.row.places[name] + offset]

    def column(self, name: Any, j: Any) -> Any:
        """A number of a tile of the other side."""
        return self.refs["columns"][0, 0, 0, self.operands.columns.places[name] * self.operands.other_count + j]

    def buffer(self, name: str, slot: Any) -> Any:
        """What a stream copied for the visit in this buffer."""
        return self.refs[f"{name} buffers"].at[slot]

    def load(self, j: Any, slot: Any, place: int) -> Any:
        """The part of an answer for a visit. Along queries and keys it has this kernel's orientation."""
        operands = self.operands
        answer, name = operands.answers[place], f"answer {place}"
        if answer.kind == NUMBER or (answer.kind == SUMMARY and answer.axis == operands.axis):
            return self.row(place)
        if answer.kind == SUMMARY:
            return self.column(place, j)
        if answer.kind == ENTRIES and answer.axis == operands.axis:
            return self.refs[f"{name} column"][:, :1]
        value = self.buffer(name, slot)[...]
        if answer.kind == PAIRS and not answer.is_bool and operands.axis != QUERIES:
            return value.astype(np.float32).T
        return value.astype(np.int32) if answer.is_bool else value

    def slots(self, j: Any) -> tuple[Any, Any]:
        """The indices of the queries and of the keys of a visit, one as a column and the other as a row."""
        operands = self.operands
        mine = lax.broadcasted_iota(jnp.int32, (operands.tile, 1), 0) + self.i * operands.tile
        other = lax.broadcasted_iota(jnp.int32, (1, operands.other_tile), 1) + j * operands.other_tile
        return (mine, other) if operands.axis == QUERIES else (other, mine)

    def tiles(self, j: Any) -> tuple[Any, Any]:
        """The query tile and the key tile of a visit."""
        return (self.i, j) if self.operands.axis == QUERIES else (j, self.i)

    def kind(self, j: Any, slot: Any) -> tuple[Any, Any]:
        """Whether a visit may allow a pair, and whether it allows all pairs."""
        operands, plan = self.operands, self.operands.plan
        q_tile, kv_tile = self.tiles(j)
        starts = q_tile * plan.q_tile, kv_tile * plan.kv_tile
        some, every = self._evaluate("classify", j, slot, *starts)
        if plan.S % plan.kv_tile:
            every = every & ((kv_tile + 1) * plan.kv_tile <= plan.S)
        if operands.counts_repeats:
            some = some & (self.repeats(slot) > 0)
        if plan.biased:  # a bias of -inf masks its key
            every = every & False
        return some, every

    def allowed(self, j: Any, slot: Any) -> Any:
        """The pairs of a visit that the mask allows: bools [tile, other tile]."""
        operands, plan = self.operands, self.operands.plan
        q, kv = self.slots(j)
        (pairs,) = self._evaluate("allowed", j, slot, q, kv)
        if jnp.ndim(pairs) == 4:
            pairs = pairs.reshape(pairs.shape[2:])
        if plan.S % plan.kv_tile:
            pairs = pairs & (kv < plan.S)
        if plan.T % plan.q_tile:  # a key that only the padding sees may hold NaN
            pairs = pairs & (q < plan.T)
        return jnp.broadcast_to(pairs, (operands.tile, operands.other_tile))

    def bias_and_allowed(self, j: Any, slot: Any, masked: bool) -> tuple[Any, Any]:
        """The bias of a visit, 0 in place of -inf, and its allowed pairs; None for what the visit does not have."""
        allowed = self.allowed(j, slot) if masked else None
        if not self.operands.plan.biased:
            return None, allowed
        bias = self.operands.bias.tile(self, j, slot)
        return jnp.where(bias == -jnp.inf, 0.0, bias), allowed & (bias != -jnp.inf)

    def _evaluate(self, name: str, j: Any, slot: Any, q: Any, kv: Any) -> Sequence[Any]:
        """The results of the mask's `allowed` or `classify`."""
        mask, rule = self.operands.mask, self.operands.prepared.get(name)
        if rule is not None:
            loads = [self.load(j, slot, place) for place in loaded_places(mask.answers)]
            return rule.split.inside(rule.values(self.refs), q, kv, *loads)
        load, here = partial(self.load, j, slot), (self.batch_number, self.head_number)
        if name == "classify":
            return mask.classify(load, *here, q, kv)
        return [mask.allowed(load, *here, q, kv)]

    def repeats(self, slot: Any) -> Any:
        """How often the pair of tiles counts in a walk over keys: the forward layout may list it more than once."""
        ends = self.buffer("repeats", slot)
        count = ends.shape[1] // 2
        total = jnp.int32(0)
        for n in range(count):
            total = total + ((ends[0, n] <= self.i) & (self.i < ends[0, count + n])).astype(np.int32)
        return total

    def run(self, visit: Callable[..., None]) -> None:
        """Calls visit(j, slot, masked=, careful=) for every tile of this row that is not EMPTY."""
        state = self.refs["walk"]

        @pl.when(self.i == 0)
        def _():
            state[SLOT], state[PENDING], state[IS_READY] = 0, NOTHING_PENDING, 0

        @pl.when(state[IS_READY] == 0)
        def _():
            self._finish_writing(state[PENDING], 1 - state[SLOT])
            state[PENDING] = NOTHING_PENDING

            @pl.when(self.row("first") >= 0)
            def _():
                self._start(self._at(self.i, self.row("first")), state[SLOT])

        cursor = _Cursor(self)
        carry = *cursor.begin(), state[SLOT], state[PENDING], jnp.int32(0)
        _, _, slot, pending, is_ready = lax.while_loop(
            lambda carry: carry[0] < cursor.end, partial(self._step, cursor, visit), carry
        )
        state[SLOT], state[PENDING], state[IS_READY] = slot, pending, is_ready

        @pl.when(self.i == self.operands.count - 1)
        def _():
            self._finish_writing(pending, 1 - slot)

    def _step(self, cursor: "_Cursor", visit: Callable[..., None], carry: tuple) -> tuple:
        place, j, slot, pending, _ = carry
        next_place, next_j = cursor.after(place, j)
        is_last = next_place >= cursor.end
        following = jnp.where(is_last, self.row("following"), next_j)
        starts_next = ~is_last | (following >= 0)
        if self._sums():  # the sums of this tile are not written yet
            starts_next = starts_next & (following != j)
        self._finish_writing(pending, 1 - slot)

        @pl.when(starts_next)
        def _():
            row = self.i + is_last.astype(np.int32)
            self._start(self._at(row, following), 1 - slot)

        for copy in self._copies(self._at(self.i, j), slot):
            copy.wait()
        self._visit(visit, j, slot)
        for copy in self._writes(j, slot):
            copy.start()
        if self._sums():
            pending = j
        return next_place, next_j, 1 - slot, pending, (is_last & starts_next).astype(np.int32)

    def _visit(self, visit: Callable[..., None], j: Any, slot: Any) -> None:
        some, every = self.kind(j, slot)
        careful = self.row("garbage") > 0
        partly = some & ~every
        if not self.operands.plan.biased:
            pl.when(some & every)(partial(visit, j, slot, masked=False, careful=False))
        pl.when(partly & ~careful)(partial(visit, j, slot, masked=True, careful=False))
        pl.when(partly & careful)(partial(visit, j, slot, masked=True, careful=True))

    def _at(self, row: Any, j: Any) -> Visit:
        return Visit(self.b, self.h, row, j, self.layer)

    def _sums(self) -> list[Any]:
        return [stream for stream in self.operands.streams if stream.is_sum]

    def _copies(self, at: Visit, slot: Any) -> list[Any]:
        found = []
        for n, (name, part, _) in enumerate(self.operands.streams):
            semaphore = self.refs["copied in"].at[n, slot]
            found.append(pltpu.make_async_copy(part(self._source(name), at), self.buffer(name, slot), semaphore))
        return found

    def _writes(self, j: Any, slot: Any) -> list[Any]:
        at, found = self._at(self.i, j), []
        for n, (name, part, is_sum) in enumerate(self.operands.streams):
            if is_sum:
                semaphore = self.refs["copied out"].at[n, slot]
                found.append(pltpu.make_async_copy(self.buffer(name, slot), part(self._source(name), at), semaphore))
        return found

    def _source(self, name: str) -> Any:
        """The array of a stream. Sums are read from the result in whose memory they are written."""
        return self.refs[self.operands.refs.aliases.get(name, name)]

    def _start(self, at: Visit, slot: Any) -> None:
        for copy in self._copies(at, slot):
            copy.start()

    def _finish_writing(self, pending: Any, slot: Any) -> None:
        if not self._sums():
            return

        @pl.when(pending >= 0)
        def _():
            for copy in self._writes(pending, slot):
                copy.wait()


class _Cursor:
    """The tiles that a row visits, in order: those of its intervals, then the common tiles outside of them.

    A place below the number of intervals is that interval; places from there on count the common tiles.
    """

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.intervals = walk.operands.intervals
        self.end = jnp.int32(self.intervals)
        if walk.operands.has_common:
            self.end = self.intervals + walk.row("common")

    def begin(self) -> tuple[Any, Any]:
        """(place, tile) of the first visit; the place is not below `end` if there is none."""
        return self._skip_visited(jnp.int32(0), self._first_tile(jnp.int32(0)))

    def after(self, place: Any, j: Any) -> tuple[Any, Any]:
        """(place, tile) of the visit after this one."""
        in_interval = place < self.intervals
        place = jnp.where(in_interval, place, place + 1)
        return self._skip_visited(place, jnp.where(in_interval, j + 1, self._first_tile(place)))

    def _first_tile(self, place: Any) -> Any:
        first = self.walk.row("starts", jnp.minimum(place, self.intervals - 1))
        if not self.walk.operands.has_common:
            return first
        last = self.walk.operands.other_count - 1
        common = self.walk.column("common", jnp.clip(place - self.intervals, 0, last))
        return jnp.where(place < self.intervals, first, common)

    def _skip_visited(self, place: Any, j: Any) -> tuple[Any, Any]:
        """Skips the ends of intervals, and common tiles inside of an interval: those were visited already."""
        return lax.while_loop(
            lambda at: self._is_over(*at), lambda at: (at[0] + 1, self._first_tile(at[0] + 1)), (place, j)
        )

    def _is_over(self, place: Any, j: Any) -> Any:
        stop = self.walk.row("stops", jnp.minimum(place, self.intervals - 1))
        over = (place < self.intervals) & (j >= stop)
        if not self.walk.operands.has_common:
            return over
        inside = jnp.zeros((), bool)
        for n in range(self.intervals):
            inside = inside | ((self.walk.row("starts", n) <= j) & (j < self.walk.row("stops", n)))
        return over | ((place >= self.intervals) & (place < self.end) & inside)


def spread_along_lanes(row: jax.Array, column: Any) -> None:
    """Writes a row [1, n] as a column [n, 128], each number repeated along the lanes."""
    column[...] = jnp.broadcast_to(row, (column.shape[1], row.shape[1])).T
