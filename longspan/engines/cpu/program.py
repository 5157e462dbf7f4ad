"""A mask as the native kernel reads it: a short postfix program of int32 words, and the arrays that it names.

The words are those of `enum Code` in native/problem.h. Rules the kernel does not know (`Custom`, and masks that users
define) are evaluated here for the tiles that the layout visits, and travel as one bit per pair.
"""

from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan._types import FAR
from longspan.engines._varying import vary, varying_axes
from longspan.layout import BlockLayout, plan
from longspan.masks import (
    And,
    Between,
    BlockCausal,
    Blocks,
    Chunk,
    Dense,
    Empty,
    FirstOfSegment,
    Full,
    Global,
    KvLengths,
    Mask,
    Not,
    Or,
    PerHead,
    Prefix,
    QLengths,
    Segments,
    TokenTypes,
    Window,
)
from longspan.masks.by_position import no_less, reach
from longspan.masks.by_slot import KvFlags
from longspan.masks.sides import Side, Slots

(FULL, EMPTY, BAND, STRIDE, CHUNK, PREFIX, KV_LENGTH, IDS, Q_FLAGS, KV_FLAGS, Q_SET, KV_SET, BLOCKS, DENSE, BITS) = (
    range(15)
)
PER_HEAD, AND, OR, NOT = range(15, 19)
BLOCK_CAUSAL, Q_LENGTH, BETWEEN, DENSE_AT = range(19, 23)
LITERAL, OPERAND = 0, 1


@dataclass
class Program:
    """The words and operands of a mask, while they are written.

    `axes` names the axes of each operand: "b" and "n" are batch and head (of full size or size 1), "l" is the batch of
    the layout's tables, "" any other.
    """

    layout: BlockLayout
    batch: int
    heads: int
    first: int  # the number of the first operand
    words: list[int] = field(default_factory=list)
    operands: list[Any] = field(default_factory=list)
    axes: list[tuple[str, ...]] = field(default_factory=list)
    needs_head_ids: bool = False

    def add(self, array, *axes: str) -> int:
        """Names an array; the same array is passed once."""
        for i, other in enumerate(self.operands):
            if other is array:
                return self.first + i
        self.operands.append(array)
        self.axes.append(axes)
        return self.first + len(self.operands) - 1

    def number(self, value) -> list[int]:
        if isinstance(value, int | np.integer):
            return [LITERAL, max(-FAR, min(FAR, int(value)))]
        array = jnp.clip(jnp.asarray(value).astype(np.int32), -FAR, FAR).reshape(-1)
        return [OPERAND, self.add(array, "b")]


def encode(layout: BlockLayout, batch: int, heads: int, first: int) -> Program:
    """The program of a layout's mask."""
    program = Program(layout, batch, heads, first)
    _write(program, layout.mask)
    return program


def _write(out: Program, mask: Mask) -> None:
    band = mask.band()
    if band is not None:
        return _band(out, *band)
    if type(mask) in _WRITERS:
        return _WRITERS[type(mask)](out, mask)
    out.words += [BITS, out.add(_bits(out, mask), "l", "n", "", "", "", "")]


def _band(out: Program, low, high) -> None:
    sides = (low is not None) + 2 * (high is not None)
    out.words += [BAND, sides, *out.number(0 if low is None else low), *out.number(0 if high is None else high)]


def _dilated_window(out: Program, mask: Window) -> None:
    left, right = (reach(number, mask.dilation) for number in (mask.left, mask.right))
    _band(out, -left, right)
    out.words += [STRIDE, *out.number(no_less(mask.dilation, 1)), AND]


def _constant(word: int, out: Program, mask: Mask) -> None:
    out.words.append(word)


def _number(word: int, name: str, least: int, out: Program, mask: Mask) -> None:
    out.words += [word, *out.number(no_less(getattr(mask, name), least))]


