"""Counts the pairs that a mask allows, query by query, if its rules are intervals of keys, equal ids or flagged keys.

Let an allowed pair be 1 and any other pair 0. Then `a & b` is a·b, `~a` is 1 - a and `a | b` is a + b - a·b, so every
composition is a sum of products. A product of intervals, ids and flags is counted without reading pairs: a million
queries take some hundredths of a second per product. For other rules the caller has to read the pairs.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from longspan.masks import And, Mask, Not, Or, PerHead
from longspan.masks.count_pieces import CountPiece
from longspan.masks.sides import KEYS, Side, Tiles, grows

FEW = 8  # a piece lists its queries if fewer than one in FEW see a key
MAX_PRODUCTS = 64  # for longer sums, reading the pairs is as fast

Factor = tuple[int, int]  # the index of a rule, and the index of one of its pieces
Sum = dict[frozenset[Factor], int]  # the coefficient of each product
ONE: Sum = {frozenset(): 1}


def count_by_query(mask: Mask, q: Side, kv: Side) -> int | None:
    """The exact number of allowed pairs of one batch row and head; None if a rule is no interval, id or flag."""
    if 0 in (q.length, kv.length):
        return 0
    rules: dict[Any, list[_PlacedPiece]] = {}
    sides = _SortedSides.of(q, kv)
    products = _sum_of(mask.atoms(), int(q.head.reshape(())), rules, lambda rule: _placed_pieces(rule, sides))
    if products is None:
        return None
    pieces = list(rules.values())
    joined: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
    total = 0
    for product, coefficient in products.items():
        factors = {(rule, piece): pieces[rule][piece] for rule, piece in product}
        total += coefficient * _count(factors, sides, joined)
    return total


def _sum_of(mask: Mask, head: int, rules: dict[Any, list[Any]], pieces: Callable) -> Sum | None:
    """A mask as a sum of products of pieces, which are added to `rules`.

    None if a rule has no pieces, or if the sum has more than MAX_PRODUCTS products.
    """
    if isinstance(mask, PerHead):
        return _sum_of(mask.masks[min(head, len(mask.masks) - 1)], head, rules, pieces)
    if isinstance(mask, And | Or | Not):
        total: Sum | None = ONE
        for part in mask.parts():
            known = _sum_of(part, head, rules, pieces)
            if known is None or total is None:
                return None
            if not isinstance(mask, And):  # `~a` is 1 - a, and `a | b` is 1 - (1 - a)·(1 - b)
                known = _minus(known)
            total = _times(total, known)
        if isinstance(mask, Or) and total is not None:
            return _minus(total)
        return total
    key = _key(mask)
    if key not in rules:
        found = pieces(mask)
        if found is None:
            return None
        rules[key] = found
    number = list(rules).index(key)
    return {frozenset({(number, i)}): 1 for i in range(len(rules[key]))}


def _key(mask: Mask) -> Any:
    """Equal rules have one key, so that they are one factor. Rules with arrays are compared by identity."""
    try:
        return type(mask), mask, hash(mask)
    except TypeError:
        return id(mask)


def _minus(a: Sum) -> Sum:
    """1 - a."""
    return _without_zeros({product: ONE.get(product, 0) - a.get(product, 0) for product in {*ONE, *a}})


def _times(a: Sum, b: Sum) -> Sum | None:
    """The product; None if it has more than MAX_PRODUCTS terms."""
    found: Sum = {}
    for p, m in a.items():
        for r, n in b.items():
            both = p | r
            if len({rule for rule, _ in both}) == len(both):  # two pieces of one rule have no pair in common
                found[both] = found.get(both, 0) + m * n
    found = _without_zeros(found)
    if len(found) > MAX_PRODUCTS:
        return None
    return found


def _without_zeros(a: Sum) -> Sum:
    return {product: times for product, times in a.items() if times}


class _SortedSides(NamedTuple):
    """Both sides, with the keys also sorted by position, so that a band allows an interval of keys."""

    q: Side
    kv: Side
    sorted_kv: Side
    order: np.ndarray | None  # the permutation that sorts the keys; None: they are sorted

    @classmethod
    def of(cls, q: Side, kv: Side) -> "_SortedSides":
        q, kv = replace(q, memory=None), replace(kv, memory=None)  # read once, and not in tiles
        if kv.positions is None:
            return cls(q, kv, kv, None)
        positions = np.asarray(kv.positions)
        row = positions[int(kv.rows_of(positions).reshape(()))]
        order = None
        if not grows(row[None]).all():
            order = np.argsort(row, kind="stable")
            row = row[order]
        return cls(q, kv, replace(kv, positions=row[None]), order)


class _PlacedPiece(NamedTuple):
    """A piece with an interval [T] of keys, where keys are sorted by position."""

    low: np.ndarray
    high: np.ndarray
    q_ids: np.ndarray | None
    kv_ids: np.ndarray | None
    keys: np.ndarray | None
    queries: np.ndarray | None  # the queries that see a key if they are few, such as global queries; else None


def _placed_pieces(rule: Mask, sides: _SortedSides) -> list[_PlacedPiece] | None:
    """The pieces of a rule; None if they are not known."""
    pieces = rule._count_pieces(sides.q, sides.kv)
    if pieces is None:
        return None
    placed = []
    for piece in pieces:
        found = _placed(piece, sides)
        if found is None:
            return None
        placed.append(found)
    return placed


def _placed(piece: CountPiece, sides: _SortedSides) -> _PlacedPiece | None:
    q_len, kv_len = sides.q.length, sides.kv.length
    low, high, kv_ids, keys = piece.low, piece.high, piece.kv_ids, piece.keys
    if low is None:
        low = 0
    if high is None:
        high = kv_len
    if piece.within is not None:
        interval = _interval(piece.within, sides.q, sides.sorted_kv)
        if interval is None:
            return None
        low, high = np.maximum(low, interval[0]), np.minimum(high, interval[1])
    low = np.broadcast_to(np.clip(low, 0, kv_len).astype(np.int32), q_len)
    high = np.maximum(low, np.clip(high, 0, kv_len).astype(np.int32))
    if kv_ids is not None and sides.order is not None:
        kv_ids = kv_ids[sides.order]
    if keys is not None and sides.order is not None:
        keys = keys[sides.order]
    queries = np.flatnonzero(low < high)
    if len(queries) * FEW >= q_len:
        queries = None
    return _PlacedPiece(low, high, piece.q_ids, kv_ids, keys, queries)


@dataclass(frozen=True)
class Runs(Tiles):
    """Runs of slots of any length, sorted by position: `size` is an upper bound on stop - start."""

    _: KW_ONLY
    stops: Any

    @property
    def stop(self):
        return self.stops

    @property
    def first(self):
        return self._position(self.start)

    @property
    def last(self):
        return self._position(self.stops - 1)

    def _position(self, slots):
        if self.side.positions is None:
            return slots
        return self.side.positions[0][np.clip(slots, 0, self.side.length - 1)]


def _interval(rule: Mask, q: Side, kv: Side) -> tuple[np.ndarray, np.ndarray] | None:
    """The keys [low, high) of each query, if the rule allows exactly these; else None."""
    queries = q.tiles(1)
    spans = rule.kv_spans(queries, kv.tiles(1))
    if spans.common is not None or spans.low.shape[KEYS] != 1:
        return None
    low = np.broadcast_to(np.clip(spans.low, 0, kv.length), (1, 1, q.length, 1))
    high = np.broadcast_to(np.clip(spans.high, 0, kv.length), (1, 1, q.length, 1))
    # Spans cover all allowed keys, but may cover others too: `classify` shows whether they do.
    _, every = rule.classify(queries, Runs(kv, kv.length, low, unit=1, stops=high))
    if not np.all(every | (low >= high)):
        return None
    return low.reshape(-1), high.reshape(-1)


def _count(product: dict[Factor, _PlacedPiece], sides: _SortedSides, joined: dict[Any, Any]) -> int:
    """The number of pairs in all pieces of a product. `joined` caches the joint ids for other products."""
    if not product:
        return sides.q.length * sides.kv.length
    some = min((p.queries for p in product.values() if p.queries is not None), key=len, default=slice(None))
    low = reduce(np.maximum, [piece.low[some] for piece in product.values()])
    high = np.maximum(low, reduce(np.minimum, [piece.high[some] for piece in product.values()]))
    flags = [piece.keys for piece in product.values() if piece.keys is not None]
    keys = None
    if flags:
        keys = np.logical_and.reduce(flags)
    equal = {factor: piece for factor, piece in product.items() if piece.q_ids is not None}
    if equal:
        if frozenset(equal) not in joined:
            joined[frozenset(equal)] = _joint(list(equal.values()))
        mine, ranked = joined[frozenset(equal)]
        return _count_equal(mine[some], ranked, keys, low, high)
    if keys is None:
        return int(high.sum(dtype=np.int64) - low.sum(dtype=np.int64))
    before = np.cumsum(np.concatenate([[False], keys]), dtype=np.int32)
    return int((before[high] - before[low]).sum(dtype=np.int64))


def _count_equal(mine: np.ndarray, ranked: np.ndarray, keys: np.ndarray | None, low: np.ndarray, high: np.ndarray):
    """The number of pairs of a query and a key in [low, high), flagged if `keys` is given, whose ids are equal."""
    length = len(ranked)
    if keys is not None:
        ranked = ranked[keys[ranked % length]]
    seen = low < high
    first = np.searchsorted(ranked, _sorted(mine[seen] + low[seen]))
    last = np.searchsorted(ranked, _sorted(mine[seen] + high[seen]))
    return int(last.sum() - first.sum())


def _joint(pieces: list[_PlacedPiece]) -> tuple[np.ndarray, np.ndarray]:
    """Joint ids of several pieces, times the number of keys: one per query, and per key plus its slot, sorted.

    Keys with the same id and slots in an interval are then neighbours.
    """
    mine, theirs = _from_zero(pieces[0])
    length = len(theirs)
    for piece in pieces[1:]:
        q_ids, kv_ids = _from_zero(piece)
        large = _end(mine, theirs) * _end(q_ids, kv_ids) * length >= 1 << 62  # the products would overflow int64
        if large:
            mine, theirs = _ranked(mine, theirs)
            q_ids, kv_ids = _ranked(q_ids, kv_ids)
        count = _end(q_ids, kv_ids)
        mine, theirs = mine * count + q_ids, theirs * count + kv_ids
        if large:
            mine, theirs = _ranked(mine, theirs)
    return mine * length, _sorted(theirs * length + np.arange(length))


def _sorted(numbers: np.ndarray) -> np.ndarray:
    # `searchsorted` is much faster for sorted numbers: others miss the CPU cache at every step of the bisection.
    # The ids of contiguous documents are already sorted.
    if grows(numbers[None]).all():
        return numbers
    return np.sort(numbers)


def _from_zero(piece: _PlacedPiece) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a piece, shifted so that none is negative."""
    q_ids, kv_ids = np.asarray(piece.q_ids).astype(np.int64), np.asarray(piece.kv_ids).astype(np.int64)
    least = min(q_ids.min(initial=0), kv_ids.min(initial=0))
    if least == 0:
        return q_ids, kv_ids
    return q_ids - least, kv_ids - least


def _end(q_ids: np.ndarray, kv_ids: np.ndarray) -> int:
    """One more than the largest id."""
    return int(max(q_ids.max(initial=0), kv_ids.max(initial=0))) + 1


def _ranked(q_ids: np.ndarray, kv_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rank of each id among all ids."""
    ranks = np.unique(np.concatenate([q_ids, kv_ids]), return_inverse=True)[1]
    return ranks[: len(q_ids)], ranks[len(q_ids) :]
