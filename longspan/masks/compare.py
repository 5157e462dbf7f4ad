"""`Compare`: compares an integer of the query with one of the key. Most leaves are made of such comparisons."""

from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from longspan.checks import check_choice
from longspan.masks.base import BY_POSITION, BY_SLOT, NO_QUERY, Extent, Mask, Periodicity, Pinned, rule
from longspan.masks.count_pieces import CountPiece
from longspan.masks.hulls import hull_between, hull_of_equals
from longspan.masks.sides import slots_between
from longspan.masks.spans import Spans, everything, nothing, whole_or_nothing
from longspan.masks.terms import (
    ARRAY,
    LEAST,
    MEMBER,
    MOST,
    NUMBER,
    POSITION,
    SLOT,
    Term,
    is_static_number,
    no_less,
    within_reach,
)

if TYPE_CHECKING:
    Relation: TypeAlias = Literal["<=", ">=", "<", ">", "=="]
else:
    Relation = str  # `Compare` checks it, with a better message than the run-time checker

FLIPPED: dict[str, Relation] = {"<=": ">=", ">=": "<=", "<": ">", ">": "<", "==": "=="}
OPPOSITE: dict[str, Relation] = {"<=": ">", ">=": "<", "<": ">=", ">": "<="}  # `a == b` has two: a < b, a > b


