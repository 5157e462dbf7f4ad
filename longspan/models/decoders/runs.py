"""Layers grouped by their repeating pattern: a scan compiles a pattern once, however often it repeats."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
MAX_PATTERN = 12  # layers of a pattern; real models have 1 to 6
LOOP_COST = 4  # in layers: at this price five local layers and a global one stay one pattern


class LayerRun(NamedTuple):
    """Consecutive layers: the kinds of a pattern, and how often it repeats.

    Example:
        >>> LayerRun(start=2, kinds=("local", "global"), count=3).numbers(1)
        range(3, 8, 2)
    """

    start: int
    kinds: tuple[Any, ...]  # of any hashable type
    count: int

    def numbers(self, place: int) -> range:
        """The numbers of the layers at one place of the pattern."""
        step = len(self.kinds)
        return range(self.start + place, self.start + step * self.count, step)


def layer_runs(kinds: Sequence[Any]) -> tuple[LayerRun, ...]:
    """The layers as runs, with the fewest pattern layers and loops together.

    Example:
        >>> [(run.kinds, run.count) for run in layer_runs("aabaabaabaa")]
        [(('a', 'a', 'b'), 3), (('a',), 2)]
    """
    return _cheapest_runs(tuple(kinds))


def group_by_run(runs: Sequence[LayerRun], stacks: Sequence[T]) -> list[tuple[T, ...]]:
    """The items of `stacks`, one per place of each pattern, grouped by run.

    Example:
        >>> group_by_run(layer_runs("aabaabaabaa"), range(4))
        [(0, 1, 2), (3,)]
    """
    remaining = iter(stacks)
    return [tuple(next(remaining) for _ in run.kinds) for run in runs]


class _Split(NamedTuple):
    """A way to split the first layers of a model into runs."""

    cost: int
    runs: tuple[LayerRun, ...]


@lru_cache(maxsize=64)
def _cheapest_runs(kinds: tuple[Any, ...]) -> tuple[LayerRun, ...]:
    # Dynamic programming: the cheapest split of the first `end` layers is the cheapest split of the layers before some
    # run that ends there, and that run. Among splits of equal cost the one with the fewest runs is taken.
    best = [_Split(0, ())]
    for end in range(1, len(kinds) + 1):
        splits = [_with_run(best[run.start], run) for run in _runs_ending_at(kinds, end)]
        best.append(min(splits, key=lambda split: (split.cost, len(split.runs))))
    return best[-1].runs


def _with_run(split: _Split, run: LayerRun) -> _Split:
    return _Split(split.cost + len(run.kinds) + LOOP_COST, (*split.runs, run))


def _runs_ending_at(kinds: tuple[Any, ...], end: int) -> list[LayerRun]:
    """All runs whose last layer is the one before `end`."""
    found = []
    for size in range(1, min(MAX_PATTERN, end) + 1):
        pattern, start = kinds[end - size : end], end - size
        while start >= 0 and kinds[start : start + size] == pattern:
            found.append(LayerRun(start, pattern, (end - start) // size))
            start -= size
    return found
