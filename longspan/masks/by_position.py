"""Rules by position: everything, bands (causal, windows), chunks, prefixes. They hold for any slots as they are.

A number is checked when its mask is made. One that is traced has no value then: if it turns out less than is legal, it
stands for the least legal one (`Window(-1, 0)` for `Window(0, 0)`, `Chunk(0)` for `Chunk(1)`), in every engine.
"""

from typing import ClassVar

import numpy as np

from longspan.array_types import Number
from longspan.masks.algebra import And
from longspan.masks.base import NO_QUERY, Mask, Periodicity, rule
from longspan.masks.checks import check_at_least, check_number
from longspan.masks.compare import Compare
from longspan.masks.pytree import short
from longspan.masks.rules import Leaf
from longspan.masks.spans import nothing
from longspan.masks.terms import no_less, number, position, reach


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
        return np.True_

    def provable_kinds(self):
        return False, True

    def nearest_query(self, key, at, step):
        return at + key * 0

    def inexact(self):
        return ()

    def negated(self):
        return Empty()

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
        return np.False_

    def provable_kinds(self):
        return True, False

    def nearest_query(self, key, at, step):
        return key * 0 + NO_QUERY * step

    def inexact(self):
        return ()

    def negated(self):
        return Full()

    def periodicity(self):
        return Periodicity()

    def classify(self, q, kv):
        no = q.side.xp.full((1, 1, 1, 1), False)
        return no, no

    def kv_spans(self, q, kv):
        return nothing(q.side.xp)

    def q_spans(self, kv, q):
        return nothing(q.side.xp)


@rule
class Band(Leaf):
    """Allows low <= k - q <= high, where `None` leaves a side open. `Causal` and `Window` are bands.

    Example:
        >>> print(Band(1, 2).show(3, 4))
        .##.
        ..##
        ...#
    """

    applied = "sliding_window"
    array_axes: ClassVar = {"low": "B", "high": "B"}

    low: Number | None
    high: Number | None

    def __post_init__(self):
        for name in ("low", "high"):
            if getattr(self, name) is not None:
                check_number(self, name)

    def lower(self):
        return _between(self.low, self.high)

    def _arguments(self):
        return [short(self.low), short(self.high)]


@rule
class Causal(Leaf):
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

    def lower(self):
        return _between(None, self.offset)

    def _arguments(self):
        return [] if isinstance(self.offset, int) and self.offset == 0 else [short(self.offset)]


@rule
class Window(Leaf):
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

    applied = "sliding_window"
    array_axes: ClassVar = {"left": "B", "right": "B", "dilation": "B"}

    left: Number
    right: Number
    dilation: Number = 1

    def __post_init__(self):
        check_at_least(self, "left", 0)
        check_at_least(self, "right", 0)
        check_at_least(self, "dilation", 1)

    def _dense(self) -> bool:
        return isinstance(self.dilation, int) and self.dilation == 1

    def largest_number(self):
        dilation = self.dilation if isinstance(self.dilation, int) else 1
        return super().largest_number() * dilation

    def lower(self):
        near = _between(reach(self.left, self.dilation, -1), reach(self.right, self.dilation))
        if self._dense():
            return near
        residue = position(modulo=no_less(self.dilation, 1))
        return near & Compare(residue, "==", residue)

    def _arguments(self):
        dilated = [] if self._dense() else [f"dilation={short(self.dilation)}"]
        return [short(self.left), short(self.right), *dilated]


@rule
class Chunk(Leaf):
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

    applied = "chunked"

    array_axes: ClassVar = {"size": "B"}

    size: Number

    def __post_init__(self):
        check_at_least(self, "size", 1)

    def lower(self):
        chunk = position(divide=no_less(self.size, 1))
        return Compare(chunk, "==", chunk)

    def _arguments(self):
        return [short(self.size)]


@rule
class BlockCausal(Leaf):
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

    array_axes: ClassVar = {"size": "B"}

    size: Number

    def __post_init__(self):
        check_at_least(self, "size", 1)

    def lower(self):
        block = position(divide=no_less(self.size, 1))
        return Compare(block, ">=", block)

    def _arguments(self):
        return [short(self.size)]


@rule
class Prefix(Leaf):
    """Allows k < length, for every query. `Causal() | Prefix(n)` is a prefix-LM.

    Args:
        length: an int >= 0, or an int array of shape () or [B].

    Example:
        >>> print((Causal() | Prefix(2)).show(3, 3))
        ##.
        ##.
        ###
    """

    array_axes: ClassVar = {"length": "B"}

    length: Number

    def __post_init__(self):
        check_at_least(self, "length", 0)

    def lower(self):
        return Compare(number(no_less(self.length, 0)), ">", position())

    def _arguments(self):
        return [short(self.length)]


def _between(low: Number | None, high: Number | None) -> Mask:
    """Low <= k - q <= high."""
    ends = ((low, "<="), (high, ">="))
    found = [Compare(position(plus=end), relation, position()) for end, relation in ends if end is not None]
    return And(tuple(found)) if len(found) > 1 else found[0] if found else Full()
