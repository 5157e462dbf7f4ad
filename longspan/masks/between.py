"""`Between`: one interval of keys per query, said by arrays."""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from longspan._types import Array, Namespace
from longspan.masks.base import Extent, rule
from longspan.masks.by_slot import FOREVER, BySlot
from longspan.masks.checks import check_intervals
from longspan.masks.cut import gather, view
from longspan.masks.pytree import short
from longspan.masks.sides import grows, search_rows
from longspan.masks.spans import Spans


@rule
class Between(BySlot):
    """Allows starts[t] <= kv slot < stops[t]: each query sees one interval of key slots, none where it is empty.

    Ends before the first slot or past the last are legal. A rule that is an interval by position is better said by
    `Band` or `Window`, which hold for any length.

    Args:
        starts: int [T], [B or 1, T] or [B or 1, N or 1, T]; kept as rank 3.
        stops: likewise. Of batch rows and heads, one of the two may have one where the other has all.

    Example:
        >>> print(Between(np.array([0, 0, 2]), np.array([1, 3, 2])).show(3, 4))
        #...
        ###.
        ....
    """

    one_interval = True

    array_axes: ClassVar = {"starts": "BNT", "stops": "BNT"}

    starts: Array
    stops: Array

    def __post_init__(self):
        check_intervals(self, "starts", "stops")

    def allowed(self, q, kv):
        return (q.take(self.starts) <= kv.index) & (kv.index < q.take(self.stops))

    def classify(self, q, kv):
        may_any = (q.least(self.starts) < kv.stop) & (kv.start < q.greatest(self.stops))
        return may_any, (q.greatest(self.starts) <= kv.start) & (kv.stop <= q.least(self.stops))

    def kv_spans(self, q, kv):
        starts, stops = self._within(q.side, kv.side.length)
        low, high = q.least(starts), q.greatest(stops)
        return Spans(kv.side.xp.minimum(low, high), high)

    def q_spans(self, kv, q):
        """From the first query that ends after the tile's first key to the last that starts before its last key."""
        xp, (starts, stops) = q.side.xp, self._within(q.side, kv.side.length)
        rows = (max(starts.shape[0], kv.start.shape[0]), starts.shape[1])
        reached, left = (_by_rows(xp, a, rows) for a in (_running_greatest(xp, stops), _least_from_here(xp, starts)))
        low = search_rows(xp, reached, _by_rows(xp, kv.start, rows)[:, None], "right")
        high = search_rows(xp, left, _by_rows(xp, kv.stop, rows)[:, None], "left")
        return Spans(*(end.reshape(*rows, 1, end.shape[3]) for end in (low, high)))

    def extents(self):
        for name in ("starts", "stops"):
            for axis, size in zip("BNT", getattr(self, name).shape, strict=True):
                yield Extent(f"Between.{name}", axis, size)

    def _within(self, side, kv_len: int) -> tuple[Any, Any]:
        """Starts and stops with ends inside of the keys; of an interval without keys, both beyond all others."""
        xp = side.xp
        starts, stops = (side.table(ends) for ends in (self.starts, self.stops))
        starts, stops = xp.maximum(starts, np.int32(0)), xp.minimum(stops, np.int32(kv_len))
        some = starts < stops
        return xp.where(some, starts, np.int32(FOREVER)), xp.where(some, stops, np.int32(0))

    def _cut(self, q, kv, q_len, kv_len):
        kept = replace(self, starts=gather(self.starts, q), stops=gather(self.stops, q))
        if kv is None:
            return kept
        if isinstance(kv, np.ndarray) and grows(kv).all():  # then what is kept of an interval is one
            return replace(kept, starts=_before(kept.starts, kv), stops=_before(kept.stops, kv))
        return view(kept, None, kv, None, kv_len)

    def _arguments(self):
        return [short(self.starts), short(self.stops)]


def _before(ends: Any, kept: np.ndarray) -> Any:
    """How many of the kept slots [B or 1, n], which grow, lie before each end [B or 1, N or 1, T]."""
    xp = np if isinstance(ends, np.ndarray) else jnp
    return search_rows(xp, xp.asarray(kept), xp.asarray(ends)[..., None], "left")[..., 0]


def _running_greatest(xp: Namespace, array) -> Any:
    return np.maximum.accumulate(array, axis=2) if xp is np else jax.lax.cummax(array, axis=2)


def _least_from_here(xp: Namespace, array) -> Any:
    """The least of each entry and all that follow it."""
    if xp is np:
        return np.minimum.accumulate(array[:, :, ::-1], axis=2)[:, :, ::-1]
    return jax.lax.cummin(array, axis=2, reverse=True)


def _by_rows(xp: Namespace, array, rows: tuple[int, int]) -> Any:
    """An array [B or 1, N or 1, ...] with an axis of all rows and heads in place of two."""
    return xp.broadcast_to(array, (*rows, *array.shape[2:])).reshape(rows[0] * rows[1], *array.shape[2:])
