"""Cuts a rule down to some slots: array leaves are gathered, rules about positions stay as they are."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from longspan.masks import (
    And,
    Band,
    Causal,
    Chunk,
    Custom,
    Dense,
    Empty,
    Full,
    Global,
    KvLengths,
    Mask,
    Not,
    Or,
    PerHead,
    Prefix,
    Segments,
    TokenTypes,
    Window,
    rule,
)
from longspan.masks.base import Extent, short
from longspan.masks.side import Slots

BY_POSITION = (Full, Empty, Band, Causal, Window, Chunk, Prefix, Custom)

Kept = Any  # int [B, kept], the slots that stay on a side; None: all


def take(array: Any, slots: Kept) -> Any:
    """The columns of [B or 1, L] at some slots of each row."""
    if array is None or slots is None:
        return array
    array = jnp.broadcast_to(jnp.asarray(array), (slots.shape[0], array.shape[1]))
    return jnp.take_along_axis(array, slots, axis=1)


def cut(mask: Mask, q: Kept, kv: Kept, q_len: int, kv_len: int) -> Mask:
    """The same rule for the slots that stay; positions must be cut alike by the caller."""

    def again(inner: Mask) -> Mask:
        return cut(inner, q, kv, q_len, kv_len)

    kind = type(mask)
    if kind in BY_POSITION or (q is None and kv is None):
        return mask
    if kind in CUTS:
        return CUTS[kind](mask, q, kv, again, q_len)
    return View(mask, q, kv, q_len, kv_len)


def _segments(mask, q, kv, again, q_len):
    return Segments(*(take(ids, slots) for ids, slots in zip(mask._ids(), (q, kv), strict=True)))


def _types(mask, q, kv, again, q_len):
    return TokenTypes(*(take(ids, slots) for ids, slots in zip(mask._ids(), (q, kv), strict=True)), zero=mask.zero)


def _lengths(mask, q, kv, again, q_len):
    if kv is None:
        return mask
    length = jnp.asarray(mask.lengths).astype(np.int32)
    inside = kv < (length.reshape(-1, 1) if length.ndim else length.reshape(1, 1))
    queries = jnp.zeros((1, q_len if q is None else q.shape[1]), np.int32)
    return Segments(queries, jnp.where(inside, 0, -1))


def _global(mask, q, kv, again, q_len):
    flags = dict(q_flags=take(mask.q_flags, q), kv_flags=take(mask.kv_flags, kv))
    return Global(mask.indices, **flags, rows=mask.rows, columns=mask.columns)


def _dense(mask, q, kv, again, q_len):
    array = jnp.asarray(mask.array)
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    for slots, axis in ((q, 2), (kv, 3)):
        if slots is not None and array.shape[axis] > 1:
            index = slots[:, None, :, None] if axis == 2 else slots[:, None, None, :]
            array = jnp.broadcast_to(array, (slots.shape[0], *array.shape[1:]))
            array = jnp.take_along_axis(array, index, axis=axis)
    return Dense(array)


def _parts(mask, q, kv, again, q_len):
    return type(mask)(tuple(again(m) for m in mask.masks))


def _not(mask, q, kv, again, q_len):
    return Not(again(mask.mask))


CUTS: dict[type, Callable[..., Mask]] = {
    And: _parts,
    Or: _parts,
    PerHead: _parts,
    Not: _not,
    Segments: _segments,
    TokenTypes: _types,
    KvLengths: _lengths,
    Global: _global,
    Dense: _dense,
}


@rule
class View(Mask):
    """Allows what `mask` allows for the slots that were kept; for rules that only know how to look at whole rows."""

    mask: Mask
    q_slots: Kept
    kv_slots: Kept
    q_len: int  # of the sides before the cut
    kv_len: int

    def allowed(self, q, kv):
        return self.mask.allowed(_through(q, self.q_slots, self.q_len), _through(kv, self.kv_slots, self.kv_len))

    def extents(self):
        for slots, axis in ((self.q_slots, "T"), (self.kv_slots, "S")):
            if slots is not None:
                yield Extent("View.slots", "B", slots.shape[0])
                yield Extent("View.slots", axis, slots.shape[1])
        gone = {axis for axis, slots in (("T", self.q_slots), ("S", self.kv_slots)) if slots is not None}
        yield from (extent for extent in self.mask.extents() if extent.axis not in gone)

    def _arguments(self):
        return [repr(self.mask), short(self.q_slots), short(self.kv_slots)]


@dataclass(frozen=True)
class _SeenThrough(Slots):
    """Slots of the side before the cut, at the positions of the side after it."""

    _: KW_ONLY
    outer: Slots

    @property
    def position(self):
        return self.outer.position


def _through(outer: Slots, kept: Kept, length: int) -> Slots:
    if kept is None:
        return outer
    return _SeenThrough(replace(outer.side, length=length), outer.take(kept), outer=outer)