def _all_of(word: int, out: Program, mask: Mask) -> None:
    # The highest first, so that the kernel's stack grows with the logarithm of a mask's size, however it is nested.
    first, *others = sorted(mask.parts(), key=_height, reverse=True)
    _write(out, first)
    for part in others:
        _write(out, part)
        out.words.append(word)


def _height(mask: Mask) -> int:
    """How many truths the kernel keeps at once while it evaluates a mask."""
    if mask.band() is not None or type(mask) not in _WRITERS:
        return 1
    heights = sorted(map(_height, mask.parts()), reverse=True)
    if isinstance(mask, And | Or):
        return max([heights[0], *(height + 1 for height in heights[1:])])
    return max(heights, default=2 if isinstance(mask, Window | Global) else 1)


def _not(out: Program, mask: Not) -> None:
    _write(out, mask.mask)
    out.words.append(NOT)


def _per_head(out: Program, mask: PerHead) -> None:
    # The kernel picks a part by the head's global number, so that sharded heads keep theirs.
    out.needs_head_ids = True
    before, parts = out.words, []
    for part in mask.parts():
        out.words = []
        _write(out, part)
        parts.append(out.words)
    out.words = [*before, PER_HEAD, len(parts), *map(len, parts), *(word for part in parts for word in part)]


def _segments(out: Program, mask: Segments) -> None:
    _ids(out, 0, mask.q_ids, mask.kv_ids)


def _first_of_segment(out: Program, mask: FirstOfSegment) -> None:
    _ids(out, 0, mask.q_ids, mask.first_ids)


def _token_types(out: Program, mask: TokenTypes) -> None:
    _ids(out, 2 if mask.zero == "none" else 1, mask.q_types, mask.kv_types)


def _ids(out: Program, valid: int, q_ids, kv_ids) -> None:
    q_ids = jnp.asarray(q_ids).astype(np.int32)
    kv_ids = q_ids if kv_ids is None else jnp.asarray(kv_ids).astype(np.int32)
    out.words += [IDS, valid, out.add(q_ids, "b", ""), out.add(kv_ids, "b", "")]


def _between(out: Program, mask: Between) -> None:
    starts, stops = jnp.broadcast_arrays(jnp.asarray(mask.starts), jnp.asarray(mask.stops))
    out.words += [BETWEEN, out.add(starts, "b", "n", ""), out.add(stops, "b", "n", "")]


def _kv_flags(out: Program, mask: KvFlags) -> None:
    out.words += [KV_FLAGS, out.add(jnp.asarray(mask.flags), "b", "")]


def _global(out: Program, mask: Global) -> None:
    parts = []
    for wanted, flags, by_flag, by_set in (
        (mask.rows, mask.q_flags, Q_FLAGS, Q_SET),
        (mask.columns, mask.kv_flags, KV_FLAGS, KV_SET),
    ):
        if wanted and mask.indices:
            parts.append([by_set, out.add(jnp.asarray(np.unique(np.asarray(mask.indices, np.int32))), "")])
        if wanted and flags is not None:
            parts.append([by_flag, out.add(jnp.asarray(flags), "b", "")])
    out.words += parts[0] if parts else [EMPTY]
    for part in parts[1:]:
        out.words += [*part, OR]


def _blocks(out: Program, mask: Blocks) -> None:
    table = jnp.asarray(mask.table).astype(np.int32)
    table = table.reshape((1,) * (4 - table.ndim) + table.shape)
    out.words += [BLOCKS, out.add(table, "b", "n", "", ""), mask.block_size]


def _dense(out: Program, mask: Dense) -> None:
    array = jnp.asarray(mask.array)
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    operand, offsets = out.add(array, "b", "n", "", ""), (mask.q_offset, mask.kv_offset)
    if all(offset is None for offset in offsets):
        out.words += [DENSE, operand]
        return
    sides = sum(side for side, offset in zip((1, 2), offsets, strict=True) if offset is not None)
    out.words += [DENSE_AT, sides, operand]
    for offset in offsets:
        out.words += out.number(0 if offset is None else offset)


