"""Splits a traced function into a part that runs outside of a kernel and a part that runs inside.

The outer part has the operations whose inputs are all known outside of the kernel: the batch row, the head, and whole
arrays. The inner part has all others. Values that pass from the outer part to the inner part are the boundary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxprs_in_params

# Operations that read or write an array at computed indices. The compiler for TPUs refuses them in a kernel.
INDEXING = ("gather", "scatter", "scatter-add", "dynamic_slice", "dynamic_update_slice", "sort")

# Operations that only repeat a value. The kernel repeats it itself: the result has the size of a tile.
REPEATING = ("broadcast_in_dim", "iota")


@dataclass(frozen=True)
class SplitFunction:
    """A function of `known` arguments, then of further arguments, traced for some shapes."""

    jaxpr: ClosedJaxpr
    known: int
    outer_equations: tuple[Any, ...]
    inner_equations: tuple[Any, ...]
    boundary: tuple[Var, ...]

    @classmethod
    def of(cls, function: Callable, known: int, *examples: Any) -> "SplitFunction":
        """Traces function(*examples), whose first `known` arguments are known outside of the kernel."""
        closed = jax.make_jaxpr(function)(*examples)
        jaxpr = closed.jaxpr
        available = {*jaxpr.invars[:known], *jaxpr.constvars}
        outer, inner = [], []
        for equation in jaxpr.eqns:
            inputs = [x for x in equation.invars if not isinstance(x, Literal)]
            if inputs and available.issuperset(inputs) and equation.primitive.name not in REPEATING:
                outer.append(equation)
                available.update(equation.outvars)
            else:
                inner.append(equation)
        used = [x for equation in inner for x in equation.invars] + list(jaxpr.outvars)
        boundary = dict.fromkeys(x for x in used if not isinstance(x, Literal) and x in available)
        return cls(closed, known, tuple(outer), tuple(inner), tuple(boundary))

    def outside(self, *known: Any) -> list[Any]:
        """The values of the boundary, from the known arguments."""
        jaxpr = self.jaxpr.jaxpr
        values = dict(zip(jaxpr.constvars, self.jaxpr.consts, strict=True))
        values.update(zip(jaxpr.invars[: self.known], known, strict=True))
        _evaluate(self.outer_equations, values)
        return [values[x] for x in self.boundary]

    def inside(self, boundary: Sequence[Any], *rest: Any) -> list[Any]:
        """The results, from the values of the boundary and the other arguments."""
        jaxpr = self.jaxpr.jaxpr
        values = dict(zip(self.boundary, boundary, strict=True))
        values.update(zip(jaxpr.invars[self.known :], rest, strict=True))
        _evaluate(self.inner_equations, values)
        return [_read(values, x) for x in jaxpr.outvars]

    def indexes_arrays(self) -> bool:
        """Whether the inner part reads or writes an array at computed indices."""
        return any(map(_indexes_arrays, self.inner_equations))

    def is_argument(self, value: Var) -> bool:
        """Whether a value of the boundary is one of the known arguments, or a constant, unchanged."""
        jaxpr = self.jaxpr.jaxpr
        return value in jaxpr.invars or value in jaxpr.constvars


def _indexes_arrays(equation: Any) -> bool:
    if equation.primitive.name in INDEXING:
        return True
    inner = jaxprs_in_params(equation.params)
    return any(_indexes_arrays(each) for jaxpr in inner for each in jaxpr.eqns)


def _evaluate(equations: Sequence[Any], values: dict[Var, Any]) -> None:
    """Evaluates the equations in order, adding the results to `values`."""
    for equation in equations:
        options = equation.primitive.get_bind_params(equation.params)
        found = equation.primitive.bind(*(_read(values, x) for x in equation.invars), **options)
        if not equation.primitive.multiple_results:
            found = [found]
        values.update(zip(equation.outvars, found, strict=True))


def _read(values: dict[Var, Any], x: Any) -> Any:
    return x.val if isinstance(x, Literal) else values[x]
