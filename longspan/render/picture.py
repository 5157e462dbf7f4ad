"""What every picture of a mask shows, before it is drawn in characters, SVG or matplotlib."""

import math
from typing import Any, NamedTuple

import numpy as np

from longspan.layout import plan_layout
from longspan.masks import Mask
from longspan.render.bands import Bands
from longspan.render.grid import Grid, grid_of, most_visits
from longspan.render.shares import shares_of

TILE = 128  # slots along the tiles of which the caption says how many are visited
MAX_HEADS = 4  # side by side
LEVELS = 3  # shades between none and all
MAX_TITLE = 160  # characters
TICKS = 4  # numbers along an axis, about


class Panel(NamedTuple):
    """One head's cells."""

    head: int | None  # None: all heads are alike
    grid: Grid
    share: np.ndarray  # of allowed pairs, in each cell

    def levels(self, count: int = LEVELS) -> np.ndarray:
        """Shades: 0 none, 1 to `count` more and more, `count + 1` all. None and all are promises."""
        between = np.clip((self.share * (count - 1) + 0.5).astype(int) + 1, 1, count)
        return np.where(self.grid.every, count + 1, np.where(self.grid.some, between, 0))


class Picture(NamedTuple):
    """One batch row of a mask, its heads side by side."""

    title: str
    q_len: int
    kv_len: int
    q_cell: int
    kv_cell: int
    panels: list[Panel]
    batch: int  # the row that is shown
    rows: int  # that the mask tells apart
    heads: int
    allowed: float  # share of all pairs, over the heads shown
    exact: bool  # whether that was counted
    visited: float  # share of all tiles
    bands: Bands | None  # documents

    @property
    def facts(self) -> str:
        """The caption: how long, how sparse, at what cost."""
        share = f"{'' if self.exact else 'about '}{percent(self.allowed)} of the pairs are allowed"
        cost = f"{percent(self.visited)} of the {TILE} x {TILE} tiles are visited"
        sizes = f"{_counted(self.q_len, 'query', 'queries')} x {_counted(self.kv_len, 'key', 'keys')}"
        return f"{sizes}: {share}, {cost}" + (f"; {self.shown}" if self.shown else "")

    @property
    def shown(self) -> str:
        """Which row and heads are shown, where there are more."""
        row = f"batch row {self.batch} of {self.rows}" if self.rows > 1 else ""
        numbers = [panel.head for panel in self.panels if panel.head is not None]
        heads = ""
        if numbers and len(numbers) < self.heads:
            few = f"heads {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"head {numbers[0]}"
            heads = f"{few} of {self.heads}"
        return ", ".join(words for words in (row, heads) if words)


def picture_of(
    mask: Mask,
    q_len: int,
    kv_len: int,
    *,
    cells: int | tuple[int, int],
    batch: int = 0,
    head: int | None = None,
    q_positions: Any = None,
    kv_positions: Any = None,
) -> Picture:
    """A batch row of a mask in cells of so many slots; `head`: one, or None: the first few that are told apart."""
    q_cell, kv_cell = cells if isinstance(cells, tuple) else (cells, cells)
    positions = dict(q_positions=q_positions, kv_positions=kv_positions)
    heads = heads_shown(mask, head)
    panels, pairs, exact = [], 0.0, True
    for number in heads:
        which = dict(batch=batch, head=number or 0, **positions)
        grid = grid_of(mask, q_len, kv_len, q_cell, kv_cell, **which)
        found = shares_of(mask, q_len, kv_len, q_cell, kv_cell, **which)
        panels.append(Panel(number, grid, found.pairs / _areas(q_len, kv_len, grid)))
        pairs, exact = pairs + float(found.pairs.sum()), exact and found.exact
    return Picture(
        title=shortened(repr(mask)),
        q_len=q_len,
        kv_len=kv_len,
        q_cell=q_cell,
        kv_cell=kv_cell,
        panels=panels,
        batch=batch,
        rows=mask.batch,
        heads=mask.heads,
        allowed=pairs / max(len(heads) * q_len * kv_len, 1),
        exact=exact,
        visited=_visited(mask, q_len, kv_len, batch, heads, positions),
        bands=Bands.of(mask.documents(), batch, q_cell, kv_cell),
    )


def heads_shown(mask: Mask, head: int | None) -> list[int | None]:
    """The heads to draw: the one asked for, or the first few; None where all are alike."""
    if head is not None:
        return [head]
    return [None] if mask.heads == 1 else list(range(min(mask.heads, MAX_HEADS)))


def shortened(text: str, max_length: int = MAX_TITLE) -> str:
    """A text without its middle if it is too long, as that of a rule with a thousand indices is."""
    return text if len(text) <= max_length else f"{text[: max_length // 2]} ... {text[-max_length // 3 :]}"


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def percent(share: float) -> str:
    """A share as people read it: 12%, 0.064%, none, all.

    Example:
        >>> percent(0.12345), percent(0.00064), percent(0.99996), percent(1.0), percent(0.0)
        ('12.3%', '0.064%', '99.99%', '100%', '0%')
    """
    if share in (0, 1):
        return f"{share:.0%}"
    if share > 0.999:  # rounded down: only all is all
        return f"{math.floor(1e4 * share) / 100:.2f}%"
    return f"{100 * share:.{max(1, 1 - math.floor(math.log10(100 * share)))}f}%"


def ticks(length: int, cell: int = 1, count: int = TICKS) -> list[int]:
    """Token numbers along an axis, at the beginnings of cells: about `count`, of round steps.

    Example:
        >>> ticks(4096, 64), ticks(1_000_000, 15_625), ticks(9), ticks(300)
        ([0, 1024, 2048, 3072], [0, 250000, 500000, 750000], [0, 2, 4, 6, 8], [0, 100, 200])
    """
    least = -(-length // (cell * (count + 1)))
    if cell == 1 and length % 10 == 0:
        tens = 10 ** (len(str(max(least, 1))) - 1)
        step = next(n * tens for n in (1, 2, 5, 10) if n * tens >= least)
    else:  # 2^n or 5·2^n cells
        step = cell * min(n * 2 ** max(0, -(-least // n) - 1).bit_length() for n in (1, 5))
    return list(range(0, length, step))


def _areas(q_len: int, kv_len: int, grid: Grid) -> np.ndarray:
    """The pairs of each cell; those at the ends may be cut short."""
    sides = [
        np.minimum(cell, length - np.arange(0, length, cell))
        for length, cell in ((q_len, grid.q_cell), (kv_len, grid.kv_cell))
    ]
    return np.multiply.outer(*sides)


def _visited(
    mask: Mask, q_len: int, kv_len: int, batch: int, heads: list[int | None], positions: dict[str, Any]
) -> float:
    """The share of tiles that an engine would visit."""
    if not q_len or not kv_len:
        return 0.0
    layout = plan_layout(mask, q_len, kv_len, TILE, TILE, **positions, xp=np)
    visits = sum(most_visits(layout, batch, head or 0) for head in heads)
    return min(1.0, visits / (layout.q_tiles * layout.kv_tiles * len(heads)))
