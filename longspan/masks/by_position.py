"""Masks by position: full, empty, bands (causal, windows), chunks and prefixes. They apply to any slots unchanged.

Numbers are checked when a mask is made, except traced numbers, which have no value yet. In every engine a traced number
below the legal minimum is replaced by the minimum: `Window(-1, 0)` is `Window(0, 0)`, and `Chunk(0)` is `Chunk(1)`.
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
    """Allows no pair: every output is zero.

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
    """Allows low <= k - q <= high, where `None` is no bound. `Causal` and `Window` are bands.

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
        offset: the distance to the last allowed key; an int, or an int array of shape () or [B].

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
        if isinstance(self.offset, int) and self.offset == 0:
            return []
        return [short(self.offset)]


@rule
class Window(Leaf):
    """Allows q - left·dilation <= k <= q + right·dilation where k - q is divisible by dilation.

    `left` and `right` do not count the query's own position: `Window(3, 0)` allows 4 keys, the query's own position and
    3 before it. `Window(4, 4)` is Longformer's radius 4, 9 keys.

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

    def _is_dilated(self) -> bool:
        return not isinstance(self.dilation, int) or self.dilation != 1

    def largest_number(self):
        if isinstance(self.dilation, int):
            return super().largest_number() * self.dilation
        return super().largest_number()

    def lower(self):
        near = _between(reach(self.left, self.dilation, -1), reach(self.right, self.dilation))
        if not self._is_dilated():
            return near
        residue = position(modulo=no_less(self.dilation, 1))
        return near & Compare(residue, "==", residue)

    def _arguments(self):
        arguments = [short(self.left), short(self.right)]
        if self._is_dilated():
            arguments.append(f"dilation={short(self.dilation)}")
        return arguments


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
    """Allows k // size <= q // size: the query's own block and all blocks before it (block diffusion).

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
    """The mask low <= k - q <= high, where None is no bound."""
    bounds: list[Mask] = []
    if low is not None:
        bounds.append(Compare(position(plus=low), "<=", position()))
    if high is not None:
        bounds.append(Compare(position(plus=high), ">=", position()))
    if not bounds:
        return Full()
    if len(bounds) == 1:
        return bounds[0]
    return And(tuple(bounds))
