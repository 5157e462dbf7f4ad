"""Rules by slot: lengths, segment ids, token types and global tokens. Their arrays line up with the slots of a side.

`tables` has those whose arrays say who sees whom, block by block or pair by pair.
"""

from dataclasses import KW_ONLY, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from longspan._checks import check_choice
from longspan._types import FAR, Array, Namespace, Number
from longspan.masks.base import BY_POSITION, BY_SLOT, NOBODY, Extent, Mask, Periodicity, Pinned, rule
from longspan.masks.by_position import Empty, Full
from longspan.masks.checks import check_array, check_indices, check_number
from longspan.masks.cut import gather
from longspan.masks.pieces import Piece
from longspan.masks.pytree import short
from longspan.masks.spans import Spans, whole_or_nothing

FOREVER = np.iinfo(np.int32).max


class BySlot(Mask):
    """What rules with arrays along the slots share: those are cut with the queries, and so say who the queries are."""

    reads = BY_SLOT

    @property
    def reads_q_place(self):
        return False


@rule
class KvLengths(BySlot):
    """Allows kv slot < lengths[b]: the rest of each row of keys is padding.

    Args:
        lengths: int [B].

    Example:
        >>> print(KvLengths(np.array([2])).show(2, 4))
        ##..
        ##..
    """

    one_interval = True

    array_axes: ClassVar = {"lengths": "B"}
    by_token = True

    lengths: Number

    def __post_init__(self):
        check_number(self, "lengths")

    def allowed(self, q, kv):
        return Full().allowed(q, kv) & (kv.index < q.number(self.lengths))

    def classify(self, q, kv):
        length = q.number(self.lengths)
        return kv.start < length, kv.stop <= length

    def kv_spans(self, q, kv):
        return _first(q.side.xp, q.number(self.lengths), kv.side.length)

    def q_spans(self, kv, q):
        return whole_or_nothing(kv.side.xp, kv.start < kv.number(self.lengths), q.side.length)

    def _pieces(self, q, kv):
        if kv.positions is None:
            return [Piece(0, np.reshape(kv.number(self.lengths), -1))]
        return [Piece(keys=(kv.slots().index < kv.number(self.lengths)).reshape(-1))]

    def _cut(self, q, kv, q_len, kv_len):
        return self if kv is None else KvFlags(_inside(kv, self.lengths))

    def _arguments(self):
        return [short(self.lengths)]


@rule
class QLengths(BySlot):
    """Allows query slot < lengths[b]: the rest of each row of queries is padding, which gives zeros.

    Args:
        lengths: int [B].

    Example:
        >>> print(QLengths(np.array([1])).show(2, 4))
        ####
        ....
    """

    one_interval = True

    array_axes: ClassVar = {"lengths": "B"}
    by_token = True

    lengths: Number

    def __post_init__(self):
        check_number(self, "lengths")

    @property
    def reads_q_place(self):
        return True

    def allowed(self, q, kv):
        return Full().allowed(q, kv) & (q.index < q.number(self.lengths))

    def classify(self, q, kv):
        length = q.number(self.lengths)
        return q.start < length, q.stop <= length

    def kv_spans(self, q, kv):
        return whole_or_nothing(q.side.xp, q.start < q.number(self.lengths), kv.side.length)

    def q_spans(self, kv, q):
        return _first(kv.side.xp, kv.number(self.lengths), q.side.length)

    def _cut(self, q, kv, q_len, kv_len):
        return self if q is None else Global(q_flags=_inside(q, self.lengths), columns=False)

    def _arguments(self):
        return [short(self.lengths)]


