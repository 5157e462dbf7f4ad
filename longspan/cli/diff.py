"""`longspan diff`: whether two masks allow the same pairs, and the first at which they differ."""

from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from longspan.cli.expressions import parse
from longspan.cli.options import KEYS, PLANNED, AsJson, Expression, print_json

CELLS = 64  # along a side, at each step of the search


class Difference(NamedTuple):
    """The first pair, row by row, that one mask allows and the other does not."""

    batch: int
    head: int
    query: int
    key: int
    allowed_by: str  # "first" or "second"
    share: float  # of the pairs of this row and head that differ


def diff(
    first: Expression,
    second: Expression,
    queries: Annotated[int, typer.Option("-T", "--queries", min=0, max=PLANNED, help="Number of queries.")] = 1024,
    keys: Annotated[
        int | None,
        typer.Option("-S", "--keys", min=0, max=PLANNED, help=KEYS, show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether two masks allow the same pairs, and where they first differ. Exits with 1 if they do."""
    a, b = parse(first, queries), parse(second, queries)
    kv_len = queries if keys is None else keys
    found = difference(a, b, queries, kv_len)
    if as_json:
        print_json(dict(same=found is None, queries=queries, keys=kv_len, first_difference=found and found._asdict()))
    elif found is None:
        print(f"same: {queries:,} queries x {kv_len:,} keys")
    else:
        from longspan.render.picture import percent

        place = f"query {found.query}, key {found.key}"
        if max(a.batch, b.batch) > 1:
            place += f", batch row {found.batch}"
        if max(a.heads, b.heads) > 1:
            place += f", head {found.head}"
        print(
            f"different: {place} is allowed by the {found.allowed_by} only; {percent(found.share)} of the pairs differ"
        )
    if found is not None:
        raise typer.Exit(1)


def difference(a: Any, b: Any, q_len: int, kv_len: int) -> Difference | None:
    """The first pair at which two masks differ; tiles are asked, so that long ones can be compared."""
    from longspan.render.grid import grid_of
    from longspan.render.shares import shares_of

    if a == b or not q_len or not kv_len:
        return None
    either = (a & ~b) | (~a & b)
    for batch, head in np.ndindex(either.batch, either.heads):
        plane: dict[str, Any] = dict(batch=batch, head=head)
        pair = _first_pair(either, q_len, kv_len, plane)
        if pair is not None:
            one = [np.array([slot]) for slot in pair]
            positions: dict[str, Any] = dict(q_positions=one[0], kv_positions=one[1])
            mine = grid_of(a.cut(*one, q_len=q_len, kv_len=kv_len), 1, 1, 1, 1, **plane, **positions).every[0, 0]
            cells = max(1, -(-max(q_len, kv_len) // CELLS))
            differing = shares_of(either, q_len, kv_len, cells, cells, **plane).pairs.sum()
            share = min(1.0, float(differing) / (q_len * kv_len))
            return Difference(batch, head, *pair, "first" if mine else "second", share)
    return None


def _first_pair(mask: Any, q_len: int, kv_len: int, plane: dict[str, int]) -> tuple[int, int] | None:
    """The first query that sees a key, and the first key that it sees."""
    query = _first_slot(mask, q_len, kv_len, plane, range(q_len), range(kv_len), axis=0)
    if query is None:
        return None
    key = _first_slot(mask, q_len, kv_len, plane, range(query, query + 1), range(kv_len), axis=1)
    assert key is not None
    return query, key


def _first_slot(
    mask: Any, q_len: int, kv_len: int, plane: dict[str, int], queries: range, keys: range, *, axis: int
) -> int | None:
    """The first slot of one side (axis 0: queries) with an allowed pair, found by cells that become smaller."""
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
        queries, keys = (narrower, keys) if axis == 0 else (queries, narrower)
