"""Masks made of masks: `And`, `Or`, `Not`, and `PerHead`, which gives every head its own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from math import lcm
from typing import Any

import numpy as np

from longspan.masks.base import NO_QUERY, Extent, Mask, Periodicity, Pinned, rule
from longspan.masks.checks import check_masks
from longspan.masks.compare import Compare
from longspan.masks.sides import KEYS, QUERIES
from longspan.masks.spans import Spans, intersect, unite

PATIENCE = 32  # rounds that every key may go in search of a query that all parts of an `And` agree on
LEAST_PATIENCE = 2**22  # steps of single keys that are always gone: short masks are known exactly


class _Composition(Mask):
    """What all compositions share: they are what their parts are."""

    def parts(self):
        return self.masks  # type: ignore[attr-defined]

    def lower(self):
        return self.atoms()

    def atoms(self):
        return self.with_parts(self._lowered())

    def _lowered(self):
        # A plain loop, because masks nest: every function between two levels takes from Python's stack.
        found: dict[int, Mask] = {}
        for part in self.parts():
            if id(part) not in found:  # heads that share a mask still share it
                found[id(part)] = part.atoms()
        return [found[id(part)] for part in self.parts()]

    def _negated(self):
        found: dict[int, Mask] = {}
        for part in self.parts():
            if id(part) not in found:
                opposite = part.negated()
                found[id(part)] = Not(part) if opposite is None else opposite
        return [found[id(part)] for part in self.parts()]

    def with_parts(self, parts: Sequence[Mask]) -> Mask:
        assert len(parts) == len(self.parts()), "as many parts as before"
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
        # Where no part pins anything, each part is its rest: so is what is made of them.
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
    """Allows what every one of `masks` allows; write it `a & b`.

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
        """From one part's nearest to the next part's, until all agree, or for so long that it must do as a bound."""
        found, moving = np.array(np.broadcast_to(at, key.shape)), np.arange(key.size)
        patience = max(PATIENCE * key.size, LEAST_PATIENCE)
        while moving.size and patience > 0:
            before = after = found[moving]
            patience -= moving.size
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
        return None if self._slow_to_agree() else super().periodicity()

    def _slow_to_agree(self) -> list[Mask]:
        """Two strides may take longer to agree than `nearest_query` searches."""
        strides = [mask for mask in self.walk() if mask.is_strided]
        return strides if len(strides) > 1 else []

    def atoms(self):
        return And(_tightest(_flat(And, self._lowered())))

    def negated(self):
        return Or.of(*self._negated())

    def __repr__(self):
        return " & ".join(_wrapped(m, Or) for m in self.masks)