@rule
class KvFlags(BySlot):
    """Allows the keys that are flagged, for every query: `KvLengths` after a cut, when they need not come first.

    Args:
        flags: bool [B or 1, S].

    Example:
        >>> print(KvFlags(np.array([[True, False, True]])).show(2, 3))
        #.#
        #.#
    """

    array_axes: ClassVar = {"flags": "BS"}
    by_token = True

    flags: Array

    def __post_init__(self):
        check_array(self, "flags", "bool", "BS")

    def allowed(self, q, kv):
        return Full().allowed(q, kv) & kv.take(self.flags)

    def classify(self, q, kv):
        return kv.greatest(self.flags) > 0, kv.least(self.flags) > 0

    def kv_spans(self, q, kv):
        """From the first to the last flagged key."""
        xp, flags = kv.side.xp, kv.table(self.flags)
        slot = xp.arange(flags.shape[1], dtype=np.int32).reshape(1, -1)
        high = xp.max(xp.where(flags, slot + 1, np.int32(0)), axis=1, initial=0)
        low = xp.min(xp.where(flags, slot, np.int32(FOREVER)), axis=1, initial=FOREVER)
        return Spans(*(end.reshape(-1, 1, 1, 1) for end in (xp.minimum(low, high), high)))

    def q_spans(self, kv, q):
        return whole_or_nothing(kv.side.xp, kv.greatest(self.flags) > 0, q.side.length)

    def _pieces(self, q, kv):
        return [Piece(keys=kv.slots().take(self.flags).reshape(-1))]

    def extents(self):
        yield from _extents(self, "flags", self.flags, "BS")

    def _cut(self, q, kv, q_len, kv_len):
        return replace(self, flags=gather(self.flags, kv))

    def _arguments(self):
        return [short(self.flags)]


class EqualIds(BySlot):
    """The part that `Segments`, `TokenTypes` and `FirstOfSegment` share: ids are equal, and both are valid."""

    def _ids(self) -> tuple[Any, Any]:
        raise NotImplementedError

    def _valid(self, ids):
        raise NotImplementedError

    def allowed(self, q, kv):
        q_ids, kv_ids = (side.take(ids) for side, ids in zip((q, kv), self._ids(), strict=True))
        return (q_ids == kv_ids) & self._valid(q_ids)

    def classify(self, q, kv):
        (q_least, q_most, q_all), (kv_least, kv_most, kv_all) = (
            self._range(tiles, ids) for tiles, ids in zip((q, kv), self._ids(), strict=True)
        )
        may_any = (q_least <= kv_most) & (kv_least <= q_most)
        q_one, kv_one = q_all & (q_least == q_most), kv_all & (kv_least == kv_most)
        if q.side.xp is np and not (q_one.any() and kv_one.any()):  # as where ids are shuffled: no pair to be compared
            return may_any, np.full((1, 1, 1, 1), False)
        return may_any, (q_one & kv_one) & (q_least == kv_least)

    def _range(self, tiles, ids):
        """The least and greatest valid id of each tile (least > greatest if there is none), and whether all are."""
        least, most = tiles.least(ids, self._valid), tiles.greatest(ids, self._valid)
        return least, most, (tiles.least(ids) >= least) & (tiles.greatest(ids) <= most) & (least <= most)

    def kv_spans(self, q, kv):
        q_ids, kv_ids = self._ids()
        return self._hull(q, q_ids, kv_ids)

    def q_spans(self, kv, q):
        q_ids, kv_ids = self._ids()
        return self._hull(kv, kv_ids, q_ids)

    def _hull(self, tiles, row_ids, other_ids) -> Spans:
        """From the first to the last slot of the other side whose id occurs in the tile."""
        xp = tiles.side.xp
        first, last = _occurrences(xp, tiles.table(row_ids), tiles.table(other_ids), self._valid)
        low, high = tiles.least(first), tiles.greatest(last) + 1
        return Spans(xp.where(low < high, low, np.int32(0)), xp.where(low < high, high, np.int32(0)))

    def _pieces(self, q, kv):
        q_ids, kv_ids = (side.slots().take(ids).reshape(-1) for side, ids in zip((q, kv), self._ids(), strict=True))
        return [Piece(0, np.where(self._valid(q_ids), kv.length, 0), q_ids=q_ids, kv_ids=kv_ids)]


