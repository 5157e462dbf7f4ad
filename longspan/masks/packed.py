"""Packed rows: the position of each token in its document, and the first tokens of each document."""

from copy import copy
from dataclasses import KW_ONLY, InitVar, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from longspan.array_types import Array, Namespace, Number, no_type_check
from longspan.checks import ids_as_int32, is_array, is_int
from longspan.constants import unfolded
from longspan.masks.base import Extent, rule
from longspan.masks.by_slot import EqualIds, both_extents
from longspan.masks.checks import check_array, check_at_least
from longspan.masks.cut import gather
from longspan.masks.pytree import short
from longspan.masks.spans import running_max

PADDING = -1  # the id of a key that is not among the first tokens of its document


@no_type_check
def positions_from_segments(segment_ids: Int[Array, "*B L"]) -> Int[jax.Array, "*B L"]:
    """Positions that start at 0 in every document of a packed row.

    The position of a token is the number of tokens of its document that come before it. A document is all tokens of a
    row with the same id >= 0. Padding (negative ids) has position 0.

    Args:
        segment_ids: int [L] or [B, L], as for `Segments`.

    Example:
        >>> positions_from_segments(np.array([[5, 5, 5, 2, 2, -1]])).tolist()
        [[0, 1, 2, 0, 1, 0]]
    """
    if not is_array(segment_ids) or not is_int(segment_ids) or segment_ids.ndim not in (1, 2):
        got = repr(segment_ids)
        if is_array(segment_ids):
            got = f"{segment_ids.dtype}, shape {tuple(segment_ids.shape)}"
        raise TypeError(f"`segment_ids` must be an int array [L] or [B, L], got {got}.")
    ids = unfolded(jnp.asarray(ids_as_int32("segment_ids", segment_ids)))
    rows = ids
    if ids.ndim == 1:
        rows = ids[None]
    places = _places(jnp, rows).reshape(ids.shape)
    return jnp.where(ids >= 0, places, np.int32(0))


@rule
class FirstOfSegment(EqualIds):
    """Allows the first n tokens of the query's document: pinned tokens of each packed document.

    A document is all tokens of a row with the same id >= 0; its first n tokens are those with the lowest slots. The
    mask is `Segments(q_ids, kv_ids)` without keys that have n or more tokens of their document before them.
    (`Prefix(n)` allows the first n positions instead.)

    Args:
        q_ids: int [B or 1, T].
        n: the number of tokens of each document; an int >= 0, or an int array of shape () or [B].
        kv_ids: int [B or 1, S]; by default the same as `q_ids`.

    Example:
        >>> print(FirstOfSegment(np.array([[0, 0, 0, 1, 1, -1]]), 1).show(6, 6))
        #.....
        #.....
        #.....
        ...#..
        ...#..
        ......
    """

    array_axes: ClassVar = {"q_ids": "BT", "n": "B", "first_ids": "BS"}
    by_token: ClassVar = False  # in another order, other tokens are the first ones

    q_ids: Array
    n: Number
    _: KW_ONLY
    kv_ids: InitVar[Array | None] = None
    first_ids: Array = field(init=False)  # int32 [B or 1, S]: a key's id if it is among the first n, else -1

    def __post_init__(self, kv_ids):
        check_array(self, "q_ids", "int", "BT")
        check_at_least(self, "n", 0)
        if kv_ids is None:
            kv_ids = self.q_ids
        object.__setattr__(self, "first_ids", kv_ids)
        check_array(self, "first_ids", "int", "BS", label="FirstOfSegment.kv_ids")
        object.__setattr__(self, "first_ids", _first(self.first_ids, self.n))

    def _ids(self):
        return self.q_ids, self.first_ids

    def _cut(self, q, kv, q_len, kv_len):
        # A copy, not a new mask: the first tokens of a document are those before the cut.
        cut = copy(self)
        object.__setattr__(cut, "q_ids", gather(self.q_ids, q))
        object.__setattr__(cut, "first_ids", gather(self.first_ids, kv))
        return cut

    def extents(self):
        yield from both_extents(self, "q_ids", "kv_ids")
        n: Any = self.n
        if getattr(n, "ndim", 0) == 1:
            yield Extent("FirstOfSegment.n", "B", n.shape[0])

    def _arguments(self):
        return [short(self.q_ids), short(self.n), f"kv_ids={short(self.first_ids)}"]


def _first(ids: Any, n: Any) -> Any:
    """The ids [B or 1, S] of tokens that are among the first n of their document, -1 elsewhere."""
    if any(isinstance(value, jax.ShapeDtypeStruct) for value in (ids, n)):
        rows = max(ids.shape[0], *getattr(n, "shape", ()), 1)
        return jax.ShapeDtypeStruct((rows, ids.shape[1]), np.int32)
    xp = np
    if any(isinstance(value, jax.Array) for value in (ids, n)):
        xp, ids = jnp, unfolded(jnp.asarray(ids))
    if isinstance(n, int):
        count = min(n, ids.shape[1])
    else:
        count = xp.asarray(n).reshape(-1, 1)
    return xp.where((ids >= 0) & (_places(xp, ids) < count), ids, np.int32(PADDING))


def _places(xp: Namespace, ids) -> Any:
    """The number of equal ids before each id in its row [B, L]."""
    if not ids.shape[1]:
        return xp.zeros(ids.shape, np.int32)
    # A stable sort keeps equal ids in slot order. The place of a token is its distance from the first of its equal ids.
    order = xp.argsort(ids, axis=1, stable=True)
    ranked = xp.take_along_axis(ids, order, axis=1)
    slots = xp.broadcast_to(xp.arange(ids.shape[1], dtype=np.int32).reshape(1, -1), ids.shape)
    starts = xp.concatenate([xp.ones_like(ranked[:, :1], bool), ranked[:, 1:] != ranked[:, :-1]], axis=1)
    begins = running_max(xp, xp.where(starts, slots, np.int32(0)))
    return xp.take_along_axis(slots - begins, xp.argsort(order, axis=1), axis=1)
