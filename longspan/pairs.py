"""How many pairs a mask allows, counted by query: where its rules are intervals of keys, equal ids or flagged keys.

What is allowed is 1, what is not 0: then `a & b` is a·b, `~a` is 1 - a and `a | b` is a + b - a·b. So every composition
is a sum of products, and a product of intervals, ids and flags is counted without reading a pair. A million queries
take some hundredths of a second per product. What a mask's rules do not tell, whoever counts has to read.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from longspan.masks import And, Mask, Not, Or, PerHead
from longspan.masks.count_pieces import CountPiece
from longspan.masks.sides import KEYS, Side, Tiles, grows

FEW = 8  # one of so many
MOST_PRODUCTS = 64  # sums of more are not worth it: reading is then as fast

Factor = tuple[int, int]  # a rule's number, and that of its piece
Sum = dict[frozenset[Factor], int]  # how often each product counts
ONE: Sum = {frozenset(): 1}


def count_by_query(mask: Mask, q: Side, kv: Side) -> int | None:
    """The allowed pairs of one batch row and head, exactly; None if the mask is more than intervals, ids and flags."""
    if 0 in (q.length, kv.length):
        return 0
    rules: dict[Any, list[_Placed]] = {}
    places = _Places.of(q, kv)
    products = _sum_of(mask.atoms(), int(q.head.reshape(())), rules, lambda rule: _pieces(rule, places))
    if products is None:
        return None
    pieces = list(rules.values())
    joined: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
    return sum(
        times * _count({factor: pieces[factor[0]][factor[1]] for factor in product}, places, joined)
        for product, times in products.items()
    )


def _sum_of(mask: Mask, head: int, rules: dict[Any, list[Any]], pieces: Callable) -> Sum | None:
    """A mask as a sum of products of pieces, which are added to `rules`; None if one is not known, or sums are long."""
    if isinstance(mask, PerHead):
        return _sum_of(mask.masks[min(head, len(mask.masks) - 1)], head, rules, pieces)
    if isinstance(mask, And | Or | Not):
        total: Sum | None = ONE
        for part in mask.parts():
            known = _sum_of(part, head, rules, pieces)
            if known is None or total is None:
                return None
            total = _times(total, known if isinstance(mask, And) else _minus(known))
        return _minus(total) if isinstance(mask, Or) and total is not None else total
    key = _key(mask)
    if key not in rules:
        found = pieces(mask)
        if found is None:
            return None
        rules[key] = found
    number = list(rules).index(key)
    return {frozenset({(number, i)}): 1 for i in range(len(rules[key]))}


def _key(mask: Mask) -> Any:
    """Equal rules have one key, so that they are one factor; those that hold arrays are compared by identity."""
    try:
        return type(mask), mask, hash(mask)
    except TypeError:
        return id(mask)


def _minus(a: Sum) -> Sum:
    """1 - a."""
    return _without_zeros({product: ONE.get(product, 0) - a.get(product, 0) for product in {*ONE, *a}})


def _times(a: Sum, b: Sum) -> Sum | None:
    """Their product; None if it is long."""
    found: Sum = {}
    for p, m in a.items():
        for r, n in b.items():
            both = p | r
            if len({rule for rule, _ in both}) == len(both):  # two pieces of one rule share no pair
                found[both] = found.get(both, 0) + m * n
    found = _without_zeros(found)
    return found if len(found) <= MOST_PRODUCTS else None


def _without_zeros(a: Sum) -> Sum:
    return {product: times for product, times in a.items() if times}


class _Places(NamedTuple):
    """Both sides, with the keys in the order of their positions: what a band allows is then an interval of them."""

    q: Side
    kv: Side  # as it was
    sorted: Side
    order: np.ndarray | None  # None: as they are

    @classmethod
    def of(cls, q: Side, kv: Side) -> "_Places":
        q, kv = (replace(side, memory=None) for side in (q, kv))  # looked at once, and not in tiles
        if kv.positions is None:
            return cls(q, kv, kv, None)
        positions = np.asarray(kv.positions)
        row = positions[int(kv.rows_of(positions).reshape(()))]
        order = None if grows(row[None]).all() else np.argsort(row, kind="stable")
        return cls(q, kv, replace(kv, positions=(row if order is None else row[order])[None]), order)


class _Placed(NamedTuple):
    """A piece with an interval [T] of keys, in the order of their positions."""

    low: np.ndarray
    high: np.ndarray
    q_ids: np.ndarray | None
    kv_ids: np.ndarray | None
    keys: np.ndarray | None
    queries: np.ndarray | None  # the queries that see a key, where they are few, as global ones are; else None


def _pieces(rule: Mask, places: _Places) -> list[_Placed] | None:
    """A rule's pieces; None if it does not know them."""
    pieces = rule._count_pieces(places.q, places.kv)
    if pieces is None:
        return None
    placed = [_placed(piece, places) for piece in pieces]
    return None if any(piece is None for piece in placed) else [piece for piece in placed if piece is not None]


