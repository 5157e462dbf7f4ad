"""`CountPiece`: pairs that can be counted query by query, without being read."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from longspan.masks.base import Mask


class CountPiece(NamedTuple):
    """Some pairs of one batch row and head: those for which all that is given holds."""

    low: Any = None  # int [T] or an int: the query sees key slots from here on
    high: Any = None  # up to here
    q_ids: Any = None  # int [T], equal to
    kv_ids: Any = None  # int [S]
    keys: Any = None  # bool [S]: the keys that can be seen
    within: "Mask | None" = None  # a rule by position that may allow an interval of keys to each query
