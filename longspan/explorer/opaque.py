"""Rules that no comparison expresses: Python evaluates them, pair by pair or in cells."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from longspan.masks import Mask
from longspan.masks.sides import Side, two_sides
from longspan.render.grid import grid_of

MAX_EXACT = 1 << 20  # pairs: up to this many, the document has one bit for each
MAX_READ = 1 << 26  # pairs that are read of a rule without bounds
CELLS = 512  # along a side


@dataclass(frozen=True)
class ShownPlane:
    """The batch row and head of a document, and its sides."""

    q_len: int
    kv_len: int
    batch: int
    head: int
    rows: int  # that the masks and the positions distinguish
    heads: int
    q_positions: Any  # int32 [B or 1, T], or None
    kv_positions: Any

    def sides(self) -> tuple[Side, Side]:
        """Both sides as rules read them, of the one row and head."""
        positions = dict(q_positions=self.q_positions, kv_positions=self.kv_positions)
        sides = two_sides(self.q_len, self.kv_len, batch=self.rows, heads=self.heads, **positions, xp=np)
        here = [np.full((1, 1, 1, 1), n, np.int32) for n in (self.batch, self.head)]
        q, kv = [side.at(batch=here[0], head=here[1]) for side in sides][:2]
        return q, kv

    def row(self, array: np.ndarray) -> Any:
        """An array [B or 1, ...] of the one row."""
        return array[min(self.batch, len(array) - 1)]

    def plane(self, array: np.ndarray) -> np.ndarray:
        """An array [B or 1, N or 1, ...] of the one row and head."""
        row = self.row(array)
        return row[min(self.head, len(row) - 1)]


def evaluated(mask: Mask, plane: ShownPlane) -> tuple[np.ndarray, np.ndarray, int, int, str]:
    """(some, every, q_cell, kv_cell, note): whether any and all pairs of each cell are allowed."""
    pairs = plane.q_len * plane.kv_len
    bounded = not mask.unbounded()
    skipped = " The rule has no bounds, so engines skip no tile because of it."
    if bounded:
        skipped = " Engines skip tiles by the rule's bounds, and may visit more tiles than the pairs need."
    if pairs <= MAX_EXACT:
        q, kv = plane.sides()
        truth = np.broadcast_to(np.asarray(mask.allowed(q.slots(), kv.slots())), (1, 1, plane.q_len, plane.kv_len))
        return truth[0, 0], truth[0, 0], 1, 1, f"Python evaluated every pair of {mask!r}.{skipped}"
    if not bounded and pairs > MAX_READ:
        some, every = np.ones((1, 1), bool), np.zeros((1, 1), bool)
        note = f"{mask!r} has no bounds, and {pairs:,} pairs are too many to evaluate: this page does not show it."
        return some, every, plane.q_len, plane.kv_len, f"{note} Explore at most {MAX_READ:,} pairs.{skipped}"
    q_cell, kv_cell = max(1, -(-plane.q_len // CELLS)), max(1, -(-plane.kv_len // CELLS))
    positions = dict(q_positions=plane.q_positions, kv_positions=plane.kv_positions)
    which: dict[str, Any] = dict(batch=plane.batch, head=plane.head, **positions)
    grid = grid_of(mask, plane.q_len, plane.kv_len, q_cell, kv_cell, **which)
    note = (
        f"Python evaluated {mask!r} in cells of {q_cell:,} x {kv_cell:,} pairs. This page does not know the pairs of a "
        f"cell of which some are allowed.{skipped}"
    )
    return grid.some, grid.every, q_cell, kv_cell, note
