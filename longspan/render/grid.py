"""The grid under every picture: which cells of a mask hold no, some, or only allowed pairs.

A cell is a rectangle of slots. The search classifies the tiles that the mask's spans list. A cell is settled once one
allowed and one forbidden pair of it are known, or once all its pairs are known to be alike. Tiles that do not settle
their cell are split, down to single pairs. The work therefore grows with the edges of the mask, and a T×S array never
exists.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np

from longspan.layout import EMPTY, FULL, PARTIAL, BlockLayout, plan_layout
from longspan.masks import Mask
from longspan.masks.sides import Side, Slots, Tiles

LEAF = 16  # slots along a tile that is read pair by pair instead of being split
FINENESS = (8192, 2048, 512)  # tiles along a side at the start of the search: the first count that makes few tiles
FEW = 1 << 18  # tiles
AT_ONCE = 1 << 14  # tiles that are classified together


class Grid(NamedTuple):
    """One batch row and head of a mask in cells of `q_cell` x `kv_cell` slots; arrays are bool [rows, columns]."""

    some: np.ndarray  # a pair of the cell is allowed
    every: np.ndarray  # all pairs of the cell are allowed
    q_cell: int
    kv_cell: int

    @property
    def kinds(self) -> np.ndarray:
        """EMPTY, PARTIAL or FULL for each cell."""
        return np.where(self.every, FULL, np.where(self.some, PARTIAL, EMPTY))


class Plane(TypedDict, total=False):
    """The batch row and head to draw, 0 by default, and the positions, by default the slots.

    Any number is legal for `batch` or `head` if all rows or all heads are alike.
    """

    batch: int
    head: int
    q_positions: Any
    kv_positions: Any


def grid_of(mask: Mask, q_len: int, kv_len: int, q_cell: int, kv_cell: int, **plane: Unpack[Plane]) -> Grid:
    """The grid of one batch row and head (host only)."""
    search = start(mask, q_len, kv_len, q_cell, kv_cell, **plane)
    if search.layout is not None:
        _settle(search, _first_look(search, search.layout))
    return Grid(search.allowed.reshape(search.shape), ~search.forbidden.reshape(search.shape), q_cell, kv_cell)


def start(mask: Mask, q_len: int, kv_len: int, q_cell: int, kv_cell: int, **plane: Unpack[Plane]) -> "Search":
    """A search that has found no pairs yet."""
    batch, head = plane.get("batch", 0), plane.get("head", 0)
    positions = plane.get("q_positions"), plane.get("kv_positions")
    q, kv = mask._sides(q_len, kv_len, *positions, np)
    _check_index("batch", batch, q.batch.size, "batch rows")
    _check_index("head", head, q.head.size, "heads")
    place = dict(batch=np.full((1, 1, 1, 1), batch, np.int32), head=np.full((1, 1, 1, 1), head, np.int32))
    q, kv = q.at(**place).remembering(), kv.at(**place).remembering()
    cells = -(-q_len // q_cell) * -(-kv_len // kv_cell)
    layout = None
    if cells:
        layout = _layout(mask, (q_len, q_cell), (kv_len, kv_cell), positions, (batch, head))
    allowed, forbidden = np.zeros((2, cells), bool)
    return Search(mask, q, kv, q_cell, kv_cell, allowed, forbidden, layout, (batch, head))


def _check_index(name: str, value: int, size: int, unit: str) -> None:
    if not 0 <= value < size and size > 1:
        raise IndexError(f"{name}={value} is out of range: the mask has {size} {unit}, 0 to {size - 1}.")


class Search(NamedTuple):
    """A mask, the batch row and head that are searched, and the pairs found so far in each cell, row by row."""

    mask: Mask
    q: Side
    kv: Side
    q_cell: int
    kv_cell: int
    allowed: np.ndarray  # bool: an allowed pair was found
    forbidden: np.ndarray  # bool: a forbidden pair was found
    layout: BlockLayout | None  # the tiles that may hold allowed pairs; None if there are no cells
    plane: tuple[int, int]  # batch row and head

    def layout_parts(self) -> Iterator["Parts"]:
        """The parts of the layout's tiles, about `AT_ONCE` at a time."""
        if self.layout is None:
            return
        for rows, tiles in self.layout.entries(*self.plane):
            for at in range(0, len(rows), AT_ONCE):
                some = rows[at : at + AT_ONCE], tiles[at : at + AT_ONCE]
                yield cut_to_cells(self, self.layout.q_tile, self.layout.kv_tile, *some)

    @property
    def shape(self) -> tuple[int, int]:
        return -(-self.q.length // self.q_cell), self.columns

    @property
    def columns(self) -> int:
        return -(-self.kv.length // self.kv_cell)


class Parts(NamedTuple):
    """Tiles of one size, each cut to one cell: a tile that overlaps several cells has a part in each."""

    q_size: int
    kv_size: int
    q: np.ndarray  # tile numbers
    kv: np.ndarray
    cell: np.ndarray

    @property
    def are_leaves(self) -> bool:
        return max(self.q_size, self.kv_size) <= LEAF

    def take(self, which: Any) -> "Parts":
        return self._replace(q=self.q[which], kv=self.kv[which], cell=self.cell[which])


def _layout(mask: Mask, q: tuple[int, int], kv: tuple[int, int], positions: Any, plane: tuple[int, int]) -> BlockLayout:
    """The layout of the finest tiles that are few, none larger than a cell; each side is (length, cell)."""
    layout, (q_positions, kv_positions) = None, positions
    for count in FINENESS:
        sizes = [_tile(length, cell, count) for length, cell in (q, kv)]
        if layout is None or sizes != [layout.q_tile, layout.kv_tile]:
            layout = plan_layout(mask, q[0], kv[0], *sizes, q_positions=q_positions, kv_positions=kv_positions, xp=np)
            if max_visits(layout, *plane) <= FEW:
                break
    assert layout is not None
    return layout


def _tile(length: int, cell: int, count: int) -> int:
    """A power of two, so that tiles can be halved, and at most a cell, so that a tile overlaps at most two cells."""
    wanted = max(LEAF, -(-length // count))
    return min(1 << (wanted - 1).bit_length(), 1 << (cell.bit_length() - 1))


def max_visits(layout: BlockLayout, batch: int, head: int) -> int:
    """An upper bound on the tiles visited in one batch row and head of a layout, without listing them."""
    starts, stops = plane_of(layout.starts, batch, head), plane_of(layout.stops, batch, head)
    visits = int(np.maximum(stops - starts, 0).sum(dtype=np.int64))
    if layout.common_count is not None:
        visits += int(plane_of(layout.common_count, batch, head)) * layout.q_tiles
    return visits


def plane_of(table: Any, batch: int, head: int) -> np.ndarray:
    """One batch row and head of a table [B or 1, N or 1, ...]."""
    return np.asarray(table[min(batch, table.shape[0] - 1), min(head, table.shape[1] - 1)])


def _first_look(search: Search, layout: BlockLayout) -> Parts:
    """Classifies all tiles of a layout and returns those in doubt. Tiles outside the layout are forbidden."""
    visits, doubtful = np.zeros(search.allowed.size, np.int64), []
    for parts in search.layout_parts():
        visits += np.bincount(parts.cell, minlength=visits.size)
        doubtful.append(_look(search, _unsettled(search, parts)))
    overlapping = np.multiply.outer(
        _tiles_per_cell(search.q.length, search.q_cell, layout.q_tile),
        _tiles_per_cell(search.kv.length, search.kv_cell, layout.kv_tile),
    )
    search.forbidden[visits < overlapping.reshape(-1)] = True
    none = np.zeros(0, np.int64)
    return Parts(
        layout.q_tile,
        layout.kv_tile,
        q=np.concatenate([none, *(parts.q for parts in doubtful)]),
        kv=np.concatenate([none, *(parts.kv for parts in doubtful)]),
        cell=np.concatenate([none, *(parts.cell for parts in doubtful)]),
    )


def _tiles_per_cell(length: int, cell: int, size: int) -> np.ndarray:
    """The number of tiles that each cell of a side overlaps."""
    starts = np.arange(0, length, cell)
    return -(-np.minimum(starts + cell, length) // size) - starts // size


def cut_to_cells(search: Search, q_size: int, kv_size: int, q: np.ndarray, kv: np.ndarray) -> Parts:
    """The parts of tiles that are no larger than cells."""
    q_cells = _first_and_last(q * q_size, np.minimum((q + 1) * q_size, search.q.length), search.q_cell)
    kv_cells = _first_and_last(kv * kv_size, np.minimum((kv + 1) * kv_size, search.kv.length), search.kv_cell)
    which, row, column = _each_with_each(q_cells, kv_cells)
    return Parts(q_size, kv_size, q[which], kv[which], row * search.columns + column)


def _settle(search: Search, doubtful: Parts) -> None:
    """Splits the tiles in doubt until every cell is settled; depth first, so that few parts exist at a time."""
    stack = [doubtful.take(_one_per_cell_first(doubtful.cell))]
    while stack:
        parts = _unsettled(search, stack.pop())
        now, later = parts.take(slice(AT_ONCE // 4)), parts.take(slice(AT_ONCE // 4, None))
        if len(later.cell):
            stack.append(later)
        if len(now.cell):
            stack.append(_look(search, _quarters(search, now)))


def _one_per_cell_first(cells: np.ndarray) -> np.ndarray:
    """An order that takes the parts of all cells in turn, because one part may settle its cell."""
    order = np.argsort(cells, kind="stable")
    ranked = cells[order]
    turn = np.arange(len(cells)) - np.searchsorted(ranked, ranked)
    return order[np.argsort(turn, kind="stable")]


def _quarters(search: Search, parts: Parts) -> Parts:
    """Parts of half the tile size along each side that is longer than a leaf."""
    q_size = parts.q_size if parts.q_size <= LEAF else parts.q_size // 2
    kv_size = parts.kv_size if parts.kv_size <= LEAF else parts.kv_size // 2
    (q_start, q_stop), (kv_start, kv_stop) = edges(search, parts)
    halves = _first_and_last(q_start, q_stop, q_size), _first_and_last(kv_start, kv_stop, kv_size)
    which, q, kv = _each_with_each(*halves)
    return Parts(q_size, kv_size, q, kv, parts.cell[which])


def _unsettled(search: Search, parts: Parts) -> Parts:
    """The parts whose cell is not known to hold both an allowed and a forbidden pair."""
    return parts.take(~(search.allowed[parts.cell] & search.forbidden[parts.cell]))


def _look(search: Search, parts: Parts) -> Parts:
    """Classifies parts, records the result, and returns the parts that are still in doubt."""
    if not len(parts.cell):
        return parts
    some, every = classified(search, parts)
    search.allowed[parts.cell[every]] = True
    search.forbidden[parts.cell[~some]] = True
    partial = _unsettled(search, parts.take(some & ~every))
    if len(partial.cell):
        _read(search, partial)
    if partial.are_leaves:  # every pair was read: none is in doubt
        return partial.take(slice(0))
    return _unsettled(search, partial)


def classified(search: Search, parts: Parts) -> tuple[np.ndarray, np.ndarray]:
    """(some, every): the bounds of `Mask.classify` for each part's tile."""
    i, j = parts.q.astype(np.int32).reshape(1, 1, -1, 1), parts.kv.astype(np.int32).reshape(1, 1, -1, 1)
    some, every = search.mask.classify(Tiles(search.q, parts.q_size, i), Tiles(search.kv, parts.kv_size, j))
    some, every = np.broadcast_to(np.asarray(some), i.shape), np.broadcast_to(np.asarray(every), i.shape)
    return some.reshape(-1), every.reshape(-1)


def _read(search: Search, parts: Parts) -> None:
    """Evaluates pairs and records the result: all pairs of leaves, else the corners, which settle most cells."""
    (q_start, q_stop), (kv_start, kv_stop) = edges(search, parts)
    if parts.are_leaves:
        q, kv = within(q_start, q_stop, parts.q_size), within(kv_start, kv_stop, parts.kv_size)
    else:
        q, kv = np.stack([q_start, q_stop - 1], axis=1), np.stack([kv_start, kv_stop - 1], axis=1)
    truth = truths(search, q, kv)
    search.allowed[parts.cell[truth.any(axis=(1, 2))]] = True
    search.forbidden[parts.cell[~truth.all(axis=(1, 2))]] = True


def truths(search: Search, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
    """Whether pairs are allowed, bool [parts, queries, keys], for slots [parts, n] of each side."""
    # Padded to a power of two: rules in jax.numpy compile once per size.
    count, padded = len(q), 1 << (len(q) - 1).bit_length()
    q = np.pad(q, ((0, padded - count), (0, 0)), mode="edge").astype(np.int32)
    kv = np.pad(kv, ((0, padded - count), (0, 0)), mode="edge").astype(np.int32)
    # The head axis runs over the parts.
    slots = Slots(search.q, q.reshape(1, padded, -1, 1)), Slots(search.kv, kv.reshape(1, padded, 1, -1))
    truth = np.asarray(search.mask.allowed(*slots))
    return np.broadcast_to(truth, (1, padded, q.shape[1], kv.shape[1]))[0, :count]


def edges(search: Search, parts: Parts) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The slots (start, stop) of each part, of queries and of keys."""
    row, column = np.divmod(parts.cell, search.columns)
    return (
        _overlap(parts.q, parts.q_size, row, search.q_cell, search.q.length),
        _overlap(parts.kv, parts.kv_size, column, search.kv_cell, search.kv.length),
    )


def _overlap(tile: np.ndarray, size: int, cell: np.ndarray, cell_size: int, length: int):
    stop = np.minimum((tile + 1) * size, (cell + 1) * cell_size)
    return np.maximum(tile * size, cell * cell_size), np.minimum(stop, length)


def within(start: np.ndarray, stop: np.ndarray, size: int) -> np.ndarray:
    """The slots of each part [parts, size]; a shorter part repeats its last slot."""
    return np.minimum(start[:, None] + np.arange(size), stop[:, None] - 1)


def _first_and_last(start: np.ndarray, stop: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of `size` slots in which each span of slots starts and ends."""
    return start // size, (stop - 1) // size


def _each_with_each(q: tuple[np.ndarray, np.ndarray], kv: tuple[np.ndarray, np.ndarray]):
    """(which, q, kv): all pairs of a query block and a key block, where each span covers one or two blocks."""
    q_two, kv_two = q[0] < q[1], kv[0] < kv[1]
    which = [np.flatnonzero(wanted) for wanted in (np.ones_like(q_two), kv_two, q_two, q_two & kv_two)]
    # In the order of `which`: (first, first), (first, last), (last, first), (last, last).
    q_blocks = [q[i][w] for i, w in zip((0, 0, 1, 1), which, strict=True)]
    kv_blocks = [kv[j][w] for j, w in zip((0, 1, 0, 1), which, strict=True)]
    return np.concatenate(which), np.concatenate(q_blocks), np.concatenate(kv_blocks)
