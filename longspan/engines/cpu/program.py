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

from longspan.array_types import FAR
from longspan.engines.varying import vary, varying_axes
from longspan.layout import BlockLayout, plan_layout
from longspan.masks import And, Blocks, Dense, Empty, Full, Mask, Not, Or, PerHead
from longspan.masks.compare import Compare
from longspan.masks.sides import Side, Slots
from longspan.masks.terms import ARRAY, MEMBER, NUMBER, POSITION, SLOT, Term, is_static_number, no_less

FULL, EMPTY, WITHIN, BLOCKS, DENSE, DENSE_AT, BITS, PER_HEAD, AND, OR, NOT = range(11)
SOURCES = (POSITION, SLOT, ARRAY, NUMBER, MEMBER)  # as `enum Source` in native/problem.h
VALID = (">=0", "!=0", "all")
LOW, HIGH, SAME, ABOVE, BELOW = 1, 2, 4, 8, 16  # which ends there are, whether they are one term, and whether strict
ENDS = {"<=": LOW, "<": LOW + ABOVE, ">=": HIGH, ">": HIGH + BELOW, "==": LOW + HIGH + SAME}
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
        array = self._here(array, axes)
        for i, other in enumerate(self.operands):
            if other is array:
                return self.first + i
        self.operands.append(array)
        self.axes.append(axes)
        return self.first + len(self.operands) - 1

    def _here(self, array, axes):
        """An array of all rows and heads, of which only some are here, as these have it."""
        here = dict(b=(self.batch, self.layout.rows), n=(self.heads, self.layout.heads))
        for axis, (name, size) in enumerate(zip(axes, array.shape, strict=True)):
            count, numbers = here.get(name, (1, None))
            if numbers is not None and size not in (1, count):
                array = jnp.take(array, numbers, axis=axis)
        return array

    def number(self, value) -> list[int]:
        if isinstance(value, int | np.integer):
            return [LITERAL, max(-FAR, min(FAR, int(value)))]
        array = jnp.clip(jnp.asarray(value).astype(np.int32), -FAR, FAR).reshape(-1)
        return [OPERAND, self.add(array, "b")]


def encode(layout: BlockLayout, batch: int, heads: int, first: int) -> Program:
    """The program of a layout's mask."""
    program = Program(layout, batch, heads, first)
    _write(program, layout.mask.atoms())
    return program


def _write(out: Program, mask: Any) -> None:
    if type(mask) in _WRITERS:
        return _WRITERS[type(mask)](out, mask)
    out.words += [BITS, out.add(_bits(out, mask), "l", "n", "", "", "", "")]


def _compare(out: Program, mask: Compare) -> None:
    _within(out, ENDS[mask.relation], mask.kv, mask.q)


def _within(out: Program, ends: int, kv: Term, *ends_of: Term) -> None:
    out.words += [WITHIN, ends]
    for term in (kv, *ends_of):
        _term(out, term)


def _term(out: Program, term: Term) -> None:
    out.words += [SOURCES.index(term.of), VALID.index(term.valid)]
    if term.of == ARRAY:
        out.words.append(out.add(_entries(term), "b", *["n"] * (term.data.ndim - 2), ""))
    elif term.of == MEMBER:
        out.words.append(out.add(jnp.asarray(np.unique(np.asarray(term.data, np.int32))), ""))
    elif term.of == NUMBER:
        out.words += out.number(term.data)
    out.words += out.number(no_less(term.divide, 1))
    out.words += out.number(0 if term.modulo is None else no_less(term.modulo, 1))
    out.words += out.number(term.plus)


def _entries(term: Term):
    if isinstance(term.data, jax.Array) and is_static_number(term.plus, 0):
        return term.data  # as it is, so that it is passed once
    array = jnp.asarray(term.data)
    # The kernel adds in 32 bits: what lies beyond all positions is as good as the last of these.
    return array if array.dtype == bool or is_static_number(term.plus, 0) else jnp.clip(array, -FAR, FAR)


def _constant(word: int, out: Program, mask: Mask) -> None:
    out.words.append(word)


def _all_of(word: int, out: Program, mask: Mask) -> None:
    # The highest first, so that the kernel's stack grows with the logarithm of a mask's size, however it is nested.
    parts = _merged(mask.parts()) if word == AND else mask.parts()
    first, *others = sorted(parts, key=_height, reverse=True)
    _write(out, first)
    for part in others:
        _write(out, part)
        out.words.append(word)


@dataclass(frozen=True)
class _Both:
    """Two comparisons with one number of the key: the kernel has one word for them."""

    low: Compare
    high: Compare

    def parts(self):
        return ()


def _merged(parts) -> list[Any]:
    """The parts of an `&`, each lower end with an upper end of the same term of the key."""
    left, found = list(parts), []
    for part in parts:
        upper = next((other for other in left if _is_upper_end_of(part, other)), None)
        if upper is not None and any(part is other for other in left):
            left = [other for other in left if other is not part and other is not upper]
            found.append(_Both(part, upper))
    return [*found, *left]


def _is_upper_end_of(low: Any, high: Any) -> bool:
    if not (isinstance(low, Compare) and isinstance(high, Compare)):
        return False
    return "<" in low.relation and ">" in high.relation and _same(low.kv, high.kv)


def _same(a: Term, b: Term) -> bool:
    """Whether two terms are one; arrays are compared by identity."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("of", "data", "divide", "modulo", "plus", "valid")]
    return all(x is y or (isinstance(x, int | str | tuple) and x == y) for x, y in pairs)


def _both(out: Program, mask: _Both) -> None:
    _within(out, ENDS[mask.low.relation] + ENDS[mask.high.relation], mask.low.kv, mask.low.q, mask.high.q)


def _height(mask: Any) -> int:
    """How many truths the kernel keeps at once while it evaluates a mask."""
    if type(mask) not in _WRITERS:
        return 1
    heights = sorted(map(_height, mask.parts()), reverse=True)
    if isinstance(mask, And | Or):
        return max([heights[0], *(height + 1 for height in heights[1:])])
    return max(heights, default=1)


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
    And: partial(_all_of, AND),
    Or: partial(_all_of, OR),
    Not: _not,
    PerHead: _per_head,
    Compare: _compare,
    _Both: _both,
    Blocks: _blocks,
    Dense: _dense,
}


def knows(mask: Mask) -> bool:
    """Whether the kernel evaluates a mask by itself, without bit tiles."""
    return not unknown(mask)


def unknown(mask: Mask) -> tuple[Mask, ...]:
    """The rules in a mask that the kernel has no words for: they travel as bits."""
    mask = mask.atoms()
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
        return _widest(plan_layout(layout.mask, *sizes, xp=np))
    # What data allow lies within what the static parts of an intersection allow: within the hull of each, that is, for
    # intervals that would be too many are replaced by wider ones.
    mask = layout.mask.atoms()
    parts = [part for part in mask.parts() if _is_static(part)]
    if isinstance(mask, And) and parts and layout.common is None:
        first, last = zip(*(_hulls(plan_layout(part, *sizes, xp=np)) for part in parts), strict=True)
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
