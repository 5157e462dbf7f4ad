"""The losses and metrics of training tasks equal plain NumPy ones computed from the models' outputs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspan import models
from longspan.train.data import BucketedBatches, MaskedBatches, PackedBatches
from longspan.train.tasks import CausalLMTraining, ClassificationTraining, EmbeddingTraining, MaskedLMTraining
from tests.made import made

SIZES = dict(hidden_size=6, num_attention_heads=2, num_hidden_layers=1, intermediate_size=7, initializer_range=0.5)
BERT = models.BertConfig(vocab_size=23, num_labels=3, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **SIZES)
KEY = jax.random.key(0)


def log_softmax(scores):
    wide = np.asarray(scores, np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def documents(count, seed=0, longest=9):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 23, rng.integers(2, longest)) for _ in range(count)]


def close(found, wanted):
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=2e-5)


def plain_loss(logits, labels):
    """The mean over the labels that count, and their number."""
    logits, labels = np.asarray(logits).reshape(-1, np.shape(logits)[-1]), np.asarray(labels).reshape(-1)
    kept = labels >= 0
    return -log_softmax(logits[kept])[np.arange(kept.sum()), labels[kept]].mean(), kept.sum()


def test_the_rows_that_fill_up_a_batch_do_not_count_in_a_classifier():
    labels = dict(labels=np.array([2, 0, 1, 1]))
    batch = BucketedBatches(documents(4), rows=7, length=11, labels=labels)(0)
    model, task = made(models.SequenceClassifier, BERT), ClassificationTraining()
    logits = np.asarray(model(batch["input_ids"], batch["attention_mask"]).logits)
    wanted, count = plain_loss(logits, batch["labels"])
    loss, weight = task.loss(model, batch, KEY)
    close(loss, wanted)
    assert (float(weight), count) == (4, 4)
    found = task.evaluate(model, batch)
    close(found["eval_loss"][0], wanted)
    close(found["accuracy"][0], np.mean((logits.argmax(-1) == batch["labels"])[batch["labels"] >= 0]))
    empty = batch | dict(labels=np.full(7, -100))
    assert [float(x) for x in task.loss(model, empty, KEY)] == [0, 0]


@pytest.mark.parametrize("tied", [True, False])
def test_a_masked_lm_counts_the_replaced_tokens(tied):
    config = models.BertConfig(
        vocab_size=23, hidden_dropout_prob=0, attention_probs_dropout_prob=0, tie_word_embeddings=tied, **SIZES
    )
    rows = BucketedBatches(documents(5), rows=5, length=11)
    batch = MaskedBatches(rows, mask_token=3, vocab_size=23, special_tokens=(0, 1, 2, 3), rate=0.6)(0)
    model, task = made(models.MaskedLM, config), MaskedLMTraining()
    model.bias[...] = jnp.asarray(np.random.default_rng(0).normal(size=23), np.float32)
    logits = np.asarray(model(batch["input_ids"], batch["attention_mask"]).logits)
    wanted, count = plain_loss(logits, batch["labels"])
    assert count > 5
    loss, weight = task.loss(model, batch, KEY)
    close(loss, wanted)
    close(weight, count)
    kept = batch["labels"] >= 0
    close(task.evaluate(model, batch)["accuracy"][0], np.mean(logits.argmax(-1)[kept] == batch["labels"][kept]))


GRANITE = partial(models.GraniteConfig, logits_scaling=0.2)


@pytest.mark.parametrize("kind", [models.LlamaConfig, models.Gemma2Config, GRANITE])  # untied; tied, with a soft cap
def test_a_causal_lm_predicts_within_documents(kind):
    sizes = SIZES | dict(hidden_size=8, num_attention_heads=2, num_key_value_heads=1)
    model = made(models.CausalLM, kind(vocab_size=23, **sizes))
    batch = PackedBatches(documents(7), rows=2, length=17)(0)
    logits = model(batch["input_ids"], segment_ids=batch["segment_ids"]).logits
    wanted, count = plain_loss(logits, batch["labels"])
    loss, weight = CausalLMTraining().loss(model, batch, None)
    close(loss, wanted)
    close(weight, count)


def unit_vectors(model, batch, name):
    """The means over tokens, of length 1."""
    mask = batch[f"{name}_attention_mask"][..., None]
    hidden = np.asarray(model(batch[f"{name}_input_ids"], mask[..., 0]).last_hidden_state, np.float64)
    found = (hidden * mask).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
    return found / np.linalg.norm(found, axis=-1, keepdims=True)


@pytest.mark.parametrize("negatives", [False, True])
def test_embeddings_have_the_other_texts_of_a_batch_as_negatives(negatives):
    names = ("anchor", "positive", "negative")[: 2 + negatives]
    texts = {name: documents(5, seed) for seed, name in enumerate(names)}
    texts["positive"][3] = texts["positive"][1]  # not a negative of the first
    batch = BucketedBatches(texts, rows=5, length=13, drop_incomplete=True)(0)
    model = made(models.Encoder, BERT)
    unit = {name: unit_vectors(model, batch, name) for name in names}
    candidates = np.concatenate([unit[name] for name in names[1:]])
    scores = 20 * unit["anchor"] @ candidates.T
    ids = [row.tobytes() for row in batch["positive_input_ids"]]
    for row in range(5):
        for other in range(5):
            if other != row and ids[other] == ids[row]:
                scores[row, other] = -np.inf
    assert np.isinf(scores).sum() == 2
    loss, weight = EmbeddingTraining().loss(model, batch, KEY)
    close(loss, -log_softmax(scores).diagonal().mean())
    assert float(weight) == 5


@pytest.mark.parametrize("rows", [3, 7])
def test_recall_is_the_share_of_anchors_that_find_their_own_text(rows):
    texts = dict(anchor=documents(7, 5), positive=documents(7, 6))
    texts["positive"][:3] = texts["anchor"][:3]
    batch = BucketedBatches(texts, rows=7, length=13)(0)
    model = made(models.Encoder, BERT)
    cosines = unit_vectors(model, batch, "anchor") @ unit_vectors(model, batch, "positive").T
    found = EmbeddingTraining(rows=rows).evaluate(model, batch)
    close(found["recall_at_1"][0], np.mean(cosines.argmax(axis=1) == np.arange(7)))
    close(found["eval_loss"][0], -log_softmax(20 * cosines).diagonal().mean())
