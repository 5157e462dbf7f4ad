"""The small arrays that a kernel reads besides q, k and v: the tiles to visit, and what the mask and the bias read.

A row of the grid is one query tile that visits key tiles, or one key tile that visits query tiles. Numbers of a row are
one block of scalar memory, the table `row`. Numbers of all tiles of the other side are the table `columns`. Entries by
slot are vectors: those of the row arrive with its block, those of a visited tile by a copy for each visit.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from longspan.engines.door import ENTRIES, NUMBER, PAIRS, SUMMARY, TABLE, Answer, RecordedMask
from longspan.engines.pallas_tpu.places import LANES, Visit, place_in, tile_slice
from longspan.engines.pallas_tpu.plan import TpuPlan
from longspan.engines.pallas_tpu.prepared import PreparedRule
from longspan.engines.pallas_tpu.refs import HBM, KernelRefs, smem, vmem
from longspan.layout import BlockLayout
from longspan.masks.sides import KEYS, QUERIES


class Stream(NamedTuple):
    """An operand in HBM, of which each visit copies one part into one of two buffers."""

    name: str
    part: Any  # a function of (ref, visit) that returns the part of the ref
    is_sum: bool = False  # whether the visit adds to the buffer, which is then copied back


class Table:
    """Integers [B or 1, heads or 1, rows, width], made of named columns."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.places: dict[Any, int] = {}
        self.width = 0

    def add(self, name: Any, array: Any) -> None:
        """Adds an array [B or 1, heads or 1, rows or 1, n] as n columns."""
        self.places[name] = self.width
        self.parts.append(jnp.asarray(array).astype(np.int32))
        self.width += array.shape[3]

    def joined(self, rows: int) -> Any:
        """The whole table."""
        batch = max(part.shape[0] for part in self.parts)
        heads = max(part.shape[1] for part in self.parts)
        wide = [jnp.broadcast_to(part, (batch, heads, rows, part.shape[3])) for part in self.parts]
        return jnp.concatenate(wide, axis=3)


