"""How many pairs a mask allows, counted by query: where its parts are intervals of keys and equal ids, no pair is read.

A million queries take a second that way. What a mask's parts do not tell, whoever counts has to read.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from longspan.masks import And, Mask, PerHead
from longspan.masks.base import SLOT
from longspan.masks.by_slot import EqualIds
from longspan.masks.sides import KEYS, Side, Tiles


def count_by_query(mask: Mask, q: Side, kv: Side) -> int | None:
    """The allowed pairs of one batch row and head, exactly; None if the mask is more than intervals and ids."""
    if kv.positions is not None:
        return None
    low, high = np.zeros(q.length, np.int64), np.full(q.length, kv.length, np.int64)
    equal: list[EqualIds] = []
    for part in _all_of(mask, int(q.head.reshape(()))):
        if isinstance(part, EqualIds) and type(part).allowed is EqualIds.allowed:
            equal.append(part)
            continue
        interval = _interval(part, q, kv)
        if interval is None:
            return None
        low, high = np.maximum(low, interval[0]), np.minimum(high, interval[1])
    high = np.maximum(low, high)
    return int((high - low).sum()) if not equal else _count_equal(equal, int(q.batch.reshape(())), low, high)


def _all_of(mask: Mask, head: int) -> list[Mask]:
    """The parts that must all hold for a head."""
    if isinstance(mask, PerHead):
        return _all_of(mask.masks[min(head, len(mask.masks) - 1)], head)
    return [rule for part in mask.parts() for rule in _all_of(part, head)] if isinstance(mask, And) else [mask]


@dataclass(frozen=True)
class Runs(Tiles):
    """Runs of slots of any length: `size` is a bound on stop - start."""

    _: KW_ONLY
    stops: Any

    @property
    def stop(self):
        return self.stops


def _interval(rule: Mask, q: Side, kv: Side) -> tuple[np.ndarray, np.ndarray] | None:
    """The keys [low, high) of each query, if the rule allows all of them and nothing else."""
    if SLOT in rule.reads and not rule.one_interval:  # only tiles of one size can tell its arrays
        return None
    queries = q.tiles(1)
    spans = rule.kv_spans(queries, kv.tiles(1))
    if spans.common is not None or spans.low.shape[KEYS] != 1:
        return None
    low, high = (np.broadcast_to(np.clip(end, 0, kv.length), (1, 1, q.length, 1)) for end in spans[:2])
    # Spans only promise to leave nothing out: that they hold nothing else is for `classify` to say.
    _, every = rule.classify(queries, Runs(kv, kv.length, low, unit=1, stops=high))
    return (low.reshape(-1), high.reshape(-1)) if np.all(every | (low >= high)) else None


def _count_equal(rules: list[EqualIds], row: int, low: np.ndarray, high: np.ndarray) -> int:
    """The pairs of queries with keys in [low, high) whose ids are equal by all rules."""
    seen = np.full(len(low), True)
    mine, theirs = None, None
    for rule in rules:
        q_ids, kv_ids = (np.asarray(ids)[min(row, len(ids) - 1)].astype(np.int64) for ids in rule._ids())
        seen &= rule._valid(q_ids)
        mine, theirs = (q_ids, kv_ids) if mine is None or theirs is None else _joint(mine, theirs, q_ids, kv_ids)
    assert mine is not None and theirs is not None
    # Keys in the order of their ids, slots within: those of one id in an interval of slots stand side by side.
    keys = np.sort(theirs * len(theirs) + np.arange(len(theirs)))
    first, last = (np.searchsorted(keys, (mine * len(theirs) + end)[seen]) for end in (low, high))
    return int((last - first).sum())


def _joint(mine: np.ndarray, theirs: np.ndarray, q_ids: np.ndarray, kv_ids: np.ndarray):
    """One id for each pair of ids, small enough to be paired again."""
    a, b = (np.unique(np.concatenate(ids), return_inverse=True)[1] for ids in ((mine, theirs), (q_ids, kv_ids)))
    joint = np.unique(a * (b.max(initial=0) + 1) + b, return_inverse=True)[1]
    return joint[: len(mine)], joint[len(mine) :]
