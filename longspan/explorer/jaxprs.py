"""The operations by which `lower` computes numbers from numbers, read from a traced program (a jaxpr)."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

# The same names in `numbers.js`.
COMPUTE: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "abs": abs,
    "sign": lambda a: (a > 0) - (a < 0),
    "max": max,
    "min": min,
    "div": lambda a, b: _quotient(a, b),
    "rem": lambda a, b: a - _quotient(a, b) * b,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": lambda a: 1 - a,
    "select_n": lambda which, *cases: cases[which],
    "clamp": lambda least, a, greatest: max(least, min(greatest, a)),
}
OF_BOOLS = frozenset(("and", "or", "xor", "not"))  # of ints they would be bitwise
SAME_VALUE = frozenset(("convert_element_type", "squeeze", "reshape", "broadcast_in_dim", "copy", "stop_gradient"))


class UnknownOperation(Exception):
    """A number is computed by an operation that the page does not have."""


class Operations:
    """Operations on numbers, each once: entries `[name, operand, ...]`; an operand is an int or a reference."""

    def __init__(self, entries: list[list[Any]]) -> None:
        self.entries = entries
        self._known: dict[str, int] = {}

    def add(self, name: str, operands: list[Any]) -> list[Any]:
        """A reference to the result of an operation."""
        key = repr((name, operands))
        if key not in self._known:
            self._known[key] = len(self.entries)
            self.entries.append([name, *operands])
        return ["v", self._known[key]]

    def of_program(self, program: Any, arguments: list[Any]) -> list[Any]:
        """The results of a closed jaxpr as ints and references; only operations that they need are added."""
        jaxpr, known = program.jaxpr, dict(zip(program.jaxpr.invars, arguments, strict=True))
        known |= {name: _as_int(value) for name, value in zip(jaxpr.constvars, program.consts, strict=True)}
        made_by = {name: equation for equation in jaxpr.eqns for name in equation.outvars}

        def read(name: Any) -> Any:
            if hasattr(name, "val"):
                return _as_int(name.val)
            if name not in known:
                equation = made_by[name]
                known.update(zip(equation.outvars, self._results(equation, read), strict=True))
            return known[name]

        return [read(name) for name in jaxpr.outvars]

    def _results(self, equation: Any, read: Any) -> list[Any]:
        name, inner = equation.primitive.name, equation.params.get("jaxpr")
        if any(v.aval.shape != () or v.aval.dtype.kind not in "bi" for v in (*equation.invars, *equation.outvars)):
            raise UnknownOperation(name)
        operands = [read(operand) for operand in equation.invars]
        if inner is not None:
            return self.of_program(inner, operands)
        kinds = {v.aval.dtype.kind for v in equation.invars}
        if name in SAME_VALUE:
            if equation.outvars[0].aval.dtype.kind == "b" and kinds == {"i"}:
                return [self.add("ne", [operands[0], 0])]
            return operands
        if name not in COMPUTE or (name in OF_BOOLS and kinds != {"b"}):
            raise UnknownOperation(name)
        return [self.add(name, operands)]


def _as_int(value: Any) -> int | None:
    """A constant of a program; None for arrays, which no operation accepts."""
    if np.shape(value) != ():
        return None
    return int(value)


def values_of(entries: list[list[Any]], numbers: dict[int, int]) -> list[int]:
    """The values of derived numbers, as `numbers.js` computes them."""
    found: list[int] = []

    def value(operand: Any) -> int:
        if isinstance(operand, int):
            return operand
        kind, index = operand
        return numbers[index] if kind == "n" else found[index]

    for name, *operands in entries:
        found.append(int(COMPUTE[name](*map(value, operands))))
    return found


def _quotient(a: int, b: int) -> int:
    """The quotient, rounded towards zero."""
    magnitude = abs(a) // abs(b)
    return magnitude if (a < 0) == (b < 0) else -magnitude
