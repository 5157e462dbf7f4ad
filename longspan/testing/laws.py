"""Checks that a mask's methods agree: `allowed` for pairs, `classify` for tiles, and the layout of its spans."""

import numpy as np

from longspan.layout import plan_layout
from longspan.masks import Mask


def assert_obeys_laws(
    mask: Mask, q_len: int, kv_len: int, *, q_tile: int = 3, kv_tile: int = 2, q_positions=None, kv_positions=None
) -> None:
    """Asserts that a mask's `classify` agrees with `allowed`, and that its layout visits every allowed pair once.

    Args:
        mask: any mask, also one of your own classes.
        q_len: number of queries.
        kv_len: number of keys.
        q_tile: queries per tile.
        kv_tile: keys per tile.
        q_positions: positions of the queries, as for `attention`.
        kv_positions: positions of the keys.
    """
    positions = dict(q_positions=q_positions, kv_positions=kv_positions)
    layout = plan_layout(mask, q_len, kv_len, q_tile, kv_tile, **positions, xp=np)
    q, kv = layout.sides(xp=np)
    shape = (q.batch.size, q.head.size, q_len, kv_len)
    truth = np.broadcast_to(np.asarray(mask.allowed(q.slots(), kv.slots())), shape)
    some, every = mask.classify(q.tiles(q_tile), kv.tiles(kv_tile))
    some = np.broadcast_to(np.asarray(some), (*shape[:2], layout.q_tiles, layout.kv_tiles))
    every = np.broadcast_to(np.asarray(every), some.shape)
    visits, mirrored = _visits(layout, shape[:2]), _visits(layout.transpose(), shape[:2]).swapaxes(2, 3)
    for b, n, i, j in np.ndindex(*some.shape):
        tile = truth[b, n, i * q_tile : (i + 1) * q_tile, j * kv_tile : (j + 1) * kv_tile]
        where = f"{mask!r}, batch {b}, head {n}, tile ({i}, {j})"
        assert some[b, n, i, j] or not tile.any(), f"classify returned EMPTY, but a pair is allowed: {where}"
        assert not every[b, n, i, j] or tile.all(), f"classify returned FULL, but a pair is not allowed: {where}"
        for times, name in ((visits[b, n, i, j], "layout"), (mirrored[b, n, i, j], "transpose")):
            assert tile.any() <= times <= 1, f"the {name} visits a tile {times} times: {where}"


def _visits(layout, planes: tuple[int, int]) -> np.ndarray:
    """The number of times a layout visits each tile."""
    rows, tiles = layout.q_tiles, layout.kv_tiles
    if layout.is_transposed:
        rows, tiles = tiles, rows
    times = np.zeros((*planes, rows, tiles), int)
    for b, n in np.ndindex(*planes):
        for row, tile in layout.entries(b, n):
            np.add.at(times[b, n], (row, tile), 1)
    return times
