"""`Nodes`: lowered masks as nodes of the document, see `document`."""

from typing import Any

import numpy as np
from jax.core import Tracer

from longspan.array_types import FAR
from longspan.checks import is_array
from longspan.explorer.arrays import Arrays
from longspan.explorer.opaque import ShownPlane, evaluated
from longspan.masks import And, Blocks, Compare, Dense, Empty, Full, Mask, Not, Or, PerHead, Rule
from longspan.masks.terms import ARRAY, MEMBER, NUMBER, Term


class Nodes:
    """Converts masks to nodes of one batch row and head, and collects arrays, numbers of arrays, and notes.

    While JAX traces a rule, `traced` collects its numbers: each a place in a node, a list, and the traced number.
    `stand_ins` maps the positions that stand for numbers to the index of these.
    """

    def __init__(self, arrays: Arrays, plane: ShownPlane) -> None:
        self.arrays, self.plane = arrays, plane
        self.data: list[int] = []
        self.notes: list[str] = []
        self.traced: list[tuple[list[Any], Any]] = []
        self.stand_ins: dict[int, int] = {}
        self._data_known: dict[int, tuple[Any, list[Any]]] = {}
        self._cells_known: dict[int, tuple[Mask, dict[str, Any]]] = {}

    def node(self, mask: Mask) -> dict[str, Any]:
        """The node of a mask; rules are lowered."""
        kind = type(mask)
        if kind in (Full, Empty):
            return dict(op=kind.__name__.lower())
        if kind in (And, Or):
            return dict(op=kind.__name__.lower(), parts=[self.node(part) for part in mask.parts()])
        if isinstance(mask, Not):
            return dict(op="not", part=self.node(mask.mask))
        if isinstance(mask, PerHead):
            return self.node(mask.masks[min(self.plane.head, len(mask.masks) - 1)])
        if kind is Compare:
            return self._compare(mask)
        if kind is Blocks:
            return self._blocks(mask)
        if kind is Dense:
            return self._dense(mask)
        if is_opaque(mask):
            return self._cells(mask)
        return self.node(mask.lower())

    def _compare(self, mask: Any) -> dict[str, Any]:
        sides = dict(q=self._term(mask.q), relation=mask.relation, kv=self._term(mask.kv))
        return dict(op="compare", **sides, few=mask.few)

    def _term(self, term: Term) -> dict[str, Any]:
        data: Any = None
        by_head = term.of == ARRAY and term.data.ndim == 3
        if term.of == ARRAY:
            array = np.asarray(term.data)
            data = self.arrays.add(self.plane.plane(array) if by_head else self.plane.row(array))
        elif term.of == NUMBER:
            data = self._number(term.data)
        elif term.of == MEMBER:
            data = [["n", self.stand_ins[i]] if i in self.stand_ins else i for i in term.data]
        numbers = dict(
            divide=self._number(term.divide), modulo=self._optional_number(term.modulo), plus=self._number(term.plus)
        )
        return dict(of=term.of, data=data, **numbers, valid=term.valid, by_head=by_head)

    def _blocks(self, mask: Any) -> dict[str, Any]:
        table = np.asarray(mask.table)
        table = self.plane.plane(table.reshape((1,) * (4 - table.ndim) + table.shape))
        return dict(op="blocks", table=self.arrays.add(table), size=mask.block_size)

    def _dense(self, mask: Any) -> dict[str, Any]:
        array = np.asarray(mask.array)
        array = self.plane.plane(array.reshape((1,) * (4 - array.ndim) + array.shape))
        q_offset = self._optional_number(mask.q_offset)
        return dict(
            op="dense", array=self.arrays.add(array), q_offset=q_offset, kv_offset=self._optional_number(mask.kv_offset)
        )

    def _cells(self, mask: Mask) -> dict[str, Any]:
        if id(mask) not in self._cells_known:
            some, every, q_cell, kv_cell, note = evaluated(mask, self.plane)
            self.notes.append(note)
            sizes = dict(q_cell=q_cell, kv_cell=kv_cell, bounded=not mask.unbounded())
            kinds = dict(some=self.arrays.add(some), every=self.arrays.add(every))
            # The mask is kept too: as long as it exists, no other mask has its id.
            self._cells_known[id(mask)] = mask, dict(op="cells", **kinds, **sizes, text=repr(mask))
        return self._cells_known[id(mask)][1]

    def _optional_number(self, value: Any) -> Any:
        if value is None:
            return None
        return self._number(value)

    def _number(self, value: Any) -> Any:
        """A number: an int, or a reference to a number of an array, or a place for a traced one."""
        if isinstance(value, int):
            return clipped(value)
        if isinstance(value, Tracer):
            place: list[Any] = []
            self.traced.append((place, value))
            return place
        assert is_array(value), "masks check their numbers"
        if id(value) not in self._data_known:
            numbers = np.asarray(value).reshape(-1)
            self._data_known[id(value)] = value, ["d", len(self.data)]
            self.data.append(clipped(int(self.plane.row(numbers))))
        return self._data_known[id(value)][1]


def is_opaque(mask: Mask) -> bool:
    """Whether a rule does not lower to comparisons, tables and arrays of bools."""
    if type(mask) in (Full, Empty, And, Or, Not, PerHead, Compare, Blocks, Dense):
        return False
    return not isinstance(mask, Rule) or type(mask).allowed is not Rule.allowed


def clipped(value: int) -> int:
    """A number as rules read it."""
    return max(-FAR, min(FAR, value))
