"""Masks by slot: lengths, segment ids, token types and global tokens. Their arrays have one entry per slot of a side.

`tables` has the masks with one entry per pair of blocks or per pair of slots.
"""

from dataclasses import KW_ONLY, replace
from typing import Any, ClassVar

from longspan.array_types import Array, Number
from longspan.checks import check_choice
from longspan.masks.algebra import Or
from longspan.masks.base import BY_SLOT, Extent, Mask, rule
from longspan.masks.by_position import Empty
from longspan.masks.checks import check_array, check_indices, check_number
from longspan.masks.compare import Compare
from longspan.masks.cut import gather
from longspan.masks.pytree import short
from longspan.masks.rules import Leaf
from longspan.masks.terms import Term, Valid, array, member, number, slot


class BySlot(Mask):
    """Base of masks whose arrays have one entry per slot. They do not read the query's place: `cut` cuts the arrays."""

    reads = BY_SLOT

    @property
    def reads_q_place(self):
        return False


@rule
class KvLengths(Leaf):
    """Allows kv slot < lengths[b]: the later keys of each row are padding.

    Args:
        lengths: int [B].

    Example:
        >>> print(KvLengths(np.array([2])).show(2, 4))
        ##..
        ##..
    """

    array_axes: ClassVar = {"lengths": "B"}

    lengths: Number

    def __post_init__(self):
        check_number(self, "lengths")

    def lower(self):
        return Compare(number(self.lengths), ">", slot())

    def _arguments(self):
        return [short(self.lengths)]


@rule
class QLengths(Leaf):
    """Allows query slot < lengths[b]: the later queries of each row are padding, whose outputs are zero.

    Args:
        lengths: int [B].

    Example:
        >>> print(QLengths(np.array([1])).show(2, 4))
        ####
        ....
    """

    array_axes: ClassVar = {"lengths": "B"}

    lengths: Number

    def __post_init__(self):
        check_number(self, "lengths")

    def lower(self):
        return Compare(slot(), "<", number(self.lengths))

    def _arguments(self):
        return [short(self.lengths)]


def kv_flags(flags: Any) -> Mask:
    """Allows every query the flagged keys, bool [B or 1, S].

    Example:
        >>> print(kv_flags(np.array([[True, False, True]])).show(2, 3))
        #.#
        #.#
    """
    return Compare(number(1), "<=", array(flags))


class EqualIds(Leaf):
    """Base of `Segments`, `TokenTypes` and `FirstOfSegment`: allows equal ids if both are valid."""

    def _ids(self) -> tuple[Any, Any]:
        raise NotImplementedError

    @property
    def _valid(self) -> Valid:
        return ">=0"

    def lower(self):
        q_ids, kv_ids = self._ids()
        return Compare(array(q_ids, valid=self._valid), "==", array(kv_ids, valid=self._valid))


