"""Masks drawn in characters."""

from typing import Any

from longspan.masks import Mask
from longspan.render.grid import Grid, grid_of

INK = (".", "+", "#")


def draw(
    mask: Mask,
    q_len: int,
    kv_len: int,
    *,
    batch: int = 0,
    head: int = 0,
    most: int = 64,
    q_positions: Any = None,
    kv_positions: Any = None,
) -> str:
    """A picture in characters: `#` = may attend, `.` = may not; by blocks (`+` = partly) if a side is over `most`."""
    cell = max(1, -(-q_len // most), -(-kv_len // most))
    grid = grid_of(
        mask, q_len, kv_len, cell, cell, batch=batch, head=head, q_positions=q_positions, kv_positions=kv_positions
    )
    return "\n".join(lines(grid, INK))


def lines(grid: Grid, ink: tuple[str, str, str]) -> list[str]:
    """The rows of a grid, in the characters for empty, partial and full cells."""
    return ["".join(ink[kind] for kind in row) for row in grid.kinds]
