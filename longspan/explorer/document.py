"""`document`: everything that the page of the mask explorer knows of a mask, as one JSON document.

The page evaluates the mask from its lowered program, of one batch row and one head. The document has these keys:

```
format       1
longspan     the version
q_len, kv_len
batch, rows  the batch row of the document, and the number of rows that the mask distinguishes
head, heads  likewise
mask         {text, tree, program}: the mask of the page
other        the same of the mask that it is compared with, without numbers that change; or null
numbers      the numbers of `mask.text`, from left to right
derived      numbers computed from `numbers`, in the order of computation
data         numbers that come from arrays: `["d", i]` is `data[i]`
arrays       the arrays that nodes and terms name by their index
q_positions, kv_positions  the index of an array: the position of each slot; null: the slot's index
documents    {q, kv}: indices of arrays with the document id of each token, negative for padding; or null
tokens       {q, kv}: lists of texts; or null
sizes        {batch, heads, kv_heads, head_dim, itemsize, dtype}: the call whose FLOPs and bytes the page prints
cache        see `caches`; {error} if there is no plan
devices      see `devices`; {error} if there is no plan
notes        sentences about the document, for example which rules Python evaluated
```

A *number* in a program is an int; `["n", i]`, the value of `numbers[i]`; `["v", i]`, the value of `derived[i]`; or
`["d", i]`. All are clipped to ±(2**30 - 1) where they are read. Only the last is not static: `_by_distance`,
`hull_of_equals` and the clipping of array entries depend on this, see `masks/terms.py` and `masks/compare.py`.

An entry of `numbers` is `{value, start, stop, leaf, rule, field, least, greatest, fixed, high}`.
`text[start:stop]` is its place in `mask.text`, in UTF-16 code units as JavaScript counts; `leaf` is the index of its
leaf, from left to right, `rule` the leaf's name, `field` that of the number. `least` and `greatest` are the legal
values, and a slider ends at `high` at the latest. `fixed` is null, or the reason why the page cannot change it.

An entry of `derived` is `[operation, number, ...]`, where the operations are those of `OPERATIONS` in `numbers.js`, on
ints; bools are 0 and 1.

`mask.tree` is the user's expression:
`{op: "and" | "or" | "not", parts: [tree, ...], start, stop}`, `{op: "per_head", head, heads, parts: [tree]}` with the
part of the document's head only, or `{op: "leaf", leaf, start, stop, program: node}`; `start` and `stop` are places in
`mask.text`.

`mask.program` and the programs of leaves are nodes:

```
{op: "full"}, {op: "empty"}
{op: "and" | "or", parts: [node, ...]}, {op: "not", part: node}
{op: "compare", q: term, relation: "<=" | ">=" | "<" | ">" | "==", kv: term, few: bool}
{op: "blocks", table: array [q blocks, r], size: number}
{op: "dense", array: array [T or n or 1, S or n or 1], q_offset: number or null, kv_offset: number or null}
{op: "cells", some: array [rows, columns], every: array [rows, columns], q_cell, kv_cell, bounded: bool, text}
```

`cells` are rules that no comparison expresses, evaluated by Python: whether some and whether every pair of each cell of
q_cell x kv_cell pairs is allowed. The page does not know the pairs of a cell of which some are allowed, but not every
one (`null`). If not `bounded`, engines cannot skip tiles because of this rule.

A term is `{of, data, divide, modulo, plus, valid, by_head}`, as `masks.terms.Term`: `of` is "position", "slot",
"array" (`data` is the index of an array of one entry per slot), "number" (`data` is a number) or "member" (`data` is a
list of numbers). `by_head` is whether the array had an axis of heads.

An array is `{type, shape, data}`: base64 of little-endian `i8`, `i16` or `i32`, or of `bits` (bool, the first entry in
the lowest bit). An array in which few steps from entry to entry differ, such as ids of packed documents, is
`{type, shape, steps: array, counts: array}`: each entry is the one before it plus a step, starting at 0, and step i is
repeated `counts[i]` times.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import numpy as np

from longspan.checks import check_sides, check_static_size, is_known
from longspan.constants import on_host
from longspan.explorer.arrays import Arrays
from longspan.explorer.caches import cache_plan
from longspan.explorer.devices import device_plans
from longspan.explorer.expression import Expression
from longspan.explorer.jaxprs import Operations
from longspan.explorer.lowered import lowered
from longspan.explorer.nodes import Nodes
from longspan.explorer.opaque import ShownPlane
from longspan.masks import And, Mask
from longspan.masks.sides import as_positions
from longspan.version import __version__

FORMAT = 1
MUST_BE_TEXTS = "`tokens` must be a list of strings, or a pair of such lists for queries and keys"
# One batch row and one head of a call, per head: the sizes that FLOPs and bytes are printed for.
SIZES = dict(batch=1, heads=1, kv_heads=1, head_dim=64, itemsize=2, dtype="bfloat16")


def document(
    mask: Mask,
    q_len: int,
    kv_len: int | None = None,
    *,
    tokens: Any = None,
    other: Mask | None = None,
    batch: int = 0,
    head: int | None = None,
    q_positions: Any = None,
    kv_positions: Any = None,
) -> dict[str, Any]:
    """The JSON document of a mask. `explore` describes the arguments.

    Example:
        >>> found = document(ls.Causal() & ls.Window(511, 0), 4096)
        >>> found["mask"]["text"], [number["value"] for number in found["numbers"]]
        ('Causal() & Window(511, 0)', [511, 0])
    """
    if kv_len is None:
        kv_len = q_len
    masks = [_checked(mask, "mask")]
    if other is not None:
        masks.append(_checked(other, "other"))
    rows = check_sides(reduce(And.of, masks), q_len, kv_len, q_positions, kv_positions)
    heads = max(m.heads for m in masks)
    batch = _place("batch", batch, rows, "batch rows")
    head_shown = _place("head", 0 if head is None else head, heads, "heads")
    arrays, notes = Arrays(), []
    q_at, kv_at = as_positions(q_positions, np), as_positions(kv_positions, np)
    plane = ShownPlane(q_len, kv_len, batch, head_shown, rows, heads, q_at, kv_at)
    nodes, operations = Nodes(arrays, plane), Operations([])
    expression = Expression(masks[0], head_shown)
    shown = lowered(expression, nodes, operations)
    compared = None
    if other is not None:
        compared = lowered(Expression(masks[1], head_shown), nodes, operations, constant=True)
    if heads > 1:
        notes.append(
            f"This page shows head {head_shown} of {heads}, counted from 0. The cache and the devices are those of all "
            "heads."
        )
    if rows > 1:
        notes.append(f"This page shows batch row {batch} of {rows}, counted from 0.")
    notes += nodes.notes
    return dict(
        format=FORMAT,
        longspan=__version__,
        q_len=q_len,
        kv_len=kv_len,
        batch=batch,
        rows=rows,
        head=head_shown,
        heads=heads,
        mask=shown,
        other=compared,
        numbers=expression.entries(max(q_len, kv_len)),
        derived=operations.entries,
        data=nodes.data,
        q_positions=_positions(arrays, q_at, batch),
        kv_positions=_positions(arrays, kv_at, batch),
        documents=_documents(arrays, masks[0], batch),
        tokens=_tokens(tokens, q_len, kv_len),
        sizes=SIZES,
        cache=cache_plan(masks[0], q_len, kv_len, q_at is not None or kv_at is not None, SIZES),
        devices=device_plans(masks[0], q_len, kv_len, q_at is not None or kv_at is not None),
        notes=notes,
        arrays=arrays.entries,
    )


def _checked(mask: Any, name: str) -> Mask:
    """The mask with NumPy arrays."""
    if not isinstance(mask, Mask):
        raise TypeError(f"`{name}` must be a Mask, got {type(mask).__name__}. For a MaskInfo, pass `info.mask`.")
    known = on_host(mask)
    if known is None or not all(map(is_known, jax.tree.leaves(mask))):
        raise ValueError(
            f"`explore` needs the values of the arrays in {mask!r}, and they are not known here. Call it outside of "
            "`jit`, with arrays that this process holds on one device."
        )
    return known


def _place(name: str, value: Any, count: int, unit: str) -> int:
    """A batch row or head of the document; 0 if all are alike."""
    value = check_static_size(name, value, 0)
    if value >= count > 1:
        raise IndexError(f"{name}={value} is out of range: the mask has {count} {unit}, 0 to {count - 1}.")
    return min(value, count - 1)


def _positions(arrays: Arrays, positions: Any, batch: int) -> int | None:
    if positions is None:
        return None
    return arrays.add(positions[min(batch, len(positions) - 1)])


def _documents(arrays: Arrays, mask: Mask, batch: int) -> dict[str, int] | None:
    ids = mask.documents()
    if ids is None:
        return None
    of = [np.asarray(side)[min(batch, side.shape[0] - 1)] for side in ids]
    return dict(q=arrays.add(of[0]), kv=arrays.add(of[1]))


def _tokens(tokens: Any, q_len: int, kv_len: int) -> dict[str, list[str]] | None:
    """The texts of both sides: one list of texts, or a pair (queries, keys) of lists."""
    if tokens is None:
        return None
    sides = tokens
    if not (isinstance(tokens, tuple) and len(tokens) == 2 and not any(isinstance(side, str) for side in tokens)):
        sides = (tokens, tokens)
    for side, count, name in zip(sides, (q_len, kv_len), ("queries", "keys"), strict=True):
        if not isinstance(side, Sequence) or isinstance(side, str):
            raise TypeError(f"{MUST_BE_TEXTS}, got {type(side).__name__}.")
        others = [(type(text).__name__, index) for index, text in enumerate(side) if not isinstance(text, str)]
        if others:
            raise TypeError(f"{MUST_BE_TEXTS}, got {others[0][0]} at index {others[0][1]} of the {name}.")
        if len(side) != count:
            raise ValueError(f"`tokens` must have one string for each of the {count:,} {name}, got {len(side):,}.")
    return dict(q=list(sides[0]), kv=list(sides[1]))
