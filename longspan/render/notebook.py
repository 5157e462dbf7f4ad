"""The HTML that notebooks display for a mask and for a layout."""

from typing import Any

import jax

from longspan.checks import is_known
from longspan.layout import BlockLayout
from longspan.masks import Mask
from longspan.render.html import picture_html, tiles_html
from longspan.render.picture import picture_of
from longspan.render.tiles import tiles_of

CELLS = 64  # along a side
SHORTEST, LONGEST = 64, 1 << 17  # limits of the length that is chosen for a mask that fixes none


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
    """A mask's picture as HTML. `lengths` chooses lengths that are not given."""
    q_len, kv_len = lengths(mask, q_len, kv_len)
    cells = max(1, -(-q_len // CELLS), -(-kv_len // CELLS))
    which: dict[str, Any] = dict(batch=batch, head=head, q_positions=q_positions, kv_positions=kv_positions)
    return picture_html(picture_of(mask, q_len, kv_len, cells=cells, **which), more=more)


def shown_html(tree: Any) -> str | None:
    """The HTML of a mask or a layout; None if its arrays have no values, as inside `jit`."""
    if not all(map(is_known, jax.tree.leaves(tree))):
        return None
    if isinstance(tree, BlockLayout):
        return tiles_html(tiles_of(tree))
    return mask_html(tree)


def lengths(mask: Mask, q_len: int | None = None, kv_len: int | None = None) -> tuple[int, int]:
    """The number of queries and keys to draw: as given, as the mask's arrays fix them, or long enough for its numbers.

    Example:
        >>> from longspan import Causal, Segments, Window
        >>> lengths(Causal()), lengths(Causal() & Window(511, 0)), lengths(Segments(np.zeros((1, 7), int)))
        ((64, 64), (2048, 2048), (7, 7))
    """
    if q_len is None:
        q_len = mask._length("T")
    if kv_len is None:
        kv_len = mask._length("S")
    if q_len is None and kv_len is None:
        wanted = 4 * mask.largest_number() - 1
        q_len = kv_len = min(LONGEST, max(SHORTEST, 1 << max(wanted, 0).bit_length()))
    if kv_len is None:
        kv_len = q_len
    if q_len is None:
        q_len = kv_len
    assert q_len is not None and kv_len is not None
    return q_len, kv_len
