"""`Spans`: intervals that cover the tokens a row of tiles may see, and how `&` and `|` combine them."""

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import Namespace
from longspan.masks.sides import KEYS

NO_SLOT = np.iinfo(np.int32).max  # where an interval without slots begins: after every slot
MAX_INTERVALS = 64  # per row: if a rule needs more intervals, fewer and wider ones cover its tokens


class Spans(NamedTuple):
    """Covers the slots that each row of tiles may see: half-open intervals, and tiles that every row may see.

    `low`, `high`: int32 [B or 1, N or 1, rows, P] (for `q_spans` [.., P, rows]); `common`: bool over the tiles of the
    other side, rank 4, or None. `Mask.kv_spans` and `Mask.q_spans` return spans.

    Example:
        >>> from longspan.masks import Spans
        >>> first_ten = Spans(np.zeros((1, 1, 1, 1), np.int32), np.full((1, 1, 1, 1), 10, np.int32))
        >>> first_ten.high.item(), first_ten.common
        (10, None)
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
    """The whole other side for tiles that are `seen`, an empty interval for the others."""
    return Spans(xp.zeros_like(seen, np.int32), xp.where(seen, np.int32(length), np.int32(0)))


def unite(axis: int, spans: list[Spans]) -> Spans:
    """The union of several spans: their intervals, concatenated along `axis`, the axis of the other side."""
    low, high = _stack(axis, [s.low for s in spans]), _stack(axis, [s.high for s in spans])
    return Spans(low, high, reduce(_either, [s.common for s in spans]))


def intersect(axis: int, spans: list[Spans]) -> Spans:
    """Spans that cover the intersection of several spans."""
    return reduce(lambda a, b: _both(axis, a, b), spans)


def running_max(xp: Namespace, array):
    """The running maximum along the last axis."""
    if xp is np:
        return np.maximum.accumulate(array, axis=-1)
    return jax.lax.cummax(array, axis=array.ndim - 1)


def _both(axis: int, a: Spans, b: Spans) -> Spans:
    # A token seen by both lies in an interval of each, or in a common tile of one of them.
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
    """The intervals of `few`, cut to the range from the first slot of `many` to the last."""
    xp = _namespace(*few[:2], *many[:2])
    empty = many.low >= many.high
    first = xp.min(xp.where(empty, np.int32(NO_SLOT), many.low), axis=axis, keepdims=True)
    last = xp.max(xp.where(empty, np.int32(0), many.high), axis=axis, keepdims=True)
    return xp.maximum(few.low, first), xp.minimum(few.high, last)


def _nth(axis: int, array, i: int):
    if array.shape[axis] == 1:
        return array
    if axis == KEYS:
        return array[:, :, :, i : i + 1]
    return array[:, :, i : i + 1, :]


def _stack(axis: int, arrays):
    """Concatenates arrays along an axis, broadcast along all others."""
    if len(arrays) == 1:
        return arrays[0]
    xp = _namespace(*arrays)
    others = np.broadcast_shapes(*[(*a.shape[:axis], 1, *a.shape[axis + 1 :]) for a in arrays])
    parts = []
    for a in arrays:
        shape = (*others[:axis], a.shape[axis], *others[axis + 1 :])
        parts.append(xp.broadcast_to(a, shape))
    return xp.concatenate(parts, axis=axis)


def _either(a, b):
    if a is None:
        return b
    if b is None:
        return a
    return a | b


def _namespace(*arrays) -> Namespace:
    if all(isinstance(a, np.ndarray) for a in arrays):
        return np
    return jnp
