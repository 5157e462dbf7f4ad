"""A mask's three granularities agree: single pairs, tiles, and the tiles that a layout visits."""

import numpy as np

from longspan.layout import plan_layout
from longspan.masks import Mask


def assert_obeys_laws(
    mask: Mask, q_len: int, kv_len: int, *, q_tile: int = 3, kv_tile: int = 2, q_positions=None, kv_positions=None
) -> None:
    """Asserts that a mask's `classify` never lies and that its layout visits every allowed pair exactly once.

    Args:
        mask: any mask, yours included.
        q_len: number of queries.
        kv_len: number of keys.
        q_tile: queries in a tile.
        kv_tile: keys in a tile.
        q_positions: positions of the queries, as for `attention`.
        kv_positions: positions of the keys.
    """
    positions = dict(q_positions=q_positions, kv_positions=kv_positions)
    layout = plan_layout(mask, q_len, kv_len, q_tile, kv_tile, **positions, xp=np)
    q, kv = layout.sides(xp=np)
    shape = (q.batch.size, q.head.size, q_len, kv_len)
    truth = np.broadcast_to(np.asarray(mask.allowed(q.slots(), kv.slots())), shape)
    some, every = (
        np.broadcast_to(np.asarray(kind), (*shape[:2], layout.q_tiles, layout.kv_tiles))
        for kind in mask.classify(q.tiles(q_tile), kv.tiles(kv_tile))
    )
    visits, mirrored = _visits(layout, shape[:2]), _visits(layout.transpose(), shape[:2]).swapaxes(2, 3)
    for b, n, i, j in np.ndindex(*some.shape):
        tile = truth[b, n, i * q_tile : (i + 1) * q_tile, j * kv_tile : (j + 1) * kv_tile]
        where = f"{mask!r}, batch {b}, head {n}, tile ({i}, {j})"
        assert some[b, n, i, j] or not tile.any(), f"classify says EMPTY, but a pair is allowed: {where}"
        assert not every[b, n, i, j] or tile.all(), f"classify says FULL, but a pair is not allowed: {where}"
        for times, name in ((visits[b, n, i, j], "layout"), (mirrored[b, n, i, j], "transpose")):
            assert tile.any() <= times <= 1, f"visited {times} times by the {name}: {where}"


def _visits(layout, planes: tuple[int, int]) -> np.ndarray:
    """How often a layout visits each pair of tiles."""
    rows, tiles = (layout.kv_tiles, layout.q_tiles) if layout.is_transposed else (layout.q_tiles, layout.kv_tiles)
    times = np.zeros((*planes, rows, tiles), int)
    for b, n in np.ndindex(*planes):
        for row, tile in layout.entries(b, n):
            np.add.at(times[b, n], (row, tile), 1)
    return times