@rule
class Compare(Mask):
    """Allows the pairs whose query term is <=, >=, <, > or == the key term, if both are valid.

    Args:
        q: the query's term: `position()`, `slot()`, `array(...)`, `number(...)` or `member(...)`.
        relation: "<=", ">=", "<", ">" or "==".
        kv: the key's term.
        few: set it if one term is a number and few, scattered tokens of the other side are allowed, such as global
            tokens: their tiles are then listed one by one. By default all tiles from the first to the last are visited.

    Example:
        >>> from longspan.masks import position
        >>> print(Compare(position() // 2, ">=", position() // 2).show(4, 4))
        ##..
        ##..
        ####
        ####
    """

    q: Term
    relation: Relation
    kv: Term
    few: bool = False

    def __post_init__(self):
        check_choice("relation", self.relation, tuple(FLIPPED))
        for name in ("q", "kv"):
            if not isinstance(getattr(self, name), Term):
                raise TypeError(
                    f"Compare.{name} must be a term: `position()`, `slot()`, `array(...)`, `number(...)` or "
                    f"`member(...)` of longspan.masks, got {getattr(self, name)!r}."
                )

    @property
    def reads(self):
        sources, found = {self.q.of, self.kv.of}, frozenset()
        if sources & {POSITION, MEMBER}:
            found = found | BY_POSITION
        if sources & {SLOT, ARRAY}:
            found = found | BY_SLOT
        return found

    @property
    def reads_q_place(self):
        return self.q.of in (POSITION, SLOT, MEMBER)

    @property
    def by_token(self):
        sources = {self.q.of, self.kv.of}
        return SLOT not in sources or NUMBER in sources

    @property
    def is_strided(self):
        return self.q.modulo is not None

    def provable_kinds(self):
        return True, True

    def allowed(self, q, kv):
        truth = _holds(self.relation, self.q.value(q), self.kv.value(kv))
        defined = self.q.defined(q)
        if defined is not None:
            truth = truth & defined
        if not self._of_ids:  # of two equal ids, one is valid if the other is
            defined = self.kv.defined(kv)
            if defined is not None:
                truth = truth & defined
        if isinstance(truth, bool):  # both terms are static numbers
            return np.bool_(truth)
        return truth

    def classify(self, q, kv):
        if self._by_distance and self.q.modulo is not None:
            step, least, most = no_less(q.number(self.q.modulo), 1), kv.first - q.last, kv.last - q.first
            return most // step * step >= least, ((least == most) & (least % step == 0)) | (step == 1)
        (q_least, q_most, q_all), (kv_least, kv_most, kv_all) = self.q.range(q), self.kv.range(kv)
        yes = q.start >= 0
        if self.relation == "==":
            some = yes & (q_least <= kv_most) & (kv_least <= q_most)
            q_one, kv_one = yes & q_all & (q_least == q_most), yes & kv_all & (kv_least == kv_most)
            # With shuffled ids no tile has a single id: there is nothing to compare.
            if q.side.xp is np and not (q_one.any() and kv_one.any()):
                return some, np.full((1, 1, 1, 1), False)
            return some, q_one & kv_one & (q_least == kv_least)
        if "<" in self.relation:
            some, every = _holds(self.relation, q_least, kv_most), _holds(self.relation, q_most, kv_least)
        else:
            some, every = _holds(self.relation, q_most, kv_least), _holds(self.relation, q_least, kv_most)
        return yes & some, yes & q_all & kv_all & every

    def kv_spans(self, q, kv):
        return _spans(self.q, self.relation, self.kv, q, kv, self.few)

    def q_spans(self, kv, q):
        return _spans(self.kv, FLIPPED[self.relation], self.q, kv, q, self.few)

    def nearest_query(self, key, at, step):
        if self.inexact():
            return at
        value, far = self.kv.at(key), key * 0 + NO_QUERY
        low = {"<=": -far, "<": -far, ">": value + 1}.get(self.relation, value)
        high = {">=": far, ">": far, "<": value - 1}.get(self.relation, value)
        return self.q.nearest(np.broadcast_to(at, key.shape), step, low, high)

    def inexact(self):
        if self.q.is_static and self.kv.is_static:
            return ()
        return (self,)

    def periodicity(self):
        if self.inexact():
            return Periodicity()
        if self.q.grows and self.kv.grows:
            if self.q.divide != self.kv.divide:
                return None
            unit = within_reach(self.q.divide)
            away = (within_reach(self.q.plus) - within_reach(self.kv.plus)) * unit
            return Periodicity(unit, frozenset({away}))
        period = lcm(self.q.period, self.kv.period)
        if period > 1 and (self.q.grows or self.kv.grows):
            return None
        return Periodicity(period, places=self.q.places(self.kv) | self.kv.places(self.q))

    def pinned(self, length):
        from longspan.masks.by_position import Empty

        # number <relation> term, where the term is the key's or the query's
        by_key = self.q.of == NUMBER
        number, relation, term = self.q, self.relation, self.kv
        if not by_key:
            number, relation, term = self.kv, FLIPPED[self.relation], self.q
        if number.of != NUMBER or not number.is_static or not term.is_plain:
            return Pinned(self)
        value = int(number.at(np.zeros(1, np.int64))[0])
        if by_key and term.of == POSITION and relation in (">", ">="):
            count = value + (relation == ">=")
            return Pinned(Empty(), frozenset(range(max(min(count, length), 0))))
        if not (self.few and relation == "<=" and value == 1):
            return Pinned(self)
        if term.of == MEMBER:
            inside = frozenset(place for place in term.data if 0 <= place < length)
            if by_key:
                return Pinned(Empty(), columns=inside)
            return Pinned(Empty(), rows=inside)
        if term.of == ARRAY and term.data.dtype == bool and term.data.ndim == 2:
            if by_key:
                return Pinned(Empty(), kv_flags=(term.data,))
            return Pinned(Empty(), q_flags=(term.data,))
        return Pinned(self)

    def extents(self):
        for name, term, axis in (("q", self.q, "T"), ("kv", self.kv, "S")):
            for field, letters in term._letters():
                for letter, size in zip(letters.replace(".", axis), getattr(term, field).shape, strict=True):
                    yield Extent(f"Compare.{name}", letter, size)

    def negated(self) -> Mask | None:
        """The negation as one or two comparisons; None if it is none."""
        if self.is_strided or self.kv.modulo is not None or self.q.valid != "all" or self.kv.valid != "all":
            return None
        if self.relation == "==":
            return replace(self, relation="<", few=False) | replace(self, relation=">", few=False)
        return replace(self, relation=OPPOSITE[self.relation], few=False)

    def _cut(self, q, kv, q_len, kv_len):
        mine, theirs = self.q.cut(q), self.kv.cut(kv)
        if mine is self.q and theirs is self.kv:
            return self
        return replace(self, q=mine, kv=theirs)

    def _count_pieces(self, q, kv):
        if self.relation == "==" and not (self.q.grows and self.kv.grows):
            q_ids, kv_ids = _line(self.q.value(q.slots()), q), _line(self.kv.value(kv.slots()), kv)
            mine, theirs = self.q.defined(q.slots()), self.kv.defined(kv.slots())
            high, keys = kv.length, None
            if mine is not None:
                high = np.where(_line(mine, q), kv.length, 0)
            if theirs is not None and not self._of_ids:
                keys = _line(theirs, kv)
            return [CountPiece(0, high, q_ids, kv_ids, keys=keys)]
        if self.q.of == NUMBER:
            return [CountPiece(keys=_line(self.allowed(q.slots(0, 1), kv.slots()), kv))]
        if self.kv.of == NUMBER:
            return [CountPiece(0, np.where(_line(self.allowed(q.slots(), kv.slots(0, 1)), q), kv.length, 0))]
        if self.kv.of in (ARRAY, MEMBER) or (self.kv.of == SLOT and kv.positions is not None):
            return None
        return [CountPiece(within=self)]

    @property
    def _of_ids(self) -> bool:
        """Whether it compares the entries of two arrays for equality, and the same entries are valid in both."""
        plain = all(term.of == ARRAY and term.is_plain for term in (self.q, self.kv))
        return plain and self.relation == "==" and self.q.valid == self.kv.valid

    @property
    def _by_distance(self) -> bool:
        """Whether it allows distances that are multiples of a number: distances bound tiles better than residues."""
        q, kv = self.q, self.kv
        if not (q.of == kv.of == POSITION and self.relation == "==" and is_static_number(q.divide, 1)):
            return False
        pairs = [(q.divide, kv.divide), (q.modulo, kv.modulo), (q.plus, kv.plus)]
        return q.modulo is not None and all(_same(mine, theirs) for mine, theirs in pairs)

    def __repr__(self):
        return f"Compare({self.q!r} {self.relation} {self.kv!r})"


