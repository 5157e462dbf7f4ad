"""The grid under every picture: which cells of a mask hold no, some, or only allowed pairs.

A cell is a rectangle of slots. The mask is asked about the tiles that its spans name, and a cell is settled once an
allowed and a forbidden pair of it are known, or what all its pairs are. Tiles that leave their cell in doubt are split,
down to single pairs. So the work follows the edges of what is allowed, and a T×S array never exists.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np

from longspan.layout import EMPTY, FULL, PARTIAL, BlockLayout, plan_layout
from longspan.masks import Mask
from longspan.masks.sides import Side, Slots, Tiles

LEAF = 16  # slots along a tile that is read pair by pair instead of being split
FINENESS = (8192, 2048, 512)  # tiles along a side that are looked at first; the finest of which there are few
FEW = 1 << 18
AT_ONCE = 1 << 14  # tiles that are looked at together


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


class Which(TypedDict, total=False):
    """What is looked at; 0 and slots by default. Where rows or heads are all alike, any number names them."""

    batch: int
    head: int
    q_positions: Any
    kv_positions: Any


def grid_of(mask: Mask, q_len: int, kv_len: int, q_cell: int, kv_cell: int, **which: Unpack[Which]) -> Grid:
    """The grid of one batch row and head (host only)."""
    search = start(mask, q_len, kv_len, q_cell, kv_cell, **which)
    if search.layout is not None:
        _settle(search, _first_look(search, search.layout))
    return Grid(search.allowed.reshape(search.shape), ~search.forbidden.reshape(search.shape), q_cell, kv_cell)


def start(mask: Mask, q_len: int, kv_len: int, q_cell: int, kv_cell: int, **which: Unpack[Which]) -> "Search":
    """A search that has found nothing yet."""
    batch, head = plane = which.get("batch", 0), which.get("head", 0)
    positions = which.get("q_positions"), which.get("kv_positions")
    q, kv = mask._sides(q_len, kv_len, *positions, np)
    for name, value, size in (("batch", batch, q.batch.size), ("head", head, q.head.size)):
        if not 0 <= value < size and size > 1:
            raise IndexError(f"{name}={value} is out of range: the mask tells {size} apart.")
    one_row, one_head = (np.full((1, 1, 1, 1), value, np.int32) for value in (batch, head))
    q, kv = (side.at(batch=one_row, head=one_head).remembering() for side in (q, kv))
    cells = -(-q_len // q_cell) * -(-kv_len // kv_cell)
    layout = _layout(mask, (q_len, q_cell), (kv_len, kv_cell), positions, plane) if cells else None
    allowed, forbidden = np.zeros((2, cells), bool)
    return Search(mask, q, kv, q_cell, kv_cell, allowed, forbidden, layout, plane)


class Search(NamedTuple):
    """A mask, where it is looked at, and what is known so far of each cell, row after row."""

    mask: Mask
    q: Side
    kv: Side
    q_cell: int
    kv_cell: int
    allowed: np.ndarray  # bool: an allowed pair was found
    forbidden: np.ndarray
    layout: BlockLayout | None  # the tiles that may hold allowed pairs; None if there are no cells
    plane: tuple[int, int]  # batch row and head

    def looks(self) -> Iterator["Parts"]:
        """The parts of the layout's tiles, some at a time."""
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
    """Tiles of one size, each cut to one cell: a tile that touches several cells has a part in each."""

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
    """The finest tiles that are few, none larger than a cell; each side is (length, cell)."""
    layout, (q_at, kv_at) = None, positions
    for count in FINENESS:
        sizes = [_tile(length, cell, count) for length, cell in (q, kv)]
        if layout is None or sizes != [layout.q_tile, layout.kv_tile]:
            layout = plan_layout(mask, q[0], kv[0], *sizes, q_positions=q_at, kv_positions=kv_at, xp=np)
            if most_visits(layout, *plane) <= FEW:
                break
    assert layout is not None
    return layout


