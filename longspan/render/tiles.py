"""A layout's tiles by kind: which are visited, and whether their pairs are all allowed."""

from typing import NamedTuple

import numpy as np

from longspan.layout import EMPTY, PARTIAL, BlockLayout
from longspan.render.bands import Bands
from longspan.render.grid import grid_of, most_visits
from longspan.render.picture import heads_shown, percent, shortened


class TilePicture(NamedTuple):
    """One batch row of a layout, its heads side by side: EMPTY (not visited), PARTIAL or FULL by cell.

    A cell is a tile, or a square of tiles where there are too many; it is visited if one of them is.
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
    layout = layout if layout.forward is None else layout.forward
    heads = heads_shown(layout.mask, head)
    together = max(1, -(-layout.q_tiles // max_cells), -(-layout.kv_tiles // max_cells))
    cells = together * layout.q_tile, together * layout.kv_tile
    levels = []
    for number in heads:
        which = dict(batch=batch, head=number or 0, q_positions=layout.q_positions, kv_positions=layout.kv_positions)
        kinds = grid_of(layout.mask, layout.q_len, layout.kv_len, *cells, **which).kinds
        visited = _visited(layout, batch, number or 0, together)
        # What is visited without an allowed pair costs as much as one with some.
        levels.append(np.where(visited, np.maximum(kinds, PARTIAL), EMPTY))
    visits = sum(most_visits(layout, batch, number or 0) for number in heads)
    share = min(1.0, visits / max(layout.q_tiles * layout.kv_tiles * len(heads), 1))
    return TilePicture(
        title=shortened(repr(layout.mask)),
        facts=(
            f"{layout.q_len:,} queries x {layout.kv_len:,} keys in tiles of {layout.q_tile} x {layout.kv_tile}: "
            f"{percent(share)} are visited" + (f"; {together} x {together} tiles in each cell" if together > 1 else "")
        ),
        q_len=layout.q_len,
        kv_len=layout.kv_len,
        q_cell=cells[0],
        kv_cell=cells[1],
        heads=heads,
        levels=levels,
        bands=Bands.of(layout.mask.documents(), batch, *cells),
    )


def _visited(layout: BlockLayout, batch: int, head: int, together: int) -> np.ndarray:
    """Whether a tile of each cell is visited, bool [rows, columns] of cells."""

    def part(table) -> np.ndarray:
        return np.asarray(table[min(batch, table.shape[0] - 1), min(head, table.shape[1] - 1)])

    starts, stops = part(layout.starts), part(layout.stops)
    columns = np.arange(0, layout.kv_tiles, together)
    seen = np.zeros((layout.q_tiles, len(columns)), bool)
    for low, high in zip(starts.T, stops.T, strict=True):
        seen |= (low[:, None] < columns + together) & (high[:, None] > columns) & (low < high)[:, None]
    if layout.common is not None:
        common = part(layout.common)[: int(part(layout.common_count))]
        seen[:, np.unique(common // together)] = True
    return np.logical_or.reduceat(seen, np.arange(0, layout.q_tiles, together)) if layout.q_tiles else seen
