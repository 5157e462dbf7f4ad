"""The batches of an embedder: texts packed into rows of few lengths, so that few programs are compiled.

A row holds several texts one after another, and `segment_ids` separate them. So there is hardly any padding, whatever
the lengths of the texts, and the length of the row alone decides the program.
"""

import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from longspan.models.pooling import PackedTexts

MAX_PROGRAMS = 16
MIN_LENGTH = 32  # of a row
MIN_TEXT = 4  # slots of a row for each text: the program has one output per `MIN_TEXT` slots


class TextBatch(NamedTuple):
    """One row, and the indices of its texts."""

    packed: PackedTexts
    texts: list[int]

    @property
    def length(self) -> int:
        return self.packed.ids.shape[1]


def row_lengths(longest: int) -> list[int]:
    """At most `MAX_PROGRAMS` row lengths, of which the largest is at least `longest`.

    They are powers of two, and as many numbers halfway between them as fit, the largest first.

    Example:
        >>> row_lengths(1024)
        [32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
        >>> row_lengths(32768)[:6], len(row_lengths(32768))
        ([32, 64, 128, 256, 512, 1024], 16)
    """
    largest = max((longest - 1).bit_length(), MIN_LENGTH.bit_length() - 1)
    smallest = max(largest - MAX_PROGRAMS + 1, MIN_LENGTH.bit_length() - 1)
    powers = [2**k for k in range(smallest, largest + 1)]
    between = [3 * power // 4 for power in reversed(powers[1:])]
    return sorted(powers + between[: MAX_PROGRAMS - len(powers)])


def pack(
    texts: Sequence[Int[np.ndarray, "_"]], lengths: Sequence[int], capacity: int, *, skip: int = 0, single: bool = False
) -> Iterator[TextBatch]:
    """Packs texts into rows, those with the longest texts first.

    Each row takes the longest text that is left, and then again and again the longest one that fits.

    Args:
        texts: the token ids of each text.
        lengths: the row lengths to choose from, increasing; the last one is at least that of every text.
        capacity: the number of tokens of a row, unless one text is longer.
        skip: `PackedTexts.skip`.
        single: whether each text has a row of its own.
    """
    waiting: dict[int, deque[int]] = {}
    for index, text in enumerate(texts):
        waiting.setdefault(len(text), deque()).append(index)
    sizes = sorted(waiting)
    while sizes:
        chosen, used = [], 0
        room = max(capacity, _fitting(lengths, sizes[-1]))
        while sizes and len(chosen) < room // MIN_TEXT:
            place = bisect.bisect_right(sizes, room - used) - 1
            if place < 0 or (single and chosen):
                break
            size = sizes[place]
            chosen.append(waiting[size].popleft())
            used += size
            if not waiting[size]:
                del sizes[place]
        length = _fitting(lengths, max(used, len(chosen) * MIN_TEXT))
        yield TextBatch(_row([texts[index] for index in chosen], length, skip), chosen)


def _fitting(lengths: Sequence[int], tokens: int) -> int:
    """The smallest of the lengths that is at least `tokens`."""
    return lengths[bisect.bisect_left(lengths, tokens)]


def _row(texts: Sequence[np.ndarray], length: int, skip: int) -> PackedTexts:
    ids, text, place = np.zeros(length, np.int32), np.full(length, -1, np.int32), np.full(length, -1, np.int32)
    starts, counts = np.zeros(length // MIN_TEXT, np.int32), np.zeros(length // MIN_TEXT, np.int32)
    start = 0
    for number, tokens in enumerate(texts):
        stop = start + len(tokens)
        ids[start:stop], text[start:stop], place[start:stop] = tokens, number, np.arange(len(tokens))
        starts[number], counts[number] = start, len(tokens)
        start = stop
    return PackedTexts(ids[None], text[None], place[None], starts, counts, np.int32(skip))
