"""The contents of every picture of a mask, before it is drawn in characters, SVG or matplotlib."""

import math
from typing import Any, NamedTuple

import numpy as np

from longspan.layout import plan_layout
from longspan.masks import Mask
from longspan.render.bands import Bands
from longspan.render.grid import Grid, grid_of, max_visits
from longspan.render.shares import shares_of

TILE = 128  # slots along a tile; the caption has the share of tiles that is visited
MAX_HEADS = 4  # side by side
LEVELS = 3  # shades between none and all
MAX_TITLE = 160  # characters
TICKS = 4  # approximate count of numbers along an axis


class Panel(NamedTuple):
    """One head's cells."""

    head: int | None  # None: all heads are alike
    grid: Grid
    share: np.ndarray  # share of allowed pairs in each cell

    def levels(self, count: int = LEVELS) -> np.ndarray:
        """Shades: 0 if no pair is allowed, `count + 1` if all are, 1 to `count` by the share. 0 and all are exact."""
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
    rows: int  # batch rows of the mask; 1: all rows are alike
    heads: int  # heads of the mask; 1: all heads are alike
    allowed: float  # share of all pairs, over the heads shown
    exact: bool  # whether `allowed` was counted, not estimated
    visited: float  # share of all tiles
    bands: Bands | None  # documents

    @property
    def facts(self) -> str:
        """The caption: lengths, share of allowed pairs, share of visited tiles."""
        share = f"{percent(self.allowed)} of the pairs are allowed"
        if not self.exact:
            share = f"about {share}"
        cost = f"{percent(self.visited)} of the {TILE} x {TILE} tiles are visited"
        sizes = f"{_counted(self.q_len, 'query', 'queries')} x {_counted(self.kv_len, 'key', 'keys')}"
        facts = f"{sizes}: {share}, {cost}"
        if self.shown:
            facts += f"; {self.shown}"
        return facts

    @property
    def shown(self) -> str:
        """The batch row and the heads that are shown, if there are others."""
        shown = []
        if self.rows > 1:
            shown.append(f"batch row {self.batch} of {self.rows}")
        numbers = [panel.head for panel in self.panels if panel.head is not None]
        if numbers and len(numbers) < self.heads:
            heads = f"head {numbers[0]}"
            if len(numbers) > 1:
                heads = f"heads {numbers[0]} to {numbers[-1]}"
            shown.append(f"{heads} of {self.heads}")
        return ", ".join(shown)


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
    """A batch row of a mask in cells of `cells` slots, or (queries, keys); `head`: see `heads_shown`."""
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
    """The heads to draw: the given one, else [None] if all heads are alike, else the first `MAX_HEADS`."""
    if head is not None:
        return [head]
    if mask.heads == 1:
        return [None]
    return list(range(min(mask.heads, MAX_HEADS)))


def shortened(text: str, max_length: int = MAX_TITLE) -> str:
    """The text, without its middle if it is longer than `max_length` characters."""
    if len(text) <= max_length:
        return text
    return f"{text[: max_length // 2]} ... {text[-max_length // 3 :]}"


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def percent(share: float) -> str:
    """A share as a percentage with at least two significant digits; only 0 and 1 are written as 0% and 100%.

    Example:
        >>> percent(0.12345), percent(0.00064), percent(0.99996), percent(1.0), percent(0.0)
        ('12.3%', '0.064%', '99.99%', '100%', '0%')
    """
    if share in (0, 1):
        return f"{share:.0%}"
    if share > 0.999:  # rounded down, so that it is never 100%
        return f"{math.floor(1e4 * share) / 100:.2f}%"
    return f"{100 * share:.{max(1, 1 - math.floor(math.log10(100 * share)))}f}%"


def ticks(length: int, cell: int = 1, count: int = TICKS) -> list[int]:
    """About `count` token numbers along an axis, at the beginnings of cells, in round steps.

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
    """The number of pairs of each cell; the last cell of a side may be shorter."""
    queries = np.minimum(grid.q_cell, q_len - np.arange(0, q_len, grid.q_cell))
    keys = np.minimum(grid.kv_cell, kv_len - np.arange(0, kv_len, grid.kv_cell))
    return np.multiply.outer(queries, keys)


def _visited(
    mask: Mask, q_len: int, kv_len: int, batch: int, heads: list[int | None], positions: dict[str, Any]
) -> float:
    """The share of tiles that an engine would visit."""
    if not q_len or not kv_len:
        return 0.0
    layout = plan_layout(mask, q_len, kv_len, TILE, TILE, **positions, xp=np)
    visits = sum(max_visits(layout, batch, head or 0) for head in heads)
    return min(1.0, visits / (layout.q_tiles * layout.kv_tiles * len(heads)))
