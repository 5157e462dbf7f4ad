"""`plan`: what a cache for a mask must hold, and where."""

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longspan.array_types import FAR, no_type_check
from longspan.cache.lifetimes import (
    MOST_REMEMBERED,
    Lifetimes,
    by_structure,
    is_hashable,
    lifetimes,
    without_data,
)
from longspan.cache.outline import Outline
from longspan.cache.picture import show_all, show_step
from longspan.cache.slots import FOREVER, Slots, allocate, at_once, number_alive
from longspan.checks import check_extents, check_static_size
from longspan.masks import Mask

MOST_DIGESTED = 2**22  # positions that are all in the digest, also where an outline was looked at
DIGESTED_AT_ONCE = 2**16


@dataclass(frozen=True, eq=False)
class CachePlan:
    """Which slot of a cache each key has. Made by `ls.cache.plan`; it hashes, compares by what it says, and prints.

    Example:
        >>> ls.cache.plan(ls.Causal() & ls.Window(3, 0), 1000)
        CachePlan(4 of 1,000 positions, a ring)
    """

    capacity: int  # slots
    length: int  # positions, 0 to length - 1
    slack: int  # how far back a rollback may go
    why: str  # what the form follows from
    digest: str  # of everything that a cache must agree on
    outline: Outline = field(repr=False)  # the positions that `end` and `tied` have entries of
    ring: int = 0  # slots that positions go round, behind the pinned ones; 0: there is a table
    pinned: tuple[int, ...] = ()
    at_once: int = FOREVER  # tokens that can be appended without overwriting what the first of them sees
    steady: bool = True  # every key of the ring lives as long as its slot: `end` need not be asked
    mask: Any = field(default=None, repr=False)  # without its data
    table: np.ndarray | None = field(default=None, repr=False)  # int32 [length]: slots, -1: never stored
    end: np.ndarray | None = field(default=None, repr=False)  # int32 [keys]: the last step that needs each key
    tied: np.ndarray | None = field(default=None, repr=False)  # bool [keys]: must come with the position before it

    def nbytes(self, batch: int, kv_heads: int, head_dim: int, dtype: Any, *, v_head_dim: int | None = None) -> int:
        """How many bytes the keys and values of such a cache take.

        Example:
            >>> ls.cache.plan(ls.Causal() & ls.Window(1023, 0), 10**6).nbytes(1, 8, 64, jnp.bfloat16)
            2097152
        """
        return self.capacity * self._row_bytes(batch, kv_heads, head_dim, dtype, v_head_dim)

    def full_nbytes(
        self, batch: int, kv_heads: int, head_dim: int, dtype: Any, *, v_head_dim: int | None = None
    ) -> int:
        """How many bytes a cache of every position would take."""
        return self.length * self._row_bytes(batch, kv_heads, head_dim, dtype, v_head_dim)

    def show(self, step: int | None = None, *, max_cells: int = 64) -> str:
        """A picture in characters of what is kept and what is evicted, after one step or after every step.

        Args:
            step: after the token at this position; None: after every token, one row each, or one of so many.
            max_cells: width of the picture in characters.

        Example:
            >>> plan = ls.cache.plan(ls.Causal() & (ls.Window(2, 0) | ls.Prefix(1)), 9)
            >>> print(plan.show(step=6))
            7 of 9 positions: 4 kept, 3 evicted; 4 slots
            0 2 4 6 8
            #...###
            # kept, . evicted, blank to come
        """
        return show_all(self, max_cells) if step is None else show_step(self, step, max_cells)

    def _row_bytes(self, batch: int, kv_heads: int, head_dim: int, dtype: Any, v_head_dim: int | None) -> int:
        sizes = head_dim + (head_dim if v_head_dim is None else v_head_dim)
        return batch * kv_heads * sizes * np.dtype(dtype).itemsize

    @property
    def evicts(self) -> bool:
        """Whether some slot serves one key after another."""
        return self.at_once < FOREVER

    @property
    def form(self) -> str:
        """How slots follow from positions."""
        if self.capacity == 0:
            return "nothing"
        if self.table is not None:
            return "a table"
        return f"{len(self.pinned)} pinned and a ring" if self.pinned else "a ring"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CachePlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"CachePlan({self.capacity:,} of {self.length:,} positions, {self.form})"

    def __str__(self) -> str:
        share = self.capacity / max(self.length, 1)
        lines = [f"{self.capacity:,} slots for {self.length:,} positions ({share:.2%} of a full cache): {self.form}"]
        return "\n".join([*lines, self.why, *([f"slack for rolling back {self.slack}"] if self.slack else [])])


