"""Pictures of a `MaskInfo`, for the terminal and for notebooks. They run on the host and never hold T×S pairs."""

import html
from itertools import pairwise
from typing import NamedTuple, no_type_check

import jax
import numpy as np

from longspan._checks import check_choice
from longspan.maskinfo.bound import Bound
from longspan.maskinfo.checks import check_size, is_traced
from longspan.masks.sides import Side, Slots, Tiles, two_sides

EMPTY, PARTIAL, FULL = 0, 1, 2
INK = {"unicode": ("  ", "░░", "██"), "ascii": ("  ", "..", "##")}
AT_ONCE = 1 << 20  # how many pairs are looked at together
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")


class Grid(NamedTuple):
    """One row and head of a mask by blocks, and the ids along its edges: a number, -1 for padding, None if mixed."""

    kinds: np.ndarray
    q_ids: list[int | None]
    kv_ids: list[int | None]
    q_block: int
    kv_block: int


class Pictures(Bound):
    """The methods that draw."""

    @no_type_check
    def visualize(
        self,
        block_size: int | tuple[int, int] = 32,
        batch: int = 0,
        head: int = 0,
        fit_in_screen: bool = True,
        max_rows: int = 32,
        max_cols: int = 64,
        charset: str = "unicode",
        show_segments: bool = True,
        return_str: bool = False,
    ) -> str | None:
        """Prints the mask by blocks: full `██` (`##`), partial `░░` (`..`), empty; ids along the edges.

        Args:
            block_size: slots in a block, or (queries, keys).
            batch: which batch row.
            head: which head.
            fit_in_screen: whether to use larger blocks if there are more than `max_rows` x `max_cols`.
            max_rows: blocks on the screen, downwards.
            max_cols: blocks on the screen, across.
            charset: "unicode" or "ascii".
            show_segments: whether to write ids at the left and on top: `PAD` is padding, `MIX` and `??` several ids.
            return_str: return the picture instead of printing it.

        Example:
            >>> info = ls.MaskInfo.from_segments(np.array([[0, 0, 0, 0, 1, 1, -1]])).apply_causal()
            >>> info.visualize(block_size=2, charset="ascii")
            MaskInfo batch 0, head 0: 7 queries x 7 keys in blocks of 2 x 2
                 000001
                +--------+
               0|..      |
               0|##..    |
               1|    ..  |
             PAD|        |
                +--------+
            ## all, .. some, blank none; ids of queries left, of keys above: PAD padding, MIX and ?? several
        """
        check_choice("charset", charset, tuple(INK))
        grid = self._grid(block_size, batch, head, *((max_rows, max_cols) if fit_in_screen else (None, None)))
        text = _text(grid, INK[charset], show_segments)
        title = (
            f"{type(self).__name__} batch {batch}, head {head}: {self.q_len} queries x {self.kv_len} keys in blocks of "
            f"{grid.q_block} x {grid.kv_block}"
        )
        _, some, every = INK[charset]
        legend = f"{every} all, {some} some, blank none"
        if show_segments:
            legend += "; ids of queries left, of keys above: PAD padding, MIX and ?? several"
        picture = "\n".join([title, *text, legend])
        if return_str:
            return picture
        print(picture)
        return None

    @no_type_check
    def to_html(self, batch: int = 0, head: int = 0, *, most: int = 64) -> str:
        """A picture and a table of facts as HTML, without scripts; notebooks show it by themselves.

        Args:
            batch: which batch row.
            head: which head.
            most: blocks in the picture, along each side.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0, -1]])).to_html()[:25]
            '<div class="longspan-mask'
        """
        grid = self._grid(1, batch, head, most, most)
        facts = {
            "mask": repr(self.mask),
            "batch, queries, keys": " x ".join(map(str, self.shape)),
            "shown": f"batch {batch}, head {head}, blocks of {grid.q_block} x {grid.kv_block}",
            "applied": ", ".join(self._applied) or "nothing",
        }
        rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in facts.items())
        return f'<div class="longspan-mask">{_svg(grid)}<table>{rows}</table></div>'

    def _repr_html_(self) -> str | None:
        return None if any(map(is_traced, jax.tree.leaves(self))) or not self.batch_size else self.to_html()

    def _grid(self, block_size, batch: int, head: int, max_rows: int | None, max_cols: int | None) -> Grid:
        if any(map(is_traced, jax.tree.leaves(self))):
            raise TypeError("A picture needs values, which are not known while tracing. Draw outside jit.")
        for name, value, size in (("batch", batch, self.batch_size), ("head", head, self.mask.heads)):
            if not 0 <= value < size:
                raise IndexError(f"{name}={value} is out of range: the mask has {size}.")
        pair = block_size if isinstance(block_size, tuple) else (block_size, block_size)
        q_block, kv_block = (
            _block(check_size("block_size", block, least=1), length, most)
            for block, length, most in zip(pair, (self.q_len, self.kv_len), (max_rows, max_cols), strict=True)
        )
        sides = self._sides(batch, head)
        kinds = _kinds(self.mask, *sides, q_block, kv_block)
        q_ids, kv_ids = (
            [_one_id(row[at : at + block]) for at in range(0, len(row), block)]
            for row, block in (
                (np.asarray(self.q_segment_ids[batch]), q_block),
                (np.asarray(self.kv_segment_ids[batch]), kv_block),
            )
        )
        return Grid(kinds, q_ids, kv_ids, q_block, kv_block)

    def _sides(self, batch: int, head: int) -> tuple[Side, Side]:
        positions = (None if p is None else np.asarray(p) for p in (self.q_positions, self.kv_positions))
        q, kv = two_sides(
            self.q_len,
            self.kv_len,
            batch=self.batch_size,
            heads=self.mask.heads,
            **dict(zip(("q_positions", "kv_positions"), positions, strict=True)),
            xp=np,
        )
        here = dict(batch=q.batch[batch : batch + 1], head=q.head[:, head : head + 1])
        return q.at(**here), kv.at(**here)


