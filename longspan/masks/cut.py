"""Masks cut to some slots: arrays are gathered; rules that cannot be gathered are evaluated through the kept slots.

`CutMask` gives its rule the sides as they were before the cut. For each tile the rule reads the range of slots that the
kept slots lie in, their positions, and the entries of its arrays at the kept slots only. A bound on the tile therefore
holds for the kept slots. If the kept slots never decrease, an interval of slots before the cut is an interval after it,
and tiles can still be skipped.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from longspan.array_types import FAR, Namespace
from longspan.masks.base import Extent, Mask, rule
from longspan.masks.pytree import short
from longspan.masks.sides import Side, Slots, Tiles, find_between, grows
from longspan.masks.spans import MAX_INTERVALS, Spans

Kept = Any  # int32 [B or 1, n], the slots of a side that are kept, NumPy (static) or JAX (data); None: all


def gather(array: Any, slots: Kept) -> Any:
    """The entries of an array [B or 1, ..., L] at some slots of each row; a NumPy array if both are NumPy arrays."""
    if array is None or slots is None:
        return array
    xp = jnp
    if isinstance(array, np.ndarray) and isinstance(slots, np.ndarray):
        xp = np
    return _columns(xp, xp.asarray(array), xp.asarray(slots))


def cut_mask(mask: Mask, q: Kept, kv: Kept, q_len: int | None, kv_len: int | None) -> "CutMask":
    """A mask cut to some slots. Lengths that are not given are those of the mask's arrays, or else upper bounds."""
    return CutMask(mask, q, kv, _length_before(mask, "T", q, q_len), _length_before(mask, "S", kv, kv_len))


@rule
class CutMask(Mask):
    """Allows the pairs of kept slots that `mask` allows."""

    static = ("q_slots", "kv_slots")

    array_axes: ClassVar = {"q_slots": "BT", "kv_slots": "BS"}

    mask: Mask
    q_slots: Kept
    kv_slots: Kept
    q_len: int | None  # the length of the side before the cut; None if all slots are kept
    kv_len: int | None

    def allowed(self, q, kv):
        return self.mask.allowed(_slots(q, self.q_slots, self.q_len), _slots(kv, self.kv_slots, self.kv_len))

    def classify(self, q, kv):
        return self.mask.classify(*self._tiles(q, kv))

    def kv_spans(self, q, kv):
        return _after_cut(kv.side, self.kv_slots, self.mask.kv_spans(*self._tiles(q, kv)))

    def q_spans(self, kv, q):
        q_tiles, kv_tiles = self._tiles(q, kv)
        return _after_cut(q.side, self.q_slots, self.mask.q_spans(kv_tiles, q_tiles))

    @property
    def reads(self):
        return self.mask.reads

    @property
    def reads_q_place(self):
        return self.mask.reads_q_place

    def unbounded(self):
        return self.mask.unbounded()

    def provable_kinds(self):
        return self.mask.provable_kinds()

    def extents(self):
        gone = set()
        for name, slots, axis in (("q_slots", self.q_slots, "T"), ("kv_slots", self.kv_slots, "S")):
            if slots is not None:
                gone.add(axis)
                yield Extent(f"CutMask.{name}", "B", slots.shape[0])
                yield Extent(f"CutMask.{name}", axis, slots.shape[1])
        yield from (extent for extent in self.mask.extents() if extent.axis not in gone)

    def _cut(self, q, kv, q_len, kv_len):
        # One cut with the slots of both, instead of a cut of a cut.
        if self.q_slots is not None:
            q, q_len = gather(self.q_slots, q), self.q_len
        if self.kv_slots is not None:
            kv, kv_len = gather(self.kv_slots, kv), self.kv_len
        return cut_mask(self.mask, q, kv, q_len, kv_len)

    def _tiles(self, q, kv):
        return _tiles(q, self.q_slots, self.q_len), _tiles(kv, self.kv_slots, self.kv_len)

    def _arguments(self):
        return [repr(self.mask), short(self.q_slots), short(self.kv_slots)]


@dataclass(frozen=True)
class KeptSide(Side):
    """A side before a cut. It has positions only at the kept slots, so rules read positions through those."""

    _: KW_ONLY
    outer: Side  # after the cut
    kept: Any

    def number(self, value):
        return self.outer.number(value)

    def table(self, array):
        return self.outer.table(array)

    def between(self, low, high):
        """The interval of slots before the cut that contains the kept slots with positions in [low, high]."""
        xp, kept = self.xp, self.table(self.kept)
        start, stop = self.outer.between(low, high)
        if not kept.shape[1]:
            return start * 0, stop * 0
        seen, grow = start < stop, grows(kept).reshape(-1, 1, 1, 1)
        first = _each_row(xp, kept, xp.clip(start, 0, kept.shape[1] - 1))
        last = _each_row(xp, kept, xp.clip(stop - 1, 0, kept.shape[1] - 1))
        high = xp.where(grow, last + 1, np.int32(self.length))
        return xp.where(seen & grow, first, np.int32(0)), xp.where(seen, high, np.int32(0))


