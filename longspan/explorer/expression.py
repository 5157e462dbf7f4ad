"""`Expression`: a mask as its user wrote it: its text, the places of its leaves and of its numbers.

The places come from the mask's own repr. Leaves and numbers are replaced by others whose repr is enclosed in marks, and
the text between two marks is the place of a leaf or a number.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from longspan.array_types import FAR
from longspan.masks import And, Mask, Not, Or, PerHead
from longspan.masks.base import rule

# Private code points: in a text they begin a leaf or a number, or end it.
LEAF, LEAF_END, NUMBER, SEPARATOR, NUMBER_END = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"
OPERATIONS = {And: "and", Or: "or", Not: "not"}
NEVER_LESS = (0, 1)  # the lower bounds of numbers that masks have, apart from none


@dataclass
class NumberPlace:
    """One number of an expression."""

    value: int
    leaf: int  # the index of its leaf
    field: str
    entry: int | None  # its index, if the field is a tuple
    start: int = 0  # its place in the text
    stop: int = 0
    fixed: str | None = None  # the reason why the page cannot change it


@dataclass
class LeafPlace:
    """One leaf of an expression: a mask without parts."""

    mask: Mask
    shown: bool  # whether the selected head uses it
    start: int = 0
    stop: int = 0
    numbers: list[int] = field(default_factory=list)  # indices of its numbers


class MarkedInt(int):
    """An int whose repr is enclosed in marks, after its index among all numbers of the leaves."""

    index: int

    def __repr__(self) -> str:
        return f"{NUMBER}{self.index}{SEPARATOR}{int(self)}{NUMBER_END}"


@rule
class MarkedLeaf(Mask):
    """A leaf whose repr is enclosed in marks. It is only printed."""

    text: str

    def __repr__(self):
        return f"{LEAF}{self.text}{LEAF_END}"


class Expression:
    """The text of a mask, its tree, its leaves and its numbers, from left to right."""

    def __init__(self, mask: Mask, head: int) -> None:
        self.mask, self.head = mask, head
        self.leaves: list[LeafPlace] = []
        self.numbers: list[NumberPlace] = []
        self.text = ""
        marked = repr(self._marked(mask, True))
        self._read(marked)

    def tree(self, programs: Sequence[Any]) -> dict[str, Any]:
        """The user's expression as a JSON tree; `programs` has the node of each leaf."""
        return self._node(self.mask, iter(range(len(self.leaves))), programs)

    def rebuilt(self, leaf: int, values: dict[int, int]) -> Mask:
        """A leaf with other numbers, made by its constructor: an illegal number raises an error."""
        mask, changed = self.leaves[leaf].mask, {}
        for index, value in values.items():
            place = self.numbers[index]
            if place.entry is None:
                changed[place.field] = value
            else:
                entries = list(changed.get(place.field, getattr(mask, place.field)))
                entries[place.entry] = value
                changed[place.field] = tuple(entries)
        return replace(mask, **changed)  # type: ignore[type-var]

    def entries(self, longest: int) -> list[dict[str, Any]]:
        """The numbers for the document."""
        return [self._entry(index, longest) for index in range(len(self.numbers))]

    def _marked(self, mask: Mask, shown: bool) -> Mask:
        """The mask with marked leaves, which are collected in the order of the text."""
        if type(mask) not in (*OPERATIONS, PerHead):
            index = len(self.leaves)
            self.leaves.append(LeafPlace(mask, shown))
            return MarkedLeaf(repr(_with_marked_numbers(mask, self.numbers, index)))
        parts = []
        for number, part in enumerate(mask.parts()):
            used = shown
            if isinstance(mask, PerHead):
                used = shown and number == _selected(mask, self.head)
            parts.append(self._marked(part, used))
        return mask.with_parts(parts)

    def _read(self, marked: str) -> None:
        """Removes the marks from a text and stores their places."""
        length, leaf, marks = 0, -1, [LEAF, LEAF_END, NUMBER, SEPARATOR, NUMBER_END]
        shown: list[NumberPlace] = []
        pieces = iter(re.split(f"([{''.join(marks)}])", marked))
        for piece in pieces:
            if piece == LEAF:
                leaf += 1
                self.leaves[leaf].start = length
            elif piece == LEAF_END:
                self.leaves[leaf].stop = length
            elif piece == NUMBER:
                number = self.numbers[int(next(pieces))]
                number.start = length
                self.leaves[leaf].numbers.append(len(shown))
                shown.append(number)
            elif piece == NUMBER_END:
                shown[-1].stop = length
            elif piece != SEPARATOR:
                self.text += piece
                length += len(piece.encode("utf-16-le")) // 2
        self.numbers = shown

    def _node(self, mask: Mask, leaves: Iterator[int], programs: Sequence[Any]) -> dict[str, Any]:
        kind = type(mask)
        if kind not in (*OPERATIONS, PerHead):
            index = next(leaves)
            leaf = self.leaves[index]
            return dict(op="leaf", leaf=index, start=leaf.start, stop=leaf.stop, program=programs[index])
        parts = [self._node(part, leaves, programs) for part in mask.parts()]
        place = dict(start=parts[0]["start"], stop=parts[-1]["stop"])
        if isinstance(mask, PerHead):
            chosen = parts[_selected(mask, self.head)]
            return dict(op="per_head", head=self.head, heads=len(parts), parts=[chosen], **place)
        return dict(op=OPERATIONS[kind], parts=parts, **place)

    def _entry(self, index: int, longest: int) -> dict[str, Any]:
        place = self.numbers[index]
        least, greatest = -FAR, FAR
        if place.fixed is None:
            least = self._least(index)
        return dict(
            value=place.value,
            start=place.start,
            stop=place.stop,
            leaf=place.leaf,
            rule=re.match(r"\w*", repr(self.leaves[place.leaf].mask))[0],  # type: ignore[index]
            field=place.field,
            least=least,
            greatest=greatest,
            fixed=place.fixed,
            high=min(greatest, max(longest, place.value)),
        )

    def _least(self, index: int) -> int:
        """The least legal value, found by making the leaf with others."""
        for least in (-FAR, *NEVER_LESS):
            if self.is_legal(index, least):
                return least
        return self.numbers[index].value

    def is_legal(self, index: int, value: int) -> bool:
        """Whether the leaf can be made with another value of one of its numbers."""
        try:
            self.rebuilt(self.numbers[index].leaf, {index: value})
        except (ValueError, TypeError):
            return False
        return True


def _selected(mask: PerHead, head: int) -> int:
    if len(mask.masks) == 1:
        return 0
    return head


def _with_marked_numbers(mask: Mask, numbers: list[NumberPlace], leaf: int) -> Mask:
    """The leaf with marked ints in its fields, which are added to `numbers`."""

    def marked(value: int, name: str, entry: int | None) -> MarkedInt:
        found = MarkedInt(value)
        found.index = len(numbers)
        numbers.append(NumberPlace(int(value), leaf, name, entry))
        return found

    changed: dict[str, Any] = {}
    for name in (f.name for f in fields(mask)):  # type: ignore[arg-type]
        value = getattr(mask, name)
        if _is_int(value):
            changed[name] = marked(value, name, None)
        elif isinstance(value, tuple) and value and all(map(_is_int, value)):
            changed[name] = tuple(marked(v, name, i) for i, v in enumerate(value))
    return with_fields(mask, changed)


def with_fields(mask: Any, changed: dict[str, Any]) -> Any:
    """A copy with other values of fields, without the checks of the constructor."""
    copy = object.__new__(type(mask))
    for name, value in (vars(mask) | changed).items():
        object.__setattr__(copy, name, value)
    return copy


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
