"""A mask in the form of the native kernel: a short postfix program of int32 words, and the arrays that it refers to.

The words are those of `enum Code` in native/problem.h. The kernel does not support `Custom` and masks that users define
without comparisons: JAX evaluates these for the tiles that the layout visits, and passes one bit per pair.
"""

from collections.abc import Sequence
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
from longspan.masks.rules import atoms_of
from longspan.masks.sides import Side, Slots
from longspan.masks.terms import ARRAY, MEMBER, NUMBER, POSITION, SLOT, Term, is_static_number, no_less

FULL, EMPTY, WITHIN, BLOCKS, DENSE, DENSE_AT, BITS, PER_HEAD, AND, OR, NOT = range(11)
SOURCES = (POSITION, SLOT, ARRAY, NUMBER, MEMBER)  # in the order of `enum Source` in native/problem.h
VALID = (">=0", "!=0", "all")
# The flags of WITHIN: it has a lower end, an upper end, both are the same term; the lower or upper end is exclusive.
LOW, HIGH, SAME, ABOVE, BELOW = 1, 2, 4, 8, 16
ENDS = {"<=": LOW, "<": LOW + ABOVE, ">=": HIGH, ">": HIGH + BELOW, "==": LOW + HIGH + SAME}
LITERAL, OPERAND = 0, 1


@dataclass
class Program:
    """The words and operands of a mask program under construction.

    `axes` has the names of the axes of each operand: "b" and "n" for batch and head (of full size or of size 1), "l"
    for the batch of the layout's tables, "" for any other.
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
        """Adds an array, unless it is an operand already, and returns its number."""
        array = self._in_shard(array, axes)
        for i, other in enumerate(self.operands):
            if other is array:
                return self.first + i
        self.operands.append(array)
        self.axes.append(axes)
        return self.first + len(self.operands) - 1

    def _in_shard(self, array, axes):
        """An array over all rows and heads, cut to those of this shard."""
        in_shard = dict(b=(self.batch, self.layout.rows), n=(self.heads, self.layout.heads))
        for axis, (name, size) in enumerate(zip(axes, array.shape, strict=True)):
            count, numbers = in_shard.get(name, (1, None))
            if numbers is not None and size not in (1, count):
                array = jnp.take(array, numbers, axis=axis)
        return array

    def number(self, value) -> list[int]:
        """The words of a number: a literal, or the number of an operand."""
        if isinstance(value, int | np.integer):
            return [LITERAL, max(-FAR, min(FAR, int(value)))]
        array = jnp.clip(jnp.asarray(value).astype(np.int32), -FAR, FAR).reshape(-1)
        return [OPERAND, self.add(array, "b")]


def encode(layout: BlockLayout, batch: int, heads: int, first: int) -> Program:
    """The program of a layout's mask."""
    program = Program(layout, batch, heads, first)
    _write(program, atoms_of(layout.mask))
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
        return term.data  # unchanged, because `add` recognises the same array by identity
    array = jnp.asarray(term.data)
    if array.dtype == bool or is_static_number(term.plus, 0):
        return array
    # The kernel adds in 32 bits. Clipping changes no comparison, because all positions lie within ±FAR.
    return jnp.clip(array, -FAR, FAR)


def _constant(word: int, out: Program, mask: Mask) -> None:
    out.words.append(word)


def _combine(word: int, out: Program, mask: Mask) -> None:
    parts: Sequence[Any] = mask.parts()
    if word == AND:
        parts = _with_intervals(parts)
    # The part that needs the deepest stack comes first: then the kernel's stack grows with the logarithm of the size of
    # a mask, however it is nested.
    first, *others = sorted(parts, key=_stack_depth, reverse=True)
    _write(out, first)
    for part in others:
        _write(out, part)
        out.words.append(word)


@dataclass(frozen=True)
class _Interval:
    """Two comparisons of the same term of the key, a lower and an upper end. The kernel has one word for them."""

    low: Compare
    high: Compare

    def parts(self):
        return ()


def _with_intervals(parts) -> list[Any]:
    """The parts of an `&`, with each pair of a lower and an upper end of the same key term as one interval."""
    left, found = list(parts), []
    for part in parts:
        upper = next((other for other in left if _are_ends(part, other)), None)
        if upper is not None and any(part is other for other in left):
            left = [other for other in left if other is not part and other is not upper]
            found.append(_Interval(part, upper))
    return [*found, *left]