def _tile(length: int, cell: int, count: int) -> int:
    """A power of two, so that tiles can be halved, and no larger than a cell, so that it touches two at most."""
    wanted = max(LEAF, -(-length // count))
    return min(1 << (wanted - 1).bit_length(), 1 << (cell.bit_length() - 1))


def most_visits(layout: BlockLayout, batch: int, head: int) -> int:
    """A bound on the tiles that a plane of a layout visits, without a list of them."""
    arrays = (layout.starts, layout.stops, layout.common_count)
    starts, stops, common = (
        0 if a is None else np.asarray(a[min(batch, a.shape[0] - 1), min(head, a.shape[1] - 1)]) for a in arrays
    )
    return int(np.maximum(stops - starts, 0).sum(dtype=np.int64)) + int(common) * layout.q_tiles


def _first_look(search: Search, layout: BlockLayout) -> Parts:
    """Looks at all tiles of a layout, and returns those in doubt. What the layout leaves out is forbidden."""
    sizes = layout.q_tile, layout.kv_tile
    visits, doubtful = np.zeros(search.allowed.size, np.int64), []
    for parts in search.looks():
        visits += np.bincount(parts.cell, minlength=visits.size)
        doubtful.append(_look(search, _unsettled(search, parts)))
    touched = np.multiply.outer(
        _tiles_touched(search.q.length, search.q_cell, layout.q_tile),
        _tiles_touched(search.kv.length, search.kv_cell, layout.kv_tile),
    )
    search.forbidden[visits < touched.reshape(-1)] = True
    nothing = np.zeros(0, np.int64)
    return Parts(*sizes, *(np.concatenate([nothing, *(parts[i] for parts in doubtful)]) for i in (2, 3, 4)))


def _tiles_touched(length: int, cell: int, size: int) -> np.ndarray:
    """How many tiles of a side each of its cells touches."""
    starts = np.arange(0, length, cell)
    return -(-np.minimum(starts + cell, length) // size) - starts // size


def cut_to_cells(search: Search, q_size: int, kv_size: int, q: np.ndarray, kv: np.ndarray) -> Parts:
    """The parts of tiles that are no larger than cells."""
    q_cells = _first_and_last(q * q_size, np.minimum((q + 1) * q_size, search.q.length), search.q_cell)
    kv_cells = _first_and_last(kv * kv_size, np.minimum((kv + 1) * kv_size, search.kv.length), search.kv_cell)
    which, row, column = _each_with_each(q_cells, kv_cells)
    return Parts(q_size, kv_size, q[which], kv[which], row * search.columns + column)


def _settle(search: Search, doubtful: Parts) -> None:
    """Splits the tiles in doubt until every cell is known; depth first, so that only a few are held at a time."""
    stack = [doubtful.take(_one_per_cell_first(doubtful.cell))]
    while stack:
        parts = _unsettled(search, stack.pop())
        now, later = parts.take(slice(AT_ONCE // 4)), parts.take(slice(AT_ONCE // 4, None))
        if len(later.cell):
            stack.append(later)
        if len(now.cell):
            stack.append(_look(search, _quarters(search, now)))


def _one_per_cell_first(cells: np.ndarray) -> np.ndarray:
    """An order that goes round the cells, because one part may settle its cell."""
    order = np.argsort(cells, kind="stable")
    ranked = cells[order]
    turn = np.arange(len(cells)) - np.searchsorted(ranked, ranked)
    return order[np.argsort(turn, kind="stable")]


def _quarters(search: Search, parts: Parts) -> Parts:
    """Parts of half the tile size along each side that is longer than a leaf."""
    q_size, kv_size = (size if size <= LEAF else size // 2 for size in (parts.q_size, parts.kv_size))
    (q_start, q_stop), (kv_start, kv_stop) = edges(search, parts)
    halves = _first_and_last(q_start, q_stop, q_size), _first_and_last(kv_start, kv_stop, kv_size)
    which, q, kv = _each_with_each(*halves)
    return Parts(q_size, kv_size, q, kv, parts.cell[which])


def _unsettled(search: Search, parts: Parts) -> Parts:
    """The parts of cells whose kind is not known."""
    return parts.take(~(search.allowed[parts.cell] & search.forbidden[parts.cell]))


def _look(search: Search, parts: Parts) -> Parts:
    """Notes what the mask says of some parts, and returns those that are still in doubt."""
    if not len(parts.cell):
        return parts
    some, every = classified(search, parts)
    search.allowed[parts.cell[every]] = True
    search.forbidden[parts.cell[~some]] = True
    partial = _unsettled(search, parts.take(some & ~every))
    if len(partial.cell):
        _read(search, partial)
    return partial.take(slice(0)) if partial.are_leaves else _unsettled(search, partial)


def classified(search: Search, parts: Parts) -> tuple[np.ndarray, np.ndarray]:
    """(some, every) as the mask bounds each part's tile."""
    i, j = (numbers.astype(np.int32).reshape(1, 1, -1, 1) for numbers in (parts.q, parts.kv))
    kinds = search.mask.classify(Tiles(search.q, parts.q_size, i), Tiles(search.kv, parts.kv_size, j))
    some, every = (np.broadcast_to(np.asarray(kind), i.shape).reshape(-1) for kind in kinds)
    return some, every


def _read(search: Search, parts: Parts) -> None:
    """Notes what the pairs of some parts are: all pairs of leaves, of others the corners, which settle most edges."""
    q, kv = (
        within(start, stop, size) if parts.are_leaves else np.stack([start, stop - 1], axis=1)
        for (start, stop), size in zip(edges(search, parts), (parts.q_size, parts.kv_size), strict=True)
    )
    truth = truths(search, q, kv)
    search.allowed[parts.cell[truth.any(axis=(1, 2))]] = True
    search.forbidden[parts.cell[~truth.all(axis=(1, 2))]] = True


def truths(search: Search, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
    """What the pairs of some parts are, bool [parts, queries, keys], by the slots [parts, n] of each side."""
    count, padded = len(q), 1 << (len(q) - 1).bit_length()  # of few sizes, as rules in jax.numpy compile for each
    q, kv = (np.pad(a, ((0, padded - count), (0, 0)), mode="edge").astype(np.int32) for a in (q, kv))
    # The head axis runs over the parts.
    slots = Slots(search.q, q.reshape(1, padded, -1, 1)), Slots(search.kv, kv.reshape(1, padded, 1, -1))
    truth = np.asarray(search.mask.allowed(*slots))
    return np.broadcast_to(truth, (1, padded, q.shape[1], kv.shape[1]))[0, :count]


def edges(search: Search, parts: Parts) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The slots of each part, from start to stop, on both sides."""
    row, column = np.divmod(parts.cell, search.columns)
    return (
        _overlap(parts.q, parts.q_size, row, search.q_cell, search.q.length),
        _overlap(parts.kv, parts.kv_size, column, search.kv_cell, search.kv.length),
    )


def _overlap(tile: np.ndarray, size: int, cell: np.ndarray, cell_size: int, length: int):
    stop = np.minimum((tile + 1) * size, (cell + 1) * cell_size)
    return np.maximum(tile * size, cell * cell_size), np.minimum(stop, length)


def within(start: np.ndarray, stop: np.ndarray, size: int) -> np.ndarray:
    """The slots of each part [parts, size]; a shorter one repeats its last."""
    return np.minimum(start[:, None] + np.arange(size), stop[:, None] - 1)


def _first_and_last(start: np.ndarray, stop: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The pieces of `size` slots in which each run of slots begins and ends."""
    return start // size, (stop - 1) // size


def _each_with_each(q: tuple[np.ndarray, np.ndarray], kv: tuple[np.ndarray, np.ndarray]):
    """(which, q, kv): for runs of one or two numbers on both sides, every number of one with every one of the other."""
    q_two, kv_two = q[0] < q[1], kv[0] < kv[1]
    which = [np.flatnonzero(wanted) for wanted in (np.ones_like(q_two), kv_two, q_two, q_two & kv_two)]
    numbers = [(q[i][w], kv[j][w]) for (i, j), w in zip(np.ndindex(2, 2), which, strict=True)]
    return np.concatenate(which), *(np.concatenate(side) for side in zip(*numbers, strict=True))
