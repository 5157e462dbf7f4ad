"""`hf.extend`, then `hf.save`: the tokenizer's files have the new maximum length, or a warning names them."""

import json
import re
import shutil
import warnings

import jax.numpy as jnp
import pytest
from flax import nnx

from longspan import hf, models
from tests.made import made

SIZES = dict(
    vocab_size=19, hidden_size=12, num_attention_heads=3, num_hidden_layers=1, intermediate_size=10,
    max_position_embeddings=512,
)  # fmt: skip
ROBERTA = dict(SIZES, max_position_embeddings=514)
HUGE = 10**30  # the limit in tokenizers that have none
TOKENIZER = {
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0},
    "padding": {"strategy": {"Fixed": 512}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[PAD]": 0, "[UNK]": 1, "é": 2, "b": 3}, "unk_token": "[UNK]"},
}


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def short(tmp_path):
    """A BERT of 512 tokens, with the limit in every place that a tokenizer has."""
    where = tmp_path / "short"
    where.mkdir()
    write(where, "tokenizer.json", TOKENIZER)
    write(where, "tokenizer_config.json", dict(model_max_length=512, max_length=128, do_lower_case=True))
    hf.save(made(models.Encoder, models.BertConfig(**SIZES)), where)
    return where


def write(where, name, content):
    where.mkdir(exist_ok=True)
    (where / name).write_text(json.dumps(content))


def read(where, name):
    return json.loads((where / name).read_text())


def extended(where, positions=1000):
    return hf.extend(hf.load(where), max_positions=positions, window=8)


def test_a_tokenizer_that_comes_along_has_the_new_limit(short, tmp_path, caplog):
    with caplog.at_level("INFO", logger="longspan.hf"):
        hf.save(extended(short), tmp_path / "long")
    assert read(tmp_path / "long", "tokenizer_config.json") == dict(
        model_max_length=1000, max_length=1000, do_lower_case=True
    )
    assert "tokenizer_config.json: raised model_max_length from 512 to 1000, the model's maximum length" in caplog.text
    got = read(tmp_path / "long", "tokenizer.json")
    assert (got["truncation"]["max_length"], got["padding"]["strategy"]) == (1000, {"Fixed": 1000})
    for section in ("truncation", "padding"):
        got[section] = TOKENIZER[section]
    assert got == TOKENIZER and list(got) == list(TOKENIZER)
    assert read(short, "tokenizer_config.json")["model_max_length"] == 512, "the short model's own files stay"