def _are_ends(low: Any, high: Any) -> bool:
    if not (isinstance(low, Compare) and isinstance(high, Compare)):
        return False
    return "<" in low.relation and ">" in high.relation and _same_term(low.kv, high.kv)


def _same_term(a: Term, b: Term) -> bool:
    """Whether two terms are equal; arrays are compared by identity."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("of", "data", "divide", "modulo", "plus", "valid")]
    return all(x is y or (isinstance(x, int | str | tuple) and x == y) for x, y in pairs)


def _interval(out: Program, mask: _Interval) -> None:
    _within(out, ENDS[mask.low.relation] + ENDS[mask.high.relation], mask.low.kv, mask.low.q, mask.high.q)


def _stack_depth(mask: Any) -> int:
    """The stack depth that the kernel needs to evaluate a mask."""
    if type(mask) not in _WRITERS:
        return 1
    depths = sorted(map(_stack_depth, mask.parts()), reverse=True)
    if isinstance(mask, And | Or):
        return max([depths[0], *(depth + 1 for depth in depths[1:])])
    return max(depths, default=1)


def _not(out: Program, mask: Not) -> None:
    _write(out, mask.mask)
    out.words.append(NOT)


def _per_head(out: Program, mask: PerHead) -> None:
    # The kernel picks a part by the head's number among all heads, so that sharded heads keep their parts.
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
    And: partial(_combine, AND),
    Or: partial(_combine, OR),
    Not: _not,
    PerHead: _per_head,
    Compare: _compare,
    _Interval: _interval,
    Blocks: _blocks,
    Dense: _dense,
}


def supports(mask: Mask) -> bool:
    """Whether the kernel evaluates the whole mask, without bits from JAX."""
    return not unsupported_rules(mask)


def unsupported_rules(mask: Mask) -> tuple[Mask, ...]:
    """The rules in a mask that the kernel cannot evaluate: JAX passes one bit per pair for each of them."""
    return _unsupported_atoms(atoms_of(mask))


def _unsupported_atoms(atoms: Mask) -> tuple[Mask, ...]:
    if type(atoms) not in _WRITERS:
        return (atoms,)
    return tuple(rule for part in atoms.parts() for rule in _unsupported_atoms(part))


def _bits(out: Program, mask: Mask):
    """One bit for each pair of every visited tile: uint8 [B or 1, N or 1, q tiles, visits, q_tile, kv_tile / 8]."""
    layout = out.layout
    q, kv = layout.sides(batch=out.batch, heads=out.heads)
    planes, rows = layout.starts.shape[:2], layout.q_tiles
    width = max_visits(layout)

    def row_bits(index):
        b, n, i = jnp.unravel_index(index, (*planes, rows))
        b, n, i = b.astype(np.int32), n.astype(np.int32), i.astype(np.int32)
        at = dict(batch=b.reshape(1, 1, 1, 1), head=n.reshape(1, 1, 1, 1))
        evaluate = _bits_of_row if mask.unbounded() else _bits_by_tile
        return evaluate(layout, mask, q.at(**at), kv.at(**at), i, _visited_tiles(layout, b, n, i, width))

    packed = jax.lax.map(row_bits, jnp.arange(planes[0] * planes[1] * rows))
    return packed.reshape(*planes, rows, *packed.shape[1:])


def _bits_of_row(layout: BlockLayout, mask: Mask, q: Side, kv: Side, i, tiles):
    """The bits [tiles, q_tile, kv_tile / 8] of all tiles of a row, evaluated at once."""
    index = tiles[:, None] * layout.kv_tile + jnp.arange(layout.kv_tile, dtype=np.int32)[None]
    q_slots, kv_slots = q.slots(i * layout.q_tile, layout.q_tile), Slots(kv, index.reshape(1, 1, 1, -1))
    allowed = jnp.broadcast_to(mask.allowed(q_slots, kv_slots), (1, 1, layout.q_tile, index.size))
    allowed = allowed.reshape(layout.q_tile, tiles.size, layout.kv_tile).swapaxes(0, 1)
    return jnp.packbits(allowed, axis=-1, bitorder="little")


def _bits_by_tile(layout: BlockLayout, mask: Mask, q: Side, kv: Side, i, tiles):
    """The same bits for a rule with `classify`: its pairs are evaluated only in PARTIAL tiles."""
    size = layout.q_tile
    shape, axes = (size, -(-layout.kv_tile // 8)), varying_axes(layout)

    def bits(tile):
        start = tile * layout.kv_tile

        def pairs():
            allowed = mask.allowed(q.slots(i * size, size), kv.slots(start, layout.kv_tile))
            allowed = jnp.broadcast_to(allowed, (1, 1, size, layout.kv_tile))[0, 0]
            return jnp.packbits(allowed, axis=-1, bitorder="little")

        some, every = mask.classify(q.run(i * size, size), kv.run(start, layout.kv_tile))
        kind = jnp.where(jnp.all(every), 2, jnp.where(jnp.any(some), 1, 0))
        branches = (lambda: jnp.zeros(shape, np.uint8)), pairs, (lambda: jnp.full(shape, 255, np.uint8))
        return jax.lax.switch(kind, [lambda branch=branch: vary(branch(), axes) for branch in branches])

    return jax.lax.map(bits, tiles)


def _visited_tiles(layout: BlockLayout, b, n, i, width: int):
    """The tiles that one row visits, in the kernel's order, as `width` entries. The kernel ignores the unused ones.

    First come the tiles of all intervals, one interval after the other: entry e lies in the first interval whose
    cumulative end exceeds e. Then come the common tiles that lie in none of the row's intervals.
    """
    starts, stops = layout.starts[b, n, i], layout.stops[b, n, i]
    widths = jnp.maximum(stops - starts, 0)
    ends = jnp.cumsum(widths, dtype=np.int32)
    entry = jnp.arange(width, dtype=np.int32)
    if starts.size:
        interval = jnp.clip(jnp.searchsorted(ends, entry, side="right"), 0, starts.size - 1)
        tiles = starts[interval] + entry - (ends - widths)[interval]
        total = ends[-1]
    else:
        tiles, total = jnp.zeros(width, np.int32), np.int32(0)
    if layout.common is None:
        return tiles
    listed, count = layout.common[b, n], layout.common_count[b, n]
    inside = jnp.any((starts[:, None] <= listed[None]) & (listed[None] < stops[:, None]), axis=0)
    unvisited = ~inside & (jnp.arange(listed.size, dtype=np.int32) < count)
    listed = listed[jnp.argsort(~unvisited, stable=True)]
    return jnp.where(entry < total, tiles, listed[jnp.clip(entry - total, 0, listed.size - 1)]).astype(np.int32)


def max_visits(layout: BlockLayout) -> int:
    """The maximum number of tiles that a row visits, or an upper bound if it depends on data. The kernel checks it."""
    if isinstance(layout.starts, np.ndarray):
        return _max_row_width(layout)
    if layout.repeats:
        return layout.kv_tiles * max(1, layout.starts.shape[3])
    if layout.q_positions is not None or layout.kv_positions is not None:
        return layout.kv_tiles
    sizes = layout.q_len, layout.kv_len, layout.q_tile, layout.kv_tile
    if _is_static(layout.mask):
        return _max_row_width(plan_layout(layout.mask, *sizes, xp=np))
    # An intersection allows no more than any of its static parts. Only the hulls of the parts are compared, because a
    # layout replaces intervals that are too many by wider ones.
    mask = atoms_of(layout.mask)
    parts = [part for part in mask.parts() if _is_static(part)]
    if isinstance(mask, And) and parts and layout.common is None:
        hulls = [_hulls(plan_layout(part, *sizes, xp=np)) for part in parts]
        first = reduce(np.maximum, [starts for starts, _ in hulls])
        stop = reduce(np.minimum, [stops for _, stops in hulls])
        return max(1, int((stop - first).max(initial=0)))
    return layout.kv_tiles


def _is_static(mask: Mask) -> bool:
    try:
        hash(mask)
    except TypeError:  # it holds arrays
        return False
    return True


def _hulls(layout: BlockLayout) -> tuple[np.ndarray, np.ndarray]:
    """The first tile that each row of a NumPy layout visits, and the one after the last."""
    empty = layout.starts >= layout.stops
    first = np.where(empty, layout.kv_tiles, layout.starts).min(axis=3, initial=layout.kv_tiles)
    return first, np.where(empty, 0, layout.stops).max(axis=3, initial=0)


def _max_row_width(layout: BlockLayout) -> int:
    """The maximum number of tiles that a row of a NumPy layout visits."""
    widths = np.maximum(layout.stops - layout.starts, 0).sum(axis=3, initial=0)
    width = int(widths.max(initial=0))
    if layout.common_count is not None:
        width += int(np.max(np.asarray(layout.common_count), initial=0))
    if not layout.repeats:
        width = min(width, layout.kv_tiles)
    return max(1, width)
