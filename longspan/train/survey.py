"""What the examples of a folder or file are: their number, labels and digest, before anything is tokenized."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from longspan.train.sources import Example

HELD_OUT_STREAM = 7  # the second number of the random seed: see `longspan.train.data`

Source = Callable[[], Iterable[Example]]  # each call reads the examples again


class Survey(NamedTuple):
    """The facts about the examples of a source.

    Attributes:
        count: the number of examples.
        labels: the different labels, sorted; numbers by value.
        unlabelled: the place of the first example without a label.
        digest: of all texts and labels. A resumed run compares it.
    """

    count: int
    labels: tuple[str, ...]
    unlabelled: str | None
    digest: str

    @classmethod
    def of(cls, source: Source) -> "Survey":
        """Reads all examples once.

        Example:
            >>> examples = [Example("a", dict(text="one"), "10"), Example("b", dict(text="two"), "9")]
            >>> survey = Survey.of(lambda: examples)
            >>> survey.count, survey.labels, survey.unlabelled
            (2, ('9', '10'), None)
        """
        count, labels, unlabelled, digest = 0, set(), None, hashlib.sha256()
        for example in source():
            count += 1
            for part in (*example.texts, *example.texts.values(), example.label or ""):
                raw = part.encode("utf-8", errors="surrogatepass")
                digest.update(len(raw).to_bytes(8, "little") + raw)
            if example.label is not None:
                labels.add(example.label)
            elif unlabelled is None:
                unlabelled = example.place
        return cls(count, _sorted(labels), unlabelled, digest.hexdigest())


def _sorted(labels: set[str]) -> tuple[str, ...]:
    if all(label.isdecimal() for label in labels):
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    return tuple(sorted(labels))


def held_out_examples(count: int, share: float, most: int, seed: int) -> frozenset[int]:
    """The indices of the examples that are held out for evaluation: a share of them, at most `most`.

    At least one example is held out, unless the share is 0 or there is only one example.

    Example:
        >>> len(held_out_examples(1000, 0.1, 30, 0)), len(held_out_examples(3, 0.1, 30, 0))
        (30, 1)
    """
    if share <= 0 or count < 2:
        return frozenset()
    number = min(most, max(1, round(count * share)), count - 1)
    order = np.random.default_rng((seed, HELD_OUT_STREAM)).permutation(count)
    return frozenset(order[:number].tolist())


def part_of(source: Source, indices: frozenset[int], *, inside: bool) -> Iterator[Example]:
    """The examples with these indices, or the others."""
    for index, example in enumerate(source()):
        if (index in indices) is inside:
            yield example
