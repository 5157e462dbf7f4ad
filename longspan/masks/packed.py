"""Rows that several documents are packed into: where each token stands in its document, and who starts one."""

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

PADDING = -1


@no_type_check
def positions_from_segments(segment_ids: Int[Array, "*B L"]) -> Int[jax.Array, "*B L"]:
    """Positions that start from 0 in every document of a packed row: how many of its tokens stand before each token.

    A document is all tokens of a row with the same id >= 0. Padding, a negative id, stands at 0.

    Args:
        segment_ids: int [L] or [B, L], as for `Segments`.

    Example:
        >>> positions_from_segments(np.array([[5, 5, 5, 2, 2, -1]])).tolist()
        [[0, 1, 2, 0, 1, 0]]
    """
    if not is_array(segment_ids) or not is_int(segment_ids) or segment_ids.ndim not in (1, 2):
        got = f"{segment_ids.dtype}, shape {tuple(segment_ids.shape)}" if is_array(segment_ids) else repr(segment_ids)
        raise TypeError(f"`segment_ids` must be an int array [L] or [B, L], got {got}.")
    ids = unfolded(jnp.asarray(ids_as_int32("segment_ids", segment_ids)))
    places = _places(jnp, ids[None] if ids.ndim == 1 else ids).reshape(ids.shape)
    return jnp.where(ids >= 0, places, np.int32(0))


@rule
class FirstOfSegment(EqualIds):
    """Allows the first n tokens of the query's own document: each packed document keeps its own pinned tokens.

    A document is all tokens of a row with the same id >= 0; its first n are those of the lowest slots. It is
    `Segments(q_ids, kv_ids)` of the keys that have fewer than n of their document before them. Unlike `Prefix(n)`,
    whose keys are the first of the row.

    Args:
        q_ids: int [B or 1, T].
        n: how many tokens of each document; an int >= 0, or an int array of shape () or [B].
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
    by_token: ClassVar = False  # tokens in another order have other firsts

    q_ids: Array
    n: Number
    _: KW_ONLY
    kv_ids: InitVar[Array | None] = None
    first_ids: Array = field(init=False)  # int32 [B or 1, S]: a key's id if it is among the first, else -1

    def __post_init__(self, kv_ids):
        check_array(self, "q_ids", "int", "BT")
        check_at_least(self, "n", 0)
        object.__setattr__(self, "first_ids", self.q_ids if kv_ids is None else kv_ids)
        check_array(self, "first_ids", "int", "BS", label="FirstOfSegment.kv_ids")
        object.__setattr__(self, "first_ids", _first(self.first_ids, self.n))

    def _ids(self):
        return self.q_ids, self.first_ids

    def _cut(self, q, kv, q_len, kv_len):
        # Not made anew: what comes first in a document was settled before the cut.
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
    """The ids [B or 1, S] of the tokens that are among the first n of their document, -1 elsewhere."""
    if any(isinstance(value, jax.ShapeDtypeStruct) for value in (ids, n)):
        rows = max(ids.shape[0], *getattr(n, "shape", ()), 1)
        return jax.ShapeDtypeStruct((rows, ids.shape[1]), np.int32)
    xp = jnp if any(isinstance(value, jax.Array) for value in (ids, n)) else np
    ids = ids if xp is np else unfolded(jnp.asarray(ids))
    most = min(n, ids.shape[1]) if isinstance(n, int) else xp.asarray(n).reshape(-1, 1)
    return xp.where((ids >= 0) & (_places(xp, ids) < most), ids, np.int32(PADDING))


def _places(xp: Namespace, ids) -> Any:
    """How many equal ids stand before each one in its row [B, L]."""
    if not ids.shape[1]:
        return xp.zeros(ids.shape, np.int32)
    # A stable sort keeps equal ids in slot order: a token's place is its distance from the start of their run.
    order = xp.argsort(ids, axis=1, stable=True)
    ranked = xp.take_along_axis(ids, order, axis=1)
    slots = xp.broadcast_to(xp.arange(ids.shape[1], dtype=np.int32).reshape(1, -1), ids.shape)
    starts = xp.concatenate([xp.ones_like(ranked[:, :1], bool), ranked[:, 1:] != ranked[:, :-1]], axis=1)
    begins = xp.where(starts, slots, np.int32(0))
    begins = np.maximum.accumulate(begins, axis=1) if xp is np else jax.lax.cummax(begins, axis=1)
    return xp.take_along_axis(slots - begins, xp.argsort(order, axis=1), axis=1)
