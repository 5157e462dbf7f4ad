"""Compositions of masks: `And`, `Or`, `Not`, and `PerHead`, one mask per head."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from math import lcm
from typing import Any, ClassVar

import numpy as np

from longspan.masks.base import NO_QUERY, Extent, Mask, Periodicity, Pinned, rule
from longspan.masks.checks import check_masks
from longspan.masks.compare import Compare
from longspan.masks.sides import KEYS, QUERIES
from longspan.masks.spans import Spans, intersect, unite

MAX_ROUNDS = 32  # of `And.nearest_query`, on average per key; after them the result is only a bound
MIN_STEPS = 2**22  # the steps of single keys that are always made: for short masks the result is exact


class _Composition(Mask):
    """Base of compositions: their properties follow from those of their parts."""

    def parts(self):
        return self.masks  # type: ignore[attr-defined]

    def lower(self):
        return self.atoms()

    def atoms(self):
        return self.with_parts(self._lowered())

    def _lowered(self):
        # A plain loop, because masks nest: each function call between two levels uses Python's stack.
        found: dict[int, Mask] = {}
        for part in self.parts():
            if id(part) not in found:  # heads that share a mask share the lowered mask
                found[id(part)] = part.atoms()
        return [found[id(part)] for part in self.parts()]

    def _negated(self):
        found: dict[int, Mask] = {}
        for part in self.parts():
            if id(part) not in found:
                opposite = part.negated()
                if opposite is None:
                    opposite = Not(part)
                found[id(part)] = opposite
        return [found[id(part)] for part in self.parts()]

    def with_parts(self, parts: Sequence[Mask]) -> Mask:
        assert len(parts) == len(self.parts()), "the number of parts stays the same"
        return type(self)(tuple(parts))  # type: ignore[call-arg]

    @property
    def reads(self):
        return frozenset[str]().union(*(part.reads for part in self.parts()))

    @property
    def reads_q_place(self):
        return any(part.reads_q_place for part in self.parts())

    @property
    def by_token(self):
        return all(part.by_token or "slot" not in part.reads for part in self.parts())

    def pinned(self, length):
        # On pairs without pinned tokens each part equals its rest, so the composition equals that of the rests.
        found = [part.pinned(length) for part in self.parts()]
        return Pinned(
            self.with_parts([part.rest for part in found]),
            frozenset().union(*(part.columns for part in found)),
            frozenset().union(*(part.rows for part in found)),
            tuple(flags for part in found for flags in part.kv_flags),
            tuple(flags for part in found for flags in part.q_flags),
        )

    def periodicity(self):
        return combine_periodicities([part.periodicity() for part in self.parts()])

    def _cut(self, q, kv, q_len, kv_len):
        given = {name: length for name, length in (("q_len", q_len), ("kv_len", kv_len)) if length is not None}
        cut = {id(part): part.cut(q, kv, **given) for part in self.parts()}
        return self.with_parts([cut[id(part)] for part in self.parts()])


@rule
class And(_Composition):
    """Allows the pairs that every one of `masks` allows; write it `a & b`.

    Example:
        >>> from longspan import Causal, Chunk
        >>> Causal() & Chunk(4)
        Causal() & Chunk(4)
    """

    masks: tuple[Mask, ...]

    @classmethod
    def of(cls, *masks: Mask) -> "And":
        return cls(_flat(cls, masks))

    def allowed(self, q, kv):
        return reduce(lambda a, b: a & b, [m.allowed(q, kv) for m in self.masks])

    def classify(self, q, kv):
        kinds = [m.classify(q, kv) for m in self.masks]
        return reduce(lambda a, b: (a[0] & b[0], a[1] & b[1]), kinds)

    def kv_spans(self, q, kv):
        return intersect(KEYS, [m.kv_spans(q, kv) for m in self.masks])

    def q_spans(self, kv, q):
        return intersect(QUERIES, [m.q_spans(kv, q) for m in self.masks])

    def provable_kinds(self):
        empty, full = zip(*(m.provable_kinds() for m in self.masks), strict=True)
        return any(empty), all(full)

    def nearest_query(self, key, at, step):
        """The nearest query that all parts allow.

        Each part in turn moves the query to the nearest one that it allows, until no part moves it. If this takes too
        many steps, the query reached so far is a bound.
        """
        found, moving = np.array(np.broadcast_to(at, key.shape)), np.arange(key.size)
        steps = max(MAX_ROUNDS * key.size, MIN_STEPS)
        while moving.size and steps > 0:
            before = after = found[moving]
            steps -= moving.size
            for mask in self.masks:
                after = mask.nearest_query(key[moving], after, step)
                if (np.abs(after) >= NO_QUERY).all():
                    break
            found[moving] = after
            moving = moving[(after != before) & (np.abs(after) < NO_QUERY)]
        return found

    def inexact(self):
        return (*super().inexact(), *self._slow_to_agree())

    def periodicity(self):
        if self._slow_to_agree():
            return None
        return super().periodicity()

    def _slow_to_agree(self) -> list[Mask]:
        """The strided parts if there are several: `nearest_query` may stop before they agree."""
        strided = [mask for mask in self.walk() if mask.is_strided]
        if len(strided) < 2:
            return []
        return strided

    def atoms(self):
        return And(_tightest(_flat(And, self._lowered())))

    def negated(self):
        return Or.of(*self._negated())

    def __repr__(self):
        return " & ".join(_wrapped(m, Or) for m in self.masks)


@rule
class Or(_Composition):
    """Allows the pairs that any one of `masks` allows; write it `a | b`.

    Example:
        >>> from longspan import Prefix, Window
        >>> Window(2, 0) | Prefix(1)
        Window(2, 0) | Prefix(1)
    """

    masks: tuple[Mask, ...]

    @classmethod
    def of(cls, *masks: Mask) -> "Or":
        return cls(_flat(cls, masks))

    def allowed(self, q, kv):
        return reduce(lambda a, b: a | b, [m.allowed(q, kv) for m in self.masks])

    def classify(self, q, kv):
        kinds = [m.classify(q, kv) for m in self.masks]
        return reduce(lambda a, b: (a[0] | b[0], a[1] | b[1]), kinds)

    def kv_spans(self, q, kv):
        return unite(KEYS, [m.kv_spans(q, kv) for m in self.masks])

    def q_spans(self, kv, q):
        return unite(QUERIES, [m.q_spans(kv, q) for m in self.masks])

    def provable_kinds(self):
        empty, full = zip(*(m.provable_kinds() for m in self.masks), strict=True)
        return all(empty), any(full)

    def nearest_query(self, key, at, step):
        found = [m.nearest_query(key, at, step) for m in self.masks]
        if step < 0:
            return reduce(np.maximum, found)
        return reduce(np.minimum, found)

    def atoms(self):
        return Or.of(*self._lowered())

    def negated(self):
        return And.of(*self._negated())

    def __repr__(self):
        return " | ".join(repr(m) for m in self.masks)


@rule
class Not(_Composition):
    """Allows the pairs that `mask` does not allow; written `~mask`.

    `~mask` also allows pairs with padding. To exclude padding, add the padding rule after the negation:
    `~mask & KvLengths(lengths)`.

    Example:
        >>> from longspan import Causal
        >>> print((~Causal()).show(3, 3))
        .##
        ..#
        ...
    """

    is_monotone: ClassVar = False

    mask: Mask

    def parts(self):
        return (self.mask,)

    def with_parts(self, parts):
        (mask,) = parts
        return Not(mask)

    def allowed(self, q, kv):
        return ~self.mask.allowed(q, kv)

    def classify(self, q, kv):
        may_any, must_all = self.mask.classify(q, kv)
        return ~must_all, ~may_any

    def provable_kinds(self):
        if type(self.mask).classify is Mask.classify:  # spans of a mask are no bound on its negation
            return False, False
        empty, full = self.mask.provable_kinds()
        return full, empty

    def atoms(self):
        """The negation moved down to the comparisons, whose negations can skip tiles."""
        lowered = self.mask.atoms()
        opposite = lowered.negated()
        if opposite is None:
            return Not(lowered)
        return opposite

    def negated(self):
        return self.mask

    def kv_spans(self, q, kv):
        lowered = self.lower()
        if isinstance(lowered, Not):
            return super().kv_spans(q, kv)
        return lowered.kv_spans(q, kv)

    def q_spans(self, kv, q):
        lowered = self.lower()
        if isinstance(lowered, Not):
            return super().q_spans(kv, q)
        return lowered.q_spans(kv, q)

    def nearest_query(self, key, at, step):
        lowered = self.lower()
        if isinstance(lowered, Not):
            return at
        return lowered.nearest_query(key, at, step)

    def inexact(self):
        lowered = self.lower()
        if isinstance(lowered, Not) or lowered.inexact():
            return (self,)
        return ()

    def periodicity(self):
        lowered = self.lower()
        if isinstance(lowered, Not):
            return Periodicity()
        return lowered.periodicity()

    def __repr__(self):
        return f"~{_wrapped(self.mask, And, Or)}"


@rule
class PerHead(_Composition):
    """Allows, in head n, the pairs that `masks[n]` allows.

    Args:
        masks: one mask per query head.

    Example:
        >>> from longspan import Causal, Full
        >>> print(PerHead((Causal(), Full())).show(2, 2, head=0))
        #.
        ##
    """

    masks: tuple[Mask, ...]

    def __post_init__(self):
        check_masks(self, "masks", Mask)

    def allowed(self, q, kv):
        return self._select(q.side, lambda mask: mask.allowed(q, kv))

    def provable_kinds(self):
        empty, full = zip(*(m.provable_kinds() for m in self.masks), strict=True)
        return any(empty), any(full)

    def classify(self, q, kv):
        may_any = self._select(q.side, lambda mask: mask.classify(q, kv)[0])
        must_all = self._select(q.side, lambda mask: mask.classify(q, kv)[1])
        return may_any, must_all

    def kv_spans(self, q, kv):
        return self._spans(q.side, KEYS, lambda mask: mask.kv_spans(q, kv))

    def q_spans(self, kv, q):
        return self._spans(q.side, QUERIES, lambda mask: mask.q_spans(kv, q))

    def nearest_query(self, key, at, step):
        """The nearest query in any head."""
        return Or(self.masks).nearest_query(key, at, step)

    def negated(self):
        return PerHead(tuple(self._negated()))

    def of_head(self, head):
        if len(self.masks) == 1:
            return self.masks[0].of_head(head)
        return self.masks[head].of_head(head)

    def extents(self):
        yield Extent("PerHead.masks", "N", len(self.masks))
        yield from super().extents()

    def _select(self, side, of: Callable[[Mask], Any]):
        """The truth of each head's mask, along the head axis."""
        xp, ((first, _), *others) = side.xp, self._groups()
        truth = of(first)
        for mask, heads in others:
            # `where` is avoided: kernels have no select between bools.
            mine = _is_one_of(side.head, heads)
            truth = (mine & of(mask)) | (~mine & truth)
        return xp.broadcast_to(truth, np.broadcast_shapes(truth.shape, side.head.shape))

    def _spans(self, side, axis: int, of: Callable[[Mask], Spans]) -> Spans:
        """The spans of all heads; a head with fewer intervals gets empty ones."""
        xp, parts = side.xp, [(of(mask), heads) for mask, heads in self._groups()]
        count = max(spans.low.shape[axis] for spans, _ in parts)
        # The first mask is for all heads that are not in another group, as in `_select`.
        padded = [(_padded(xp, spans, axis, count), heads) for spans, heads in parts]
        low, high, common = padded[0][0]
        for spans, heads in padded[1:]:
            mine = _is_one_of(side.head, heads)
            low, high = xp.where(mine, spans.low, low), xp.where(mine, spans.high, high)
            if common is not None or spans.common is not None:
                theirs = False
                if common is not None:
                    theirs = ~mine & common
                if spans.common is not None:
                    theirs = (mine & spans.common) | theirs
                common = theirs
        return Spans(low, high, common)

    def _groups(self) -> list[tuple[Mask, list[int]]]:
        """The distinct masks, each with its heads."""
        groups: dict[Any, tuple[Mask, list[int]]] = {}
        for head, mask in enumerate(self.masks):
            try:
                key = (type(mask), mask, hash(mask))
            except TypeError:  # a mask with arrays does not hash, and is compared by identity
                key = id(mask)
            groups.setdefault(key, (mask, []))[1].append(head)
        return list(groups.values())

    def _arguments(self):
        return [f"({', '.join(map(repr, self.masks))}{',' * (len(self.masks) == 1)})"]


