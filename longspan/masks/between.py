"""`Between`: one interval of keys per query, said by arrays."""

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

    array_axes: ClassVar = {"starts": "BNT", "stops": "BNT"}

    starts: Array
    stops: Array

    def __post_init__(self):
        check_intervals(self, "starts", "stops")

    def lower(self):
        # An interval without keys is beyond all others, so that it widens nothing.
        starts = derived(lambda xp, a, b: xp.where(a < b, a, np.int32(FAR)), self.starts, self.stops)
        stops = derived(lambda xp, a, b: xp.where(a < b, b, np.int32(-FAR)), self.starts, self.stops)
        return Compare(array(starts), "<=", slot()) & Compare(array(stops), ">", slot())

    def _cut(self, q, kv, q_len, kv_len):
        kept = replace(self, starts=gather(self.starts, q), stops=gather(self.stops, q))
        if isinstance(kv, np.ndarray) and grows(kv).all():  # then what is kept of an interval is one
            return replace(kept, starts=_before(kept.starts, kv), stops=_before(kept.stops, kv))
        return kept if kv is None else kept.lower().cut(kv=kv, kv_len=kv_len)

    def _arguments(self):
        return [short(self.starts), short(self.stops)]


def _before(ends: Any, kept: np.ndarray) -> Any:
    """How many of the kept slots [B or 1, n], which grow, lie before each end [B or 1, N or 1, T]."""
    xp = np if isinstance(ends, np.ndarray) else jnp
    return search_rows(xp, xp.asarray(kept), xp.asarray(ends)[..., None], "left")[..., 0]
