"""`plan`: the keys that a cache for a mask must hold, and their slots."""

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longspan.array_types import FAR, no_type_check
from longspan.cache.lifetimes import (
    MAX_CACHED_LENGTH,
    Lifetimes,
    cached_by_structure,
    is_hashable,
    lifetimes,
    without_data,
)
from longspan.cache.outline import Outline
from longspan.cache.picture import show_all, show_step
from longspan.cache.slots import NEVER_REUSED, SlotAllocation, allocate, at_once, number_alive
from longspan.checks import check_extents, check_static_size
from longspan.masks import Mask

MAX_DIGESTED = 2**22  # positions: digests of plans up to this length cover every position, with or without an outline
DIGESTED_AT_ONCE = 2**16  # positions


@dataclass(frozen=True, eq=False)
class CachePlan:
    """The slot of each key in a cache, as `ls.cache.plan` computes it. Plans can be compared, hashed and printed.

    Example:
        >>> ls.cache.plan(ls.Causal() & ls.Window(3, 0), 1000)
        CachePlan(4 of 1,000 positions, a ring)
    """

    capacity: int  # slots
    length: int  # positions, 0 to length - 1
    slack: int  # tokens that a rollback may remove
    why: str  # the reason for the capacity
    digest: str  # of everything that plans of interchangeable caches have in common
    outline: Outline = field(repr=False)  # the positions that `end` and `tied` have entries for
    ring: int = 0  # slots of the ring, after the pinned slots; 0: there is a table
    pinned: tuple[int, ...] = ()  # keys that are kept forever, in the first slots
    at_once: int = NEVER_REUSED  # the most new tokens after whose append the cache holds every key that they attend to
    steady: bool = True  # every key of the ring lives exactly until its slot is reused, so `end` is not needed
    mask: Any = field(default=None, repr=False)  # without its data
    table: np.ndarray | None = field(default=None, repr=False)  # int32 [length]: slots, -1: never stored
    end: np.ndarray | None = field(default=None, repr=False)  # int32 [keys]: the last step that needs each key
    tied: np.ndarray | None = field(default=None, repr=False)  # bool [keys]: appended together with the one before

    def nbytes(self, batch: int, kv_heads: int, head_dim: int, dtype: Any, *, v_head_dim: int | None = None) -> int:
        """The bytes that the keys and values of a cache with this plan take.

        Example:
            >>> ls.cache.plan(ls.Causal() & ls.Window(1023, 0), 10**6).nbytes(1, 8, 64, jnp.bfloat16)
            2097152
        """
        return self.capacity * self._row_bytes(batch, kv_heads, head_dim, dtype, v_head_dim)

    def full_nbytes(
        self, batch: int, kv_heads: int, head_dim: int, dtype: Any, *, v_head_dim: int | None = None
    ) -> int:
        """The bytes that a cache of all positions would take."""
        return self.length * self._row_bytes(batch, kv_heads, head_dim, dtype, v_head_dim)

    def show(self, step: int | None = None, *, max_cells: int = 64) -> str:
        """A text picture of the kept and the evicted keys, after one step or after every step.

        Args:
            step: the position of the last token that was appended; None draws all steps, one row per step, and leaves
                out some of them if there are more than 32.
            max_cells: the largest number of cells (characters) across.

        Example:
            >>> plan = ls.cache.plan(ls.Causal() & (ls.Window(2, 0) | ls.Prefix(1)), 9)
            >>> print(plan.show(step=6))
            7 of 9 positions: 4 kept, 3 evicted; 4 slots
            0 2 4 6 8
            #...###
            # kept, . evicted, blank if not yet appended
        """
        if step is None:
            return show_all(self, max_cells)
        return show_step(self, step, max_cells)

    def _row_bytes(self, batch: int, kv_heads: int, head_dim: int, dtype: Any, v_head_dim: int | None) -> int:
        if v_head_dim is None:
            v_head_dim = head_dim
        return batch * kv_heads * (head_dim + v_head_dim) * np.dtype(dtype).itemsize

    @property
    def evicts(self) -> bool:
        """Whether some slot is reused."""
        return self.at_once < NEVER_REUSED

    @property
    def form(self) -> str:
        """How the slot of a key is computed from its position."""
        if self.capacity == 0:
            return "no slots"
        if self.table is not None:
            return "a table"
        if self.pinned:
            return f"{_counted(len(self.pinned), 'pinned key')} and a ring"
        return "a ring"

    def _use(self) -> str:
        """How the slots are used, in words that follow their number."""
        if self.capacity == 0:
            return ""
        if self.table is not None:
            return ", assigned by a table"
        return f", used as {self.form}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CachePlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"CachePlan({self.capacity:,} of {self.length:,} positions, {self.form})"

    def __str__(self) -> str:
        share = self.capacity / max(self.length, 1)
        lines = [
            f"{self.capacity:,} slots for {self.length:,} positions ({share:.2%} of a full cache){self._use()}",
            self.why,
        ]
        if self.slack:
            lines.append(f"a rollback may remove up to {_counted(self.slack, 'token')}")
        return "\n".join(lines)