def combine_periodicities(found: Sequence[Periodicity | None]) -> Periodicity | None:
    """The quantities that several masks depend on; None if those of one mask are not known."""
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    return Periodicity(
        lcm(*(one.period for one in known)),
        frozenset().union(*(one.distances for one in known)),
        frozenset().union(*(one.places for one in known)),
    )


def _flat(kind, masks: Sequence[Mask]) -> tuple[Mask, ...]:
    """The parts of nested `And`s (or `Or`s) as one tuple, so that the grouping does not matter."""
    found = []
    for mask in masks:
        if type(mask) is kind:
            found += mask.parts()
        else:
            found.append(mask)
    return tuple(found)


def _tightest(masks: Sequence[Mask]) -> tuple[Mask, ...]:
    """Drops the parts of an `&` that another part implies.

    Of static bounds that differ only in the number added to the query's term, the tightest is kept.
    """
    kept: dict[Any, Mask] = {}
    for number, mask in enumerate(masks):
        kind: Any = number
        if _is_static_bound(mask):
            kind = (mask.relation, replace(mask.q, plus=0), mask.kv)  # type: ignore[attr-defined]
        other = kept.get(kind)
        if other is None or _is_tighter(mask, other):
            kept[kind] = mask
    return tuple(kept.values())


def _is_static_bound(mask: Mask) -> bool:
    return isinstance(mask, Compare) and mask.q.is_static and mask.kv.is_static and mask.relation != "=="


def _is_tighter(bound: Any, other: Any) -> bool:
    if "<" in bound.relation:
        return bound.q.plus > other.q.plus
    return bound.q.plus < other.q.plus


def _wrapped(mask: Mask, *kinds) -> str:
    if isinstance(mask, kinds):
        return f"({mask!r})"
    return repr(mask)


def _padded(xp, spans: Spans, axis: int, count: int) -> Spans:
    """The spans with `count` intervals per row; the added ones are empty."""
    more = [(0, 0)] * 4
    more[axis] = (0, count - spans.low.shape[axis])
    return Spans(xp.pad(spans.low, more), xp.pad(spans.high, more), spans.common)


def _is_one_of(head, heads: list[int]):
    mine = head == heads[0]
    for other in heads[1:]:
        mine = mine | (head == other)
    return mine