_WRITERS = {
    Full: partial(_constant, FULL),
    Empty: partial(_constant, EMPTY),
    Window: _dilated_window,
    Chunk: partial(_number, CHUNK, "size", 1),
    BlockCausal: partial(_number, BLOCK_CAUSAL, "size", 1),
    Prefix: partial(_number, PREFIX, "length", 0),
    QLengths: partial(_number, Q_LENGTH, "lengths", -FAR),
    KvLengths: partial(_number, KV_LENGTH, "lengths", -FAR),
    And: partial(_all_of, AND),
    Or: partial(_all_of, OR),
    Not: _not,
    PerHead: _per_head,
    Between: _between,
    Segments: _segments,
    FirstOfSegment: _first_of_segment,
    TokenTypes: _token_types,
    KvFlags: _kv_flags,
    Global: _global,
    Blocks: _blocks,
    Dense: _dense,
}


def knows(mask: Mask) -> bool:
    """Whether the kernel evaluates a mask by itself, without bit tiles."""
    return not unknown(mask)


def unknown(mask: Mask) -> tuple[Mask, ...]:
    """The rules in a mask that the kernel has no words for: they travel as bits."""
    if mask.band() is not None:
        return ()
    if type(mask) not in _WRITERS:
        return (mask,)
    return tuple(rule for part in mask.parts() for rule in unknown(part))


def _bits(out: Program, mask: Mask):
    """One bit for each pair of every visited tile: uint8 [B or 1, N or 1, q tiles, visits, q_tile, kv_tile / 8]."""
    layout = out.layout
    q, kv = layout.sides(batch=out.batch, heads=out.heads)
    planes, rows = layout.starts.shape[:2], layout.q_tiles
    most = most_visits(layout)

    def row(index):
        b, n, i = (a.astype(np.int32) for a in jnp.unravel_index(index, (*planes, rows)))
        at = dict(batch=b.reshape(1, 1, 1, 1), head=n.reshape(1, 1, 1, 1))
        look = _read_row if mask.unbounded() else _read_by_tile
        return look(layout, mask, q.at(**at), kv.at(**at), i, _visited(layout, b, n, i, most))

    packed = jax.lax.map(row, jnp.arange(planes[0] * planes[1] * rows))
    return packed.reshape(*planes, rows, *packed.shape[1:])


def _read_row(layout: BlockLayout, mask: Mask, q: Side, kv: Side, i, tiles):
    """The bits of a row's tiles, [tiles, q_tile, kv_tile / 8], all read at once."""
    index = tiles[:, None] * layout.kv_tile + jnp.arange(layout.kv_tile, dtype=np.int32)[None]
    q_slots, kv_slots = q.slots(i * layout.q_tile, layout.q_tile), Slots(kv, index.reshape(1, 1, 1, -1))
    truth = jnp.broadcast_to(mask.allowed(q_slots, kv_slots), (1, 1, layout.q_tile, index.size))
    truth = truth.reshape(layout.q_tile, tiles.size, layout.kv_tile).swapaxes(0, 1)
    return jnp.packbits(truth, axis=-1, bitorder="little")


