"""Text pictures of the keys that a plan keeps and evicts, for one step or for a whole generation."""

from typing import TYPE_CHECKING

import numpy as np

from longspan.cache.outline import BYTES_EACH, MAX_LISTED
from longspan.cache.slots import SlotAllocation, slot_of
from longspan.checks import check_static_size
from longspan.render.text import INK, numbers_above

if TYPE_CHECKING:
    from longspan.cache.plan import CachePlan

LEGEND = "# kept, . evicted, blank if not yet appended"
CELL_LEGEND = "# all kept, '*' '+' ':' some kept, . all evicted, blank if not yet appended"
MAX_ROWS = 32


def show_step(plan: "CachePlan", step: int, max_cells: int) -> str:
    """The positions up to a step, and those that a cache holds after it."""
    step = check_step(plan, step)
    evicted_at = eviction_steps(plan)[: step + 1]
    return show_kept(plan, np.flatnonzero(evicted_at > step), step + 1, max_cells)


def show_kept(plan: "CachePlan", kept: np.ndarray, count: int, max_cells: int) -> str:
    """The positions `kept` in a cache of `count` tokens."""
    cell = _cell(plan, max_cells)
    title = (
        f"{count:,} of {plan.length:,} positions: {len(kept):,} kept, {count - len(kept):,} evicted; "
        f"{plan.capacity:,} slots"
    )
    row = _row(kept, count, cell)
    return "\n".join(line.rstrip() for line in (title, numbers_above(plan.length, cell, count=4), row, _legend(cell)))


def show_all(plan: "CachePlan", max_cells: int) -> str:
    """The positions kept after each step, one row per step; some steps are left out if there are too many."""
    cell, stride = _cell(plan, max_cells), max(1, -(-plan.length // MAX_ROWS))
    steps = [min(first + stride, plan.length) - 1 for first in range(0, plan.length, stride)]
    width, evicted_at = len(f"{plan.length - 1:,}"), eviction_steps(plan)
    rows = []
    for step in steps:
        kept = np.flatnonzero(evicted_at[: step + 1] > step)
        rows.append(f"{step:>{width},} {_row(kept, step + 1, cell)}")
    lines = [
        str(plan),
        " " * (width + 1) + numbers_above(plan.length, cell, count=4),
        *rows,
        f"each row is the cache after the step at its left; {_legend(cell)}",
    ]
    return "\n".join(line.rstrip() for line in lines)


def eviction_steps(plan: "CachePlan") -> np.ndarray:
    """The step at which each key is overwritten, [length]; -1: it is never stored, `length`: it is kept to the end."""
    check_drawn(plan)
    key = np.arange(plan.length)
    slot = slot_of(SlotAllocation(plan.capacity, plan.ring, plan.pinned, plan.table), key)
    stored = (slot >= 0) & (plan.capacity > 0)
    if plan.end is not None:
        stored &= plan.outline.ends_at(plan.end, key) >= key
    evicted_at = np.where(stored, plan.length, -1)
    order = np.lexsort((key[stored], slot[stored]))
    by_slot, slots = key[stored][order], slot[stored][order]
    same = slots[1:] == slots[:-1]
    evicted_at[by_slot[:-1][same]] = by_slot[1:][same]
    return evicted_at


def check_drawn(plan: "CachePlan") -> None:
    """Pictures list every position."""
    if plan.length > MAX_LISTED:
        raise ValueError(
            f"A picture of {plan!r} lists every position, which takes about {plan.length * BYTES_EACH:,} bytes. The "
            f"limit is {MAX_LISTED:,} positions. Draw a shorter plan of the same mask."
        )


def check_step(plan: "CachePlan", step: int) -> int:
    """A step of the plan."""
    step = check_static_size("step", step, 0)
    if step >= plan.length:
        raise ValueError(f"step={step} is out of range: the plan has {plan.length} positions, 0 to {plan.length - 1}.")
    return step


def _cell(plan: "CachePlan", max_cells: int) -> int:
    """The number of positions in a cell."""
    return max(1, -(-plan.length // check_static_size("max_cells", max_cells, 1)))


def _row(kept: np.ndarray, count: int, cell: int) -> str:
    """One character for each cell of the first `count` positions."""
    cells = -(-count // cell)
    kept_in_cell = np.bincount(kept // cell, minlength=cells)
    size = np.minimum(cell, count - cell * np.arange(cells))
    between = np.clip((kept_in_cell / size * 2 + 0.5).astype(int) + 1, 1, 3)
    levels = np.where(kept_in_cell == size, 4, np.where(kept_in_cell > 0, between, 0))
    return "".join(INK[level] for level in levels)


def _legend(cell: int) -> str:
    if cell == 1:
        return LEGEND
    return f"one character is {cell:,} positions: {CELL_LEGEND}"
