"""Batches: a pure function of (seed, step), packed rows and buckets, masking."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from longspan.models import CausalLM, LlamaConfig
from longspan.train.data import BucketedBatches, MaskedBatches, PackedBatches
from longspan.train.documents import DocumentBuilder, Documents
from tests.made import made


def documents(count, longest, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 90, rng.integers(1, longest + 1)) for _ in range(count)]


def packed_pieces(batches, steps):
    """The documents in the rows of some batches, as tuples of tokens."""
    found = []
    for step in steps:
        batch = batches(step)
        for ids, segments in zip(batch["input_ids"], batch["segment_ids"], strict=True):
            found += [tuple(ids[segments == number].tolist()) for number in range(segments.max() + 1)]
    return sorted(found)


def test_packed_rows_have_every_document_once_per_epoch():
    texts = documents(37, 11)
    batches = PackedBatches(texts, rows=3, length=13, seed=5)
    n = batches.steps_per_epoch
    whole = sorted(tuple(text.tolist()) for text in texts if len(text) > 1)
    assert packed_pieces(batches, range(n)) == whole
    assert packed_pieces(batches, range(n, 2 * n)) == whole
    assert n * 3 * 13 < 1.35 * sum(map(len, texts)), "best fit leaves little padding"
    first, second = batches(0)["input_ids"], batches(n)["input_ids"]
    assert (first != second).any(), "another order in the next epoch"


def test_packed_positions_and_targets_are_those_of_the_own_document():
    batches = PackedBatches(documents(23, 9), rows=4, length=17)
    for step in range(batches.steps_per_epoch):
        batch = batches(step)
        for ids, segments, positions, labels in zip(
            *(batch[name] for name in ("input_ids", "segment_ids", "positions", "labels")), strict=True
        ):
            for number in range(segments.max() + 1):
                own = segments == number
                np.testing.assert_array_equal(positions[own], np.arange(own.sum()))
                np.testing.assert_array_equal(labels[own][:-1], ids[own][1:])
                assert labels[own][-1] == -100
            assert (labels[segments < 0] == -100).all() and (ids[segments < 0] == 0).all()


def test_long_documents_are_split_into_pieces():
    batches = PackedBatches([np.arange(1, 24)], rows=2, length=7)
    pieces = packed_pieces(batches, range(batches.steps_per_epoch))
    assert pieces == [tuple(range(1, 8)), tuple(range(8, 15)), tuple(range(15, 22)), (22, 23)]


def test_no_gradient_crosses_documents():
    config = LlamaConfig(
        vocab_size=90, hidden_size=8, intermediate_size=11, num_attention_heads=2, num_hidden_layers=2,
        initializer_range=0.5,
    )  # fmt: skip
    model = made(CausalLM, config)
    batch = PackedBatches([documents(3, 7)[0][:1].repeat(5), np.arange(20, 27), np.arange(40, 43)], rows=1, length=16)(
        0
    )
    graph, state = nnx.split(model)
    segments, labels = batch["segment_ids"], batch["labels"]

    @jax.jit
    def gradients(embedded):
        """Of each document's loss, with respect to the embedding of every slot."""

        def losses(embedded):
            logits = nnx.merge(graph, state)(inputs_embeds=embedded, segment_ids=segments).logits
            each = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels.clip(0)[..., None], axis=-1)[..., 0]
            each = jnp.where(labels >= 0, each, 0)
            return jnp.stack([jnp.where(segments == number, each, 0).sum() for number in range(3)])

        return jax.jacrev(losses)(embedded)

    embedded = np.asarray(model.embed.embedding[...])[batch["input_ids"]]
    sizes = np.abs(np.asarray(gradients(embedded)))[:, 0].max(axis=-1)
    same = segments[0][None] == np.arange(3)[:, None]
    np.testing.assert_array_equal(sizes[~same], 0)
    has_target = (segments[0] >= 0) & (labels[0] >= 0)
    assert (sizes[same & has_target] > 0).all()


@pytest.mark.parametrize("kind", ["packed", "bucketed", "masked"])
def test_a_batch_depends_on_seed_and_step_alone(kind):
    def make(seed):
        if kind == "packed":
            return PackedBatches(documents(19, 9), rows=2, length=11, seed=seed)
        bucketed = BucketedBatches(documents(19, 80), rows=2, length=100, seed=seed)
        if kind == "bucketed":
            return bucketed
        return MaskedBatches(bucketed, mask_token=3, vocab_size=90, seed=seed)

    one, other, different = make(7), make(7), make(8)
    backwards = [other(step) for step in reversed(range(25))][::-1]
    for step, batch in enumerate(backwards):
        for name, array in one(step).items():
            assert array.dtype == np.int32
            np.testing.assert_array_equal(array, batch[name])
    assert any(
        one(step)["input_ids"].shape != different(step)["input_ids"].shape
        or (one(step)["input_ids"] != different(step)["input_ids"]).any()
        for step in range(5)
    )


