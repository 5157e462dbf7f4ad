"""A dense model of `MaskInfo` in NumPy and plain loops, for tests."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

LAST = np.iinfo(np.int32).max


class Rule(NamedTuple):
    """An expression: a table [B, 1, T, S], a condition on positions, or two rules joined with & or |."""

    kind: str
    left: Any
    right: Any = None

    def truth(self, q_pos, kv_pos):
        if self.kind == "table":
            return self.left
        if self.kind == "positions":
            return self.left(q_pos[:, None, :, None], kv_pos[:, None, None, :])
        sides = self.left.truth(q_pos, kv_pos), self.right.truth(q_pos, kv_pos)
        return sides[0] & sides[1] if self.kind == "and" else sides[0] | sides[1]

    def cut(self, q, kv):
        if self.kind == "table":
            return Rule("table", np.array([self.left[b][:, q[b]][:, :, kv[b]] for b in range(len(q))]))
        if self.kind == "positions":
            return self
        return Rule(self.kind, self.left.cut(q, kv), self.right.cut(q, kv))


@dataclass(frozen=True)
class Model:
    """Documents, segment ids, positions (None: slots), and all other rules as a function of the positions."""

    q_docs: np.ndarray
    kv_docs: np.ndarray
    q_ids: np.ndarray
    kv_ids: np.ndarray
    q_pos: np.ndarray | None
    kv_pos: np.ndarray | None
    rule: Rule

    @classmethod
    def of(cls, q_ids, kv_ids, q_pos=None, kv_pos=None):
        shape = (q_ids.shape[0], 1, q_ids.shape[1], kv_ids.shape[1])
        return cls(q_ids, kv_ids, q_ids, kv_ids, q_pos, kv_pos, Rule("table", np.ones(shape, bool)))

    @property
    def shape(self):
        return self.q_docs.shape[0], self.q_docs.shape[1], self.kv_docs.shape[1]

    @property
    def truth(self):
        q, kv = self.q_docs[:, None, :, None], self.kv_docs[:, None, None, :]
        return self.rule.truth(*self.positions()) & (q == kv) & (q >= 0)

    def positions(self):
        B, T, S = self.shape
        q = np.tile(np.arange(T), (B, 1)) if self.q_pos is None else self.q_pos
        kv = np.tile(np.arange(S), (B, 1)) if self.kv_pos is None else self.kv_pos
        return q, kv

    def distance(self):
        """k - q by position, [B, 1, T, S]."""
        q, kv = self.positions()
        return kv[:, None, None, :] - q[:, None, :, None]

    def add(self, condition):
        return replace(self, rule=Rule("and", self.rule, Rule("positions", condition)))

    def causal(self, offset):
        return self.add(lambda q, k: k <= q + rank4(offset))

    def window(self, left, right, offset):
        left, right, offset = rank4(left), rank4(right), rank4(offset)
        return self.add(lambda q, k: (q + offset - left <= k) & (k <= q + offset + right))

    def chunked(self, size, offset):
        q, kv = (p // np.reshape(np.asarray(size), (-1, 1)) for p in self.positions())
        names = [name_pairs(*row, shift=1) for row in zip(self.q_ids, self.kv_ids, q, kv, strict=True)]
        q_ids, kv_ids = (np.array(side) for side in zip(*names, strict=True))
        named = replace(self, q_ids=q_ids, kv_ids=kv_ids)
        size, offset = rank4(size), rank4(offset)
        return named.add(lambda q, k: (q // size == k // size) & (k <= q + offset))

    def types(self, q_types, kv_types, combine, zero, update):
        q, kv = q_types[:, None, :, None], kv_types[:, None, None, :]
        equal = Rule("table", (q == kv) & ((q != 0) | (zero == "none")))
        model, ids = self, (self.q_ids, self.kv_ids)
        if combine == "union":
            model = replace(self, rule=Rule("or", self.rule, equal))
        elif combine == "intersect":
            model = replace(self, rule=Rule("and", self.rule, equal))
        else:
            ids = np.minimum(self.q_docs, 0), np.minimum(self.kv_docs, 0)
            model = replace(self, rule=equal, q_docs=ids[0], kv_docs=ids[1])
        if combine != "union" if update is None else update:
            shown = [t if zero == "none" else np.where(t == 0, -1, t) for t in (q_types, kv_types)]
            names = [name_pairs(*row, shift=0) for row in zip(*ids, *shown, strict=True)]
            q_ids, kv_ids = (np.array(side) for side in zip(*names, strict=True))
            model = replace(model, q_ids=q_ids, kv_ids=kv_ids)
        return model

    def cut(self, q_slots, kv_slots):
        """Keeps the slots [B, kept] of each side; None: all."""
        B, T, S = self.shape
        every_q, every_kv = np.tile(np.arange(T), (B, 1)), np.tile(np.arange(S), (B, 1))
        (q_pos, kv_pos), rows = self.positions(), np.arange(B)[:, None]
        q, kv = every_q if q_slots is None else q_slots, every_kv if kv_slots is None else kv_slots
        return Model(
            self.q_docs[rows, q],
            self.kv_docs[rows, kv],
            self.q_ids[rows, q],
            self.kv_ids[rows, kv],
            self.q_pos if q_slots is None else q_pos[rows, q],
            self.kv_pos if kv_slots is None else kv_pos[rows, kv],
            self.rule.cut(q, kv),
        )

    def decode(self, left, right, offset, index):
        B, _, S = self.shape
        width = min(left + right + 1, S)
        index, offset = (np.broadcast_to(np.asarray(n), B) for n in (index, offset))
        slots = []
        for b in range(B):
            if self.q_pos is None and self.kv_pos is None:
                start = min(max(index[b] + offset[b] - left, 0), S - width)
                slots.append(list(range(start, start + width)))
                continue
            near = (self.distance() - rank4(offset))[b, 0, index[b]]
            doc = self.q_docs[b, index[b]]
            seen = (-left <= near) & (near <= right) & (self.kv_docs[b] == doc) & (doc >= 0)
            order = [s for s in range(S) if seen[s]] + [s for s in range(S) if not seen[s]]
            slots.append(sorted(order[:width]))
        one = self.window(left, right, offset)
        return one.cut(index.reshape(-1, 1), np.array(slots, int).reshape(B, width))

    def prefill(self, left, right, offset, count):
        B, _, S = self.shape
        slots = None if count >= S else np.tile(np.arange(S - count, S), (B, 1))
        return self.window(left, right, offset).cut(None, slots)

    def kv_lengths(self, lengths, q_len, window):
        B, T, S = self.shape
        lengths = np.broadcast_to(lengths, B)
        inside = np.arange(S) < lengths[:, None]
        kv_docs, kv_ids = (np.where(inside, ids, -1) for ids in (self.kv_docs, self.kv_ids))
        model = replace(self, kv_docs=kv_docs, kv_ids=kv_ids)
        q = None if q_len == T else np.clip(lengths - q_len, 0, T - q_len)[:, None] + np.arange(q_len)
        kv = None
        if window is not None and window < S:
            kv = np.clip(lengths - window, 0, S - window)[:, None] + np.arange(window)
        return model if q is None and kv is None else model.cut(q, kv)

    def with_ids(self, q_ids, kv_ids):
        return replace(self, q_docs=q_ids, kv_docs=kv_ids, q_ids=q_ids, kv_ids=kv_ids)

    def derived_positions(self):
        q = restart(self.q_ids, -1) if self.q_pos is None else self.q_pos
        kv = restart(self.kv_ids, LAST) if self.kv_pos is None else self.kv_pos
        return q, kv

    def offsets(self):
        """([0, n0, ...], [0, m0, ...]), or None if no order of sequences fits both sides."""
        q_lengths, kv_lengths = [], []
        for q, kv in zip(self.q_ids, self.kv_ids, strict=True):
            order = merged(in_order(q), in_order(kv))
            if order is None:
                return None
            q_lengths += [int((q == i).sum()) for i in order]
            kv_lengths += [int((kv == i).sum()) for i in order]
        return np.cumsum([0, *q_lengths]), np.cumsum([0, *kv_lengths])


def rank4(number):
    return np.reshape(np.asarray(number), (-1, 1, 1, 1))


def restart(ids, padding):
    out = np.full(ids.shape, padding)
    for b, row in enumerate(ids):
        for i, name in enumerate(row):
            if name >= 0:
                out[b, i] = out[b, i - 1] + 1 if i and row[i - 1] == name else 0
    return out


def name_pairs(q_ids, kv_ids, q_parts, kv_parts, shift):
    """Ids of parts: part + shift in a row of one document, else one per (document, part), counted from 1."""
    documents = {i for i in (*q_ids, *kv_ids) if i >= 0}
    numbers = {}

    def name(document, part):
        if document < 0 or (shift == 0 and part < 0):
            return -1
        return numbers.setdefault((document, part), len(numbers) + 1) if len(documents) > 1 else part + shift

    sides = ((q_ids, q_parts), (kv_ids, kv_parts))
    return [[name(d, p) for d, p in zip(ids, parts, strict=True)] for ids, parts in sides]


def in_order(row):
    """The ids of a row in order, or None if an id reappears after another id."""
    seen = []
    for name in row:
        if name >= 0 and (not seen or seen[-1] != name):
            if name in seen:
                return None
            seen.append(int(name))
    return seen


def merged(q, kv):
    """One order of the ids of both sides: ascending, or the order of queries with ids that only keys have inserted."""
    if q is None or kv is None:
        return None
    if q == sorted(q) and kv == sorted(kv):
        return sorted({*q, *kv})
    order, at = list(q), 0
    for name in kv:
        if name in q:
            if order.index(name) < at:
                return None
            at = order.index(name) + 1
        else:
            order.insert(at, name)
            at += 1
    return order