@no_type_check
def plan(mask: Mask, length: int, *, slack: int = 0) -> CachePlan:
    """Plans a cache for `mask`: each key is kept from its own position to the last query that may attend to it.

    The capacity is the largest number of keys that are needed at the same time. Rules with arrays (documents, lengths,
    flags) are ignored, which keeps more keys than necessary but never fewer: `Causal() & Window(1023, 0) &
    Segments(ids)` keeps the window.

    Args:
        mask: the mask of the attention calls. Position p is slot p of the mask.
        length: the total number of positions, prompt and new tokens; at most 2**30 - 1. If lifetimes of keys repeat, as
            those of causal masks, windows, chunks and prefixes do, the memory for planning does not depend on the
            length. Plans that list every position (tables, blocks, your own rules) take 128 bytes per position;
            more than 2**25 of them, 4 GiB, raise a ValueError.
        slack: the number of tokens that `Cache.rollback` may remove.

    Example:
        >>> print(ls.cache.plan(ls.Causal() & (ls.Window(1023, 0) | ls.Prefix(4)), 10**5))
        1,028 slots for 100,000 positions (1.03% of a full cache), used as 4 pinned keys and a ring
        each key is kept for 1,024 steps; 4 keys are kept forever
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"`mask` must be a Mask, got {type(mask).__name__}. For a MaskInfo, pass `info.mask`.")
    length = check_static_size("length", length, 1)
    if length > FAR:
        raise ValueError(f"`length` must be at most {FAR:,} (2**30 - 1), got {length:,}. Plan fewer positions.")
    slack = check_static_size("slack", slack, 0)
    check_extents(mask, q_len=length, kv_len=length)
    mask = without_data(mask)
    if is_hashable(mask) and length <= MAX_CACHED_LENGTH:
        return _cached_plan(mask, length, slack)
    return _make_plan(mask, length, slack)


def _make_plan(mask: Mask, length: int, slack: int) -> CachePlan:
    for margin_factor in (1, 4):
        made = _plan_from(mask, length, slack, lifetimes(mask, length, slack, margin_factor))
        if made is not None:
            return made
    # No outline decides the plan, or it needs a table, which lists every position.
    made = _plan_from(mask, length, slack, lifetimes(mask, length, slack, None))
    assert made is not None, "every position decides it"
    return made


_cached_plan = cached_by_structure(_make_plan)


def _plan_from(mask: Mask, length: int, slack: int, needs: Lifetimes) -> CachePlan | None:
    """The plan from lifetimes; None if their outline does not decide it."""
    if length > 1 and needs.tied[1:].all():
        raise ValueError(
            f"{mask!r} lets queries attend to later keys, so all positions must be appended together, and none "
            f"can be decoded step by step. Decode with `({mask!r}) & Causal()`."
        )
    outline, end = needs.outline, np.where(needs.last < 0, -1, np.minimum(needs.last + slack, length - 1))
    slots = allocate(end, outline)
    if slots is None:
        return None
    append_limit = at_once(needs.last, end, slots, outline)
    if append_limit is None:
        return None
    steady = slots.table is None and _is_steady(end, slots, outline)
    tied = needs.tied if needs.tied.any() else None
    return CachePlan(
        capacity=slots.capacity,
        length=length,
        slack=slack,
        why=_why(mask, slots, end, outline),
        digest=_digest(slack, slots, end, needs, steady),
        ring=slots.ring,
        pinned=slots.pinned,
        at_once=append_limit,
        steady=steady,
        mask=mask,
        table=slots.table,
        end=None if steady else end.astype(np.int32),
        tied=tied,
        outline=Outline(length) if steady and tied is None else outline,
    )


def _digest(slack: int, slots: SlotAllocation, end: np.ndarray, needs: Lifetimes, steady: bool) -> str:
    """A hash of the plan. Up to 4M positions it covers all of them, and is the same with and without an outline.

    Longer plans hash the outline, and only if `end` or `tied` matter.
    """
    outline = needs.outline
    digest = hashlib.sha256(f"{outline.length} {slack} {slots.capacity} {slots.ring} {slots.pinned}".encode())
    if slots.table is not None:
        digest.update(np.ascontiguousarray(slots.table).tobytes())
    if outline.cuts and outline.length > MAX_DIGESTED:
        arrays = []
        if not steady:
            arrays.append(end)
        if needs.tied.any():
            arrays.append(needs.tied)
        if arrays:
            digest.update(repr((outline, len(arrays))).encode())
        for array in arrays:
            digest.update(array.tobytes())
        return digest.hexdigest()
    for values_at, array in ((outline.ends_at, end), (outline.at, needs.tied)):
        for first in range(0, outline.length, DIGESTED_AT_ONCE):
            places = np.arange(first, min(first + DIGESTED_AT_ONCE, outline.length))
            digest.update(np.ascontiguousarray(values_at(array, places)).tobytes())
    return digest.hexdigest()


def _is_steady(end: np.ndarray, slots: SlotAllocation, outline: Outline) -> bool:
    """Whether every key of the ring is needed for as many steps as the ring has slots, or up to the end."""
    key = outline.keys
    expected = np.minimum(key + slots.ring - 1, outline.length - 1)
    return bool((end == expected)[~np.isin(key, slots.pinned)].all())


def _why(mask: Mask, slots: SlotAllocation, end: np.ndarray, outline: Outline) -> str:
    key = outline.keys
    alive = end >= key
    if not alive.any():
        return "no query attends to any key"
    if slots.capacity >= number_alive(alive, outline):
        rules = ", ".join(map(repr, _rules_that_keep_all(mask, outline.length)))
        return f"no key can be evicted: every key is needed until the end because of {rules}"
    note = ""
    inexact = list(dict.fromkeys(map(repr, mask.inexact())))
    if inexact:
        note = f"; fewer keys may be enough, because the plan does not evaluate {', '.join(inexact)}"
    if slots.table is None and _is_steady(end, slots, outline):
        forever = ""
        if slots.pinned:
            forever = f"; {_counted(len(slots.pinned), 'key is', 'keys are')} kept forever"
        return f"each key is kept for {_counted(slots.ring, 'step')}{forever}{note}"
    longest = int((end - key + 1)[alive].max())
    most = f"the cache never holds more than {_counted(slots.capacity, 'key')}"
    return f"each key is kept for up to {_counted(longest, 'step')}; {most}{note}"


def _rules_that_keep_all(mask: Mask, length: int) -> list[Mask]:
    """The parts of a mask under which old keys are still needed at the end."""
    if len(mask.parts()) < 2:
        return [mask]
    parts = [part for part in mask.parts() if _keeps_old_keys(part, length)]
    return [leaf for part in parts for leaf in _rules_that_keep_all(part, length)] or [mask]


def _keeps_old_keys(mask: Mask, length: int) -> bool:
    last, _, outline = lifetimes(mask, length)
    return bool((last[outline.keys < math.ceil(length / 2)] >= length - 1).all())


def _counted(count: int, one: str, several: str | None = None) -> str:
    """A number and its noun: "1 key", "4 keys"."""
    if count == 1:
        return f"1 {one}"
    return f"{count:,} {several or one + 's'}"
