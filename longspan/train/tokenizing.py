"""The token ids and labels of examples, read in small groups: the texts themselves are not kept."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from longspan.train.documents import DocumentBuilder, Documents
from longspan.train.sources import Example

GROUP_CHARACTERS = 1 << 18  # of the texts that are tokenized at once: a tokenizer's results take 100 bytes a token

TooLong = Literal["error", "split", "truncate", "pieces"]


class Examples(NamedTuple):
    """Tokenized examples.

    Attributes:
        texts: the documents by field: "text", or "anchor" and "positive" and possibly "negative".
        labels: the label of each example; None if it has none.
        empty: the number of examples that were left out because a text has no tokens of its own.
        long: the number of examples that were split or truncated.
        unlabelled: the place of the first example without a label.
    """

    texts: dict[str, Documents]
    labels: list[str | None]
    empty: int
    long: int
    unlabelled: str | None

    @property
    def count(self) -> int:
        """The number of examples."""
        return len(self.labels)


def tokenized(
    tokenizer: Any, examples: Iterable[Example], *, length: int, too_long: TooLong = "error", end: int | None = None
) -> Examples:
    """Tokenizes examples in groups.

    Args:
        tokenizer: of the library `tokenizers`, without truncation and padding.
        examples: the texts.
        length: the maximum number of tokens of a text.
        too_long: for longer texts, "error" raises a ValueError that names the options of the command, "split" makes
            several examples with the same label, "truncate" keeps the beginning, and "pieces" keeps all tokens, for
            `PackedBatches`, which splits them.
        end: a token to add to the end of each text, unless the tokenizer adds it.

    Example:
        >>> from longspan.train.byte_level import ByteVocabulary
        >>> tokenizer = ByteVocabulary.of(False, None).tokenizer()
        >>> examples = [Example("a", dict(text="abc")), Example("b", dict(text=""))]
        >>> found = tokenized(tokenizer, examples, length=5, end=256)
        >>> found.texts["text"].row(0).tolist(), found.empty
        ([97, 98, 99, 256], 1)
    """
    if too_long in ("split", "truncate"):
        _limit(tokenizer, length - (end is not None))
    builders: dict[str, DocumentBuilder] = {}
    labels: list[str | None] = []
    empty = long = 0
    unlabelled = None
    for group in _groups(examples):
        names = list(group[0].texts)
        for example in group:
            if list(example.texts) != names or (builders and list(builders) != names):
                had = ", ".join(builders or names)
                raise ValueError(f"{example.place} has {', '.join(example.texts)}, but earlier examples have {had}.")
        columns = [tokenizer.encode_batch([example.texts[name] for example in group]) for name in names]
        for example, *encodings in zip(group, *columns, strict=True):
            if any(not _own_tokens(encoding) for encoding in encodings):
                empty += 1
                continue
            long += any(encoding.overflowing for encoding in encodings)
            for parts in _parts(encodings, too_long):
                rows = [_with_end(part.ids, end) for part in parts]
                if too_long == "error":
                    _check_lengths(example, rows, length)
                for name, row in zip(names, rows, strict=True):
                    builders.setdefault(name, DocumentBuilder()).add(row)
                labels.append(example.label)
            if example.label is None and unlabelled is None:
                unlabelled = example.place
    if too_long in ("split", "truncate"):
        tokenizer.no_truncation()
    texts = {name: builder.documents() for name, builder in builders.items()}
    return Examples(texts, labels, empty, long, unlabelled)


def _groups(examples: Iterable[Example]) -> Iterator[list[Example]]:
    group: list[Example] = []
    size = 0
    for example in examples:
        group.append(example)
        size += sum(map(len, example.texts.values()))
        if size >= GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _limit(tokenizer: Any, length: int) -> None:
    special = tokenizer.num_special_tokens_to_add(is_pair=False)
    if special >= length:
        raise ValueError(
            f"A text may have {length} tokens, and the tokenizer adds {special} special tokens. None is left for text. "
            "Give a larger --length."
        )
    tokenizer.enable_truncation(length)


def _own_tokens(encoding: Any) -> int:
    """The number of tokens that are not special."""
    return len(encoding.ids) - sum(encoding.special_tokens_mask)


def _parts(encodings: list[Any], too_long: TooLong) -> list[list[Any]]:
    if too_long != "split":
        return [encodings]
    (whole,) = encodings
    return [[part] for part in (whole, *whole.overflowing)]


def _with_end(ids: list[int], end: int | None) -> np.ndarray:
    if end is not None and (not ids or ids[-1] != end):
        ids = [*ids, end]
    return np.asarray(ids, np.int64)


def _check_lengths(example: Example, rows: list[np.ndarray], length: int) -> None:
    longest = max(map(len, rows))
    if longest <= length:
        return
    cure = "Use it in parts with --split, or only its beginning with --truncate"
    if len(rows) > 1:  # parts of an anchor do not belong to parts of its positive
        cure = "Use only its beginning with --truncate"
    raise ValueError(
        f"{example.place} has {longest:,} tokens, but a text may have at most {length:,} (--length, and the model's "
        f"limit). {cure}."
    )