@dataclass
class Operands:
    """The arrays of one kernel for its mask, its bias and its tiles, added to `refs`."""

    plan: TpuPlan
    axis: int  # QUERIES: rows are query tiles; KEYS: rows are key tiles
    mask: RecordedMask
    answers: list[Answer]  # of the mask, then of the bias and of dropout
    refs: KernelRefs
    intervals: int
    has_common: bool
    counts_repeats: bool
    row: Table
    columns: Table
    streams: list[Stream]
    row_entries: list[int]  # answers with one number for each slot of the row's own tile
    bias: Any  # a `KernelBias`
    prepared: dict[str, PreparedRule]  # `allowed` and `classify` of a mask that reads whole arrays
    dropout_place: int | None  # the answer with the keys' positions, by which dropout counts; None: their indices

    @classmethod
    def of(
        cls, plan: TpuPlan, layout: BlockLayout, axis: int, mask: RecordedMask, bias: Any, garbage: Any,
        layer: Any = None,
    ) -> "Operands":  # fmt: skip
        """The operands of a kernel whose rows are those of `layout`; `garbage` is int32 [B]."""
        answers, dropout_place = [*mask.answers, *bias.answers], None
        if plan.dropout_rate and layout.kv_positions is not None:
            dropout_place = len(answers)
            answers.append(Answer(ENTRIES, KEYS, jnp.asarray(layout.kv_positions)[:, None], False))
        operands = cls(
            plan=plan, axis=axis, mask=mask, answers=answers, refs=KernelRefs(), intervals=layout.starts.shape[3],
            has_common=layout.common is not None, counts_repeats=layout.repeats and layout.is_transposed,
            row=Table(), columns=Table(), streams=[], row_entries=[], bias=bias, prepared={},
            dropout_place=dropout_place,
        )  # fmt: skip
        operands._add_tiles(layout, garbage)
        operands._prepare_mask(layout)
        if layer is not None:
            operands.row.add("layer", jnp.asarray(layer).reshape(1, 1, 1, 1))
        for place, answer in enumerate(operands.answers):
            operands._add_answer(place, answer)
        operands._add_tables()
        if operands.counts_repeats:
            operands._add_repeats(layout.forward)
        bias.add_to(operands)
        return operands

    @property
    def tile(self) -> int:
        """The number of slots of a row's own tile."""
        return self.plan.q_tile if self.axis == QUERIES else self.plan.kv_tile

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.plan.q_tiles if self.axis == QUERIES else self.plan.kv_tiles

    @property
    def other_tile(self) -> int:
        """The number of slots of a visited tile."""
        return self.plan.kv_tile if self.axis == QUERIES else self.plan.q_tile

    @property
    def other_count(self) -> int:
        """The number of tiles that may be visited."""
        return self.plan.kv_tiles if self.axis == QUERIES else self.plan.q_tiles

    def _add_tiles(self, layout: BlockLayout, garbage: Any) -> None:
        first = _first_tiles(layout)
        following = jnp.concatenate([first[:, :, 1:], jnp.full_like(first[:, :, :1], -1)], axis=2)
        self.row.add("starts", jnp.asarray(layout.starts))
        self.row.add("stops", jnp.asarray(layout.stops))
        self.row.add("first", first)
        self.row.add("following", following)
        self.row.add("garbage", garbage.reshape(-1, 1, 1, 1))
        if layout.common is not None:
            self.row.add("common", jnp.asarray(layout.common_count)[:, :, None, None])
            self.columns.add("common", jnp.asarray(layout.common)[..., None])
        if layout.rows is not None:
            self.row.add("batch number", layout.rows[: self.plan.B].reshape(-1, 1, 1, 1))
            self.row.add("head number", layout.heads[: self.plan.heads].reshape(1, -1, 1, 1))

    def _prepare_mask(self, layout: BlockLayout) -> None:
        """Splits a mask that reads whole arrays: a kernel cannot read them at computed indices."""
        answers, made = self.mask.answers, partial(PreparedRule.of, plan=self.plan, layout=layout, axis=self.axis)
        if not any(answer.kind == TABLE for answer in answers):
            return
        self.prepared["allowed"] = made("allowed", self.mask.allowed, answers)
        self.prepared["classify"] = made("classify", self.mask.classify, answers, of_tiles=True)
        for rule in self.prepared.values():
            rule.add_to(self.refs)

    def _add_answer(self, place: int, answer: Answer) -> None:
        name, array = f"answer {place}", answer.array
        if answer.kind == TABLE or (answer.kind == NUMBER and self.prepared):
            return  # read by the part of a prepared rule that runs outside
        if answer.kind == NUMBER:
            self.row.add(place, array.reshape(-1, 1, 1, 1))
        elif answer.kind == SUMMARY:
            table = self.row if answer.axis == self.axis else self.columns
            table.add(place, array[..., None])
        elif answer.kind == PAIRS:
            self._add_pairs(name, answer)
        elif answer.axis == self.axis:
            array = by_tile(array, self.tile, self.count)
            self.refs.read(
                name, array, pl.BlockSpec((None, None, None, 1, self.tile), partial(_row_block, array.shape))
            )
            self.refs.keep(f"{name} column", vmem((self.tile, LANES), array.dtype))
            self.row_entries.append(place)
        else:
            array = by_tile(array, self.other_tile, self.other_count)
            self.add_stream(name, array, _part_of_tile, vmem((2, 1, self.other_tile), array.dtype))

    def add_stream(self, name: str, array: Any, part: Any, buffer: Any, is_sum: bool = False) -> None:
        """Adds an operand that is copied part by part, one part for each visit."""
        self.refs.read(name, array)
        self.refs.keep(f"{name} buffers", buffer)
        self.streams.append(Stream(name, part, is_sum))

    def add_sum(self, name: str, shape: tuple[int, ...], part: Any, buffer: tuple[int, ...]) -> None:
        """Adds a float32 result `{name} sum` in HBM, to a part of which each visit adds."""
        self.add_stream(name, jnp.zeros(shape, np.float32), part, vmem((2, *buffer)), is_sum=True)
        self.refs.write(f"{name} sum", shape, np.float32, HBM, reuses=name)

    def _add_pairs(self, name: str, answer: Answer) -> None:
        """One number per pair. Bools are transposed for kernels over keys; floats are transposed in the kernel."""
        plan, array = self.plan, answer.array
        widths = plan.q_tiles * plan.q_tile - plan.T, plan.kv_tiles * plan.kv_tile - plan.S
        array = jnp.pad(array, ((0, 0), (0, 0), (0, widths[0]), (0, widths[1])))
        shape, transposed = (plan.q_tile, plan.kv_tile), self.axis == KEYS and answer.is_bool
        if transposed:
            array, shape = array.swapaxes(2, 3), (plan.kv_tile, plan.q_tile)
        part = partial(_part_of_pairs, shape, self.axis == QUERIES or transposed)
        self.add_stream(name, array, part, vmem((2, *shape), array.dtype))
        self.refs.whole_registers = True  # the part of a visit must not cut a tile of the array's memory

    def _add_tables(self) -> None:
        row = self.row.joined(self.count)[:, :, :, None]
        spec = pl.BlockSpec((1, 1, 1, 1, row.shape[4]), partial(_row_block, row.shape), memory_space=pltpu.SMEM)
        self.refs.read("row", row, spec)
        if not self.columns.parts:
            return
        columns = self.columns.joined(self.other_count).swapaxes(2, 3)
        columns = columns.reshape(*columns.shape[:2], 1, -1)
        spec = pl.BlockSpec((1, 1, 1, columns.shape[3]), partial(_plane_block, columns.shape), memory_space=pltpu.SMEM)
        self.refs.read("columns", columns, spec)

    def _add_repeats(self, forward: Any) -> None:
        """The forward layout's intervals of each visited query tile: they say how often a pair of tiles counts."""
        ends = jnp.concatenate([jnp.asarray(forward.starts), jnp.asarray(forward.stops)], 3)[:, :, :, None]
        self.add_stream("repeats", ends, _part_of_tile, smem((2, 1, ends.shape[4])))


