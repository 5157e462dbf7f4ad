"""`Documents`: the token ids of many documents in one array."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np


class Documents(NamedTuple):
    """The token ids of many documents in one array, 2 bytes per token if all ids are below 65,536, otherwise 4.

    Attributes:
        tokens: the tokens of all documents.
        ends: int64, the index after the last token of each document.

    Example:
        >>> documents = Documents.of([[5, 6, 7], [8, 9]])
        >>> documents.count, documents.row(1).tolist(), documents.lengths.tolist()
        (2, [8, 9], [3, 2])
    """

    tokens: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, rows: "Documents | Iterable[Sequence[int] | np.ndarray]") -> "Documents":
        """The documents of a sequence of sequences of token ids."""
        if isinstance(rows, Documents):
            return rows
        builder = DocumentBuilder()
        for row in rows:
            builder.add(row)
        return builder.documents()

    @property
    def count(self) -> int:
        """The number of documents."""
        return len(self.ends)

    @property
    def starts(self) -> np.ndarray:
        """The index of the first token of each document."""
        return self.ends - self.lengths

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each document."""
        return np.diff(self.ends, prepend=0)

    def row(self, index: int) -> np.ndarray:
        """The tokens of one document."""
        start = 0 if index == 0 else int(self.ends[index - 1])
        return self.tokens[start : int(self.ends[index])]

    def select(self, indices: Sequence[int] | np.ndarray) -> "Documents":
        """The documents with these indices, in this order."""
        return Documents.of(self.row(int(index)) for index in indices)


class DocumentBuilder:
    """Collects documents one by one, in blocks of at least a million tokens.

    Example:
        >>> builder = DocumentBuilder()
        >>> builder.add([3, 70_000])
        >>> builder.documents().tokens.dtype
        dtype('int32')
    """

    BLOCK = 1 << 20

    def __init__(self) -> None:
        self.blocks: list[np.ndarray] = []
        self.recent: list[np.ndarray] = []
        self.recent_tokens = 0
        self.lengths: list[int] = []

    def add(self, row: Any) -> None:
        """Adds a document, a sequence of token ids."""
        tokens = np.asarray(row)
        is_ids = tokens.ndim == 1 and (not tokens.size or np.issubdtype(tokens.dtype, np.integer))
        if not is_ids or (tokens.size and (tokens.min() < 0 or tokens.max() >= 1 << 31)):
            raise ValueError(
                f"Document {len(self.lengths)} must be a sequence of token ids, ints from 0 to {(1 << 31) - 1}, got "
                f"{str(row)[:80]}."
            )
        self.lengths.append(len(tokens))
        self.recent.append(_compact(tokens))
        self.recent_tokens += len(tokens)
        if self.recent_tokens >= self.BLOCK:
            self._close_block()

    def documents(self) -> Documents:
        """The documents so far."""
        self._close_block()
        # One block afterwards, so that the next call does not copy twice.
        self.blocks = [np.concatenate([np.zeros(0, np.uint16), *self.blocks])]
        return Documents(self.blocks[0], np.cumsum(self.lengths, dtype=np.int64))

    def _close_block(self) -> None:
        if self.recent:
            self.blocks.append(np.concatenate(self.recent))
        self.recent, self.recent_tokens = [], 0


def _compact(tokens: np.ndarray) -> np.ndarray:
    if tokens.size and tokens.max() >= 1 << 16:
        return tokens.astype(np.int32)
    return tokens.astype(np.uint16)
