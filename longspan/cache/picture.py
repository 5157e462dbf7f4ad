"""What a plan keeps and what it has dropped, drawn in characters: one step, or the whole generation."""

from typing import TYPE_CHECKING

import numpy as np

from longspan.cache.outline import BYTES_EACH, MOST_LISTED
from longspan.cache.slots import Slots, slot_of
from longspan.checks import check_static_size
from longspan.render.text import INK, numbers_above

if TYPE_CHECKING:
    from longspan.cache.plan import CachePlan

LEGEND = "# kept, . evicted, blank to come"
BY_CELL = "# all kept, * + : some, . evicted, blank to come"
ROWS = 32


def show_step(plan: "CachePlan", step: int, max_cells: int) -> str:
    """The positions up to a step: those that a cache holds once it has been appended."""
    step = check_step(plan, step)
    gone = gone_at(plan)[: step + 1]
    return show_held(plan, np.flatnonzero(gone > step), step + 1, max_cells)


def show_held(plan: "CachePlan", held: np.ndarray, count: int, max_cells: int) -> str:
    """The positions [held] that are in a cache of `count` tokens."""
    cell = _cell(plan, max_cells)
    title = (
        f"{count:,} of {plan.length:,} positions: {len(held):,} kept, {count - len(held):,} evicted; "
        f"{plan.capacity:,} slots"
    )
    row = _row(plan, held, count, cell)
    return "\n".join(line.rstrip() for line in (title, numbers_above(plan.length, cell, count=4), row, _legend(cell)))


def show_all(plan: "CachePlan", max_cells: int) -> str:
    """Every step downwards, or one of so many, and what is kept after it."""
    cell, skip = _cell(plan, max_cells), max(1, -(-plan.length // ROWS))
    steps = [min(first + skip, plan.length) - 1 for first in range(0, plan.length, skip)]
    edge, gone = len(f"{plan.length - 1:,}"), gone_at(plan)
    rows = [f"{step:>{edge},} {_row(plan, _held(gone, step), step + 1, cell)}" for step in steps]
    lines = [
        str(plan),
        " " * (edge + 1) + numbers_above(plan.length, cell, count=4),
        *rows,
        f"after each step: {_legend(cell)}",
    ]
    return "\n".join(line.rstrip() for line in lines)


def gone_at(plan: "CachePlan") -> np.ndarray:
    """The step [length] at which each key's slot is taken by another; -1: never stored, the length: kept to the end."""
    check_drawn(plan)
    key = np.arange(plan.length)
    slot = slot_of(Slots(plan.capacity, plan.ring, plan.pinned, plan.table), key)
    stored = (
        (slot >= 0) & (plan.capacity > 0) & (True if plan.end is None else plan.outline.ends_at(plan.end, key) >= key)
    )
    gone = np.where(stored, plan.length, -1)
    order = np.lexsort((key[stored], slot[stored]))
    kept, places = key[stored][order], slot[stored][order]
    same = places[1:] == places[:-1]
    gone[kept[:-1][same]] = kept[1:][same]
    return gone


def check_drawn(plan: "CachePlan") -> None:
    """Pictures list every position."""
    if plan.length > MOST_LISTED:
        raise ValueError(
            f"A picture of {plan!r} lists each of them, which takes about {plan.length * BYTES_EACH:,} bytes. At most "
            f"{MOST_LISTED:,} positions are drawn: draw a shorter plan of the same mask."
        )


def check_step(plan: "CachePlan", step: int) -> int:
    """A step of the plan."""
    step = check_static_size("step", step, 0)
    if step >= plan.length:
        raise ValueError(f"step={step} is out of range: the plan has {plan.length} positions, 0 to {plan.length - 1}.")
    return step


def _cell(plan: "CachePlan", max_cells: int) -> int:
    """Positions to a character."""
    return max(1, -(-plan.length // check_static_size("max_cells", max_cells, 1)))


def _held(gone: np.ndarray, step: int) -> np.ndarray:
    return np.flatnonzero(gone[: step + 1] > step)


def _row(plan: "CachePlan", held: np.ndarray, count: int, cell: int) -> str:
    """One character per cell of positions that have come."""
    cells = -(-count // cell)
    kept = np.bincount(held // cell, minlength=cells)
    come = np.minimum(cell, count - cell * np.arange(cells))
    between = np.clip((kept / come * 2 + 0.5).astype(int) + 1, 1, 3)
    levels = np.where(kept == come, 4, np.where(kept > 0, between, 0))
    return "".join(INK[level] for level in levels)


def _legend(cell: int) -> str:
    return LEGEND if cell == 1 else f"each {cell:,} positions: {BY_CELL}"