def _block(block: int, length: int, most: int | None) -> int:
    """The block size, made a multiple of itself if there would be too many."""
    blocks = -(-length // block)
    return block if most is None or blocks <= most else block * -(-blocks // check_size("max_rows, max_cols", most, 1))


def _kinds(mask, q: Side, kv: Side, q_block: int, kv_block: int) -> np.ndarray:
    """EMPTY, PARTIAL or FULL for each block: what the rule promises, and where it does not, its cells."""
    shape = (-(-q.length // q_block), -(-kv.length // kv_block))
    some, every = (
        np.broadcast_to(np.asarray(k), (1, 1, *shape))[0, 0]
        for k in mask.classify(Tiles(q, q_block, q.tiles(q_block).index), Tiles(kv, kv_block, kv.tiles(kv_block).index))
    )
    kinds = np.where(every, FULL, np.where(some, PARTIAL, EMPTY))
    for i, j in np.argwhere(kinds == PARTIAL):
        kinds[i, j] = _look(mask, q, kv, int(i) * q_block, int(j) * kv_block, q_block, kv_block)
    return kinds


def _look(mask, q: Side, kv: Side, q_start: int, kv_start: int, q_block: int, kv_block: int) -> int:
    """The kind of one block by its cells, some rows at a time, until it has both kinds of them."""
    rows, columns = min(q_block, q.length - q_start), min(kv_block, kv.length - kv_start)
    keys = kv.slots(np.int32(kv_start), columns)
    step = max(1, AT_ONCE // columns)
    some, every = False, True
    for at in range(0, rows, step):
        size = min(step, rows - at)
        queries: Slots = q.slots(np.int32(q_start + at), size)
        truth = np.broadcast_to(np.asarray(mask.allowed(queries, keys)), (1, 1, size, columns))
        some, every = some or bool(truth.any()), every and bool(truth.all())
        if some and not every:
            return PARTIAL
    return FULL if some else EMPTY


def _one_id(ids: np.ndarray) -> int | None:
    first = int(ids[0])
    if np.all(ids < 0):
        return -1
    return first if np.all(ids == first) else None


def _text(grid: Grid, ink: tuple[str, str, str], show_segments: bool) -> list[str]:
    rows = ["".join(ink[kind] for kind in row) for row in grid.kinds]
    rule = "+" + "-" * (2 * grid.kinds.shape[1]) + "+"
    if not show_segments:
        return [rule, *(f"|{row}|" for row in rows), rule]
    labels = ["MIX" if i is None else "PAD" if i < 0 else str(i) for i in grid.q_ids]
    width = max([4, *map(len, labels)])
    # Two characters a block, so only the last two digits of an id fit.
    top = "".join("??" if i is None else "  " if i < 0 else f"{i % 100:02d}" for i in grid.kv_ids).rstrip()
    edge = " " * width
    body = [f"{label:>{width}}|{row}|" for label, row in zip(labels, rows, strict=True)]
    return [f"{edge} {top}".rstrip(), edge + rule, *body, edge + rule]


def _svg(grid: Grid) -> str:
    """Runs of equal blocks as rectangles, coloured by the query's id."""
    cell = 6
    height, width = (n * cell for n in grid.kinds.shape)
    shapes = []
    for y, (row, name) in enumerate(zip(grid.kinds, grid.q_ids, strict=True)):
        colour = "#555555" if name is None or name < 0 else COLOURS[name % len(COLOURS)]
        edges = [0, *(np.flatnonzero(np.diff(row)) + 1), len(row)] if len(row) else [0]
        for start, stop in pairwise(edges):
            if row[start] != EMPTY:
                opacity = 1 if row[start] == FULL else 0.45
                place = f'x="{start * cell}" y="{y * cell}" width="{(stop - start) * cell}" height="{cell}"'
                shapes.append(f'<rect {place} fill="{colour}" fill-opacity="{opacity}"/>')
    frame = f'<rect width="{width}" height="{height}" fill="none" stroke="#999999"/>'
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(shapes)}{frame}</svg>'
