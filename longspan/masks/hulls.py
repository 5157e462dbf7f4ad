"""Hulls: the interval from the first to the last slot of a side whose array entry a tile may see."""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import Namespace
from longspan.masks.sides import Side, Tiles, search_rows
from longspan.masks.spans import NO_SLOT, Spans, everything
from longspan.masks.terms import MOST, Term


def hull_of_equals(row: Term, other: Term, rows: Tiles) -> Spans | None:
    """From the first to the last slot of the other side whose entry occurs in the tile; None if this is not known."""
    mine, theirs = row.entries(rows.side), other.entries(rows.side)
    if mine is None or theirs is None or mine[0].ndim != 2 or theirs[0].ndim != 2:
        return None
    xp = rows.side.xp
    first, last = _occurrences(xp, *mine, theirs[0])
    low, high = rows.least(first), rows.greatest(last) + 1
    return Spans(xp.where(low < high, low, np.int32(0)), xp.where(low < high, high, np.int32(0)))


def hull_between(term: Term, side: Side, low: Any, high: Any) -> Spans:
    """The intersection of two hulls: of the slots with entries >= `low`, and of those with entries <= `high`.

    None is no bound.
    """
    known = term.entries(side)
    if known is None:
        return everything(side.xp, side.length)
    xp, (entries, defined) = side.xp, known
    upper_bounds = []  # (numbers, bound): number <= bound
    if high is not None:
        upper_bounds.append((entries, high))
    if low is not None:
        upper_bounds.append((~entries, ~low))  # ~x decreases as x grows, and unlike -x never overflows
    hulls = []
    for numbers, bound in upper_bounds:
        if defined is not None:
            numbers = xp.where(defined, numbers, np.int32(MOST))
        hulls.append(_first_and_last(xp, _here(side, numbers), bound))
    first = reduce(xp.maximum, [hull[0] for hull in hulls])
    last = reduce(xp.minimum, [hull[1] for hull in hulls])
    return Spans(xp.minimum(first, last), last)


def _here(side: Side, entries: Any) -> Any:
    """An array along the slots as [B or 1, N or 1, L], of the selected batch rows and heads."""
    if entries.ndim == 2:
        entries = entries[:, None]
    if side.holds(entries):
        return entries
    return entries[side.rows_of(entries).reshape(-1, 1), side.heads_of(entries.shape[1]).reshape(1, -1)]


def _first_and_last(xp: Namespace, entries: Any, bound: Any) -> tuple[Any, Any]:
    """The interval [first, last + 1) of the entries [B or 1, N or 1, L] that are at most each bound (rank 4).

    The running minimum from the left is sorted, so bisection finds the first entry; likewise from the right.
    """
    if xp is np:
        from_left = np.minimum.accumulate(entries, axis=2)
        from_right = np.minimum.accumulate(entries[..., ::-1], axis=2)[..., ::-1]
    else:
        from_left, from_right = jax.lax.cummin(entries, axis=2), jax.lax.cummin(entries, axis=2, reverse=True)
    planes = np.broadcast_shapes(entries.shape[:2], bound.shape[:2])

    def flat(a):
        return xp.broadcast_to(a, (*planes, *a.shape[2:])).reshape(planes[0] * planes[1], *a.shape[2:])

    wanted = flat(bound)[:, None]
    first = np.int32(entries.shape[2]) - search_rows(xp, flat(from_left)[:, ::-1], wanted, "right")
    last = search_rows(xp, flat(from_right), wanted, "right")
    shape = (*planes, *bound.shape[2:])
    return first.reshape(shape), last.reshape(shape)


def _occurrences(xp: Namespace, ids: Any, counts: Any, others: Any) -> tuple[Any, Any]:
    """The first and last slot of `others` [B, S] equal to each id [B, T] that counts; (NO_SLOT, -1) without one."""
    rows = max(ids.shape[0], others.shape[0])
    if counts is None:
        counts = xp.ones_like(ids, bool)
    ids, counts = xp.broadcast_to(ids, (rows, ids.shape[1])), xp.broadcast_to(counts, (rows, counts.shape[1]))
    others = xp.broadcast_to(others, (rows, others.shape[1]))
    if 0 in (ids.shape[1], others.shape[1]):
        return xp.full(ids.shape, NO_SLOT, np.int32), xp.full(ids.shape, -1, np.int32)
    if xp is np:
        found = [_occurrences_on_host(a, b) for a, b in zip(ids, others, strict=True)]
        first, last = np.stack([pair[0] for pair in found]), np.stack([pair[1] for pair in found])
    else:
        first, last = jax.vmap(_occurrences_in_row)(ids, others)
    return xp.where(counts, first, np.int32(NO_SLOT)), xp.where(counts, last, np.int32(-1))


def _occurrences_in_row(ids, others):
    # A stable sort keeps equal ids in slot order: the ends of a run of equal ids are its first and last occurrence.
    order = jnp.argsort(others, stable=True).astype(np.int32)
    ranked = others[order]
    left = jnp.searchsorted(ranked, ids, side="left")
    right = jnp.searchsorted(ranked, ids, side="right") - 1
    found, last = left <= right, len(others) - 1
    first_slot, last_slot = order[jnp.clip(left, 0, last)], order[jnp.clip(right, 0, last)]
    return jnp.where(found, first_slot, np.int32(NO_SLOT)), jnp.where(found, last_slot, np.int32(-1))


def _occurrences_on_host(ids: np.ndarray, others: np.ndarray):
    # A table indexed by id: bisection for shuffled ids would miss the CPU cache at every step.
    least, greatest = int(min(ids.min(), others.min())), int(max(ids.max(), others.max()))
    if greatest - least > 4 * (len(ids) + len(others)):
        both = np.unique(np.concatenate([ids, others]), return_inverse=True)[1].astype(np.int32)
        mine, theirs, size = both[: len(ids)], both[len(ids) :], len(both)
    else:
        mine, theirs, size = ids - np.int32(least), others - np.int32(least), greatest - least + 1
    slots = np.arange(len(others), dtype=np.int32)
    first, last = np.full(size, NO_SLOT, np.int32), np.full(size, -1, np.int32)
    last[theirs] = slots  # for equal ids, the last write wins
    first[theirs[::-1]] = slots[::-1]
    return first[mine], last[mine]
