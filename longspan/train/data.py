"""Batches that are a pure function of (seed, step): packed rows for language models, buckets by length for encoders.

A resumed run asks for the batch of its next step, so there is no loader state to save. Every epoch has its own order,
drawn from (seed, epoch).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from longspan.checks import check_static_size
from longspan.train.documents import Documents

IGNORED = -100  # the label of a token or a row without a target
SHORTEST = 32  # tokens of the shortest bucket
# Second numbers of the random seeds: two uses of one seed draw different numbers.
PACK_STREAM, ROW_STREAM, BUCKET_STREAM, ORDER_STREAM, MASK_STREAM = range(5)

Batch = dict[str, np.ndarray]
Rows = Documents | Iterable[Sequence[int] | np.ndarray]


@lru_cache(maxsize=16)  # successive steps ask for the same ones
def _permutation(seed: tuple[int, ...], count: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)


@dataclass(frozen=True, eq=False)
class PackedBatches:
    """Batches for language models: whole documents packed into rows [B, T], as dicts of int32 arrays.

    A batch has these arrays [B, T]:

    - "input_ids": the tokens, 0 at padding.
    - "segment_ids": the document of each token within its row, -1 at padding. `CausalLM` lets tokens attend to their
      own document only.
    - "labels": the next token of the same document; -100 at padding and at the last token of a document.
    - "positions": counted from 0 in each document.

    Documents of more than `length` tokens are split into pieces, and each piece is a document of its own. A document
    of one token has no target and is left out. Rows are packed once, from the seed, and every epoch has all rows in
    another order. The last batch of an epoch is filled up with rows of padding.

    Args:
        documents: the documents' token ids.
        rows: B, the number of rows of a batch.
        length: T, the number of tokens of a row.
        seed: decides which documents share a row, and the order of the rows.

    Example:
        >>> batches = PackedBatches([[5, 6, 7], [8, 9], [10, 11]], rows=1, length=6)
        >>> batch = batches(0)
        >>> batch["segment_ids"].tolist(), batch["positions"].tolist(), batches.steps_per_epoch
        ([[0, 0, 0, 1, 1, -1]], [[0, 1, 2, 0, 1, 0]], 2)
    """

    documents: Rows
    rows: int
    length: int
    seed: int = 0

    def __post_init__(self):
        check_static_size("rows", self.rows, 1)
        check_static_size("length", self.length, 2)
        check_static_size("seed", self.seed, 0)
        object.__setattr__(self, "documents", Documents.of(self.documents))

    @cached_property
    def plan(self) -> "PackPlan":
        """The pieces of each row."""
        documents = Documents.of(self.documents)
        starts, stops = _pieces(documents, self.length)
        if not len(starts):
            raise ValueError("There is no document of at least two tokens, so no token has a target. Give more text.")
        return _packed(starts, stops, self.length, np.random.default_rng((self.seed, PACK_STREAM)))

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in which every row occurs once."""
        return -(-self.plan.count // self.rows)

    def __call__(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        epoch, at = divmod(step, self.steps_per_epoch)
        order = _permutation((self.seed, ROW_STREAM, epoch), self.plan.count)
        shape = self.rows, self.length
        batch = {name: np.zeros(shape, np.int32) for name in ("input_ids", "positions")}
        batch |= dict(segment_ids=np.full(shape, -1, np.int32), labels=np.full(shape, IGNORED, np.int32))
        for row, packed in enumerate(order[at * self.rows : (at + 1) * self.rows]):
            self._fill(batch, row, int(packed))
        return batch

    def _fill(self, batch: Batch, row: int, packed: int) -> None:
        tokens, plan, at = Documents.of(self.documents).tokens, self.plan, 0
        for segment, piece in enumerate(plan.pieces[plan.firsts[packed] : plan.firsts[packed + 1]]):
            own = tokens[plan.starts[piece] : plan.stops[piece]]
            span = slice(at, at + len(own))
            batch["input_ids"][row, span], batch["segment_ids"][row, span] = own, segment
            batch["positions"][row, span] = np.arange(len(own))
            batch["labels"][row, at : at + len(own) - 1] = own[1:]
            at += len(own)


class PackPlan(NamedTuple):
    """The rows of a `PackedBatches`: row r has the pieces `pieces[firsts[r] : firsts[r + 1]]`."""

    starts: np.ndarray  # of each piece, in the documents' tokens
    stops: np.ndarray
    pieces: np.ndarray
    firsts: np.ndarray

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.firsts) - 1


def _pieces(documents: Documents, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and stop of pieces of at most `length` tokens each, without those of one token."""
    counts = -(-documents.lengths // length)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its document
    starts = np.repeat(documents.starts, counts) + number * length
    stops = np.minimum(starts + length, np.repeat(documents.ends, counts))
    kept = stops - starts > 1
    return starts[kept], stops[kept]


def _packed(starts: np.ndarray, stops: np.ndarray, length: int, rng: np.random.Generator) -> PackPlan:
    """Puts each piece, the longest first, into the fullest row that has room for it (best fit)."""
    lengths = stops - starts
    shuffled = rng.permutation(len(starts))
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]  # rows by the number of free slots
    rooms = 0  # bit r is set if a row has r free slots, so that the least sufficient room is found in one operation
    for piece in shuffled[np.argsort(-lengths[shuffled], kind="stable")]:
        need = int(lengths[piece])
        fitting = rooms >> need
        if fitting:
            room = need + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            rooms &= ~(int(not by_room[room]) << room)
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(int(piece))
        by_room[room - need].append(row)
        rooms |= 1 << (room - need)
    firsts = np.cumsum([0, *map(len, rows)])
    return PackPlan(starts, stops, np.array([piece for row in rows for piece in row]), firsts)


@dataclass(frozen=True, eq=False)
class BucketedBatches:
    """Batches for encoders: one document per row, in buckets by length, so that there are few shapes.

    A batch has "input_ids" int32 [B, T] and "attention_mask" int32 [B, T], where T is a power of two or `length`. With
    several texts per example (`documents` is a dict), each name has its arrays: "anchor_input_ids" and
    "anchor_attention_mask". Arrays of `labels` have one entry per example and appear in the batch with their names.

    A bucket with fewer than `rows` examples is joined with the next longer one. Every epoch has all examples in another
    order. The last batch of a bucket is filled up with empty rows, whose labels are -100; or it is left out, for losses
    that compare the rows of a batch.

    Args:
        documents: the token ids of each example, or a dict of several such sequences.
        rows: B, the number of rows of a batch.
        length: the maximum number of tokens of a row.
        labels: int arrays with one entry per example, by name.
        seed: decides the order.
        pad: the token at padding.
        drop_incomplete: whether batches with fewer than `rows` examples are left out.

    Example:
        >>> batches = BucketedBatches([[5, 6], [7], [8, 9]], rows=2, length=64, labels=dict(labels=np.array([0, 1, 0])))
        >>> batch = batches(0)
        >>> batch["input_ids"].shape, batch["labels"].shape, batches.steps_per_epoch
        ((2, 32), (2,), 2)
    """

    documents: Rows | Mapping[str, Rows]
    rows: int
    length: int
    labels: Mapping[str, Any] | None = None
    seed: int = 0
    pad: int = 0
    drop_incomplete: bool = False
    texts: dict[str, Documents] = field(init=False, repr=False)  # by the prefix of their arrays' names

    def __post_init__(self):
        check_static_size("rows", self.rows, 1)
        check_static_size("length", self.length, 1)
        check_static_size("seed", self.seed, 0)
        named = self.documents if isinstance(self.documents, Mapping) else {"": self.documents}
        texts = {f"{name}_" if name else "": Documents.of(rows) for name, rows in named.items()}
        object.__setattr__(self, "texts", texts)
        counts = {name or "documents": texts[name].count for name in texts}
        counts |= {name: len(values) for name, values in (self.labels or {}).items()}
        if len(set(counts.values())) != 1 or 0 in counts.values():
            raise ValueError(f"Each example needs one entry of every array, and one example at least; got {counts}.")
        longest = max(int(documents.lengths.max()) for documents in texts.values())
        if longest > self.length:
            raise ValueError(
                f"A document has {longest:,} tokens, but `length` is {self.length:,}. Truncate or split the document."
            )
        if self.drop_incomplete and next(iter(counts.values())) < self.rows:
            raise ValueError(
                f"There are {next(iter(counts.values()))} examples, fewer than the {self.rows} rows of a batch, and "
                "incomplete batches are left out. Use smaller batches."
            )

    @cached_property
    def buckets(self) -> list["Bucket"]:
        """The buckets, the shortest first."""
        lengths = {name: documents.lengths for name, documents in self.texts.items()}
        longest = np.max(list(lengths.values()), axis=0)
        sizes = np.array([bucket_length(int(length), self.length) for length in longest])
        found: list[np.ndarray] = []
        waiting = np.zeros(0, np.int64)  # the examples of shorter buckets that do not fill a batch
        for size in np.unique(sizes):
            waiting = np.concatenate([waiting, np.flatnonzero(sizes == size)])
            if len(waiting) >= self.rows:
                found.append(waiting)
                waiting = waiting[:0]
        if found and len(waiting):
            found[-1] = np.concatenate([found[-1], waiting])
        elif len(waiting):
            found.append(waiting)
        return [
            Bucket(
                members, {name: bucket_length(int(own[members].max()), self.length) for name, own in lengths.items()}
            )
            for members in found
        ]

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in which every example occurs at most once."""
        return sum(self._batches_of(bucket) for bucket in self.buckets)

    def __call__(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        epoch, at = divmod(step, self.steps_per_epoch)
        counts = [self._batches_of(bucket) for bucket in self.buckets]
        place = int(_permutation((self.seed, ORDER_STREAM, epoch), sum(counts))[at])
        number = int(np.searchsorted(np.cumsum(counts), place, side="right"))
        first = (place - sum(counts[:number])) * self.rows
        bucket = self.buckets[number]
        order = _permutation((self.seed, BUCKET_STREAM, epoch, number), len(bucket.members))
        return self._filled(bucket, bucket.members[order[first : first + self.rows]])

    def _batches_of(self, bucket: "Bucket") -> int:
        if self.drop_incomplete:
            return len(bucket.members) // self.rows
        return -(-len(bucket.members) // self.rows)

    def _filled(self, bucket: "Bucket", examples: np.ndarray) -> Batch:
        batch: Batch = {}
        for name, documents in self.texts.items():
            shape = self.rows, bucket.lengths[name]
            ids, mask = np.full(shape, self.pad, np.int32), np.zeros(shape, np.int32)
            for row, example in enumerate(examples):
                own = documents.row(int(example))
                ids[row, : len(own)], mask[row, : len(own)] = own, 1
            batch |= {f"{name}input_ids": ids, f"{name}attention_mask": mask}
        for name, values in (self.labels or {}).items():
            batch[name] = np.full(self.rows, IGNORED, np.int32)
            batch[name][: len(examples)] = np.asarray(values)[examples]
        return batch


class Bucket(NamedTuple):
    """Examples of similar lengths, and the padded length of each of their texts."""

    members: np.ndarray
    lengths: dict[str, int]


def bucket_length(length: int, longest: int) -> int:
    """The padded length of a document: the next power of two, at least 32 and at most `longest`.

    Example:
        >>> [bucket_length(n, 500) for n in (1, 33, 128, 300)]
        [32, 64, 128, 500]
    """
    return min(longest, max(SHORTEST, 1 << max(0, length - 1).bit_length()))


@dataclass(frozen=True)
class MaskedBatches:
    """Batches for masked language models: BERT's masking of other batches, drawn from (seed, step).

    Of all tokens except special ones, 15% are chosen as targets. Of these, 80% are replaced by the mask token, 10% by
    a random token, and 10% stay. "labels" [B, T] has the tokens of the targets and -100 elsewhere.

    Args:
        batches: gives a batch with "input_ids" and "attention_mask" for each step.
        mask_token: the id of the mask token.
        vocab_size: random tokens are below this number.
        special_tokens: ids that are neither targets nor random tokens.
        seed: decides targets and random tokens.
        rate: the share of tokens that are targets.

    Example:
        >>> batches = BucketedBatches([[1, *range(10, 40), 2]], rows=1, length=32)
        >>> masked = MaskedBatches(batches, mask_token=3, vocab_size=40, special_tokens=(0, 1, 2, 3))
        >>> batch = masked(0)
        >>> int((batch["labels"] >= 0).sum()), bool((batch["input_ids"] == 3).any())
        (2, True)
    """

    batches: Callable[[int], Batch]
    mask_token: int
    vocab_size: int
    special_tokens: Sequence[int] = ()
    seed: int = 0
    rate: float = 0.15

    @cached_property
    def _special(self) -> np.ndarray:
        return np.unique([*self.special_tokens, self.mask_token])

    @cached_property
    def _ordinary(self) -> np.ndarray:
        return np.setdiff1d(np.arange(self.vocab_size), self._special)

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in which every example occurs at most once."""
        batches: Any = self.batches
        return batches.steps_per_epoch

    def __call__(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        batch = self.batches(step)
        ids, rng = batch["input_ids"], np.random.default_rng((self.seed, MASK_STREAM, step))
        special = self._special
        free = batch["attention_mask"].astype(bool) & ~np.isin(ids, special)
        chosen = free & (rng.random(ids.shape) < self.rate)
        kind = rng.random(ids.shape)
        replaced = np.where(kind < 0.8, self.mask_token, rng.choice(self._ordinary, ids.shape))
        masked = np.where(chosen & (kind < 0.9), replaced, ids).astype(np.int32)
        return batch | dict(input_ids=masked, labels=np.where(chosen, ids, IGNORED).astype(np.int32))