@rule
class Segments(EqualIds):
    """Allows equal ids, both >= 0: packed documents that do not see each other. Negative ids are padding.

    Args:
        q_ids: int [B or 1, T].
        kv_ids: int [B or 1, S]; by default the same as `q_ids`.

    Example:
        >>> print(Segments(np.array([[0, 0, 1, -1]])).show(4, 4))
        ##..
        ##..
        ..#.
        ....
    """

    array_axes: ClassVar = {"q_ids": "BT", "kv_ids": "BS"}
    by_token = True

    q_ids: Array
    kv_ids: Array | None = None

    def __post_init__(self):
        check_array(self, "q_ids", "int", "BT")
        check_array(self, "kv_ids", "int", "BS", optional=True)

    def _ids(self):
        return self.q_ids, self.q_ids if self.kv_ids is None else self.kv_ids

    def documents(self):
        return self._ids()

    def _valid(self, ids):
        return ids >= 0

    def _cut(self, q, kv, q_len, kv_len):
        q_ids, kv_ids = self._ids()
        return replace(self, q_ids=gather(q_ids, q), kv_ids=gather(kv_ids, kv))

    def extents(self):
        yield from _extents(self, "q_ids", self.q_ids, "BT")
        yield from _extents(self, "kv_ids", self._ids()[1], "BS")

    def _arguments(self):
        return [short(self.q_ids)] + ([] if self.kv_ids is None else [short(self.kv_ids)])


@rule
class TokenTypes(EqualIds):
    """Allows equal token types. Type 0 never attends, unless `zero="none"`.

    Args:
        q_types: int [B or 1, T].
        kv_types: int [B or 1, S]; by default the same as `q_types`.
        zero: which side's type 0 is disabled: "q", "kv", "both", or "none" (0 is a type like any other). As the rule
            asks for equal types, the first three allow the same pairs.

    Example:
        >>> print(TokenTypes(np.array([[1, 0, 2, 2]])).show(4, 4))
        #...
        ....
        ..##
        ..##
    """

    applied = "token_type_ids"

    array_axes: ClassVar = {"q_types": "BT", "kv_types": "BS"}
    by_token = True

    q_types: Array
    kv_types: Array | None = None
    zero: str = "q"

    def __post_init__(self):
        check_array(self, "q_types", "int", "BT")
        check_array(self, "kv_types", "int", "BS", optional=True)
        check_choice("zero", self.zero, ("q", "kv", "both", "none"))

    def _ids(self):
        return self.q_types, self.q_types if self.kv_types is None else self.kv_types

    def _valid(self, ids):
        return ids == ids if self.zero == "none" else ids != 0

    def _cut(self, q, kv, q_len, kv_len):
        q_types, kv_types = self._ids()
        return replace(self, q_types=gather(q_types, q), kv_types=gather(kv_types, kv))

    def extents(self):
        yield from _extents(self, "q_types", self.q_types, "BT")
        yield from _extents(self, "kv_types", self._ids()[1], "BS")

    def _arguments(self):
        types = [short(self.q_types)] + ([] if self.kv_types is None else [short(self.kv_types)])
        return types + ([] if self.zero == "q" else [f"zero={self.zero!r}"])