@no_type_check
def plan(mask: Mask, length: int, *, slack: int = 0) -> CachePlan:
    """What a cache for `mask` must hold: a key from its own position to the last query that may see it.

    The capacity is the largest number of keys needed at once. Rules that hold arrays (documents, lengths, flags) are
    bounded by their static parts: `Causal() & Window(1023, 0) & Segments(ids)` keeps the window.

    Args:
        mask: the rule that will be attended with; position p is its slot p.
        length: positions in all, prompt and new tokens; at most 2**30 - 1. Where the lifetimes of keys repeat, as
            those of causal masks, windows, chunks and prefixes do, planning takes no more memory for more positions.
            Plans that list every position (tables, blocks, rules of your own) take 128 bytes for each, and more than
            2**25 of them, 4 GiB, are refused.
        slack: how many tokens `Cache.rollback` may take back.

    Example:
        >>> print(ls.cache.plan(ls.Causal() & (ls.Window(1023, 0) | ls.Prefix(4)), 10**5))
        1,028 slots for 100,000 positions (1.03% of a full cache): 4 pinned and a ring
        a key is needed for 1,024 steps, but for 4
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"`mask` must be a Mask, got {type(mask).__name__}. A MaskInfo has one: `info.mask`.")
    length = check_static_size("length", length, 1)
    if length > FAR:
        raise ValueError(
            f"`length` must be at most {FAR:,} (2**30 - 1): positions are int32 below that, got {length:,}."
        )
    slack = check_static_size("slack", slack, 0)
    check_extents(mask, q_len=length, kv_len=length)
    mask = without_data(mask)
    remembered = is_hashable(mask) and length <= MOST_REMEMBERED
    return (_known if remembered else _plan)(mask, length, slack)


def _plan(mask: Mask, length: int, slack: int) -> CachePlan:
    for room in (1, 4):
        made = _made(mask, length, slack, lifetimes(mask, length, slack, room))
        if made is not None:
            return made
    # Outlines do not decide it, or there is a table, which lists every position.
    made = _made(mask, length, slack, lifetimes(mask, length, slack, None))
    assert made is not None, "every position decides it"
    return made


_known = by_structure(_plan)


def _made(mask: Mask, length: int, slack: int, needs: Lifetimes) -> CachePlan | None:
    if length > 1 and needs.tied[1:].all():
        raise ValueError(
            f"{mask!r} lets queries see keys after them, position by position, so that no key is complete before the "
            f"last one is there. Decode with `({mask!r}) & Causal()`."
        )
    outline, end = needs.outline, np.where(needs.last < 0, -1, np.minimum(needs.last + slack, length - 1))
    slots = allocate(end, outline)
    together = None if slots is None else at_once(needs.last, end, slots, outline)
    if slots is None or together is None:
        return None
    steady = slots.table is None and _lives_for(end, slots, outline) is not None
    tied = needs.tied if needs.tied.any() else None
    return CachePlan(
        capacity=slots.capacity,
        length=length,
        slack=slack,
        why=_why(mask, slots, end, outline),
        digest=_digest(slack, slots, end, needs, steady),
        ring=slots.ring,
        pinned=slots.pinned,
        at_once=together,
        steady=steady,
        mask=mask,
        table=slots.table,
        end=None if steady else end.astype(np.int32),
        tied=tied,
        outline=Outline(length) if steady and tied is None else outline,
    )


def _digest(slack: int, slots: Slots, end: np.ndarray, needs: Lifetimes, steady: bool) -> str:
    """Of all positions up to 4M of them, however they were found; beyond, of the outline, and only where it matters."""
    outline = needs.outline
    digest = hashlib.sha256(f"{outline.length} {slack} {slots.capacity} {slots.ring} {slots.pinned}".encode())
    digest.update(b"" if slots.table is None else np.ascontiguousarray(slots.table).tobytes())
    if outline.cuts and outline.length > MOST_DIGESTED:
        matters = ([] if steady else [end]) + ([needs.tied] if needs.tied.any() else [])
        digest.update(repr((outline, len(matters))).encode() if matters else b"")
        for array in matters:
            digest.update(array.tobytes())
        return digest.hexdigest()
    for said, array in ((outline.ends_at, end), (outline.at, needs.tied)):
        for first in range(0, outline.length, DIGESTED_AT_ONCE):
            places = np.arange(first, min(first + DIGESTED_AT_ONCE, outline.length))
            digest.update(np.ascontiguousarray(said(array, places)).tobytes())
    return digest.hexdigest()


def _lives_for(end: np.ndarray, slots: Slots, outline: Outline) -> int | None:
    """How many steps every key of the ring is needed, if they are as many as it has slots, up to the end."""
    key = outline.keys
    expected = np.minimum(key + slots.ring - 1, outline.length - 1)
    return slots.ring if (end == expected)[~np.isin(key, slots.pinned)].all() else None


def _why(mask: Mask, slots: Slots, end: np.ndarray, outline: Outline) -> str:
    key = outline.keys
    alive = end >= key
    if not alive.any():
        return "no query sees any key"
    if slots.capacity >= number_alive(alive, outline):
        blamed = _unforgetting(mask, outline.length)
        return f"nothing can be dropped: {', '.join(map(repr, blamed))} keeps every key in view"
    loose = list(dict.fromkeys(map(repr, mask.inexact())))
    note = f"; known only by bounds: {', '.join(loose)}" if loose else ""
    steps = _lives_for(end, slots, outline)
    if slots.table is None and steps is not None:
        few = f", but for {len(slots.pinned)}" if slots.pinned else ""
        return f"a key is needed for {steps:,} steps{few}{note}"
    needed = int((end - key + 1)[alive].max())
    return f"a key is needed for up to {needed:,} steps, at most {slots.capacity:,} keys at once{note}"


def _unforgetting(mask: Mask, length: int) -> list[Mask]:
    """The parts of a mask by which an old key is still seen at the end."""
    if len(mask.parts()) < 2:
        return [mask]
    parts = [part for part in mask.parts() if _remembers(part, length)]
    return [leaf for part in parts for leaf in _unforgetting(part, length)] or [mask]


def _remembers(mask: Mask, length: int) -> bool:
    last, _, outline = lifetimes(mask, length)
    return bool((last[outline.keys < math.ceil(length / 2)] >= length - 1).all())
