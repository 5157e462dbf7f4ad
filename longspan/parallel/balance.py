"""The allowed pairs that each device computes, and the order of tokens that balances them."""

from collections.abc import Sequence

import numpy as np

from longspan.array_types import no_type_check
from longspan.checks import check_static_size
from longspan.layout import _Plane
from longspan.layout import plan_layout as layout_of
from longspan.masks import Mask
from longspan.parallel.needs import without_arrays
from longspan.parallel.order import ORDERS, Order, owner_of, padded, runs_of
from longspan.parallel.specs import rule_by_slot

TILES_PER_CHUNK = 64  # for counting pairs: the count is within a few percent of the exact one


def load(pairs: Sequence[int] | np.ndarray) -> float:
    """The pairs of the busiest device divided by the mean."""
    if not np.any(pairs):
        return 1.0
    return float(np.max(pairs) / np.mean(pairs))


def pairs_of(mask: Mask, length: int, shards: int, order: str) -> np.ndarray:
    """The pairs [shards] that each device computes per batch row and head, by tiles, for a mask without arrays."""
    size = padded(length, shards, order) // (shards * runs_of(order))
    tile = max(1, size // TILES_PER_CHUNK)
    layout = layout_of(mask, length, length, tile, tile, xp=np)
    pairs = np.zeros(layout.q_tiles)
    for batch, head in layout.planes():
        pairs += _Plane.of(layout, batch, head).widths()
    chunk = np.minimum(np.arange(layout.q_tiles) * tile // size, shards * runs_of(order) - 1)
    device, _ = owner_of(order, shards, chunk)
    return np.bincount(device, pairs, minlength=shards) * tile * tile / max(1, len(list(layout.planes())))


@no_type_check
def order(masks: Mask | Sequence[Mask], length: int, shards: int) -> Order:
    """The order of tokens for a model with these masks: "zigzag" if it balances the work better, else "contiguous".

    Orders are compared by load, the pairs of the busiest device divided by the mean, averaged over the masks;
    `ls.parallel.plan` prints the load of one mask. Rules with arrays are counted as if they allowed everything. Rules
    by slot (`Blocks`, `Dense`, `Between`) require "contiguous".

    Args:
        masks: one mask, or one per kind of layer.
        length: the number of tokens.
        shards: the number of devices that share them.

    Example:
        >>> ls.parallel.order(ls.Causal(), 16384, 8)
        'zigzag'
        >>> [f"{ls.parallel.plan(ls.Causal(), 16384, 8, order).load:.2f}" for order in ("contiguous", "zigzag")]
        ['1.87', '1.00']
    """
    from longspan.parallel.plan import check_shared

    if isinstance(masks, Mask):
        masks = [masks]
    if not isinstance(masks, Sequence) or not masks or not all(isinstance(mask, Mask) for mask in masks):
        raise TypeError(f"`masks` must be a Mask or a list of Masks, got {masks!r}. For a MaskInfo, pass `info.mask`.")
    length, shards = check_static_size("length", length, 1), check_static_size("shards", shards, 1)
    for mask in masks:
        check_shared(mask, length, shards)
    if any(rule_by_slot(mask) is not None for mask in masks):
        return "contiguous"
    known = [without_arrays(mask) for mask in masks]
    loads = {name: float(np.mean([load(pairs_of(mask, length, shards, name)) for mask in known])) for name in ORDERS}
    # Zigzag order doubles the rows that windows send, so it must gain at least 5%.
    if loads["zigzag"] < 0.95 * loads["contiguous"]:
        return "zigzag"
    return "contiguous"