@rule
class Global(Mask):
    """Allows a pair if its key is global (columns) or its query is (rows).

    Args:
        indices: positions that are global, a tuple of ints.
        q_flags: bool [B or 1, T]: further queries that are global.
        kv_flags: bool [B or 1, S]: further keys that are global.
        rows: whether global queries see every key.
        columns: whether every query sees global keys.

    Example:
        >>> print(Global((0,)).show(3, 3))
        ###
        #..
        #..
    """

    array_axes: ClassVar = {"q_flags": "BT", "kv_flags": "BS"}
    by_token = True

    indices: tuple[int, ...] = ()
    _: KW_ONLY
    q_flags: Array | None = None
    kv_flags: Array | None = None
    rows: bool = True
    columns: bool = True

    def __post_init__(self):
        check_indices(self, "indices")
        check_array(self, "q_flags", "bool", "BT", optional=True)
        check_array(self, "kv_flags", "bool", "BS", optional=True)

    @property
    def reads(self):
        by_position = BY_POSITION if self.indices else frozenset()
        return by_position if self.q_flags is None and self.kv_flags is None else by_position | BY_SLOT

    @property
    def reads_q_place(self):
        return self.rows and bool(self.indices)

    def allowed(self, q, kv):
        truth = Full().allowed(q, kv) & False
        if self.rows:
            truth = truth | self._is_global(q, self.q_flags)
        if self.columns:
            truth = truth | self._is_global(kv, self.kv_flags)
        return truth

    def classify(self, q, kv):
        (q_any, q_all), (kv_any, kv_all) = self._any_all(q, self.q_flags), self._any_all(kv, self.kv_flags)
        rows, columns = np.bool_(self.rows), np.bool_(self.columns)
        return (q_any & rows) | (kv_any & columns), (q_all & rows) | (kv_all & columns)

    def kv_spans(self, q, kv):
        return self._spans(q, self.q_flags, self.rows, kv, self.kv_flags, self.columns)

    def q_spans(self, kv, q):
        return self._spans(kv, self.kv_flags, self.columns, q, self.q_flags, self.rows)

    def extents(self):
        if self.q_flags is not None:
            yield from _extents(self, "q_flags", self.q_flags, "BT")
        if self.kv_flags is not None:
            yield from _extents(self, "kv_flags", self.kv_flags, "BS")

    def nearest_query(self, key, at, step):
        if self.loose():
            return at
        places = np.array(sorted(self.indices), np.int64)
        found = np.searchsorted(places, at, side="right") - 1 if step < 0 else np.searchsorted(places, at)
        fenced = np.array([-NOBODY, *places, NOBODY])
        global_query = fenced[found + 1] if self.rows else NOBODY * step
        return np.where(np.isin(key, places), at, global_query) if self.columns else global_query + key * 0

    def periodicity(self):
        return Periodicity(places=frozenset(place + side for place in self.indices for side in (0, 1)))

    def loose(self):
        return () if self.q_flags is None and self.kv_flags is None else (self,)

    def pinned(self, length):
        inside = frozenset(i for i in self.indices if 0 <= i < length)
        flags = [
            (array,) if wanted and array is not None else ()
            for array, wanted in ((self.kv_flags, self.columns), (self.q_flags, self.rows))
        ]
        columns, rows = (inside if wanted else frozenset() for wanted in (self.columns, self.rows))
        return Pinned(Empty(), columns, rows, *flags)

    def _spans(self, mine, my_flags, i_see_all, others, other_flags, all_see) -> Spans:
        sees_all, _ = self._any_all(mine, my_flags)
        common, _ = self._any_all(others, other_flags)
        spans = whole_or_nothing(mine.side.xp, sees_all & np.bool_(i_see_all), others.side.length)
        return spans._replace(common=common if all_see else None)

    def _pieces(self, q, kv):
        sees_all = self.rows & self._is_global(q.slots(), self.q_flags).reshape(-1)
        seen_by_all = self.columns & self._is_global(kv.slots(), self.kv_flags).reshape(-1)
        rows = Piece(0, np.where(sees_all, kv.length, 0))
        return [rows, Piece(0, np.where(sees_all, 0, kv.length), keys=seen_by_all)]

    def _is_global(self, slots, flags):
        truth = slots.index < 0
        if self.indices:
            truth = truth | slots.is_one_of(self.indices)
        return truth if flags is None else truth | slots.take(flags)

    def _any_all(self, tiles, flags):
        """Whether any, and whether all, of a tile's tokens are global."""
        some, every = tiles.start < 0, tiles.start < 0
        if self.indices:
            inside = tiles.count_of(self.indices)
            some, every = some | (inside > 0), every | (inside == tiles.last - tiles.first + 1)
        if flags is not None:
            some, every = some | (tiles.greatest(flags) > 0), every | (tiles.least(flags) > 0)
        return some, every

    def _cut(self, q, kv, q_len, kv_len):
        return replace(self, q_flags=gather(self.q_flags, q), kv_flags=gather(self.kv_flags, kv))

    def _arguments(self):
        arguments = [repr(self.indices)] if self.indices else []
        for name in ("q_flags", "kv_flags"):
            if getattr(self, name) is not None:
                arguments.append(f"{name}={short(getattr(self, name))}")
        return arguments + [f"{name}=False" for name in ("rows", "columns") if not getattr(self, name)]