@dataclass(frozen=True)
class KeptSlots(Slots):
    """Kept slots, by their indices before the cut and their positions after it."""

    _: KW_ONLY
    outer: Slots

    @property
    def position(self):
        return self.outer.position

    def take(self, array):
        side: Any = self.side
        array = side.table(array)
        if self.outer.whole and side.holds(array):
            return side.by_row(_columns(side.xp, array, side.table(side.kept)))
        return super().take(array)


@dataclass(frozen=True)
class KeptTiles(Tiles):
    """The kept slots of each tile, by their indices before the cut: `size` is an upper bound on stop - start."""

    _: KW_ONLY
    outer: Tiles

    @property
    def solid(self):
        return False

    @property
    def stop(self):
        return self.outer.greatest(self._kept) + 1

    @property
    def first(self):
        return self.outer.first

    @property
    def last(self):
        return self.outer.last

    def blocks(self, unit: int):
        if self.size > MAX_INTERVALS * unit:
            return None
        return super().blocks(unit)

    @property
    def _kept(self):
        side: Any = self.side
        return side.table(side.kept)

    def _entries(self, array):
        slots = self.outer._entries(self._kept[:, None])
        entries = _columns(self.side.xp, array, slots.reshape(slots.shape[0], -1))
        return entries.reshape(*entries.shape[:2], *slots.shape[2:])

    def _placed(self, summary):
        return self.outer._placed(summary)


def _side(outer: Side, kept: Kept, length: int) -> Side:
    positions = outer.positions
    if positions is None:  # explicit, because a position is not the slot's index before the cut
        positions = outer.xp.arange(outer.length, dtype=np.int32).reshape(1, -1)
    seen = (outer.batch, outer.head, outer.xp, outer.whole, outer.places)
    return KeptSide(outer.axis, length, positions, *seen, outer=outer, kept=kept)


def _slots(outer: Slots, kept: Kept, length: int | None) -> Slots:
    if length is None:
        return outer
    return KeptSlots(_side(outer.side, kept, length), outer.take(kept), outer=outer)


def _tiles(outer: Tiles, kept: Kept, length: int | None) -> Tiles:
    if length is None:
        return outer
    known = kept
    if not isinstance(kept, np.ndarray):
        known = outer.table(kept)
    size = _widest(known, outer.size, length)
    return KeptTiles(_side(outer.side, kept, length), size, outer.least(kept), unit=1, outer=outer)


def _widest(kept, size: int, length: int) -> int:
    """An upper bound on the range of slots before the cut that `size` neighbouring kept slots cover."""
    if not isinstance(kept, np.ndarray) or not grows(kept).all():
        return length
    step = min(size, kept.shape[1]) - 1
    return int((kept[:, step:] - kept[:, : kept.shape[1] - step]).max(initial=0)) + 1


def _after_cut(side: Side, kept: Kept, spans: Spans) -> Spans:
    """Converts intervals of slots before a cut to intervals of slots after it."""
    if kept is None:
        return spans
    xp, (low, high, common) = side.xp, spans
    start, stop = find_between(xp, side.table(kept), low, high - 1)
    return Spans(xp.where(low < high, start, np.int32(0)), xp.where(low < high, stop, np.int32(0)), common)


def _length_before(mask: Mask, axis: str, kept: Kept, given: int | None) -> int | None:
    """The length of a side before a cut, or an upper bound if it is not known; None if all slots are kept."""
    if kept is None:
        return None
    if given is None:
        given = mask._length(axis)
    if given is not None:
        return given
    if isinstance(kept, np.ndarray):
        return int(kept.max(initial=-1)) + 1
    return FAR


def _columns(xp: Namespace, array, slots):
    """The entries of an array [B or 1, ..., L] at slots [B or 1, n] of its last axis."""
    _, *middle, length = array.shape
    # Slots after the end, which a traced cut may have, read the last entry.
    slots = xp.clip(slots, 0, max(length - 1, 0))
    if slots.shape[0] == 1:
        return xp.take(array, slots[0], axis=-1)
    rows, count = slots.shape
    slots = xp.broadcast_to(slots.reshape(rows, *[1] * len(middle), count), (rows, *middle, count))
    return xp.take_along_axis(xp.broadcast_to(array, (rows, *middle, length)), slots, axis=-1)


def _each_row(xp: Namespace, rows, index):
    """The entries of rows [B or 1, L] at an index of rank 4, for each batch row."""
    found = _columns(xp, rows, index.reshape(index.shape[0], -1))
    return found.reshape(found.shape[0], *index.shape[1:])
