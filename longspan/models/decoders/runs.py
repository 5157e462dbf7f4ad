"""Layers by their repeating pattern: what is scanned is compiled once, however often it is repeated."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")
LONGEST = 12  # layers of a pattern; real ones have 1 to 6
LOOP = 4  # what a loop costs, in layers: at this price five local layers and a global one stay one pattern


class Run(NamedTuple):
    """Layers that follow each other: the kinds of a pattern, and how often it is repeated.

    Example:
        >>> Run(start=2, kinds=("local", "global"), count=3).numbers(1)
        range(3, 8, 2)
    """

    start: int
    kinds: tuple[str, ...]
    count: int

    def numbers(self, place: int) -> range:
        """The numbers of the layers that have one place of the pattern."""
        step = len(self.kinds)
        return range(self.start + place, self.start + step * self.count, step)


def runs(kinds: Sequence[str]) -> tuple[Run, ...]:
    """The layers as runs, with as few layers in all patterns together, and as few loops, as there can be.

    Example:
        >>> [(run.kinds, run.count) for run in runs("aabaabaabaa")]
        [(('a', 'a', 'b'), 3), (('a',), 2)]
    """
    return _runs(tuple(kinds))


def by_run(runs: Sequence[Run], stacks: Sequence[T]) -> list[tuple[T, ...]]:
    """What there is for each stack of layers, one for each place of each pattern, by run.

    Example:
        >>> by_run(runs("aabaabaabaa"), range(4))
        [(0, 1, 2), (3,)]
    """
    left = iter(stacks)
    return [tuple(next(left) for _ in run.kinds) for run in runs]


@lru_cache(maxsize=64)
def _runs(kinds: tuple[str, ...]) -> tuple[Run, ...]:
    best: list[tuple[int, int, tuple[Run, ...]]] = [(0, 0, ())]  # of the first layers: cost, runs, the runs
    for end in range(1, len(kinds) + 1):
        best.append(min((_with(best[run.start], run) for run in _ending(kinds, end)), key=lambda b: b[:2]))
    return best[-1][2]


def _with(before: tuple[int, int, tuple[Run, ...]], run: Run) -> tuple[int, int, tuple[Run, ...]]:
    return before[0] + len(run.kinds) + LOOP, before[1] + 1, (*before[2], run)


def _ending(kinds: tuple[str, ...], end: int) -> list[Run]:
    """All runs whose last layer is the one before `end`."""
    found = []
    for size in range(1, min(LONGEST, end) + 1):
        pattern, start = kinds[end - size : end], end - size
        while start >= 0 and kinds[start : start + size] == pattern:
            found.append(Run(start, pattern, (end - start) // size))
            start -= size
    return found
