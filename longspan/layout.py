"""`BlockLayout`: the key tiles that each query tile visits. It is planned once per step and used by every layer.

A layout holds a static number of half-open intervals of key tiles per query tile. It also holds one list of key tiles
that every query tile visits: the columns of global tokens. Both grow linearly with the length; the table of all tile
pairs is never built. Whether a visited tile is EMPTY, PARTIAL or FULL is computed from the mask during the visit.
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
from longspan.axes import explicit_mesh, on_auto_axes, spec_entries
from longspan.checks import check_sides, check_tiles
from longspan.constants import on_host, unfolded
from longspan.masks import Mask
from longspan.masks.pytree import axes_of, short
from longspan.masks.rules import atoms_of
from longspan.masks.sides import Side, Tiles, as_positions, two_sides
from longspan.masks.spans import Spans, running_max
from longspan.pairs import count_by_query
from longspan.tile_kinds import MAX_PAIRS_READ, NONE, Visits, count_and_read, count_kinds
from longspan.tile_kinds import Counts as Counts

EMPTY, PARTIAL, FULL = 0, 1, 2
CHUNK = 1 << 20  # the number of visits listed at a time
RECTANGLE = 1 << 18  # tiles classified at a time if more than CHUNK are visited: they fit in the CPU cache
SPARSE = 8  # a rectangle may have this many times as many tiles as are visited in it


def _static(**kwargs):
    return field(metadata=dict(static=True), **kwargs)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockLayout:
    """The key tiles that each query tile visits, and the mask that applies inside them.

    `starts`, `stops` [B or 1, N or 1, query tiles, P] are half-open intervals of key tiles. The intervals of a query
    tile are disjoint unless `repeats` is set: a tile that is listed twice is visited, and counts, twice. `common`
    [B or 1, N or 1, key tiles] lists `common_count` key tiles that every query tile visits in addition to its
    intervals. In a transposed layout, key tiles and query tiles are exchanged.

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
    starts: Any  # no shape in the type, because JAX rebuilds the object with placeholders
    stops: Any
    common: Any
    common_count: Any
    q_positions: Any
    kv_positions: Any
    forward: "BlockLayout | None"  # the layout that a transposed layout was made from: it has the count of each pair
    q_len: int = _static()
    kv_len: int = _static()
    q_tile: int = _static()
    kv_tile: int = _static()
    repeats: bool = _static(default=False)  # some tiles are listed, and count, more than once
    rows: Any = None  # int [B], [N]: the indices of batch rows and heads that rules and biases read; None: 0, 1, …
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
        """The query tiles that visit each key tile, for passes over keys.

        Its intervals may also hold query tiles that do not visit the key tile: `entries` leaves those out.
        """
        if self.forward is not None:
            return self.forward
        xp, here = _namespace(self), self
        if xp is jnp:
            known = on_host(self)
            if known is not None:
                return replace(jax.device_put(known.transpose()), mask=self.mask, forward=self)
            here = unfolded(self)
        q, kv = here.sides(xp=xp)
        low, high, common = atoms_of(here.mask).q_spans(kv.tiles(self.kv_tile), q.tiles(self.q_tile))
        if common is not None:
            common = common.swapaxes(2, 3)
        spans = Spans(low.swapaxes(2, 3), high.swapaxes(2, 3), common)
        rows = _rows(xp, spans, self.kv_tiles, self.q_tile, self.q_tiles)
        return replace(self, forward=self, **rows._asdict())

    def lowered(self) -> "BlockLayout":
        """The same tiles, with the mask lowered to atoms, for callers that evaluate it often."""
        return replace(self, mask=atoms_of(self.mask))

    def sides(self, *, batch: int | None = None, heads: int | None = None, xp: Namespace = jnp) -> tuple[Side, Side]:
        """Both sides of the attention matrix, as rules read them."""
        positions = dict(q_positions=self.q_positions, kv_positions=self.kv_positions)
        numbers = None
        if self.rows is not None:
            numbers = (self.rows, self.heads)
        sizes = dict(batch=batch, heads=heads)
        return sides_of(self.mask, self.q_len, self.kv_len, **positions, numbers=numbers, **sizes, xp=xp)

    def visits(self) -> int:
        """The number of visited tiles, over the batch rows and heads that the layout distinguishes (host only)."""
        return sum(len(tiles) for b, n in self.planes() for _, tiles in self.entries(b, n))

    def planes(self) -> Iterator[tuple[int, int]]:
        """Yields each pair (batch row, head) that the layout distinguishes."""
        tables = [a for a in (self.starts, self.common) if a is not None]
        yield from np.ndindex(max(a.shape[0] for a in tables), max(a.shape[1] for a in tables))

    def entries(self, batch: int, head: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All visits of one batch row and head as arrays (rows, tiles), at most about CHUNK at a time (host only)."""
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
        """All visits of one batch row and head in the form that is classified fastest: a list, or rectangles."""
        assert self.forward is None, "the columns of a transposed layout are query tiles"
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
        """The number of visits of each pair (row, tile)."""
        starts, stops, common = _Plane.of(self, batch, head)
        times = ((starts[rows] <= tiles[:, None]) & (tiles[:, None] < stops[rows])).sum(1)
        return np.where(times == 0, np.isin(tiles, common), times)

    def __repr__(self) -> str:
        kind = "transposed " * self.is_transposed
        return (
            f"<{kind}BlockLayout of {self.mask!r}: {self.q_len}x{self.kv_len} in tiles of "
            f"{self.q_tile}x{self.kv_tile}, intervals {short(self.starts)}>"
        )

    def _repr_html_(self) -> str | None:
        from longspan.render.notebook import shown_html

        return shown_html(self)


class Rows(NamedTuple):
    """The arrays of a layout that hold tile indices."""

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
    """The layout of a mask: of NumPy arrays if the mask and the positions are static, else of JAX arrays."""
    check_sides(mask, q_len, kv_len, q_positions, kv_positions)
    return plan_checked_layout(
        mask, q_len, kv_len, q_tile, kv_tile, q_positions=q_positions, kv_positions=kv_positions, xp=xp
    )


def plan_checked_layout(
    mask: Mask, q_len, kv_len, q_tile, kv_tile, *, q_positions=None, kv_positions=None, rows=None, heads=None, xp=None
) -> BlockLayout:
    """`plan_layout` of a mask and positions that were already checked.

    `rows` [B] and `heads` [N] are the indices of the call's rows and heads in a larger batch; give both or neither.
    """
    check_tiles(q_tile, kv_tile)
    if xp is None:
        xp = _namespace((mask, q_positions, kv_positions))
        known = None
        if xp is jnp:
            data: Any = dict(mask=mask, q_positions=q_positions, kv_positions=kv_positions, rows=rows, heads=heads)
            known = on_host(data)
        if known is not None:
            layout = plan_checked_layout(q_len=q_len, kv_len=kv_len, q_tile=q_tile, kv_tile=kv_tile, **known, xp=np)
            return replace(jax.device_put(layout), mask=mask)

    def tables_of(*given):
        if xp is not np:
            given = unfolded(given)
        mask, q_at, kv_at, *indices = given
        numbers = None
        if rows is not None:
            numbers = tuple(indices)
        q, kv = sides_of(mask, q_len, kv_len, q_positions=q_at, kv_positions=kv_at, numbers=numbers, xp=xp)
        spans = atoms_of(mask).kv_spans(q.tiles(q_tile), kv.tiles(kv_tile))
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
    """Both sides as a mask reads them, of `batch` rows and `heads` heads.

    By default these are the batch rows and heads that the mask and the positions distinguish. `numbers` are the indices
    of the rows [B] and heads [N] in a larger batch.
    """
    mask_rows, mask_heads = mask.batch, mask.heads
    if numbers is not None:
        mask_rows, mask_heads = min(mask_rows, len(numbers[0])), min(mask_heads, len(numbers[1]))
    rows = [p.shape[0] for p in (q_positions, kv_positions) if p is not None and p.ndim == 2]
    if batch is None:
        batch = max([mask_rows, *rows])
    if heads is None:
        heads = mask_heads
    positions = dict(q_positions=q_positions, kv_positions=kv_positions)
    return two_sides(q_len, kv_len, batch=batch, heads=heads, **positions, numbers=numbers, xp=xp)


def _on_auto_axes(function, mask: Mask, *arrays) -> Rows:
    """Calls function(mask, *arrays) on auto mesh axes; see `axes.on_auto_axes`."""
    if explicit_mesh(mask, arrays) is None:
        return function(mask, *arrays)
    axes = list(axes_of(mask))
    for x, letters in zip(arrays, ("BT", "BS", "B", "N"), strict=True):
        axes += axes_of(x, letters)

    def specs(operands, tables: Rows) -> Rows:
        where: dict[str, Any] = {}
        for x, names in zip(jax.tree.leaves(operands), axes, strict=True):
            where |= {name: entry for name, entry in zip(names, spec_entries(x), strict=True) if name in "BN" and entry}

        def spec(x, names: str) -> P:
            return P(*(where.get(name) if size > 1 else None for name, size in zip(names, x.shape, strict=True)))

        found, tree = jax.tree.flatten(tables)
        return tree.unflatten([spec(x, names) for x, names in zip(found, ("BN..", "BN..", "BN.", "BN"), strict=False)])

    return on_auto_axes(function, specs, (), (mask, *arrays))


def count(layout: BlockLayout) -> Counts:
    """Counts the visits of a concrete layout by kind, and the allowed pairs, without a T×S array."""
    total, mask = NONE, atoms_of(layout.mask)
    for plane in planes_of(layout):
        pairs = None
        if not layout.repeats:
            pairs = count_by_query(mask, plane.q.side, plane.kv.side)
        looks = layout.looks(plane.batch, plane.head)
        if pairs is not None:
            kinds = count_kinds(mask, plane.q, plane.kv, looks)._replace(pairs=pairs)
        else:
            limits = dict(visits=plane.visits * plane.planes, max_pairs=MAX_PAIRS_READ // plane.planes)
            kinds = count_and_read(mask, plane.q, plane.kv, looks, **limits)
        total = total.plus(kinds)
    return total


def count_tiles(layout: BlockLayout, max_visits: int) -> Counts | None:
    """Counts the visits of a concrete layout by kind, without pairs; None if it has more than `max_visits` visits."""
    planes, mask = list(planes_of(layout)), atoms_of(layout.mask)
    if sum(plane.visits for plane in planes) > max_visits:
        return None
    total = NONE
    for plane in planes:
        total = total.plus(count_kinds(mask, plane.q, plane.kv, layout.looks(plane.batch, plane.head)))
    return total


class PlaneOfTiles(NamedTuple):
    """The tiles of one batch row and head, of NumPy arrays."""

    batch: int
    head: int
    q: Tiles
    kv: Tiles
    visits: int  # an upper bound
    planes: int  # the number of pairs of batch row and head in the layout


def planes_of(layout: BlockLayout) -> Iterator[PlaneOfTiles]:
    """Yields the tiles of each batch row and head that a concrete layout, or its mask, distinguishes."""
    q, kv = layout.sides(xp=np)
    q, kv = q.remembering(), kv.remembering()
    last_row, last_head = list(layout.planes())[-1]
    rows, heads = max(q.batch.size, last_row + 1), max(q.head.size, last_head + 1)
    for batch, head in np.ndindex(rows, heads):
        here = dict(batch=np.full((1, 1, 1, 1), batch, np.int32), head=np.full((1, 1, 1, 1), head, np.int32))
        q_tiles, kv_tiles = q.at(**here).tiles(layout.q_tile), kv.at(**here).tiles(layout.kv_tile)
        visits = int(_Plane.of(layout, batch, head).widths().sum())
        yield PlaneOfTiles(batch, head, q_tiles, kv_tiles, visits, rows * heads)


class _Plane(NamedTuple):
    """The part of a layout of one batch row and head, or some of its rows."""

    starts: np.ndarray  # [rows, P]
    stops: np.ndarray
    common: np.ndarray  # the tiles that every row visits in addition to its intervals

    @classmethod
    def of(cls, layout: BlockLayout, batch: int, head: int) -> "_Plane":
        def part(table) -> np.ndarray:
            # Sliced in NumPy: JAX would compile a slice for every shape.
            return np.asarray(np.asarray(table)[min(batch, table.shape[0] - 1), min(head, table.shape[1] - 1)])

        common = np.zeros(0, np.int32)
        if layout.common is not None:
            common = part(layout.common)[: int(part(layout.common_count))]
        return cls(part(layout.starts), part(layout.stops), common)

    def rows(self, first: int, last: int) -> "_Plane":
        return self._replace(starts=self.starts[first:last], stops=self.stops[first:last])

    def widths(self) -> np.ndarray:
        """An upper bound on the number of tiles that each row visits."""
        return np.maximum(self.stops - self.starts, 0).sum(1) + len(self.common)

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """All visits as pairs (row, tile)."""
        rows, tiles = _interval_pairs(self.starts, self.stops)
        if not len(self.common):
            return rows, tiles
        more = _common_pairs(self.starts, self.stops, self.common)
        return np.concatenate([rows, more[0]]), np.concatenate([tiles, more[1]])

    def rectangles(self, first: int, tiles: int) -> list[Visits]:
        """All visits as two rectangles: the columns that all rows visit, and the columns that some rows visit.

        The first row has the index `first`.
        """
        starts, stops = self.starts, np.maximum(self.starts, self.stops)
        # The number of rows that visit each column: a running sum of the intervals that begin minus those that end.
        begin = np.bincount(starts.reshape(-1), minlength=tiles + 1)[:tiles]
        end = np.bincount(stops.reshape(-1), minlength=tiles + 1)[:tiles]
        visitors = np.cumsum(begin - end)
        visitors[self.common] = len(starts)
        rows = np.arange(first, first + len(starts), dtype=np.int32).reshape(-1, 1)
        solid = np.flatnonzero(visitors == len(starts)).astype(np.int32)
        edge = np.flatnonzero(visitors % len(starts) > 0).astype(np.int32)
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
    within = np.arange(widths.sum()) - np.repeat(ends - widths, widths)
    return rows, within + np.repeat(starts.reshape(-1), widths)


def _common_pairs(starts: np.ndarray, stops: np.ndarray, listed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs (row, tile) of tiles common to all rows, without the tiles inside a row's intervals."""
    inside = np.zeros((starts.shape[0], len(listed)), bool)
    for low, high in zip(starts.T, stops.T, strict=True):
        inside |= (low[:, None] <= listed) & (listed < high[:, None])
    rows, which = np.nonzero(~inside)
    return rows, listed[which]


def _rows(xp: Namespace, spans: Spans, rows: int, tile: int, tiles: int) -> Rows:
    """Converts slot intervals to disjoint tile intervals, sorted within each row."""
    low, high, common = spans
    shape = np.broadcast_shapes(low.shape, high.shape, (1, 1, rows, 1))
    # A user's rule may return slots before the first and after the last.
    low = xp.clip(xp.broadcast_to(low, shape), 0, tiles * tile)
    high = xp.clip(xp.broadcast_to(high, shape), 0, tiles * tile)
    empty = low >= high
    starts = xp.where(empty, np.int32(tiles), low // tile).astype(np.int32)
    stops = xp.where(empty, np.int32(tiles), -(-high // tile)).astype(np.int32)
    if shape[3] > 1:
        order = xp.argsort(starts, axis=3, stable=True)
        starts, stops = xp.take_along_axis(starts, order, axis=3), xp.take_along_axis(stops, order, axis=3)
        # An interval begins no earlier than the end of the intervals before it, so that no tile is visited twice.
        reached = running_max(xp, stops)
        starts = xp.concatenate([starts[..., :1], xp.maximum(starts[..., 1:], reached[..., :-1])], axis=3)
        stops = xp.maximum(starts, stops)
    if common is None:
        return Rows(starts, stops, None, None)
    common = xp.broadcast_to(common, (*common.shape[:3], tiles))[:, :, 0]
    listed = xp.argsort(~common, axis=2, stable=True).astype(np.int32)
    return Rows(starts, stops, listed, xp.sum(common, axis=2, dtype=np.int32))


def _namespace(tree: Any) -> Namespace:
    """NumPy if every array in the tree is a NumPy array, else JAX."""
    if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree)):
        return np
    return jnp
