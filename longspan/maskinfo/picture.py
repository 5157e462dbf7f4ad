"""Pictures of a `MaskInfo`, for the terminal and for notebooks. They run on the host and never need a T×S array."""

from typing import NamedTuple

import jax
import numpy as np

from longspan.array_types import no_type_check
from longspan.checks import check_choice
from longspan.maskinfo.bound import BoundMask
from longspan.maskinfo.checks import check_size, is_traced
from longspan.render import Grid, grid_of, lines
from longspan.render.bands import Bands, by_cell
from longspan.render.html import picture_html, table_html
from longspan.render.picture import picture_of

INK = {"unicode": ("  ", "░░", "██"), "ascii": ("  ", "..", "##")}


class LabelledGrid(NamedTuple):
    """A grid with the segment ids along its edges: an id, -1 for padding, None for several."""

    grid: Grid
    q_ids: list[int | None]
    kv_ids: list[int | None]

    @property
    def cell(self) -> str:
        return f"{self.grid.q_cell} x {self.grid.kv_cell}"


class Pictures(BoundMask):
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
            block_size: number of slots along a block, or (queries, keys).
            batch: which batch row.
            head: which head.
            fit_in_screen: whether to use larger blocks if there are more than `max_rows` x `max_cols`.
            max_rows: maximum number of rows of blocks.
            max_cols: maximum number of columns of blocks.
            charset: "unicode" or "ascii".
            show_segments: whether to write ids at the left and on top: `PAD` is padding, `MIX` and `??` several ids.
            return_str: whether to return the picture instead of printing it.

        Example:
            >>> info = ls.MaskInfo.from_segments(np.array([[0, 0, 0, 0, 1, 1, -1]])).apply_causal()
            >>> info.visualize(block_size=2, charset="ascii")
            Attention mask of batch 0, head 0: 7 queries x 7 keys in blocks of 2 x 2
                 000001
                +--------+
               0|..      |
               0|##..    |
               1|    ..  |
             PAD|        |
                +--------+
            ## all, .. some, blank none; left: query ids, above: key ids (PAD: padding, MIX and ??: several ids)
        """
        check_choice("charset", charset, tuple(INK))
        limits = (max_rows, max_cols) if fit_in_screen else (None, None)
        picture = self._labelled_grid(block_size, batch, head, *limits)
        title = (
            f"Attention mask of batch {batch}, head {head}: {self.q_len} queries x {self.kv_len} keys in blocks of "
            f"{picture.cell}"
        )
        _, some, every = INK[charset]
        legend = f"{every} all, {some} some, blank none"
        if show_segments:
            legend += "; left: query ids, above: key ids (PAD: padding, MIX and ??: several ids)"
        text = "\n".join([title, *_text(picture, INK[charset], show_segments), legend])
        if return_str:
            return text
        print(text)
        return None

    @no_type_check
    def to_html(self, batch: int = 0, head: int = 0, *, max_cells: int = 64) -> str:
        """A picture and a table of facts as HTML without scripts. Notebooks display it for a `MaskInfo`.

        Args:
            batch: which batch row.
            head: which head.
            max_cells: maximum number of cells along each side of the picture.

        Example:
            >>> ls.MaskInfo.from_segments(np.array([[0, 0, -1]])).to_html()[:25]
            '<div class="longspan" sty'
        """
        self._check_drawable(batch, head)
        max_cells = check_size("max_cells", max_cells, least=1)
        facts = [
            ("batch, queries, keys", " x ".join(map(str, self.shape))),
            ("shown", f"batch {batch}, head {head}"),
            ("applied", ", ".join(self._applied) or "nothing"),
        ]
        positions = dict(q_positions=self.q_positions, kv_positions=self.kv_positions)
        cells = max(1, -(-self.q_len // max_cells), -(-self.kv_len // max_cells))
        picture = picture_of(self.mask, self.q_len, self.kv_len, cells=cells, batch=batch, head=head, **positions)
        ids = (self.q_segment_ids, self.kv_segment_ids)
        return picture_html(picture._replace(bands=Bands.of(ids, batch, cells, cells)), more=table_html(facts))

    def _repr_html_(self) -> str | None:
        if any(map(is_traced, jax.tree.leaves(self))) or not self.batch_size:
            return None
        return self.to_html()

    def _check_drawable(self, batch: int, head: int) -> None:
        if any(map(is_traced, jax.tree.leaves(self))):
            raise TypeError("A picture needs values, which are unknown while tracing. Draw outside jit.")
        if not 0 <= batch < self.batch_size:
            raise IndexError(f"batch={batch} is out of range: the batch size is {self.batch_size}.")
        if not 0 <= head < self.mask.heads:
            raise IndexError(f"head={head} is out of range: the mask's number of heads is {self.mask.heads}.")

    def _labelled_grid(
        self, block_size, batch: int, head: int, max_rows: int | None, max_cols: int | None
    ) -> LabelledGrid:
        self._check_drawable(batch, head)
        q_block, kv_block = block_size if isinstance(block_size, tuple) else (block_size, block_size)
        q_block = _fitting_block(check_size("block_size", q_block, least=1), self.q_len, max_rows)
        kv_block = _fitting_block(check_size("block_size", kv_block, least=1), self.kv_len, max_cols)
        positions = dict(q_positions=self.q_positions, kv_positions=self.kv_positions)
        grid = grid_of(self.mask, self.q_len, self.kv_len, q_block, kv_block, batch=batch, head=head, **positions)
        q_ids, kv_ids = np.asarray(self.q_segment_ids[batch]), np.asarray(self.kv_segment_ids[batch])
        return LabelledGrid(grid, by_cell(q_ids, q_block), by_cell(kv_ids, kv_block))


def _fitting_block(block: int, length: int, max_blocks: int | None) -> int:
    """The smallest multiple of `block` that gives at most `max_blocks` blocks."""
    blocks = -(-length // block)
    if max_blocks is None or blocks <= max_blocks:
        return block
    return block * -(-blocks // check_size("max_rows, max_cols", max_blocks, 1))


def _text(picture: LabelledGrid, ink: tuple[str, str, str], show_segments: bool) -> list[str]:
    rows = lines(picture.grid, ink)
    rule = "+" + "-" * (2 * picture.grid.kinds.shape[1]) + "+"
    if not show_segments:
        return [rule, *(f"|{row}|" for row in rows), rule]
    labels = [_label(i, several="MIX", padding="PAD") for i in picture.q_ids]
    width = max([4, *map(len, labels)])
    # A block is two characters wide, so only the last two digits of an id fit.
    top = "".join(_label(i, several="??", padding="  ")[-2:].zfill(2) for i in picture.kv_ids).rstrip()
    edge = " " * width
    body = [f"{label:>{width}}|{row}|" for label, row in zip(labels, rows, strict=True)]
    return [f"{edge} {top}".rstrip(), edge + rule, *body, edge + rule]


def _label(cell_id: int | None, several: str, padding: str) -> str:
    if cell_id is None:
        return several
    if cell_id < 0:
        return padding
    return str(cell_id)
