"""Rules by position: everything, bands (causal, windows), chunks, prefixes. They hold for any slots as they are.

A number is checked when its mask is made. One that is traced has no value then: if it turns out less than is legal, it
stands for the least legal one (`Window(-1, 0)` for `Window(0, 0)`, `Chunk(0)` for `Chunk(1)`), in every engine.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from longspan._types import FAR, Number
from longspan.masks.base import BY_POSITION, NOBODY, Mask, Periodicity, Pinned, rule
from longspan.masks.checks import check_at_least, check_number
from longspan.masks.pieces import Piece
from longspan.masks.pytree import short
from longspan.masks.spans import Spans, nothing, whole_or_nothing


@rule
class Full(Mask):
    """Allows every pair.

    Example:
        >>> print(Full().show(2, 3))
        ###
        ###
    """

    reads = frozenset()

    def allowed(self, q, kv):
        return (q.index >= 0) | (kv.index >= 0)

    def tells(self):
        return False, True

    def query_range(self, key):
        return key * 0 - NOBODY, key * 0 + NOBODY

    def periodicity(self):
        return Periodicity()

    def classify(self, q, kv):
        yes = q.side.xp.full((1, 1, 1, 1), True)
        return yes, yes


@rule
class Empty(Mask):
    """Allows no pair: every query gives zeros.

    Example:
        >>> Empty().dense(2, 3).any().item()
        False
    """

    reads = frozenset()

    def allowed(self, q, kv):
        return (q.index < 0) & (kv.index < 0)

    def tells(self):
        return True, False

    def query_range(self, key):
        return key * 0 + 1, key * 0

    def periodicity(self):
        return Periodicity()

    def classify(self, q, kv):
        no = q.side.xp.full((1, 1, 1, 1), False)
        return no, no

    def kv_spans(self, q, kv):
        return nothing(q.side.xp)

    def q_spans(self, kv, q):
        return nothing(q.side.xp)


class _Banded(Mask):
    """The part that `Band`, `Causal` and `Window` share: low <= k - q <= high."""

    reads = BY_POSITION
    applied = "sliding_window"

    def allowed(self, q, kv):
        low, high = self._ends(q)
        truth = Full().allowed(q, kv)
        if low is not None:
            truth = truth & (kv.position >= q.position + low)
        if high is not None:
            truth = truth & (kv.position <= q.position + high)
        return truth

    def classify(self, q, kv):
        low, high = self._ends(q)
        kinds = []
        if low is not None:
            kinds.append((kv.last >= q.first + low, kv.first >= q.last + low))
        if high is not None:
            kinds.append((kv.first <= q.last + high, kv.last <= q.first + high))
        if len(kinds) < 2:
            return kinds[0] if kinds else Full().classify(q, kv)
        return kinds[0][0] & kinds[1][0], kinds[0][1] & kinds[1][1]

    def kv_spans(self, q, kv):
        low, high = self._ends(q)
        first = q.first * 0 - FAR if low is None else q.first + low
        last = q.last * 0 + FAR if high is None else q.last + high
        return Spans(*kv.side.between(first, last))

    def q_spans(self, kv, q):
        low, high = self._ends(q)
        first = kv.first * 0 - FAR if high is None else kv.first - high
        last = kv.last * 0 + FAR if low is None else kv.last - low
        return Spans(*q.side.between(first, last))

    def band(self):
        return self._limits()

    def query_range(self, key):
        low, high = self._limits()
        if not all(end is None or isinstance(end, int) for end in (low, high)):
            return None
        low, high = (None if end is None else within_reach(end) for end in (low, high))
        first = key * 0 - NOBODY if high is None else key - high
        return first, key * 0 + NOBODY if low is None else key - low

    def periodicity(self):
        ends = [end for end in self._limits() if end is not None]
        known = all(isinstance(end, int) for end in ends)
        return Periodicity(distances=frozenset(ends)) if known else Periodicity()

    def _limits(self) -> tuple[Any, Any]:
        """(low, high) as they were given; None is unbounded."""
        raise NotImplementedError

    def _ends(self, side) -> tuple[Any, Any]:
        """(low, high) ready to broadcast."""
        low, high = (None if end is None else side.number(end) for end in self._limits())
        return low, high


class MergedBand(_Banded):
    """Several bands as one, while planning; its ends are ready to broadcast."""

    def __init__(self, low, high):
        self._band = low, high

    def _ends(self, side):
        return self._band

    def _band_at(self, side):
        return self._band


@rule
class Band(_Banded):
    """Allows low <= k - q <= high, where `None` leaves a side open. `Causal` and `Window` are bands.

    Example:
        >>> print(Band(1, 2).show(3, 4))
        .##.
        ..##
        ...#
    """

    array_axes: ClassVar = {"low": "B", "high": "B"}

    low: Number | None
    high: Number | None

    def __post_init__(self):
        for name in ("low", "high"):
            if getattr(self, name) is not None:
                check_number(self, name)

    def _limits(self):
        return self.low, self.high

    def _arguments(self):
        return [short(self.low), short(self.high)]


@rule
class Causal(_Banded):
    """Allows k <= q + offset.

    Args:
        offset: how far ahead a query may look; an int, or an int array of shape () or [B].

    Example:
        >>> print(Causal().show(3, 3))
        #..
        ##.
        ###
    """

    applied = "causal"

    array_axes: ClassVar = {"offset": "B"}

    offset: Number = 0

    def __post_init__(self):
        check_number(self, "offset")

    def _limits(self):
        return None, self.offset

    def _arguments(self):
        return [] if isinstance(self.offset, int) and self.offset == 0 else [short(self.offset)]


@rule
class Window(_Banded):
    """Allows q - left·dilation <= k <= q + right·dilation where k - q is divisible by dilation.

    `left` and `right` count keys *besides* the query's own position: `Window(3, 0)` is itself and 3 before, 4 keys;
    `Window(4, 4)` is Longformer's radius 4, 9 keys.

    Args:
        left: keys before the query; an int >= 0, or an int array of shape () or [B].
        right: keys after the query; likewise.
        dilation: distance between the keys; an int >= 1, or an int array of shape () or [B].

    Example:
        >>> print(Window(1, 1, dilation=2).show(5, 5))
        #.#..
        .#.#.
        #.#.#
        .#.#.
        ..#.#
    """

    array_axes: ClassVar = {"left": "B", "right": "B", "dilation": "B"}

    left: Number
    right: Number
    dilation: Number = 1

    reads = BY_POSITION
    kv_spans, q_spans = _Banded.kv_spans, _Banded.q_spans

    def __post_init__(self):
        check_at_least(self, "left", 0)
        check_at_least(self, "right", 0)
        check_at_least(self, "dilation", 1)

    def allowed(self, q, kv):
        inside = super().allowed(q, kv)
        if self._dense():
            return inside
        return inside & ((kv.position - q.position) % no_less(q.number(self.dilation), 1) == 0)

    def classify(self, q, kv):
        if self._dense():
            return super().classify(q, kv)
        xp, dilation = q.side.xp, no_less(q.number(self.dilation), 1)
        low, high = self._ends(q)
        least, most = kv.first - q.last, kv.last - q.first
        # Some multiple of the dilation within both the tile's distances and the window's.
        nearest = xp.minimum(most, high) // dilation * dilation
        may_any = nearest >= xp.maximum(least, low)
        one_distance = (least == most) & (least % dilation == 0)
        must_all = (one_distance | (dilation == 1)) & (least >= low) & (most <= high)
        return may_any, must_all

    def _pieces(self, q, kv):
        if self._dense():
            return super()._pieces(q, kv)
        dilation = no_less(q.number(self.dilation), 1)
        q_ids, kv_ids = ((side.slots().position % dilation).reshape(-1) for side in (q, kv))
        return [Piece(q_ids=q_ids, kv_ids=kv_ids, within=MergedBand(*self._ends(q)))]

    def band(self):
        return (-no_less(self.left, 0), no_less(self.right, 0)) if self._dense() else None

    def query_range(self, key):
        return super().query_range(key) if self._dense() and not self.loose() else None

    def nearest_query(self, key, at, step):
        if self._dense() or self.loose():
            return super().nearest_query(key, at, step)
        low, high = self._limits()
        found = Band(low, high).nearest_query(key, at, step)
        # On to the next query that is a multiple of the dilation away.
        found = found + step * (step * (key - found) % within_reach(self.dilation))
        return np.where((found >= key - high) & (found <= key - low), found, NOBODY * step)

    def periodicity(self):
        return Periodicity() if self.loose() else super().periodicity()._replace(period=self.dilation)

    def loose(self):
        return () if all(isinstance(n, int) for n in (self.left, self.right, self.dilation)) else (self,)

    @property
    def strides(self):
        return not self._dense()

    def _limits(self):
        return -reach(self.left, self.dilation), reach(self.right, self.dilation)

    def _band_at(self, side):
        return self._ends(side) if self._dense() else None

    def _ends(self, side):
        left, right, dilation = (side.number(n) for n in (self.left, self.right, self.dilation))
        return -reach(left, dilation), reach(right, dilation)

    def _dense(self) -> bool:
        return isinstance(self.dilation, int) and self.dilation == 1

    def reach(self):
        dilation = self.dilation if isinstance(self.dilation, int) else 1
        return super().reach() * dilation

    def _arguments(self):
        dilated = [] if self._dense() else [f"dilation={short(self.dilation)}"]
        return [short(self.left), short(self.right), *dilated]


@rule
class Chunk(Mask):
    """Allows q // size = k // size: attention within chunks of `size` positions.

    Args:
        size: positions in a chunk; an int >= 1, or an int array of shape () or [B].

    Example:
        >>> print(Chunk(2).show(4, 4))
        ##..
        ##..
        ..##
        ..##
    """

    reads = BY_POSITION
    applied = "chunked"

    array_axes: ClassVar = {"size": "B"}

    size: Number

    def __post_init__(self):
        check_at_least(self, "size", 1)

    def allowed(self, q, kv):
        size = no_less(q.number(self.size), 1)
        return q.position // size == kv.position // size

    def classify(self, q, kv):
        size = no_less(q.number(self.size), 1)
        q_first, q_last, kv_first, kv_last = (p // size for p in (q.first, q.last, kv.first, kv.last))
        may_any = (q_first <= kv_last) & (kv_first <= q_last)
        must_all = (q_first == q_last) & (kv_first == kv_last) & (q_first == kv_first)
        return may_any, must_all

    def kv_spans(self, q, kv):
        return self._spans(q, kv)

    def q_spans(self, kv, q):
        return self._spans(kv, q)

    def query_range(self, key):
        if not isinstance(self.size, int):
            return None
        size = within_reach(self.size)
        first = key // size * size
        return first, first + (size - 1)

    def periodicity(self):
        return Periodicity(self.size if isinstance(self.size, int) else 1)

    def _spans(self, rows, others):
        size = no_less(rows.number(self.size), 1)
        return Spans(*others.side.between(rows.first // size * size, rows.last // size * size + (size - 1)))

    def _arguments(self):
        return [short(self.size)]


@rule
class BlockCausal(Mask):
    """Allows k // size <= q // size: all of the query's own block and of the blocks before it (block diffusion).

    Args:
        size: positions in a block; an int >= 1, or an int array of shape () or [B].

    Example:
        >>> print(BlockCausal(2).show(4, 5))
        ##...
        ##...
        ####.
        ####.
    """

    reads = BY_POSITION

    array_axes: ClassVar = {"size": "B"}

    size: Number

    def __post_init__(self):
        check_at_least(self, "size", 1)

    def allowed(self, q, kv):
        size = no_less(q.number(self.size), 1)
        return kv.position // size <= q.position // size

    def classify(self, q, kv):
        size = no_less(q.number(self.size), 1)
        return kv.first // size <= q.last // size, kv.last // size <= q.first // size

    def kv_spans(self, q, kv):
        size = no_less(q.number(self.size), 1)
        return Spans(*kv.side.between(q.first * 0 - FAR, q.last // size * size + (size - 1)))

    def q_spans(self, kv, q):
        size = no_less(kv.number(self.size), 1)
        return Spans(*q.side.between(kv.first // size * size, kv.last * 0 + FAR))

    def query_range(self, key):
        if not isinstance(self.size, int):
            return None
        size = within_reach(self.size)
        return key // size * size, key * 0 + NOBODY

    def periodicity(self):
        return Periodicity(self.size if isinstance(self.size, int) else 1)

    def _arguments(self):
        return [short(self.size)]


@rule
class Prefix(Mask):
    """Allows k < length, for every query. `Causal() | Prefix(n)` is a prefix-LM.

    Args:
        length: an int >= 0, or an int array of shape () or [B].

    Example:
        >>> print((Causal() | Prefix(2)).show(3, 3))
        ##.
        ##.
        ###
    """

    reads = BY_POSITION

    array_axes: ClassVar = {"length": "B"}

    length: Number

    def __post_init__(self):
        check_at_least(self, "length", 0)

    @property
    def reads_q_place(self):
        return False

    def allowed(self, q, kv):
        return Full().allowed(q, kv) & (kv.position < no_less(q.number(self.length), 0))

    def classify(self, q, kv):
        length = no_less(q.number(self.length), 0)
        return kv.first < length, kv.last < length

    def kv_spans(self, q, kv):
        xp, length = q.side.xp, no_less(q.number(self.length), 0)
        last = xp.full((1, 1, 1, 1), length - 1, "int32") if isinstance(length, int) else length - 1
        return Spans(*kv.side.between(last * 0 - FAR, last))

    def q_spans(self, kv, q):
        return whole_or_nothing(kv.side.xp, kv.first < no_less(kv.number(self.length), 0), q.side.length)

    def query_range(self, key):
        if not isinstance(self.length, int):
            return None
        return np.where(key < self.length, -NOBODY, 1), np.where(key < self.length, NOBODY, 0)

    def periodicity(self):
        return Periodicity(places=frozenset([self.length] if isinstance(self.length, int) else []))

    def pinned(self, length):
        known = isinstance(self.length, int)
        return Pinned(Empty(), frozenset(range(min(self.length, length)))) if known else Pinned(self)

    def _arguments(self):
        return [short(self.length)]


def within_reach(number: Any) -> int:
    """A static number as far as it matters: further than FAR is further than any two positions lie apart."""
    return max(-FAR, min(FAR, number))


def no_less(number: Any, least: int) -> Any:
    """A number as rules read it. Only a traced one can be less than is legal: then it stands for the least that is."""
    if isinstance(number, int):
        return number
    return (jnp if isinstance(number, jax.Array) else np).maximum(number, np.int32(least))


def reach(count: Any, dilation: Any) -> Any:
    """Count · dilation, or as many dilations as fit into FAR: small enough to be added to a position."""
    count, dilation = no_less(count, 0), no_less(dilation, 1)
    if isinstance(count, int) and isinstance(dilation, int):
        return min(FAR, count * dilation)
    xp = np if not any(isinstance(n, jax.Array) for n in (count, dilation)) else jnp
    return xp.minimum(count, FAR // dilation) * dilation
