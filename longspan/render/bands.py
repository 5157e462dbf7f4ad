"""Segment ids along the edges of a picture: one id per cell."""

from typing import Any, NamedTuple

import numpy as np

PADDING = -1  # a cell that holds only padding
SEVERAL = None  # a cell that holds tokens of several documents
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
GREY = "#8a8a8a"


class Bands(NamedTuple):
    """The segment ids of queries and keys by cell: an id, `PADDING`, or `SEVERAL`."""

    q: list[int | None]
    kv: list[int | None]

    @classmethod
    def of(cls, ids: tuple[Any, Any] | None, batch: int, q_cell: int, kv_cell: int) -> "Bands | None":
        """The bands of one batch row of ids [B or 1, T] and [B or 1, S]; None for a mask without ids."""
        if ids is None:
            return None
        q_ids, kv_ids = ids
        return cls(by_cell(_batch_row(q_ids, batch), q_cell), by_cell(_batch_row(kv_ids, batch), kv_cell))


def by_cell(ids: np.ndarray, cell: int) -> list[int | None]:
    """The id of each cell of `cell` slots."""
    if not len(ids):
        return []
    starts = np.arange(0, len(ids), cell)
    lowest, highest = np.minimum.reduceat(ids, starts), np.maximum.reduceat(ids, starts)
    return [_id_of_cell(int(low), int(high)) for low, high in zip(lowest, highest, strict=True)]


def colour(cell_id: int | None) -> str | None:
    """The colour of a cell's id; None for padding. Neighbouring documents have different colours."""
    if cell_id is None:  # SEVERAL
        return GREY
    if cell_id < 0:
        return None
    return COLOURS[cell_id % len(COLOURS)]


def _batch_row(ids: Any, batch: int) -> np.ndarray:
    return np.asarray(ids)[min(batch, ids.shape[0] - 1)]


def _id_of_cell(lowest: int, highest: int) -> int | None:
    if highest < 0:
        return PADDING
    if lowest != highest:
        return SEVERAL
    return lowest
