"""`Spans`: the few intervals that cover what a row of tiles may see, and how `&` and `|` combine them."""

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import Namespace
from longspan.masks.sides import KEYS

NO_SLOT = np.iinfo(np.int32).max  # where an interval without slots begins: after every slot
MAX_INTERVALS = 64  # a rule that needs more than this many intervals per row is covered by fewer, wider ones


class Spans(NamedTuple):
    """What a row of tiles may see: half-open slot intervals, and tiles that every row sees.

    `low`, `high`: [B or 1, N or 1, rows, P] (for `q_spans` [.., P, rows]); `common`: bool over the other side's
    tiles, rank 4, or None.

    Example:
        >>> low, high = np.zeros((1, 1, 3, 1), np.int32), np.full((1, 1, 3, 1), 4, np.int32)
        >>> ls.masks.Spans(low, high).common is None  # keys 0 to 3 for each of three rows of tiles
        True
    """

    low: Any
    high: Any
    common: Any = None


def everything(xp: Namespace, length: int) -> Spans:
    """One interval that covers a whole side."""
    return Spans(xp.zeros((1, 1, 1, 1), np.int32), xp.full((1, 1, 1, 1), length, np.int32))


def nothing(xp: Namespace) -> Spans:
    """One empty interval."""
    return Spans(xp.zeros((1, 1, 1, 1), np.int32), xp.zeros((1, 1, 1, 1), np.int32))


def whole_or_nothing(xp: Namespace, seen, length: int) -> Spans:
    """The whole other side for the tiles that are `seen`, nothing for the others."""
    return Spans(xp.zeros_like(seen, np.int32), xp.where(seen, np.int32(length), np.int32(0)))


def unite(axis: int, spans: list[Spans]) -> Spans:
    """What any of them covers; intervals stand side by side along `axis`, the other side's."""
    low, high = (_stack(axis, [getattr(s, end) for s in spans]) for end in ("low", "high"))
    return Spans(low, high, reduce(_either, [s.common for s in spans]))


def intersect(axis: int, spans: list[Spans]) -> Spans:
    """What all of them cover."""
    return reduce(lambda a, b: _both(axis, a, b), spans)


def running_max(xp: Namespace, array):
    """The greatest entry up to each one, along the last axis."""
    return np.maximum.accumulate(array, axis=-1) if xp is np else jax.lax.cummax(array, axis=array.ndim - 1)


def _both(axis: int, a: Spans, b: Spans) -> Spans:
    # What both see lies in an interval of each, or in a tile common to one of them.
    common = _either(a.common, b.common)
    if a.low.shape[axis] * b.low.shape[axis] > MAX_INTERVALS:
        few, many = sorted((a, b), key=lambda s: s.low.shape[axis])
        return Spans(*_clip(axis, few, many), common)
    later, earlier = _namespace(a.low, b.low).maximum, _namespace(a.high, b.high).minimum
    pairs = [(i, j) for i in range(a.low.shape[axis]) for j in range(b.low.shape[axis])]
    low = _stack(axis, [later(_nth(axis, a.low, i), _nth(axis, b.low, j)) for i, j in pairs])
    high = _stack(axis, [earlier(_nth(axis, a.high, i), _nth(axis, b.high, j)) for i, j in pairs])
    return Spans(low, high, common)


def _clip(axis: int, few: Spans, many: Spans):
    """The intervals of `few`, cut to what lies between the first and the last of `many`."""
    xp = _namespace(*few[:2], *many[:2])
    empty = many.low >= many.high
    first = xp.min(xp.where(empty, np.int32(NO_SLOT), many.low), axis=axis, keepdims=True)
    last = xp.max(xp.where(empty, np.int32(0), many.high), axis=axis, keepdims=True)
    return xp.maximum(few.low, first), xp.minimum(few.high, last)


def _nth(axis: int, array, i: int):
    if array.shape[axis] == 1:
        return array
    return array[:, :, :, i : i + 1] if axis == KEYS else array[:, :, i : i + 1, :]


def _stack(axis: int, arrays):
    if len(arrays) == 1:
        return arrays[0]
    xp = _namespace(*arrays)
    shape = np.broadcast_shapes(*[tuple(1 if i == axis else n for i, n in enumerate(a.shape)) for a in arrays])
    full = [tuple(a.shape[i] if i == axis else n for i, n in enumerate(shape)) for a in arrays]
    return xp.concatenate([xp.broadcast_to(a, s) for a, s in zip(arrays, full, strict=True)], axis=axis)


def _either(a, b):
    if a is None or b is None:
        return b if a is None else a
    return a | b


def _namespace(*arrays) -> Namespace:
    return np if all(isinstance(a, np.ndarray) for a in arrays) else jnp
