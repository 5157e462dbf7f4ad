"""Who has how much to do: allowed pairs by device, and the order that spreads them best."""

from collections.abc import Sequence

import numpy as np

from longspan.array_types import no_type_check
from longspan.checks import check_static_size
from longspan.layout import _Plane
from longspan.layout import plan_layout as layout_of
from longspan.masks import Mask
from longspan.parallel.needs import without_arrays
from longspan.parallel.order import ORDERS, Order, owner_of, padded, runs_of
from longspan.parallel.specs import about_slots

FINE = 64  # tiles of a chunk by which pairs are counted: within a few percent of the truth


def load(pairs: Sequence[int] | np.ndarray) -> float:
    """What the busiest device computes over the mean."""
    return float(np.max(pairs) / np.mean(pairs)) if np.any(pairs) else 1.0


def pairs_of(mask: Mask, length: int, shards: int, order: str) -> np.ndarray:
    """Pairs [shards] that each device computes for a batch row and head; by tiles, of a mask without arrays."""
    size = padded(length, shards, order) // (shards * runs_of(order))
    tile = max(1, size // FINE)
    layout = layout_of(mask, length, length, tile, tile, xp=np)
    pairs = np.zeros(layout.q_tiles)
    for batch, head in layout.planes():
        pairs += _Plane.of(layout, batch, head).widths()
    device, _ = owner_of(
        order, shards, np.minimum(np.arange(layout.q_tiles) * tile // size, shards * runs_of(order) - 1)
    )
    return np.bincount(device, pairs, minlength=shards) * tile * tile / max(1, len(list(layout.planes())))


@no_type_check
def order(masks: Mask | Sequence[Mask], length: int, shards: int) -> Order:
    """The order for a model with these masks: "zigzag" if it spreads the work better, else "contiguous".

    The load is the busiest device's pairs over the mean, here the mean over the masks; `ls.parallel.plan` prints it for
    one mask and order. Arrays are not looked at: a rule that holds some counts as if it allowed everything. Rules about
    slots (`Blocks`, `Dense`, `Between`) leave no choice.

    Args:
        masks: one mask per kind of layer, or one.
        length: the number of tokens.
        shards: how many devices share them.

    Example:
        >>> ls.parallel.order(ls.Causal(), 16384, 8)
        'zigzag'
        >>> [f"{ls.parallel.plan(ls.Causal(), 16384, 8, order).load:.2f}" for order in ("contiguous", "zigzag")]
        ['1.87', '1.00']
    """
    from longspan.parallel.plan import check_shared

    masks = [masks] if isinstance(masks, Mask) else masks
    if not isinstance(masks, Sequence) or not masks or not all(isinstance(mask, Mask) for mask in masks):
        raise TypeError(f"`masks` must be a Mask or several in a list, got {masks!r}. A MaskInfo has one, `info.mask`.")
    length, shards = check_static_size("length", length, 1), check_static_size("shards", shards, 1)
    for mask in masks:
        check_shared(mask, length, shards)
    if any(about_slots(mask) is not None for mask in masks):
        return "contiguous"
    known = [without_arrays(mask) for mask in masks]
    loads = {name: float(np.mean([load(pairs_of(mask, length, shards, name)) for mask in known])) for name in ORDERS}
    # Zigzag doubles the edges of windows, so it must gain something.
    return "zigzag" if loads["zigzag"] < 0.95 * loads["contiguous"] else "contiguous"
