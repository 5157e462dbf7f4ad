"""Where a visit lies in arrays: its batch row, head and tiles."""

from typing import Any, NamedTuple

from jax.experimental import pallas as pl

LANES = 128  # of a vector register


class Visit(NamedTuple):
    """The place of one visit: batch row, head of the grid, the row's own tile, and the visited tile."""

    b: Any
    h: Any
    i: Any
    j: Any
    layer: Any = None  # of a stack of layers


def place_in(size: int, index: Any) -> Any:
    """The index along an axis that may have size 1 for all indices."""
    return index if size > 1 else 0


def tile_slice(index: Any, size: int) -> Any:
    """The slots of a tile."""
    return pl.ds(pl.multiple_of(index * size, size), size)