def test_buckets_have_few_shapes_and_every_example_once():
    texts = documents(53, 200)
    labels = np.arange(53)
    batches = BucketedBatches(texts, rows=4, length=200, labels=dict(labels=labels), pad=1, seed=3)
    n = batches.steps_per_epoch
    for epoch in range(2):
        found, shapes = [], set()
        for step in range(epoch * n, (epoch + 1) * n):
            batch = batches(step)
            shapes.add(batch["input_ids"].shape)
            for ids, mask, label in zip(*(batch[k] for k in ("input_ids", "attention_mask", "labels")), strict=True):
                if label >= 0:
                    np.testing.assert_array_equal(ids[mask > 0], texts[label])
                    found.append(label)
                else:
                    assert label == -100 and not mask.any()
                assert (ids[mask == 0] == 1).all()
        assert sorted(found) == list(range(53))
        assert shapes <= {(4, length) for length in (32, 64, 128, 200)}


def test_a_bucket_of_few_examples_joins_the_next():
    texts = [np.full(length, 5) for length in (3, 3, 40, 40, 40, 40, 40, 100)]
    batches = BucketedBatches(texts, rows=4, length=128)
    assert [(bucket.members.tolist(), bucket.lengths[""]) for bucket in batches.buckets] == [(list(range(8)), 128)]
    assert batches.steps_per_epoch == 2


def test_pairs_keep_together_and_incomplete_batches_are_left_out():
    anchors = [[number] * 2 for number in range(5, 16)]
    positives = [[number] * (number * 5) for number in range(5, 16)]
    pairs = dict(anchor=anchors, positive=positives)
    batches = BucketedBatches(pairs, rows=4, length=99, drop_incomplete=True)
    for step in range(3 * batches.steps_per_epoch):
        batch = batches(step)
        assert batch["anchor_attention_mask"].any(axis=1).all()
        np.testing.assert_array_equal(batch["anchor_input_ids"][:, 0], batch["positive_input_ids"][:, 0])
        assert batch["anchor_input_ids"].shape == (4, 32)


def test_masking_is_berts():
    texts = [np.arange(4, 500)] * 60
    batches = BucketedBatches(texts, rows=60, length=512)
    masked = MaskedBatches(batches, mask_token=3, vocab_size=500, special_tokens=(0, 1, 2, 7))
    before, batch = batches(0), masked(0)
    labels, ids, was = batch["labels"], batch["input_ids"], before["input_ids"]
    target = labels >= 0
    np.testing.assert_array_equal(labels[target], was[target])
    np.testing.assert_array_equal(ids[~target], was[~target])
    assert not target[was == 7].any() and not target[before["attention_mask"] == 0].any()
    assert abs(target.mean() * 512 / 495 - 0.15) < 0.01
    share = [(ids == 3)[target].mean(), (ids == was)[target].mean()]
    np.testing.assert_allclose(share, [0.8, 0.1], atol=0.02)
    assert not np.isin(ids[target & (ids != 3)], (0, 1, 2, 7)).any()
    assert (masked(0)["input_ids"] == ids).all() and (masked(1)["input_ids"] != ids).any()


def test_documents_take_two_bytes_per_token_if_ids_are_small():
    assert Documents.of([[1, 65535]]).tokens.dtype == np.uint16
    builder = DocumentBuilder()
    for row in ([1, 2], [], [70000], np.array([3], np.uint8)):
        builder.add(row)
    found = builder.documents()
    assert found.tokens.dtype == np.int32
    assert [found.row(index).tolist() for index in range(4)] == [[1, 2], [], [70000], [3]]
    assert found.select([2, 0]).row(1).tolist() == [1, 2]
    assert builder.documents().count == 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Documents.of([[1], [-1]]), "Document 1 must be a sequence of token ids, ints from 0 to 2147483647"),
        (lambda: Documents.of([[0.5]]), "got [0.5]"),
        (lambda: PackedBatches([[3]], rows=1, length=4)(0), "no document of at least two tokens"),
        (lambda: PackedBatches([[3, 4]], rows=0, length=4), "`rows` must be a Python int >= 1, got 0"),
        (lambda: BucketedBatches([[3] * 9], rows=1, length=8), "A document has 9 tokens, but `length` is 8"),
        (lambda: BucketedBatches([], rows=1, length=8), "one example at least; got {'documents': 0}"),
        (
            lambda: BucketedBatches([[3], [4]], rows=1, length=8, labels=dict(labels=[1])),
            "one entry of every array, and one example at least; got {'documents': 2, 'labels': 1}",
        ),
        (
            lambda: BucketedBatches([[3], [4]], rows=3, length=8, drop_incomplete=True),
            "There are 2 examples, fewer than the 3 rows of a batch",
        ),
    ],
)
def test_errors(make, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        make()
