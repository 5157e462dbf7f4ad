"""Masks as users write them, with all optional methods or none."""

from typing import Any

from longspan.masks import Mask, rule
from longspan.masks.spans import Spans


@rule
class Near(Mask):
    """At most `left` positions back, with all bounds that let engines skip tiles."""

    left: int

    def allowed(self, q, kv):
        distance = q.position - kv.position
        return (distance >= 0) & (distance <= self.left)

    def classify(self, q, kv):
        least, most = q.first - kv.last, q.last - kv.first
        return (most >= 0) & (least <= self.left), (least >= 0) & (most <= self.left)

    def kv_spans(self, q, kv):
        return Spans(*kv.side.between(q.first - self.left, q.last))


@rule
class NearSlots(Mask):
    """The same by slot, and its mirror."""

    left: int

    reads = frozenset({"slot"})

    def allowed(self, q, kv):
        return (kv.index <= q.index) & (q.index <= kv.index + self.left)

    def classify(self, q, kv):
        may_any = (kv.start < q.stop) & (q.start < kv.stop + self.left)
        return may_any, (kv.stop - 1 <= q.start) & (q.stop - 1 <= kv.start + self.left)

    def kv_spans(self, q, kv):
        return Spans(q.start - self.left, q.stop)

    def q_spans(self, kv, q):
        return Spans(kv.start, kv.stop + self.left)


@rule
class Louder(Mask):
    """Keys that are at least as loud as the query: an array per side, read and bounded through the sides."""

    q_loud: Any
    kv_loud: Any

    def allowed(self, q, kv):
        return q.take(self.q_loud) <= kv.take(self.kv_loud)

    def classify(self, q, kv):
        may_any = q.least(self.q_loud) <= kv.greatest(self.kv_loud)
        return may_any, q.greatest(self.q_loud) <= kv.least(self.kv_loud)


@rule
class LastKeys(Mask):
    """The last keys of the whole row: it reads the length, and has no bounds."""

    count: int

    def allowed(self, q, kv):
        return (q.index >= 0) & (kv.index >= kv.side.length - self.count)


@rule
class Wrapped(Mask):
    """The same pairs as another mask, which it does not list in `parts`."""

    mask: Mask

    def allowed(self, q, kv):
        return self.mask.allowed(q, kv)

    def classify(self, q, kv):
        return self.mask.classify(q, kv)

    def kv_spans(self, q, kv):
        return self.mask.kv_spans(q, kv)

    def q_spans(self, kv, q):
        return self.mask.q_spans(kv, q)

    def extents(self):
        return self.mask.extents()
