"""`BlockLayout`: which key tiles each query tile visits. Planned once per step, used by every layer and engine.

A layout holds, for each query tile, a static number of half-open intervals of key tiles, and once for all rows a list
of further key tiles that every query tile visits (the columns of global tokens). Both grow linearly with the length;
the table of all tile pairs never exists. Whether a visited tile is EMPTY, PARTIAL or FULL is asked of the mask when it
is visited.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from longspan.array_types import Namespace, Positions, no_type_check
from longspan.axes import entries, explicit_mesh, on_auto_axes
from longspan.checks import check_sides, check_tiles
from longspan.constants import on_host, unfolded
from longspan.masks import Mask
from longspan.masks.pytree import axes_of, short
from longspan.masks.rules import atoms_of
from longspan.masks.sides import Side, Tiles, as_positions, two_sides
from longspan.masks.spans import Spans, running_max
from longspan.pairs import count_by_query
from longspan.tile_kinds import MOST_READ, NONE, Visits, count_and_read, count_kinds
from longspan.tile_kinds import Counts as Counts

EMPTY, PARTIAL, FULL = 0, 1, 2
CHUNK = 1 << 20  # visits that are listed together
RECTANGLE = 1 << 18  # tiles that are looked at together where more are visited: what is said of them fits in a cache
SPARSE = 8  # how many times as many tiles a rectangle may have as are visited


def _static(**kwargs):
    return field(metadata=dict(static=True), **kwargs)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockLayout:
    """The key tiles that each query tile visits, with the mask that rules inside them.

    `starts`, `stops` [B or 1, N or 1, query tiles, P] are half-open intervals of key tiles; within a row they are
    disjoint, unless the layout lists a tile twice on purpose: it is then visited, and counts, twice. `common`
    [B or 1, N or 1, key tiles] lists `common_count` further key tiles for every row that does not have them already.
    In a transposed layout rows are key tiles and the intervals hold query tiles.

    Example:
        >>> from longspan import Causal
        >>> layout = Causal().layout(256, 256, q_tile=128, kv_tile=64)
        >>> layout.stops[0, 0, :, 0].tolist()
        [2, 4]
    """

    array_axes: ClassVar = {
        **dict(starts="BNT.", stops="BNT.", common="BNS", common_count="BN"),
        **dict(q_positions="BT", kv_positions="BS", rows="B", heads="N"),
    }

    mask: Mask
    starts: Any  # not a shape: JAX rebuilds the object with placeholders
    stops: Any
    common: Any
    common_count: Any
    q_positions: Any
    kv_positions: Any
    forward: "BlockLayout | None"  # what a transposed layout was made from: it knows how often a pair counts
    q_len: int = _static()
    kv_len: int = _static()
    q_tile: int = _static()
    kv_tile: int = _static()
    repeats: bool = _static(default=False)  # some tiles are listed more than once, and count as often
    rows: Any = None  # int [B], [N]: the numbers of batch rows and heads, as rules and biases read them; None: from 0
    heads: Any = None

    @property
    def q_tiles(self) -> int:
        return -(-self.q_len // self.q_tile)

    @property
    def kv_tiles(self) -> int:
        return -(-self.kv_len // self.kv_tile)

    @property
    def is_transposed(self) -> bool:
        return self.forward is not None

    def transpose(self) -> "BlockLayout":
        """The query tiles that visit each key tile, for passes that go over keys.

        Its intervals may also hold query tiles that do not visit the key tile: `entries` leaves those out.
        """
        if self.forward is not None:
            return self.forward
        xp = _namespace(self)
        known = on_host(self) if xp is jnp else None
        if known is not None:
            return replace(jax.device_put(known.transpose()), mask=self.mask, forward=self)
        here = self if xp is np else unfolded(self)
        q, kv = here.sides(xp=xp)
        low, high, common = atoms_of(here.mask).q_spans(kv.tiles(self.kv_tile), q.tiles(self.q_tile))
        common = None if common is None else common.swapaxes(2, 3)
        spans = Spans(low.swapaxes(2, 3), high.swapaxes(2, 3), common)
        rows = _rows(xp, spans, self.kv_tiles, self.q_tile, self.q_tiles)
        return replace(self, forward=self, **rows._asdict())

    def lowered(self) -> "BlockLayout":
        """The same tiles, with the mask in comparisons: for those who ask it often."""
        return replace(self, mask=atoms_of(self.mask))

    def sides(self, *, batch: int | None = None, heads: int | None = None, xp: Namespace = jnp) -> tuple[Side, Side]:
        """Both sides as rules see them."""
        positions = dict(q_positions=self.q_positions, kv_positions=self.kv_positions)
        numbers = None if self.rows is None else (self.rows, self.heads)
        sizes = dict(batch=batch, heads=heads)
        return sides_of(self.mask, self.q_len, self.kv_len, **positions, numbers=numbers, **sizes, xp=xp)

    def visits(self) -> int:
        """How many tiles are visited, over the batch rows and heads that the layout tells apart (host only)."""
        return sum(len(tiles) for b, n in self.planes() for _, tiles in self.entries(b, n))

    def planes(self) -> Iterator[tuple[int, int]]:
        """(batch row, head) for each that the layout tells apart."""
        tables = [a for a in (self.starts, self.common) if a is not None]
        yield from np.ndindex(max(a.shape[0] for a in tables), max(a.shape[1] for a in tables))

    def entries(self, batch: int, head: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All visits of a plane as pairs (rows, tiles), a bounded number at a time (host only)."""
        plane = _Plane.of(self, batch, head)
        widths = plane.widths()
        last = 0
        while last < len(widths):
            first, reach = last, np.cumsum(widths[last : last + CHUNK])
            last = first + max(1, int(np.searchsorted(reach, CHUNK, side="right")))
            rows, tiles = plane.rows(first, last).pairs()
            rows = rows + first
            if self.forward is not None:
                times = self.forward._times(batch, head, tiles, rows)
                rows, tiles = rows.repeat(times), tiles.repeat(times)
            yield rows, tiles

    def looks(self, batch: int, head: int) -> Iterator[Visits]:
        """All visits of a plane as they are looked at fastest: as lists, or as rectangles if there are many."""
        assert self.forward is None, "a transposed layout has query tiles for columns"
        plane = _Plane.of(self, batch, head)
        widths = plane.widths()
        if self.repeats or widths.sum() <= CHUNK:
            yield from (Visits.listed(*pairs) for pairs in self.entries(batch, head))
            return
        step = max(1, RECTANGLE // self.kv_tiles)
        for first in range(0, self.q_tiles, step):
            some = plane.rows(first, first + step)
            rectangles = some.rectangles(first, self.kv_tiles)
            if sum(math.prod(r.shape) for r in rectangles) <= SPARSE * widths[first : first + step].sum():
                yield from rectangles
            else:
                rows, tiles = some.pairs()
                yield Visits.listed(rows + first, tiles)

    def _times(self, batch: int, head: int, rows: np.ndarray, tiles: np.ndarray) -> np.ndarray:
        """How often each pair (row, tile) is visited."""
        starts, stops, common = _Plane.of(self, batch, head)
        times = ((starts[rows] <= tiles[:, None]) & (tiles[:, None] < stops[rows])).sum(1)
        return np.where(times == 0, np.isin(tiles, common), times)

    def __repr__(self) -> str:
        kind = "transposed " if self.is_transposed else ""
        return (
            f"<{kind}BlockLayout of {self.mask!r}: {self.q_len}x{self.kv_len} in tiles of "
            f"{self.q_tile}x{self.kv_tile}, intervals {short(self.starts)}>"
        )

    def _repr_html_(self) -> str | None:
        from longspan.render.notebook import shown_html

        return shown_html(self)


class Rows(NamedTuple):
    """The arrays of a layout that name tiles."""

    starts: Any
    stops: Any
    common: Any
    common_count: Any


@no_type_check
def plan_layout(
    mask: Mask,
    q_len: int,
    kv_len: int,
    q_tile: int,
    kv_tile: int,
    *,
    q_positions: Positions | None = None,
    kv_positions: Positions | None = None,
    xp: Namespace | None = None,
) -> BlockLayout:
    """The layout of a mask, with NumPy's arrays if all that it reads is static, and with JAX's otherwise."""
    check_sides(mask, q_len, kv_len, q_positions, kv_positions)
    return plan_checked_layout(
        mask, q_len, kv_len, q_tile, kv_tile, q_positions=q_positions, kv_positions=kv_positions, xp=xp
    )


def plan_checked_layout(
    mask: Mask, q_len, kv_len, q_tile, kv_tile, *, q_positions=None, kv_positions=None, rows=None, heads=None, xp=None
) -> BlockLayout:
    """`plan_layout` of a mask and positions that were checked.

    `rows` [B] and `heads` [N] are the numbers of these rows and heads, if they are some of a call's: both or neither.
    """
    check_tiles(q_tile, kv_tile)
    if xp is None:
        xp = _namespace((mask, q_positions, kv_positions))
        data: Any = dict(mask=mask, q_positions=q_positions, kv_positions=kv_positions, rows=rows, heads=heads)
        known = on_host(data) if xp is jnp else None
        if known is not None:
            layout = plan_checked_layout(q_len=q_len, kv_len=kv_len, q_tile=q_tile, kv_tile=kv_tile, **known, xp=np)
            return replace(jax.device_put(layout), mask=mask)

    def tables_of(*given):
        mask, q_at, kv_at, *numbers = given if xp is np else unfolded(given)
        known = dict(q_positions=q_at, kv_positions=kv_at, numbers=None if rows is None else tuple(numbers))
        sides = sides_of(mask, q_len, kv_len, **known, xp=xp)
        spans = atoms_of(mask).kv_spans(
            *(side.tiles(size) for side, size in zip(sides, (q_tile, kv_tile), strict=True))
        )
        return _rows(xp, spans, -(-q_len // q_tile), kv_tile, -(-kv_len // kv_tile))

    tables = _on_auto_axes(tables_of, mask, q_positions, kv_positions, rows, heads)
    return BlockLayout(
        mask,
        **tables._asdict(),
        q_positions=as_positions(q_positions, xp),
        kv_positions=as_positions(kv_positions, xp),
        forward=None,
        q_len=q_len,
        kv_len=kv_len,
        q_tile=q_tile,
        kv_tile=kv_tile,
        rows=rows,
        heads=heads,
    )


def sides_of(
    mask: Mask, q_len, kv_len, *, q_positions=None, kv_positions=None, numbers=None, batch=None, heads=None,
    xp: Namespace = jnp,
) -> tuple[Side, Side]:  # fmt: skip
    """Both sides as a mask sees them, of all batch rows and heads that it and the positions tell apart, or of so many.

    `numbers` are those of rows [B] and of heads [N], if they are some of a call's.
    """
    told = mask.batch, mask.heads
    if numbers is not None:
        told = tuple(min(count, len(here)) for count, here in zip(told, numbers, strict=True))
    rows = [p.shape[0] for p in (q_positions, kv_positions) if p is not None and p.ndim == 2]
    batch = max([told[0], *rows]) if batch is None else batch
    heads = told[1] if heads is None else heads
    positions = dict(q_positions=q_positions, kv_positions=kv_positions)
    return two_sides(q_len, kv_len, batch=batch, heads=heads, **positions, numbers=numbers, xp=xp)


def _on_auto_axes(function, mask: Mask, *arrays) -> Rows:
    """function(mask, *arrays), where XLA places what is in between, also if the mesh of an array has explicit axes."""
    if explicit_mesh(mask, arrays) is None:
        return function(mask, *arrays)
    letters = ("BT", "BS", "B", "N")
    axes = [*axes_of(mask), *(names for x, of in zip(arrays, letters, strict=True) for names in axes_of(x, of))]

    def specs(operands, tables: Rows) -> Rows:
        where: dict[str, Any] = {}
        for x, names in zip(jax.tree.leaves(operands), axes, strict=True):
            where |= {name: entry for name, entry in zip(names, entries(x), strict=True) if name in "BN" and entry}
        found, tree = jax.tree.flatten(tables)
        parts = [
            zip(names, x.shape, strict=True) for x, names in zip(found, ("BN..", "BN..", "BN.", "BN"), strict=False)
        ]
        return tree.unflatten([P(*(where.get(name) if n > 1 else None for name, n in part)) for part in parts])

    return on_auto_axes(function, specs, (), (mask, *arrays))


def count(layout: BlockLayout) -> Counts:
    """Counts a concrete layout's visits by kind, and its allowed pairs, without a T×S array."""
    total, mask = NONE, atoms_of(layout.mask)
    for plane in planes_of(layout):
        pairs = None if layout.repeats else count_by_query(mask, plane.q.side, plane.kv.side)
        looks = layout.looks(plane.batch, plane.head)
        if pairs is not None:
            kinds = count_kinds(mask, plane.q, plane.kv, looks)._replace(pairs=pairs)
        else:
            shares = dict(visits=plane.visits * plane.planes, most=MOST_READ // plane.planes)
            kinds = count_and_read(mask, plane.q, plane.kv, looks, **shares)
        total = total.plus(kinds)
    return total


def count_tiles(layout: BlockLayout, most: int) -> Counts | None:
    """Counts a concrete layout's visits by kind, and no pairs; None if it has more than `most` visits."""
    planes, mask = list(planes_of(layout)), atoms_of(layout.mask)
    if sum(plane.visits for plane in planes) > most:
        return None
    total = NONE
    for plane in planes:
        total = total.plus(count_kinds(mask, plane.q, plane.kv, layout.looks(plane.batch, plane.head)))
    return total


class PlaneOfTiles(NamedTuple):
    """The tiles of one batch row and head, as rules see them in NumPy."""

    batch: int
    head: int
    q: Tiles
    kv: Tiles
    visits: int  # at most
    planes: int  # how many there are


def planes_of(layout: BlockLayout) -> Iterator[PlaneOfTiles]:
    """The tiles of a concrete layout, for each batch row and head that the layout or its mask tells apart."""
    q, kv = (side.remembering() for side in layout.sides(xp=np))
    planes = [max(*ns) for ns in zip((q.batch.size, q.head.size), np.add(list(layout.planes())[-1], 1), strict=True)]
    for batch, head in np.ndindex(*planes):
        one = [np.full((1, 1, 1, 1), i, np.int32) for i in (batch, head)]
        q_here, kv_here = (s.at(batch=one[0], head=one[1]) for s in (q, kv))
        tiles = q_here.tiles(layout.q_tile), kv_here.tiles(layout.kv_tile)
        visits = int(_Plane.of(layout, batch, head).widths().sum())
        yield PlaneOfTiles(batch, head, *tiles, visits, math.prod(planes))


class _Plane(NamedTuple):
    """One batch row's and head's part of a layout, or some rows of it."""

    starts: np.ndarray  # [rows, P]
    stops: np.ndarray
    common: np.ndarray  # the tiles that every row visits besides

    @classmethod
    def of(cls, layout: BlockLayout, batch: int, head: int) -> "_Plane":
        def part(table) -> np.ndarray:
            # Not `table[...]`: JAX would compile a slice of its own for every shape.
            return np.asarray(np.asarray(table)[min(batch, table.shape[0] - 1), min(head, table.shape[1] - 1)])

        common = np.zeros(0, np.int32) if layout.common is None else part(layout.common)
        return cls(
            part(layout.starts),
            part(layout.stops),
            common if layout.common is None else common[: int(part(layout.common_count))],
        )

    def rows(self, first: int, last: int) -> "_Plane":
        return self._replace(starts=self.starts[first:last], stops=self.stops[first:last])

    def widths(self) -> np.ndarray:
        """How many tiles each row visits, at most."""
        return np.maximum(self.stops - self.starts, 0).sum(1) + len(self.common)

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """All visits as pairs (row, tile)."""
        rows, tiles = _interval_pairs(self.starts, self.stops)
        if not len(self.common):
            return rows, tiles
        more = _common_pairs(self.starts, self.stops, self.common)
        return np.concatenate([rows, more[0]]), np.concatenate([tiles, more[1]])

    def rectangles(self, first: int, tiles: int) -> list[Visits]:
        """All visits as rectangles: columns that all rows visit, and those that some do. Rows count from `first`."""
        starts, stops = self.starts, np.maximum(self.starts, self.stops)
        changes = [np.bincount(ends.reshape(-1), minlength=tiles + 1)[:tiles] for ends in (starts, stops)]
        visitors = np.cumsum(changes[0] - changes[1])
        visitors[self.common] = len(starts)
        rows = np.arange(first, first + len(starts), dtype=np.int32).reshape(-1, 1)
        solid, edge = (
            np.flatnonzero(which).astype(np.int32) for which in (visitors == len(starts), visitors % len(starts) > 0)
        )
        seen = np.zeros((len(rows), len(edge)), bool)
        for low, high in zip(starts.T, stops.T, strict=True):
            seen |= (low[:, None] <= edge) & (edge < high[:, None])
        both = Visits(rows, solid.reshape(1, -1)), Visits(rows, edge.reshape(1, -1), seen)
        return [visits for visits in both if visits.kv.size]


def _interval_pairs(starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs (row, tile) of intervals [rows, P]."""
    widths = np.maximum(stops - starts, 0).reshape(-1)
    rows = np.repeat(np.arange(starts.shape[0]), starts.shape[1]).repeat(widths)
    ends = np.cumsum(widths)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - widths, widths)
    return rows, within + np.repeat(starts.reshape(-1), widths)


def _common_pairs(starts: np.ndarray, stops: np.ndarray, listed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs (row, tile) of tiles common to all rows, without those inside a row's own intervals."""
    inside = np.zeros((starts.shape[0], len(listed)), bool)
    for low, high in zip(starts.T, stops.T, strict=True):
        inside |= (low[:, None] <= listed) & (listed < high[:, None])
    rows, which = np.nonzero(~inside)
    return rows, listed[which]


def _rows(xp: Namespace, spans: Spans, rows: int, tile: int, tiles: int) -> Rows:
    """Slot intervals as disjoint tile intervals, sorted within each row."""
    low, high, common = spans
    shape = np.broadcast_shapes(low.shape, high.shape, (1, 1, rows, 1))
    # A user's rule may name slots before the first and past the last.
    low, high = (xp.clip(xp.broadcast_to(end, shape), 0, tiles * tile) for end in (low, high))
    empty = low >= high
    starts = xp.where(empty, np.int32(tiles), low // tile).astype(np.int32)
    stops = xp.where(empty, np.int32(tiles), -(-high // tile)).astype(np.int32)
    if shape[3] > 1:
        order = xp.argsort(starts, axis=3, stable=True)
        starts, stops = (xp.take_along_axis(a, order, axis=3) for a in (starts, stops))
        # What an earlier interval covers is cut off the later ones, so that no tile is visited twice.
        reached = running_max(xp, stops)
        starts = xp.concatenate([starts[..., :1], xp.maximum(starts[..., 1:], reached[..., :-1])], axis=3)
        stops = xp.maximum(starts, stops)
    if common is None:
        return Rows(starts, stops, None, None)
    common = xp.broadcast_to(common, (*common.shape[:3], tiles))[:, :, 0]
    listed = xp.argsort(~common, axis=2, stable=True).astype(np.int32)
    return Rows(starts, stops, listed, xp.sum(common, axis=2, dtype=np.int32))


def _namespace(tree: Any) -> Namespace:
    """NumPy if every array in the tree is NumPy's, else JAX."""
    return np if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree)) else jnp
