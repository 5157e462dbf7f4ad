"""Records of a mask's properties: the sizes its arrays fix, its pinned tokens, its period and its table of blocks."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from longspan.masks.base import Mask


class Extent(NamedTuple):
    """A size that an array of a mask fixes: the array `name` has `size` blocks of `unit` along `axis` (B, N, T or S).

    Example:
        >>> list(ls.Segments(np.zeros((2, 5), int)).extents())[1]
        Extent(name='Segments.q_ids', axis='T', size=5, unit=1)
    """

    name: str
    axis: str
    size: int
    unit: int = 1


class Pinned(NamedTuple):
    """A mask split into pinned tokens and the rest.

    Every query sees the keys at the positions `columns`, and the queries at the positions `rows` see every key, in all
    batch rows and heads. Flags [B or 1, L] mark further such keys and queries by slot. `rest` applies to all
    other pairs.
    """

    rest: "Mask"
    columns: frozenset[int] = frozenset()
    rows: frozenset[int] = frozenset()
    kv_flags: tuple[Any, ...] = ()
    q_flags: tuple[Any, ...] = ()


class Periodicity(NamedTuple):
    """The quantities that decide whether query q may see key k.

    These are q and k modulo `period`; on which side of each of `distances` k - q lies, up to one period; and on which
    side of each of `places` q and k lie.
    """

    period: int = 1
    distances: frozenset[int] = frozenset()
    places: frozenset[int] = frozenset()


class Listing(NamedTuple):
    """The static properties of a table that lists kv blocks per q block. The entries may be data."""

    block_size: int
    entries: int  # the number of kv blocks listed per q block
    by_head: bool
    unlisted: "Mask | None"  # if the table is data: the mask of a table without entries
