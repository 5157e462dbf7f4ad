"""`Between`: one interval of key slots per query, given as arrays."""

from dataclasses import replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from longspan.array_types import FAR, Array
from longspan.masks.base import rule
from longspan.masks.checks import check_intervals
from longspan.masks.compare import Compare
from longspan.masks.cut import gather
from longspan.masks.pytree import short
from longspan.masks.rules import Leaf
from longspan.masks.sides import grows, search_rows
from longspan.masks.terms import array, derived, slot


@rule
class Between(Leaf):
    """Allows starts[t] <= kv slot < stops[t]: one interval of key slots per query. An empty interval allows no key.

    Starts before the first slot and stops after the last are legal. For intervals of positions use `Band` or `Window`,
    which apply to any length.

    Args:
        starts: int [T], [B or 1, T] or [B or 1, N or 1, T]; stored as rank 3.
        stops: likewise. Along batch rows and heads, one of the two arrays may have size 1.

    Example:
        >>> print(Between(np.array([0, 0, 2]), np.array([1, 3, 2])).show(3, 4))
        #...
        ###.
        ....
    """

    array_axes: ClassVar = {"starts": "BNT", "stops": "BNT"}

    starts: Array
    stops: Array

    def __post_init__(self):
        check_intervals(self, "starts", "stops")

    def lower(self):
        # The ends of an empty interval are moved to ±FAR, so that it does not widen the span of its tile.
        starts = derived(lambda xp, a, b: xp.where(a < b, a, np.int32(FAR)), self.starts, self.stops)
        stops = derived(lambda xp, a, b: xp.where(a < b, b, np.int32(-FAR)), self.starts, self.stops)
        return Compare(array(starts), "<=", slot()) & Compare(array(stops), ">", slot())

    def _cut(self, q, kv, q_len, kv_len):
        kept = replace(self, starts=gather(self.starts, q), stops=gather(self.stops, q))
        if kv is None:
            return kept
        if isinstance(kv, np.ndarray) and grows(kv).all():  # then the kept slots of an interval are an interval
            return replace(kept, starts=_before(kept.starts, kv), stops=_before(kept.stops, kv))
        return kept.lower().cut(kv=kv, kv_len=kv_len)

    def _arguments(self):
        return [short(self.starts), short(self.stops)]


def _before(ends: Any, kept: np.ndarray) -> Any:
    """The number of kept slots [B or 1, n], in increasing order, before each end [B or 1, N or 1, T]."""
    xp = jnp
    if isinstance(ends, np.ndarray):
        xp = np
    return search_rows(xp, xp.asarray(kept), xp.asarray(ends)[..., None], "left")[..., 0]
