"""What notebooks show of a mask and of a layout by themselves."""

from typing import Any

import jax

from longspan.checks import is_known
from longspan.layout import BlockLayout
from longspan.masks import Mask
from longspan.render.html import picture_html, tiles_html
from longspan.render.picture import picture_of
from longspan.render.tiles import tiles_of

CELLS = 64  # along a side
SHORTEST, LONGEST = 64, 1 << 17  # a mask that fixes no length is drawn with one in between


def mask_html(
    mask: Mask,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    batch: int = 0,
    head: int | None = None,
    q_positions: Any = None,
    kv_positions: Any = None,
    more: str = "",
) -> str:
    """A mask's picture as HTML; of lengths that are not given, those that its arrays fix, or that show its numbers."""
    q_len, kv_len = lengths(mask, q_len, kv_len)
    cells = max(1, -(-q_len // CELLS), -(-kv_len // CELLS))
    which: dict[str, Any] = dict(batch=batch, head=head, q_positions=q_positions, kv_positions=kv_positions)
    return picture_html(picture_of(mask, q_len, kv_len, cells=cells, **which), more=more)


def shown_html(tree: Any) -> str | None:
    """The HTML of a mask or a layout; None where its arrays have no values here, as inside `jit`."""
    if not all(map(is_known, jax.tree.leaves(tree))):
        return None
    return tiles_html(tiles_of(tree)) if isinstance(tree, BlockLayout) else mask_html(tree)


def lengths(mask: Mask, q_len: int | None = None, kv_len: int | None = None) -> tuple[int, int]:
    """How many queries and keys to draw.

    Example:
        >>> from longspan import Causal, Segments, Window
        >>> lengths(Causal()), lengths(Causal() & Window(511, 0)), lengths(Segments(np.zeros((1, 7), int)))
        ((64, 64), (2048, 2048), (7, 7))
    """
    q_len, kv_len = mask._length("T") if q_len is None else q_len, mask._length("S") if kv_len is None else kv_len
    if q_len is None and kv_len is None:
        wanted = 4 * mask.largest_number() - 1
        q_len = kv_len = min(LONGEST, max(SHORTEST, 1 << max(wanted, 0).bit_length()))
    either = q_len if kv_len is None else kv_len
    assert either is not None
    return (either if q_len is None else q_len), either
