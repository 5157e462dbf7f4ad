"""Documents along the edges of a picture: the id of each cell."""

from typing import Any, NamedTuple

import numpy as np

PADDING, SEVERAL = -1, None
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
GREY = "#8a8a8a"


class Bands(NamedTuple):
    """The ids of both sides by cell: a number, `PADDING`, or `SEVERAL`."""

    q: list[int | None]
    kv: list[int | None]

    @classmethod
    def of(cls, ids: tuple[Any, Any] | None, batch: int, q_cell: int, kv_cell: int) -> "Bands | None":
        """The bands of one batch row of ids [B or 1, T] and [B or 1, S], if a mask has them."""
        if ids is None:
            return None
        rows = [np.asarray(side)[min(batch, side.shape[0] - 1)] for side in ids]
        return cls(*(by_cell(row, cell) for row, cell in zip(rows, (q_cell, kv_cell), strict=True)))


def by_cell(ids: np.ndarray, cell: int) -> list[int | None]:
    """The id of each cell."""
    if not len(ids):
        return []
    starts = np.arange(0, len(ids), cell)
    least, most = (f.reduceat(ids, starts) for f in (np.minimum, np.maximum))
    return [
        PADDING if high < 0 else int(low) if low == high else SEVERAL for low, high in zip(least, most, strict=True)
    ]


def colour(name: int | None) -> str | None:
    """The colour of an id: documents side by side differ, padding has none."""
    if name is None:  # several
        return GREY
    return None if name < 0 else COLOURS[name % len(COLOURS)]
