"""`hf.extend`: short texts keep their encodings, long ones have positions, heads come along."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from longspan import hf, models
from tests.made import made

SIZES = dict(
    vocab_size=19, hidden_size=12, num_attention_heads=3, num_hidden_layers=2, intermediate_size=10,
    max_position_embeddings=37, initializer_range=0.4,
)  # fmt: skip
TASKS = [models.Encoder, models.MaskedLM, models.SequenceClassifier, models.TokenClassifier, models.QuestionAnswering]
FAMILIES = {"bert": models.BertConfig, "roberta": models.RobertaConfig}
IDS = np.random.default_rng(0).integers(3, 19, (2, 23)).astype(np.int32)


def make(family, task=models.Encoder, **changes):
    return made(task, FAMILIES[family](**SIZES, **changes), seed=2)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_short_texts_keep_their_outputs(family, task):
    short = make(family, task)
    long = hf.extend(short, max_positions=100, window=23, sep_token_id=4)
    mask = np.arange(23)[None] < np.array([[23], [15]])
    ids = np.where(mask, IDS, np.int32(short.config.pad_token_id))
    before, after = short(ids, mask), long(ids, mask, global_attention_mask=np.zeros_like(ids))
    for field in ("logits", "start_logits", "end_logits", "pooler_output"):
        if getattr(after, field) is not None:
            got, want = (np.asarray(getattr(output, field))[:, :15] for output in (after, before))
            np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(
        np.where(mask[..., None], after.last_hidden_state, 0), np.where(mask[..., None], before.last_hidden_state, 0),
        atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_with_one_window_global_tokens_change_nothing_at_first(family):
    short = make(family)
    long = hf.extend(short, max_positions=100, window=23)
    got = long(IDS, global_attention_mask=(IDS % 4 == 0).astype(jnp.int32)).last_hidden_state
    np.testing.assert_allclose(got, short(IDS).last_hidden_state, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_repeat_with_the_old_table(family):
    short = make(family)
    long = hf.extend(short, max_positions=100, window=5)
    old, new = (m.embeddings.position.embedding[...][m.config.first_position :] for m in (short, long))
    assert len(new) == 100
    for i in (0, 1, len(old) - 1, len(old), 99):
        np.testing.assert_array_equal(new[i], old[i % len(old)])
    assert long(jnp.tile(IDS, (1, 4))).last_hidden_state.shape == (2, 92, 12)


def test_robertas_of_other_names_are_extended_too():
    short = made(models.Encoder, models.CamembertConfig(**SIZES, extra='{"eos_token_id": 6}'), seed=2)
    long = hf.extend(short, max_positions=100, window=23)
    assert (long.config.model_type, long.config.sep_token_id) == ("longformer", 6)
    np.testing.assert_allclose(long(IDS).last_hidden_state, short(IDS).last_hidden_state, atol=1e-5)


def test_the_models_share_no_parameters():
    short = make("bert")
    long = hf.extend(short, max_positions=50, window=5)
    before = short(IDS).last_hidden_state
    nnx.update(long, nnx.state(hf.extend(make("bert", hidden_dropout_prob=0.2), max_positions=50, window=5)))
    long.embeddings.word.embedding[...] = jnp.zeros((19, 12))
    np.testing.assert_array_equal(short(IDS).last_hidden_state, before)


def test_what_cannot_be_extended_is_refused():
    with pytest.raises(
        ValueError, match="turns a bert, roberta, xlm-roberta or camembert model into a Longformer, got a longformer"
    ):
        hf.extend(hf.extend(make("bert"), max_positions=50, window=5))
    with pytest.raises(ValueError, match="max_positions=36 must be at least 37"):
        hf.extend(make("bert"), max_positions=36)
    with pytest.raises(ValueError, match=r"has 'relu'. Extend only the encoder: `extend\(model.encoder\)`"):
        hf.extend(make("bert", models.MaskedLM, hidden_act="relu"), max_positions=50)


def test_the_separator_of_a_berts_questions_must_be_known():
    short = make("bert", models.QuestionAnswering)
    with pytest.raises(ValueError, match="Pass `sep_token_id`"):
        hf.extend(short)
    long = hf.extend(short, max_positions=100, window=5, sep_token_id=4)
    assert long.question(jnp.array([[7, 8, 4, 9]])).tolist() == [[True, True, False, False]]