def _holds(relation: str, a: Any, b: Any) -> Any:
    if relation == "<=":
        return a <= b
    if relation == ">=":
        return a >= b
    if relation == "==":
        return a == b
    if relation == "<":
        return a < b
    return a > b


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


def _line(array: Any, side: Any) -> np.ndarray:
    """One entry per slot of a side, of one batch row and head."""
    return np.broadcast_to(np.asarray(array).reshape(-1), side.length)


def _spans(row: Term, relation: str, other: Term, rows, others, few: bool) -> Spans:
    """The slots of the other side that each tile of rows may see: those with row <= (>=, <, >, ==) other."""
    xp, side = rows.side.xp, others.side
    if relation == "==" and row.of == other.of == ARRAY:
        equal = hull_of_equals(row, other, rows)
        if equal is not None:
            return equal
    low, high = _bounds(xp, relation, row, rows)
    if other.of == NUMBER:
        return whole_or_nothing(xp, _inside(other.value(others), low, high), side.length)
    if few and row.of == NUMBER:
        least, greatest, _ = other.range(others)
        if high is None:
            return nothing(xp)._replace(common=greatest >= low)
        if low is None:
            return nothing(xp)._replace(common=least <= high)
        return nothing(xp)._replace(common=(least <= high) & (greatest >= low))
    if other.of == ARRAY:
        return hull_between(other, side, low, high)
    if not other.grows:
        return everything(xp, side.length)
    low, high = other.source_range(side, low, high, of=row)
    if other.of == SLOT:
        return Spans(*slots_between(xp, side.length, low, high))
    return Spans(*side.between(low, high))


def _bounds(xp, relation: str, row: Term, rows: Any) -> tuple[Any, Any]:
    """The range of the other side's term that each tile of rows may see, of rank 4; None is no bound."""
    low = high = None
    if relation in ("==", "<=", "<"):
        low = _rank_4(xp, row.least(rows))
    if relation in ("==", ">=", ">"):
        high = _rank_4(xp, row.greatest(rows))
    if relation == "<":
        low = xp.minimum(low, MOST - 1) + 1
    if relation == ">":
        high = xp.maximum(high, LEAST + 1) - 1
    return low, high


def _rank_4(xp, end: Any) -> Any:
    if isinstance(end, int):
        return xp.full((1, 1, 1, 1), end, np.int32)
    return end


def _inside(value: Any, low: Any, high: Any) -> Any:
    if high is None:
        return value >= low
    if low is None:
        return value <= high
    return (low <= value) & (value <= high)