@rule
class Segments(EqualIds):
    """Allows equal ids >= 0: packed documents that do not attend to each other. Negative ids are padding.

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

    q_ids: Array
    kv_ids: Array | None = None

    def __post_init__(self):
        check_array(self, "q_ids", "int", "BT")
        check_array(self, "kv_ids", "int", "BS", optional=True)

    def _ids(self):
        if self.kv_ids is None:
            return self.q_ids, self.q_ids
        return self.q_ids, self.kv_ids

    def documents(self):
        return self._ids()

    def extents(self):
        yield from both_extents(self, "q_ids", "kv_ids")

    def _cut(self, q, kv, q_len, kv_len):
        q_ids, kv_ids = self._ids()
        return replace(self, q_ids=gather(q_ids, q), kv_ids=gather(kv_ids, kv))

    def _arguments(self):
        if self.kv_ids is None:
            return [short(self.q_ids)]
        return [short(self.q_ids), short(self.kv_ids)]


@rule
class TokenTypes(EqualIds):
    """Allows equal token types. Type 0 never attends, unless `zero="none"`.

    Args:
        q_types: int [B or 1, T].
        kv_types: int [B or 1, S]; by default the same as `q_types`.
        zero: the side whose type 0 is disabled: "q", "kv", "both", or "none" (0 is a type like any other). The first
            three allow the same pairs, because both types of a pair are equal.

    Example:
        >>> print(TokenTypes(np.array([[1, 0, 2, 2]])).show(4, 4))
        #...
        ....
        ..##
        ..##
    """

    applied = "token_type_ids"

    array_axes: ClassVar = {"q_types": "BT", "kv_types": "BS"}

    q_types: Array
    kv_types: Array | None = None
    zero: str = "q"

    def __post_init__(self):
        check_array(self, "q_types", "int", "BT")
        check_array(self, "kv_types", "int", "BS", optional=True)
        check_choice("zero", self.zero, ("q", "kv", "both", "none"))

    def _ids(self):
        if self.kv_types is None:
            return self.q_types, self.q_types
        return self.q_types, self.kv_types

    @property
    def _valid(self):
        if self.zero == "none":
            return "all"
        return "!=0"

    def extents(self):
        yield from both_extents(self, "q_types", "kv_types")

    def _cut(self, q, kv, q_len, kv_len):
        q_ids, kv_ids = self._ids()
        return replace(self, q_types=gather(q_ids, q), kv_types=gather(kv_ids, kv))

    def _arguments(self):
        arguments = [short(self.q_types)]
        if self.kv_types is not None:
            arguments.append(short(self.kv_types))
        if self.zero != "q":
            arguments.append(f"zero={self.zero!r}")
        return arguments


@rule
class Global(Leaf):
    """Allows a pair if its key is global (columns) or its query is global (rows).

    Args:
        indices: the positions of global tokens, a tuple of ints.
        q_flags: bool [B or 1, T]: additional global queries.
        kv_flags: bool [B or 1, S]: additional global keys.
        rows: whether global queries attend to every key.
        columns: whether every query attends to global keys.

    Example:
        >>> print(Global((0,)).show(3, 3))
        ###
        #..
        #..
    """

    array_axes: ClassVar = {"q_flags": "BT", "kv_flags": "BS"}

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

    def lower(self):
        parts: list[Mask] = []
        if self.rows:
            parts += [Compare(term, ">=", number(1), few=True) for term in self._terms(self.q_flags)]
        if self.columns:
            parts += [Compare(number(1), "<=", term, few=True) for term in self._terms(self.kv_flags)]
        if not parts:
            return Empty()
        if len(parts) == 1:
            return parts[0]
        return Or(tuple(parts))

    @property
    def reads(self):
        reads = self.lower().reads
        if self.q_flags is None and self.kv_flags is None:
            return reads
        return reads | BY_SLOT  # flags are cut even if rows or columns are off

    def _terms(self, flags: Any) -> list[Term]:
        """The terms that are 1 for the global tokens of a side, and 0 for the others."""
        found = []
        if self.indices:
            found.append(member(self.indices))
        if flags is not None:
            found.append(array(flags))
        return found

    def _cut(self, q, kv, q_len, kv_len):
        return replace(self, q_flags=gather(self.q_flags, q), kv_flags=gather(self.kv_flags, kv))

    def _arguments(self):
        arguments = []
        if self.indices:
            arguments.append(repr(self.indices))
        for name in ("q_flags", "kv_flags"):
            if getattr(self, name) is not None:
                arguments.append(f"{name}={short(getattr(self, name))}")
        return arguments + [f"{name}=False" for name in ("rows", "columns") if not getattr(self, name)]


def both_extents(mask: Mask, q: str, kv: str):
    """The sizes that the ids of both sides fix."""
    for name, ids, axes in zip((q, kv), mask._ids(), ("BT", "BS"), strict=True):  # type: ignore[attr-defined]
        for axis, size in zip(axes, ids.shape, strict=True):
            yield Extent(f"{type(mask).__name__}.{name}", axis, size)
