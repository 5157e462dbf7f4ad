"""`longspan diff`: whether two masks allow the same pairs, and the first pair at which they differ."""

from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from longspan.cli.expressions import parse
from longspan.cli.options import KEYS, MAX_PLANNED, AsJson, Expression, print_json

CELLS = 64  # cells along a side, at each step of the search


class Difference(NamedTuple):
    """The first pair, in order of queries and then keys, that one mask allows and the other does not."""

    batch: int
    head: int
    query: int
    key: int
    allowed_by: str  # "first" or "second"
    share: float  # the fraction of pairs of this batch row and head that differ


def diff(
    first: Expression,
    second: Expression,
    queries: Annotated[int, typer.Option("-T", "--queries", min=0, max=MAX_PLANNED, help="Number of queries.")] = 1024,
    keys: Annotated[
        int | None,
        typer.Option("-S", "--keys", min=0, max=MAX_PLANNED, help=KEYS, show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two masks: do they allow the same pairs, and where do they first differ? Exits with 1 if they differ."""
    a, b = parse(first, queries), parse(second, queries)
    if keys is None:
        keys = queries
    found = difference(a, b, queries, keys)
    if as_json:
        print_json(dict(same=found is None, queries=queries, keys=keys, first_difference=found and found._asdict()))
    elif found is None:
        print(f"The masks are the same for {queries:,} queries and {keys:,} keys.")
    else:
        from longspan.render.picture import percent

        pair = f"query {found.query} to attend to key {found.key}"
        if max(a.batch, b.batch) > 1:
            pair += f" in batch row {found.batch}"
        if max(a.heads, b.heads) > 1:
            pair += f" in head {found.head}"
        print(
            f"The masks differ: only the {found.allowed_by} mask allows {pair}. {percent(found.share)} of the pairs "
            "differ."
        )
    if found is not None:
        raise typer.Exit(1)


def difference(a: Any, b: Any, q_len: int, kv_len: int) -> Difference | None:
    """The first pair at which two masks differ, found by tiles, so that long masks can be compared."""
    from longspan.render.grid import grid_of
    from longspan.render.shares import shares_of

    if a == b or not q_len or not kv_len:
        return None
    either = (a & ~b) | (~a & b)
    for batch, head in np.ndindex(either.batch, either.heads):
        plane: dict[str, Any] = dict(batch=batch, head=head)
        pair = _first_pair(either, q_len, kv_len, plane)
        if pair is not None:
            slots = [np.array([slot]) for slot in pair]
            positions: dict[str, Any] = dict(q_positions=slots[0], kv_positions=slots[1])
            in_first = grid_of(a.cut(*slots, q_len=q_len, kv_len=kv_len), 1, 1, 1, 1, **plane, **positions).every[0, 0]
            cell = max(1, -(-max(q_len, kv_len) // CELLS))
            differing = shares_of(either, q_len, kv_len, cell, cell, **plane).pairs.sum()
            share = min(1.0, float(differing) / (q_len * kv_len))
            return Difference(batch, head, *pair, "first" if in_first else "second", share)
    return None


def _first_pair(mask: Any, q_len: int, kv_len: int, plane: dict[str, int]) -> tuple[int, int] | None:
    """The first query that may attend to a key, and its first such key."""
    query = _first_slot(mask, q_len, kv_len, plane, range(q_len), range(kv_len), axis=0)
    if query is None:
        return None
    key = _first_slot(mask, q_len, kv_len, plane, range(query, query + 1), range(kv_len), axis=1)
    assert key is not None
    return query, key


def _first_slot(
    mask: Any, q_len: int, kv_len: int, plane: dict[str, int], queries: range, keys: range, *, axis: int
) -> int | None:
    """The first slot of one side (axis 0: queries) with an allowed pair.

    Divides the side into cells, finds the first cell that contains an allowed pair, and repeats with that cell.
    """
    from longspan.render.grid import grid_of

    while True:
        slots = [np.arange(side.start, side.stop) for side in (queries, keys)]
        sizes = len(queries), len(keys)
        cells = [max(1, -(-size // CELLS)) for size in sizes]
        cut = mask.cut(*slots, q_len=q_len, kv_len=kv_len)
        some = grid_of(cut, *sizes, *cells, **plane, q_positions=slots[0], kv_positions=slots[1]).some
        at = np.flatnonzero(some.any(axis=1 - axis))
        if not len(at):
            return None
        side = (queries, keys)[axis]
        first = side[int(at[0]) * cells[axis]]
        if cells[axis] == 1:
            return first
        narrower = range(first, min(first + cells[axis], side.stop))
        if axis == 0:
            queries = narrower
        else:
            keys = narrower
