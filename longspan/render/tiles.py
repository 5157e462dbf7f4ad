"""A layout's tiles by kind: not visited, visited and partly allowed, visited and fully allowed."""

from typing import Any, NamedTuple

import numpy as np

from longspan.layout import EMPTY, PARTIAL, BlockLayout
from longspan.render.bands import Bands
from longspan.render.grid import grid_of, max_visits, plane_of
from longspan.render.picture import heads_shown, percent, shortened


class TilePicture(NamedTuple):
    """One batch row of a layout, its heads side by side: EMPTY (not visited), PARTIAL or FULL by cell.

    A cell is one tile, or a square of tiles if there are too many to draw; it counts as visited if any of them is.
    """

    title: str
    facts: str
    q_len: int
    kv_len: int
    q_cell: int
    kv_cell: int
    heads: list[int | None]
    levels: list[np.ndarray]
    bands: Bands | None


def tiles_of(layout: BlockLayout, *, batch: int = 0, head: int | None = None, max_cells: int = 64) -> TilePicture:
    """The tiles of one batch row of a concrete layout (host only)."""
    if layout.forward is not None:
        layout = layout.forward
    heads = heads_shown(layout.mask, head)
    side = max(1, -(-layout.q_tiles // max_cells), -(-layout.kv_tiles // max_cells))  # tiles along a cell
    cells = side * layout.q_tile, side * layout.kv_tile
    levels = []
    for number in heads:
        which = dict(batch=batch, head=number or 0, q_positions=layout.q_positions, kv_positions=layout.kv_positions)
        kinds = grid_of(layout.mask, layout.q_len, layout.kv_len, *cells, **which).kinds
        visited = _visited(layout, batch, number or 0, side)
        # A visited tile without an allowed pair costs as much as a PARTIAL one, so it is drawn as one.
        levels.append(np.where(visited, np.maximum(kinds, PARTIAL), EMPTY))
    return TilePicture(
        title=shortened(repr(layout.mask)),
        facts=_facts(layout, batch, heads, side),
        q_len=layout.q_len,
        kv_len=layout.kv_len,
        q_cell=cells[0],
        kv_cell=cells[1],
        heads=heads,
        levels=levels,
        bands=Bands.of(layout.mask.documents(), batch, *cells),
    )


def _facts(layout: BlockLayout, batch: int, heads: list[int | None], side: int) -> str:
    """The caption: lengths, tile sizes, and the share of tiles that is visited."""
    visits = sum(max_visits(layout, batch, number or 0) for number in heads)
    share = min(1.0, visits / max(layout.q_tiles * layout.kv_tiles * len(heads), 1))
    facts = (
        f"{layout.q_len:,} queries x {layout.kv_len:,} keys in tiles of {layout.q_tile} x {layout.kv_tile}: "
        f"{percent(share)} are visited"
    )
    if side > 1:
        facts += f"; {side} x {side} tiles in each cell"
    return facts


def _visited(layout: BlockLayout, batch: int, head: int, side: int) -> np.ndarray:
    """Whether a tile of each cell is visited, bool [rows, columns] of cells of `side` x `side` tiles."""

    def plane(table: Any) -> np.ndarray:
        return plane_of(table, batch, head)

    starts, stops = plane(layout.starts), plane(layout.stops)
    columns = np.arange(0, layout.kv_tiles, side)
    seen = np.zeros((layout.q_tiles, len(columns)), bool)
    for start, stop in zip(starts.T, stops.T, strict=True):
        seen |= (start[:, None] < columns + side) & (stop[:, None] > columns) & (start < stop)[:, None]
    if layout.common is not None:
        common = plane(layout.common)[: int(plane(layout.common_count))]
        seen[:, np.unique(common // side)] = True
    if not layout.q_tiles:
        return seen
    return np.logical_or.reduceat(seen, np.arange(0, layout.q_tiles, side))