def by_tile(array: Any, tile: int, count: int) -> Any:
    """Entries [B or 1, N or 1, length] as [B or 1, N or 1, tiles, 1, tile]: bools and ints as int32."""
    if not jnp.issubdtype(array.dtype, np.floating):
        array = array.astype(np.int32)
    array = jnp.pad(array, ((0, 0), (0, 0), (0, tile * count - array.shape[2])))
    return array.reshape(*array.shape[:2], count, 1, tile)


def _first_tiles(layout: BlockLayout) -> Any:
    """The first tile that each row visits, -1 for none: [B or 1, heads or 1, rows, 1]."""
    starts, stops = jnp.asarray(layout.starts), jnp.asarray(layout.stops)
    occupied = starts < stops
    place = jnp.argmax(occupied, axis=3, keepdims=True)
    first = jnp.take_along_axis(starts, place, axis=3)
    otherwise = np.int32(-1)
    if layout.common is not None and layout.common.shape[2]:
        common, count = jnp.asarray(layout.common)[:, :, :1], jnp.asarray(layout.common_count)[:, :, None]
        otherwise = jnp.where(count > 0, common, -1)[..., None]
    return jnp.where(occupied.any(3, keepdims=True), first, otherwise).astype(np.int32)


def _row_block(shape: tuple[int, ...], b: Any, h: Any, i: Any) -> tuple:
    return place_in(shape[0], b), place_in(shape[1], h), i, 0, 0


def _plane_block(shape: tuple[int, ...], b: Any, h: Any, i: Any) -> tuple:
    return place_in(shape[0], b), place_in(shape[1], h), 0, 0


def _part_of_tile(ref: Any, at: Visit) -> Any:
    return ref.at[place_in(ref.shape[0], at.b), place_in(ref.shape[1], at.h), at.j]


def _part_of_pairs(shape: tuple[int, int], row_first: bool, ref: Any, at: Visit) -> Any:
    mine, other = at.i, at.j
    first, second = (mine, other) if row_first else (other, mine)
    plane = place_in(ref.shape[0], at.b), place_in(ref.shape[1], at.h)
    return ref.at[*plane, tile_slice(first, shape[0]), tile_slice(second, shape[1])]