def _first(xp: Namespace, count: Any, length: int) -> Spans:
    """The first slots of a side, as many as a number says."""
    high = xp.full((1, 1, 1, 1), count, np.int32) if isinstance(count, int) else count
    return Spans(xp.zeros_like(high), xp.clip(high, 0, length))


def _inside(slots: Any, lengths: Any) -> Any:
    """Which of some slots [B or 1, n] lie before the length of their row."""
    return slots < (min(lengths, FAR) if isinstance(lengths, int) else lengths.reshape(-1, 1))


def _extents(mask: Mask, name: str, array, axes: str):
    for axis, size in zip(axes, array.shape, strict=False):
        yield Extent(f"{type(mask).__name__}.{name}", axis, size)


def _occurrences(xp: Namespace, ids, others, valid):
    """For each id [B, T], the first and last slot of an equal, valid id among `others` [B, S]; else (FOREVER, -1)."""
    rows = max(ids.shape[0], others.shape[0])
    ids = xp.broadcast_to(ids.astype(np.int32), (rows, ids.shape[1]))
    others = xp.broadcast_to(others.astype(np.int32), (rows, others.shape[1]))
    if 0 in (ids.shape[1], others.shape[1]):
        return xp.full(ids.shape, FOREVER, np.int32), xp.full(ids.shape, -1, np.int32)
    if xp is np:
        found = [_occurrences_on_host(a, b, valid) for a, b in zip(ids, others, strict=True)]
        return tuple(np.stack(part) for part in zip(*found, strict=True))
    return jax.vmap(lambda a, b: _occurrences_in_row(a, b, valid))(ids, others)


def _occurrences_in_row(ids, others, valid):
    # A stable sort keeps equal ids in slot order: each run's ends are its first and last occurrence.
    order = jnp.argsort(others, stable=True).astype(np.int32)
    ranked = others[order]
    left = jnp.searchsorted(ranked, ids, side="left")
    right = jnp.searchsorted(ranked, ids, side="right") - 1
    found = valid(ids) & (left <= right)
    last = len(others) - 1
    first_slot, last_slot = order[jnp.clip(left, 0, last)], order[jnp.clip(right, 0, last)]
    return jnp.where(found, first_slot, np.int32(FOREVER)), jnp.where(found, last_slot, np.int32(-1))


def _occurrences_on_host(ids: np.ndarray, others: np.ndarray, valid):
    # In a table by id: bisecting for shuffled ids misses the cache at every step.
    least, most = (int(end) for end in (min(ids.min(), others.min()), max(ids.max(), others.max())))
    if most - least > 4 * (len(ids) + len(others)):
        both = np.unique(np.concatenate([ids, others]), return_inverse=True)[1].astype(np.int32)
        mine, theirs, size = both[: len(ids)], both[len(ids) :], len(both)
    else:
        mine, theirs, size = ids - np.int32(least), others - np.int32(least), most - least + 1
    slots = np.arange(len(others), dtype=np.int32)
    first, last = np.full(size, FOREVER, np.int32), np.full(size, -1, np.int32)
    last[theirs] = slots  # of equal ids, the one that is written last stays
    first[theirs[::-1]] = slots[::-1]
    found = valid(ids)
    return np.where(found, first[mine], np.int32(FOREVER)), np.where(found, last[mine], np.int32(-1))