def _placed(piece: CountPiece, places: _Places) -> _Placed | None:
    q_len, kv_len = places.q.length, places.kv.length
    low, high = (0 if piece.low is None else piece.low), (kv_len if piece.high is None else piece.high)
    if piece.within is not None:
        interval = _interval(piece.within, places.q, places.sorted)
        if interval is None:
            return None
        low, high = np.maximum(low, interval[0]), np.minimum(high, interval[1])
    low, high = (np.broadcast_to(np.clip(end, 0, kv_len).astype(np.int32), q_len) for end in (low, high))
    high = np.maximum(low, high)
    queries = np.flatnonzero(low < high)
    kv_ids, keys = (a if a is None or places.order is None else a[places.order] for a in (piece.kv_ids, piece.keys))
    return _Placed(low, high, piece.q_ids, kv_ids, keys, queries if len(queries) * FEW < q_len else None)


@dataclass(frozen=True)
class Runs(Tiles):
    """Runs of slots of any length, whose positions grow: `size` is a bound on stop - start."""

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
    """The keys [low, high) of each query, if the rule allows all of them and nothing else."""
    queries = q.tiles(1)
    spans = rule.kv_spans(queries, kv.tiles(1))
    if spans.common is not None or spans.low.shape[KEYS] != 1:
        return None
    low, high = (np.broadcast_to(np.clip(end, 0, kv.length), (1, 1, q.length, 1)) for end in spans[:2])
    # Spans only promise to leave nothing out: that they hold nothing else is for `classify` to say.
    _, every = rule.classify(queries, Runs(kv, kv.length, low, unit=1, stops=high))
    return (low.reshape(-1), high.reshape(-1)) if np.all(every | (low >= high)) else None


def _count(product: dict[Factor, _Placed], places: _Places, joined: dict[Any, tuple[np.ndarray, np.ndarray]]) -> int:
    """The pairs that are in all pieces of a product. What is found of ids is kept in `joined`, for other products."""
    if not product:
        return places.q.length * places.kv.length
    some = min((p.queries for p in product.values() if p.queries is not None), key=len, default=slice(None))
    low = reduce(np.maximum, [piece.low[some] for piece in product.values()])
    high = np.maximum(low, reduce(np.minimum, [piece.high[some] for piece in product.values()]))
    flags = [piece.keys for piece in product.values() if piece.keys is not None]
    keys = np.logical_and.reduce(flags) if flags else None
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
    """The pairs of queries with (flagged) keys in [low, high) whose ids are equal."""
    length = len(ranked)
    if keys is not None:
        ranked = ranked[keys[ranked % length]]
    seen = low < high
    first, last = (np.searchsorted(ranked, _sorted(mine[seen] + end[seen])) for end in (low, high))
    return int(last.sum() - first.sum())


def _joint(pieces: list[_Placed]) -> tuple[np.ndarray, np.ndarray]:
    """One id per query, times the number of keys, and the keys in the order of their ids, slots within.

    So those of one id in an interval of slots stand side by side.
    """
    mine, theirs = _from_zero(pieces[0])
    length = len(theirs)
    for piece in pieces[1:]:
        q_ids, kv_ids = _from_zero(piece)
        if large := _end(mine, theirs) * _end(q_ids, kv_ids) * length >= 1 << 62:
            (mine, theirs), (q_ids, kv_ids) = _ranked(mine, theirs), _ranked(q_ids, kv_ids)
        count = _end(q_ids, kv_ids)
        mine, theirs = mine * count + q_ids, theirs * count + kv_ids
        if large:
            mine, theirs = _ranked(mine, theirs)
    return mine * length, _sorted(theirs * length + np.arange(length))


def _sorted(numbers: np.ndarray) -> np.ndarray:
    # Of contiguous documents they are already. Bisecting for others, one miss of the cache a step, takes far longer.
    return numbers if grows(numbers[None]).all() else np.sort(numbers)


def _from_zero(piece: _Placed) -> tuple[np.ndarray, np.ndarray]:
    """A piece's ids, the least of them 0."""
    q_ids, kv_ids = (np.asarray(ids).astype(np.int64) for ids in (piece.q_ids, piece.kv_ids))
    least = min(q_ids.min(initial=0), kv_ids.min(initial=0))
    return (q_ids - least, kv_ids - least) if least else (q_ids, kv_ids)


def _end(q_ids: np.ndarray, kv_ids: np.ndarray) -> int:
    return int(max(q_ids.max(initial=0), kv_ids.max(initial=0))) + 1


def _ranked(q_ids: np.ndarray, kv_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same ids as small numbers."""
    ranks = np.unique(np.concatenate([q_ids, kv_ids]), return_inverse=True)[1]
    return ranks[: len(q_ids)], ranks[len(q_ids) :]
