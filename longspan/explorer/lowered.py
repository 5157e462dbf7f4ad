"""Lowers the user's expression with references to its numbers, so that the page can change them.

How a number enters the lowered rule is known only to the rule's `lower`. So `lower` is traced by JAX with the numbers
as arguments, as inside `jit`, and the operations that JAX records become the document's list `derived`. Positions in
tuples (`Global((0, 5))`) are static: `lower` runs with other positions in their place, which are found again in the
result.

A number is fixed if this does not work, because the rule tests its value or computes arrays from it. A number is fixed
too if the traced rule differs from the one that Python makes with another number.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from longspan.array_types import FAR
from longspan.explorer.arrays import Arrays
from longspan.explorer.expression import OPERATIONS, Expression, with_fields
from longspan.explorer.jaxprs import Operations, UnknownOperation, values_of
from longspan.explorer.nodes import Nodes, clipped, is_opaque
from longspan.masks import Blocks, Mask, PerHead

STAND_IN = FAR - (1 << 20)  # positions from here on stand for the positions of a tuple
OTHERS = (1, -1, 2, -2)  # a rule is compared with the one of the number plus the first of these that is legal

Values = dict[int, Any]  # by the index of the number


def lowered(expression: Expression, nodes: Nodes, operations: Operations, *, constant: bool = False) -> dict[str, Any]:
    """The text, the tree and the program of a mask. Numbers that cannot change become fixed; with `constant`, all."""
    free = []
    if not constant:
        _fix_numbers(expression, nodes)
        free = [index for index, number in enumerate(expression.numbers) if number.fixed is None]
    # Leaves without free numbers are lowered here, outside of the trace, which would record their arrays.
    known = {
        index: leaf.mask.atoms()
        for index, leaf in enumerate(expression.leaves)
        if leaf.shown and not set(leaf.numbers) & set(free)
    }

    nodes_known = {index: nodes.node(mask) for index, mask in known.items()}

    def program(values: Values) -> Any:
        leaves, own = [], []
        for index, leaf in enumerate(expression.leaves):
            mask = known.get(index, leaf.mask)
            if leaf.shown and index not in known:
                mask = _with_values(expression, index, values)
                own.append(nodes.node(mask))
            else:
                own.append(nodes_known.get(index))
            leaves.append(mask)
        return own, nodes.node(_with_leaves(expression.mask, iter(leaves)).atoms())

    own, whole = _traced(program, expression, free, nodes, operations)
    return dict(text=expression.text, tree=expression.tree(own), program=whole)


def _traced(
    program: Callable[[Values], Any], expression: Expression, free: Sequence[int], nodes: Nodes, operations: Operations
) -> Any:
    """The nodes that a program makes, with references in place of the numbers `free`."""
    found: Any = None
    values: Values = {}
    nodes.traced, nodes.stand_ins = [], {}
    for index in free:
        if expression.numbers[index].entry is not None:
            values[index] = STAND_IN + index
            nodes.stand_ins[STAND_IN + index] = index
    arguments = [index for index in free if index not in values]

    def run(*numbers: Any) -> list[Any]:
        nonlocal found
        found = program(values | dict(zip(arguments, numbers, strict=True)))
        return [number for _, number in nodes.traced]

    jaxpr = jax.make_jaxpr(run)(*[np.int32(clipped(expression.numbers[index].value)) for index in arguments])
    results = operations.of_program(jaxpr, [["n", index] for index in arguments])
    for (place, _), result in zip(nodes.traced, results, strict=True):
        if isinstance(result, int):
            result = operations.add("add", [result, 0])
        place[:] = result
    nodes.traced, nodes.stand_ins = [], {}
    return found


def _fix_numbers(expression: Expression, nodes: Nodes) -> None:
    """Marks the numbers that the page cannot change."""
    for index, leaf in enumerate(expression.leaves):
        if not leaf.numbers:
            continue
        reason = _why_fixed(expression, index, nodes)
        for number in leaf.numbers:
            expression.numbers[number].fixed = reason
        if reason is None:
            _compare_with_python(expression, index, nodes)


def _why_fixed(expression: Expression, index: int, nodes: Nodes) -> str | None:
    leaf = expression.leaves[index]
    if not leaf.shown:
        return f"Head {nodes.plane.head} does not use this rule."
    if isinstance(leaf.mask, Blocks):
        return "The table has one row for each block of this size."
    if any(is_opaque(part) for part in leaf.mask.atoms().walk()):
        return "Python evaluated this rule."
    return None


def _compare_with_python(expression: Expression, index: int, nodes: Nodes) -> None:
    """Traces a leaf, and compares it with the leaf that Python makes with other numbers."""
    leaf, probe = expression.leaves[index], Nodes(Arrays(), nodes.plane)
    operations = Operations([])
    try:
        traced = _traced(
            lambda values: probe.node(_with_values(expression, index, values)),
            expression, leaf.numbers, probe, operations,
        )  # fmt: skip
    except (UnknownOperation, TypeError, ValueError) as error:
        for number in leaf.numbers:
            expression.numbers[number].fixed = f"The page cannot compute this rule ({type(error).__name__})."
        return
    initial = {number: expression.numbers[number].value for number in leaf.numbers}
    named = set(_named([traced, operations.entries]))
    for number in leaf.numbers:
        near = clipped(initial[number])
        others = [clipped(near + step) for step in OTHERS]
        other = next((value for value in others if value != near and expression.is_legal(number, value)), None)
        if other is None:
            expression.numbers[number].fixed = "Python accepts no other number here."
            continue
        numbers = {i: clipped(value) for i, value in (initial | {number: other}).items()}
        made = _resolved(traced, numbers, values_of(operations.entries, numbers))
        if number not in named or made != probe.node(expression.rebuilt(index, {number: other})):
            expression.numbers[number].fixed = "The rule reads this number only when it is made."


def _named(node: Any) -> Iterator[int]:
    """The numbers that a node, or a list of them, refers to."""
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, list) and node[:1] == ["n"]:
        yield node[1]
    elif isinstance(node, list):
        for entry in node:
            yield from _named(entry)


def _resolved(node: Any, numbers: dict[int, int], derived: list[int]) -> Any:
    """A node with values in place of references to numbers."""
    if isinstance(node, dict):
        return {key: _resolved(value, numbers, derived) for key, value in node.items()}
    if isinstance(node, list) and node[:1] == ["n"]:
        return clipped(numbers[node[1]])
    if isinstance(node, list) and node[:1] == ["v"]:
        return clipped(derived[node[1]])
    if isinstance(node, list) and node[:1] != ["d"]:
        return [_resolved(entry, numbers, derived) for entry in node]
    return node


def _with_values(expression: Expression, index: int, values: Values) -> Mask:
    """A leaf with other numbers, without the checks of its constructor."""
    leaf, changed = expression.leaves[index], {}
    for number in leaf.numbers:
        place = expression.numbers[number]
        value = values.get(number, place.value)
        if place.entry is None:
            changed[place.field] = value
        else:
            entries = list(changed.get(place.field, getattr(leaf.mask, place.field)))
            entries[place.entry] = value
            changed[place.field] = tuple(entries)
    return with_fields(leaf.mask, changed)


def _with_leaves(mask: Mask, leaves: Iterator[Mask]) -> Mask:
    """The same composition of other leaves, from left to right."""
    if type(mask) not in (*OPERATIONS, PerHead):
        return next(leaves)
    return mask.with_parts([_with_leaves(part, leaves) for part in mask.parts()])