def test_the_tokenizer_library_reads_what_was_written(short, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    hf.save(extended(short), tmp_path / "long")
    text = " ".join(["é", "b"] * 400)
    lengths = [
        len(tokenizers.Tokenizer.from_file(str(where / "tokenizer.json")).encode(text).ids)
        for where in (short, tmp_path / "long")
    ]
    assert lengths == [512, 1000]
    ids = tokenizers.Tokenizer.from_file(str(tmp_path / "long" / "tokenizer.json")).encode(text).ids
    assert ids[:4] == [2, 3, 2, 3] and ids[798:801] == [2, 3, 0]
    assert hf.load(tmp_path / "long")(jnp.asarray([ids])).last_hidden_state.shape == (1, 1000, 12)


@pytest.mark.parametrize("change", [lambda model: model.encoder, nnx.clone], ids=["encoder", "clone"])
def test_the_limit_survives_changes_of_the_extended_model(change, short, tmp_path):
    model = hf.extend(
        hf.load(short, task="token_classification", num_labels=2, rngs=nnx.Rngs(0)), max_positions=1000, window=8
    )
    hf.save(change(model), tmp_path / "long")
    assert read(tmp_path / "long", "tokenizer_config.json")["model_max_length"] == 1000


def test_saved_over_the_short_model_every_file_there_has_the_new_limit(short):
    for name in ("sentence_bert_config.json", "sentence_xlm-roberta_config.json"):
        write(short, name, dict(max_seq_length=256, do_lower_case=False))
    hf.save(extended(short), short)
    assert read(short, "tokenizer_config.json")["model_max_length"] == 1000
    assert read(short, "tokenizer.json")["truncation"]["max_length"] == 1000
    for name in ("sentence_bert_config.json", "sentence_xlm-roberta_config.json"):
        assert read(short, name) == dict(max_seq_length=1000, do_lower_case=False)
    before = {path.name: path.read_bytes() for path in short.iterdir()}
    hf.save(hf.load(short), short)
    assert {path.name: path.read_bytes() for path in short.iterdir()} == before


def test_a_named_tokenizers_copy_has_the_new_limit(short, tmp_path):
    shutil.copytree(short, tmp_path / "named")
    hf.save(extended(short), tmp_path / "long", tokenizer=tmp_path / "named")
    assert read(tmp_path / "long", "tokenizer_config.json")["model_max_length"] == 1000
    assert read(tmp_path / "named", "tokenizer_config.json")["model_max_length"] == 512


def test_files_that_save_does_not_own_stay_and_are_reported(short, tmp_path):
    new = tmp_path / "new"
    write(new, "tokenizer.json", TOKENIZER)
    write(new, "tokenizer_config.json", dict(model_max_length=512))
    write(new, "sentence_bert_config.json", dict(max_seq_length=128))
    with pytest.warns(UserWarning, match="The model reads up to 1000 tokens, but ") as caught:
        hf.save(extended(short), new)
    (message,) = [str(warning.message) for warning in caught]
    for line in (
        f"{new / 'tokenizer_config.json'} has model_max_length=512",
        f"{new / 'tokenizer.json'} has truncation.max_length=512",
        f"{new / 'tokenizer.json'} has padding.strategy.Fixed=512",
        f"{new / 'sentence_bert_config.json'} has max_seq_length=128",
        "Longer texts are truncated to these limits. To use the model's full length, set each limit to 1000.",
    ):
        assert line in message
    assert read(new, "tokenizer_config.json") == dict(model_max_length=512)
    # The remedy in the warning.
    write(new, "tokenizer_config.json", dict(model_max_length=1000))
    write(new, "sentence_bert_config.json", dict(max_seq_length=1000))
    write(new, "tokenizer.json", TOKENIZER | dict(truncation=None, padding=None))
    hf.save(extended(short), new)
    write(new, "tokenizer_config.json", dict(model_max_length=512))
    text = "=512. Longer texts are truncated to this limit. To use the model's full length, set it to 1000."
    with pytest.warns(UserWarning, match=re.escape(text)):
        hf.save(extended(short), new)


def test_a_model_that_was_never_loaded_reports_its_tokenizers_limit(short, tmp_path):
    model = hf.extend(made(models.Encoder, models.BertConfig(**SIZES)), max_positions=1000, window=8)
    with pytest.warns(UserWarning, match=r"long/tokenizer_config\.json has model_max_length=512"):
        hf.save(model, tmp_path / "long", tokenizer=short)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"model_max_length": null}', '{"model_max_length": "512"}', f'{{"model_max_length": {HUGE}}}'],
)
def test_a_file_without_a_lower_limit_is_copied_unchanged(content, short, tmp_path):
    (short / "tokenizer_config.json").write_text(content)
    (short / "tokenizer.json").write_text('{"truncation": null, "padding": {"strategy": "BatchLongest"}}')
    hf.save(extended(short), tmp_path / "long")
    for name in ("tokenizer_config.json", "tokenizer.json"):
        assert (tmp_path / "long" / name).read_bytes() == (short / name).read_bytes()


def test_a_limit_below_the_models_own_stays_in_a_model_that_was_not_extended(short, tmp_path):
    write(short, "tokenizer_config.json", dict(model_max_length=128))
    hf.save(hf.load(short), tmp_path / "same")
    assert read(tmp_path / "same", "tokenizer_config.json") == dict(model_max_length=128)
    hf.save(extended(short, 512), tmp_path / "as long")
    assert read(tmp_path / "as long", "tokenizer_config.json") == dict(model_max_length=128)


@pytest.mark.parametrize(
    ("config", "table"), [(models.BertConfig(**SIZES), 512), (models.RobertaConfig(**ROBERTA), 514)]
)
def test_keys_of_the_config_that_repeat_the_limit_have_the_new_one(config, table, tmp_path):
    write(tmp_path, "tokenizer.json", TOKENIZER | dict(truncation=None, padding=None))
    hf.save(made(models.Encoder, config), tmp_path)
    write(tmp_path, "config.json", read(tmp_path, "config.json") | dict(max_seq_length=512, model_max_length=table))
    hf.save(extended(tmp_path), tmp_path / "long")
    raw = read(tmp_path / "long", "config.json")
    assert (raw["max_seq_length"], raw["model_max_length"]) == (1000, 1000)
    first = config.pad_token_id + 1
    assert raw["max_position_embeddings"] == 1000 + first