def _read_by_tile(layout: BlockLayout, mask: Mask, q: Side, kv: Side, i, tiles):
    """The same of a rule that bounds tiles: pairs of those that it knows to be EMPTY or FULL are not looked at."""
    size = layout.q_tile
    shape, axes = (size, -(-layout.kv_tile // 8)), varying_axes(layout)

    def bits(tile):
        start = tile * layout.kv_tile

        def pairs():
            truth = mask.allowed(q.slots(i * size, size), kv.slots(start, layout.kv_tile))
            truth = jnp.broadcast_to(truth, (1, 1, size, layout.kv_tile))[0, 0]
            return jnp.packbits(truth, axis=-1, bitorder="little")

        some, every = mask.classify(q.run(i * size, size), kv.run(start, layout.kv_tile))
        kind = jnp.where(jnp.all(every), 2, jnp.where(jnp.any(some), 1, 0))
        known = (lambda: jnp.zeros(shape, np.uint8)), pairs, (lambda: jnp.full(shape, 255, np.uint8))
        return jax.lax.switch(kind, [lambda look=look: vary(look(), axes) for look in known])

    return jax.lax.map(bits, tiles)


def _visited(layout: BlockLayout, b, n, i, most: int):
    """The tiles that one row visits, in the kernel's order; what follows the last one is not read."""
    starts, stops = layout.starts[b, n, i], layout.stops[b, n, i]
    widths = jnp.maximum(stops - starts, 0)
    ends = jnp.cumsum(widths, dtype=np.int32)
    entry = jnp.arange(most, dtype=np.int32)
    which = jnp.searchsorted(ends, entry, side="right")
    which = jnp.clip(which, 0, max(starts.size - 1, 0))
    tiles = starts[which] + entry - (ends - widths)[which] if starts.size else jnp.zeros(most, np.int32)
    if layout.common is None:
        return tiles
    listed, count = layout.common[b, n], layout.common_count[b, n]
    inside = jnp.any((starts[:, None] <= listed[None]) & (listed[None] < stops[:, None]), axis=0)
    free = ~inside & (jnp.arange(listed.size, dtype=np.int32) < count)
    listed = listed[jnp.argsort(~free, stable=True)]
    total = ends[-1] if starts.size else np.int32(0)
    return jnp.where(entry < total, tiles, listed[jnp.clip(entry - total, 0, listed.size - 1)]).astype(np.int32)


def most_visits(layout: BlockLayout) -> int:
    """The most tiles that a row of a layout visits, or may visit where that depends on data. The kernel checks it."""
    if isinstance(layout.starts, np.ndarray):
        return _widest(layout)
    if layout.repeats:
        return layout.kv_tiles * max(1, layout.starts.shape[3])
    if layout.q_positions is not None or layout.kv_positions is not None:
        return layout.kv_tiles
    sizes = layout.q_len, layout.kv_len, layout.q_tile, layout.kv_tile
    if _is_static(layout.mask):
        return _widest(plan(layout.mask, *sizes, xp=np))
    # What data allow lies within what the static parts of an intersection allow: within the hull of each, that is, for
    # intervals that would be too many are replaced by wider ones.
    parts = [part for part in layout.mask.parts() if _is_static(part)]
    if isinstance(layout.mask, And) and parts and layout.common is None:
        first, last = zip(*(_hulls(plan(part, *sizes, xp=np)) for part in parts), strict=True)
        return max(1, int((reduce(np.minimum, last) - reduce(np.maximum, first)).max(initial=0)))
    return layout.kv_tiles


def _is_static(mask: Mask) -> bool:
    try:
        hash(mask)
    except TypeError:  # it holds arrays
        return False
    return True


def _hulls(layout: BlockLayout) -> tuple[np.ndarray, np.ndarray]:
    """The first tile that each row of a concrete layout visits, and the one after the last."""
    none = layout.starts >= layout.stops
    first = np.where(none, layout.kv_tiles, layout.starts).min(axis=3, initial=layout.kv_tiles)
    return first, np.where(none, 0, layout.stops).max(axis=3, initial=0)


def _widest(layout: BlockLayout) -> int:
    """The most tiles that a row of a concrete layout visits."""
    widths = np.maximum(layout.stops - layout.starts, 0).sum(axis=3, initial=0)
    common = 0 if layout.common_count is None else int(np.max(np.asarray(layout.common_count), initial=0))
    return max(1, min(int(widths.max(initial=0)) + common, layout.kv_tiles if not layout.repeats else 1 << 30))
