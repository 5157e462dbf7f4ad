"""Masks drawn in characters."""

from typing import Any

from longspan.checks import check_static_size
from longspan.masks import Mask
from longspan.render.grid import Grid
from longspan.render.picture import Panel, Picture, heads_shown, picture_of, ticks

INK = ".:+*#"  # none, a little, about half, nearly all, all
LEGEND = ". none, : under a quarter, + about half, * over three quarters, # all"
MIN_CELLS = 16  # along a side of each head, if several are side by side


def draw(
    mask: Mask,
    q_len: int,
    kv_len: int,
    *,
    batch: int = 0,
    head: int | None = None,
    max_cells: int = 64,
    axes: bool | None = None,
    q_positions: Any = None,
    kv_positions: Any = None,
) -> str:
    """A picture in characters, see `Mask.show`."""
    max_cells = check_static_size("max_cells", max_cells, 1)
    heads = len(heads_shown(mask, head))
    if heads > 1:
        max_cells = max(MIN_CELLS, max_cells // heads)
    cell = max(1, -(-q_len // max_cells), -(-kv_len // max_cells))
    picture = picture_of(
        mask, q_len, kv_len, cells=cell, batch=batch, head=head, q_positions=q_positions, kv_positions=kv_positions
    )
    panels = [["".join(INK[level] for level in row) for row in panel.levels()] for panel in picture.panels]
    if axes is None:
        axes = cell > 1
    if not axes:
        return "\n".join("  ".join(rows) for rows in zip(*panels, strict=True))
    return "\n".join(line.rstrip() for line in _with_axes(picture, panels, cell))


def lines(grid: Grid, ink: tuple[str, str, str]) -> list[str]:
    """The rows of a grid, in the characters for empty, partial and full cells."""
    return ["".join(ink[kind] for kind in row) for row in grid.kinds]


def numbers_above(length: int, cell: int, count: int) -> str:
    """About `count` token numbers, each over the cell that it begins; a number that would touch another is left out."""
    text = ""
    for at in ticks(length, cell, count):
        if not text or len(text) < at // cell:
            text = f"{text:<{at // cell}}{at:,}"
    return text


def _with_axes(picture: Picture, panels: list[list[str]], cell: int) -> list[str]:
    """The rows with a caption, token numbers at the left and on top, and a legend."""
    left = {at // cell: f"{at:,}" for at in ticks(picture.q_len, cell, count=8)}
    edge = max([len(label) for label in left.values()], default=0)
    columns = max([len(row) for row in panels[0]], default=0)
    top = numbers_above(picture.kv_len, cell, count=max(1, columns // 12))
    gap = max(2, len(top) - columns + 2)
    width = columns + gap
    body = [
        f"{left.get(number, ''):>{edge}} {(' ' * gap).join(rows)}"
        for number, rows in enumerate(zip(*panels, strict=True))
    ]
    above = [" " * (edge + 1) + "".join(top.ljust(width) for _ in panels)]
    if picture.panels[0].head is not None:
        names = [_name(panel, picture).ljust(width) for panel in picture.panels]
        above.insert(0, " " * (edge + 1) + "".join(names))
    legend = ["# may attend, . may not"]
    if cell > 1:
        legend = [f"each character stands for {cell:,} x {cell:,} pairs, and shows the allowed share:", LEGEND]
    return [picture.title, picture.facts, *above, *body, *legend]


def _name(panel: Panel, picture: Picture) -> str:
    """The head's number; the first name also has the number of heads."""
    if panel is picture.panels[0]:
        return f"head {panel.head} of {picture.heads}"
    return f"head {panel.head}"