@rule
class Or(_Composition):
    """Allows what any one of `masks` allows; write it `a | b`.

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
        return reduce(np.maximum if step < 0 else np.minimum, found)

    def atoms(self):
        return Or.of(*self._lowered())

    def negated(self):
        return And.of(*self._negated())

    def __repr__(self):
        return " | ".join(repr(m) for m in self.masks)


@rule
class Not(_Composition):
    """Allows what `mask` does not; write it `~a`. Padding is opened too: add padding after it, with `&`.

    Example:
        >>> from longspan import Causal
        >>> print((~Causal()).show(3, 3))
        .##
        ..#
        ...
    """

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
        if type(self.mask).classify is Mask.classify:  # its spans say nothing of what it leaves out
            return False, False
        empty, full = self.mask.provable_kinds()
        return full, empty

    def atoms(self):
        """`~` taken down to the comparisons: those say again what can be skipped."""
        lowered = self.mask.atoms()
        opposite = lowered.negated()
        return Not(lowered) if opposite is None else opposite

    def negated(self):
        return self.mask

    def kv_spans(self, q, kv):
        return super().kv_spans(q, kv) if isinstance(rule := self.lower(), Not) else rule.kv_spans(q, kv)

    def q_spans(self, kv, q):
        return super().q_spans(kv, q) if isinstance(rule := self.lower(), Not) else rule.q_spans(kv, q)

    def nearest_query(self, key, at, step):
        return at if isinstance(rule := self.lower(), Not) else rule.nearest_query(key, at, step)

    def inexact(self):
        return (self,) if isinstance(rule := self.lower(), Not) or rule.inexact() else ()

    def periodicity(self):
        return Periodicity() if isinstance(rule := self.lower(), Not) else rule.periodicity()

    def __repr__(self):
        return f"~{_wrapped(self.mask, And, Or)}"


@rule
class PerHead(_Composition):
    """Allows, for head n, what `masks[n]` allows.

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
        kinds = [self._select(q.side, lambda mask, i=i: mask.classify(q, kv)[i]) for i in (0, 1)]
        return kinds[0], kinds[1]

    def kv_spans(self, q, kv):
        return self._spans(q.side, KEYS, lambda mask: mask.kv_spans(q, kv))

    def q_spans(self, kv, q):
        return self._spans(q.side, QUERIES, lambda mask: mask.q_spans(kv, q))

    def nearest_query(self, key, at, step):
        """That of any head."""
        return Or(self.masks).nearest_query(key, at, step)

    def negated(self):
        return PerHead(tuple(self._negated()))

    def of_head(self, head):
        return self.masks[0 if len(self.masks) == 1 else head].of_head(head)

    def extents(self):
        yield Extent("PerHead.masks", "N", len(self.masks))
        yield from super().extents()

    def _select(self, side, of: Callable[[Mask], Any]):
        """Each head's own truth, along the head axis."""
        xp, ((first, _), *others) = side.xp, self._groups()
        truth = of(first)
        for mask, heads in others:
            # Not `where`: kernels have no select between bools.
            mine = _is_one_of(side.head, heads)
            truth = (mine & of(mask)) | (~mine & truth)
        return xp.broadcast_to(truth, np.broadcast_shapes(truth.shape, side.head.shape))

    def _spans(self, side, axis: int, of: Callable[[Mask], Spans]) -> Spans:
        """The spans of every head side by side; a head with fewer intervals gets empty ones."""
        xp, parts = side.xp, [(of(mask), heads) for mask, heads in self._groups()]
        most = max(spans.low.shape[axis] for spans, _ in parts)
        # What no other part claims is the first's, as in `_select`: a single mask is every head's.
        (first, _), *others = [(_padded(xp, spans, axis, most), heads) for spans, heads in parts]
        low, high, common = first
        for spans, heads in others:
            mine = _is_one_of(side.head, heads)
            low, high = xp.where(mine, spans.low, low), xp.where(mine, spans.high, high)
            if common is not None or spans.common is not None:
                theirs = False if common is None else ~mine & common
                common = theirs if spans.common is None else (mine & spans.common) | theirs
        return Spans(low, high, common)

    def _groups(self) -> list[tuple[Mask, list[int]]]:
        """Equal masks once, with the heads that have them."""
        groups: dict[Any, tuple[Mask, list[int]]] = {}
        for head, mask in enumerate(self.masks):
            try:
                key = (type(mask), mask, hash(mask))
            except TypeError:  # it holds arrays: compared by identity
                key = id(mask)
            groups.setdefault(key, (mask, []))[1].append(head)
        return list(groups.values())

    def _arguments(self):
        return [f"({', '.join(map(repr, self.masks))}{',' if len(self.masks) == 1 else ''})"]


def combine_periodicities(found: Sequence[Periodicity | None]) -> Periodicity | None:
    """What several rules depend on; None if that is not known of one of them."""
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    return Periodicity(
        lcm(*(one.period for one in known)),
        frozenset().union(*(one.distances for one in known)),
        frozenset().union(*(one.places for one in known)),
    )


def _flat(kind, masks: Sequence[Mask]) -> tuple[Mask, ...]:
    """Nested ands (ors) as one tuple, so that grouping does not show."""
    return tuple(part for m in masks for part in (m.parts() if type(m) is kind else (m,)))


def _tightest(masks: Sequence[Mask]) -> tuple[Mask, ...]:
    """The same `&` without what another part says as well: of static ends that differ in what is added, one is left."""
    kept: dict[Any, Mask] = {}
    for number, mask in enumerate(masks):
        kind = (_kind_of_end(mask) if isinstance(mask, Compare) else None) or number
        other = kept.get(kind)
        if other is None or _is_tighter(mask, other):
            kept[kind] = mask
    return tuple(kept.values())


def _kind_of_end(mask: Compare) -> Any:
    """What two static ends have in common that differ in what is added to the query's term; None: it is no such end."""
    is_end = mask.q.is_static and mask.kv.is_static and mask.relation != "=="
    return (mask.relation, replace(mask.q, plus=0), mask.kv) if is_end else None


def _is_tighter(end: Any, other: Any) -> bool:
    return end.q.plus > other.q.plus if "<" in end.relation else end.q.plus < other.q.plus


def _wrapped(mask: Mask, *kinds) -> str:
    return f"({mask!r})" if isinstance(mask, kinds) else repr(mask)


def _padded(xp, spans: Spans, axis: int, most: int) -> Spans:
    """The spans with `most` intervals per row, the further ones empty."""
    more = [(0, most - spans.low.shape[axis]) if i == axis else (0, 0) for i in range(4)]
    return Spans(xp.pad(spans.low, more), xp.pad(spans.high, more), spans.common)


def _is_one_of(head, heads: list[int]):
    mine = head == heads[0]
    for other in heads[1:]:
        mine = mine | (head == other)
    return mine
