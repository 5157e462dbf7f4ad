"""`CountPiece`: a set of pairs whose number is computed query by query, without reading the pairs."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from longspan.masks.base import Mask


class CountPiece(NamedTuple):
    """The pairs of one batch row and head that satisfy every condition given; None is no condition."""

    low: Any = None  # int [T] or int: low <= key slot
    high: Any = None  # int [T] or int: key slot < high
    q_ids: Any = None  # int [T]: the query's id equals the key's id in `kv_ids`
    kv_ids: Any = None  # int [S]
    keys: Any = None  # bool [S]: the key is flagged
    within: "Mask | None" = None  # a rule by position, counted if it allows each query one interval of keys
