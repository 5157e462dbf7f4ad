"""Finds expensive operations on closed-over constants, which XLA would compute at compile time."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

MAX_FOLDED = 4096  # elements of a constant that may be reduced at compile time, about 40 ms
SLOW = re.compile(r"^reduce_(?!precision)|cum|sort|arg(max|min)|dot_general|scatter|conv_general|top_k")
COUNTED = ("reduce", "reduce-window", "sort", "scatter", "dot", "while", "custom-call")  # opcodes of XLA
# The kinds of values at compile time: arrays with known elements; scalars and iotas; unknown values.
CONSTANT, COUNTING, DATA = 2, 1, 0


def assert_nothing_is_folded(function: Callable, *arguments: Any) -> None:
    """Asserts that no reduction, sort, scan or product in a program has only constant operands."""
    found = list(folded(function, *arguments))
    assert not found, f"XLA computes at compile time: {found}"


def assert_same_operations(function: Callable, closed_over: Any, *arguments: Any) -> None:
    """Asserts that the optimised program has the same expensive operations for closed-over data as for an argument."""
    inside = jax.jit(lambda *given: function(closed_over, *given)).lower(*arguments)
    outside = jax.jit(function).lower(closed_over, *arguments)
    assert operations(inside) == operations(outside)
    assert operations(inside), "nothing was counted"


def operations(lowered: Any) -> Counter[str]:
    """The number of times each expensive operation occurs in a program after XLA's optimisations."""
    return Counter(re.findall(rf" ({'|'.join(COUNTED)})\(", lowered.compile().as_text()))


def folded(function: Callable, *arguments: Any) -> Iterator[str]:
    """The operations of a program with only constant operands, of more than MAX_FOLDED elements."""
    closed = jax.make_jaxpr(function)(*arguments)
    yield from _walk(closed.jaxpr, [_constant(value) for value in closed.consts], [DATA] * len(closed.in_avals))[1]


def _constant(value: Any) -> int:
    return CONSTANT if np.size(value) > 1 else COUNTING


def _walk(jaxpr: Any, constants: list[int], given: list[int]) -> tuple[list[int], list[str]]:
    """The kinds of a program's results, and its folded operations."""
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *given), strict=True))
    found: list[str] = []
    for equation in jaxpr.eqns:
        operands = [COUNTING if isinstance(x, core.Literal) else known[x] for x in equation.invars]
        name = equation.primitive.name
        results = [_result(name, operands)] * len(equation.outvars)
        for inner, of_inner in _inner(equation, operands):
            inner_results, inside = _walk(inner.jaxpr, [_constant(value) for value in inner.consts], of_inner)
            found += inside
            if name not in ("scan", "while", "cond") and len(inner_results) == len(results):
                results = inner_results
        sizes = [x.aval.size for x, kind in zip(equation.invars, operands, strict=True) if kind == CONSTANT]
        if SLOW.search(name) and results[0] == CONSTANT and max(sizes) > MAX_FOLDED:
            found.append(f"{name}({', '.join(str(x.aval) for x in equation.invars)})")
        known.update(zip(equation.outvars, results, strict=True))
    return [COUNTING if isinstance(x, core.Literal) else known[x] for x in jaxpr.outvars], found


def _result(name: str, operands: list[int]) -> int:
    if name in ("optimization_barrier", "axis_index", "ffi_call", "scan", "while", "cond") or DATA in operands:
        return DATA
    return max(operands, default=COUNTING)


def _inner(equation: Any, operands: list[int]) -> Iterator[tuple[Any, list[int]]]:
    """The programs inside an operation and the kinds of their operands; values that change in a loop are DATA."""
    params, name = equation.params, equation.primitive.name
    if name == "scan":
        fixed = params["num_consts"]
        yield params["jaxpr"], [*operands[:fixed], *[DATA] * (len(operands) - fixed)]
    elif name == "while":
        of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
        carried = [DATA] * (len(operands) - of_test - of_body)
        yield params["cond_jaxpr"], [*operands[:of_test], *carried]
        yield params["body_jaxpr"], [*operands[of_test : of_test + of_body], *carried]
    elif name == "cond":
        yield from ((branch, operands[1:]) for branch in params["branches"])
    else:
        inside = [value for value in params.values() if isinstance(value, core.ClosedJaxpr | core.Jaxpr)]
        for program in inside:
            closed = program if isinstance(program, core.ClosedJaxpr) else core.ClosedJaxpr(program, ())
            if len(closed.jaxpr.invars) == len(operands):
                yield closed, operands
