"""Checkpoints on disk: the files that `load` accepts, its errors, and that `save` loses nothing."""

import json
import logging
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from longspan import hf, models
from longspan.hf.names import task_of
from tests.made import made

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = sorted(p.name for p in GOLDEN.iterdir() if (p / "config.json").is_file())
IDS = jnp.array([[5, 9, 7, 11, 4, 13]])


@pytest.fixture
def copy(tmp_path):
    """A copy of a golden checkpoint to break, and functions that change its parts."""

    def make(name="bertModel", *, config=None, tensors=None):
        where = tmp_path / name
        shutil.copytree(GOLDEN / name, where)
        if config:
            raw = json.loads((where / "config.json").read_text())
            config(raw)
            (where / "config.json").write_text(json.dumps(raw))
        if tensors:
            arrays = dict(load_file(where / "model.safetensors"))
            tensors(arrays)
            save_file(arrays, where / "model.safetensors", metadata={"format": "pt"})
        return where

    return make


@pytest.mark.parametrize("name", NAMES)
def test_save_writes_back_every_tensor_and_number(name, tmp_path):
    hf.save(hf.load(GOLDEN / name), tmp_path)
    before, after = load_file(GOLDEN / name / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    for key in before:
        np.testing.assert_array_equal(before[key], after[key], err_msg=key)
    old, new = (json.loads((d / "config.json").read_text()) for d in (GOLDEN / name, tmp_path))
    assert {k: new.get(k) for k in old} == old


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_is_the_files_or_the_callers(dtype, tmp_path):
    hf.save(hf.load(GOLDEN / "bertModel", dtype=dtype), tmp_path)
    model = hf.load(tmp_path)
    assert {v.dtype for v in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype(dtype)}

    def computed(model):
        return nnx.eval_shape(lambda model: model(IDS).last_hidden_state, model).dtype

    assert computed(model) == jnp.dtype(dtype)
    assert computed(hf.load(tmp_path, dtype=jnp.float32)) == jnp.float32


def test_shards_with_an_index_load_like_one_file(copy):
    where = copy()
    arrays = dict(load_file(where / "model.safetensors"))
    names = sorted(arrays)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in files.items():
        save_file({k: arrays[k] for k in keys}, where / file)
    (where / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {k: f for f, keys in files.items() for k in keys}}
    (where / "model.safetensors.index.json").write_text(json.dumps(index))
    same(hf.load(where), hf.load(GOLDEN / "bertModel"))
    (where / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lists files that do not exist: b\.safetensors"):
        hf.load(where)


def test_one_error_lists_everything_that_does_not_fit(copy):
    def damage(arrays):
        del arrays["encoder.layer.0.attention.self.query.bias"], arrays["encoder.layer.1.output.dense.weight"]
        arrays["encoder.layer.7.output.dense.weight"] = np.zeros(3, np.float32)
        arrays["embeddings.word_embeddings.weight"] = np.zeros((24, 12), np.float32)

    with pytest.raises(ValueError, match="do not fit its config") as error:
        hf.load(copy(tensors=damage))
    text = str(error.value)
    assert "Missing (2):" in text
    assert "Wrong size in config.json (2):\n  num_hidden_layers=2, but model.safetensors has the tensors of 3" in text
    assert "vocab_size=23, but embeddings.word_embeddings.weight in model.safetensors is [24, 12]" in text
    assert "encoder.layer.0.attention.self.query.bias [12]" in text
    assert "encoder.layer.1.output.dense.weight [12, 20]" in text
    assert "Unexpected (1):\n  encoder.layer.7.output.dense.weight" in text
    assert "Wrong shape (1):\n  embeddings.word_embeddings.weight is [24, 12], but the config needs [23, 12]" in text


def test_buffers_and_other_heads_are_ignored_and_named(copy, caplog):
    def add(arrays):
        arrays["embeddings.position_ids"] = np.arange(71)[None]
        arrays["cls.predictions.bias"] = np.zeros(23, np.float32)

    with caplog.at_level(logging.INFO, logger="longspan.hf"):
        hf.load(copy(tensors=add))
    assert re.search(r"ignored embeddings\.position_ids \(tables of constants\)", caplog.text)
    assert re.search(r"ignored cls\.predictions\.bias \(another task's head\)", caplog.text)


def test_a_load_of_a_fitting_file_logs_nothing(caplog):
    with caplog.at_level(logging.INFO, logger="longspan.hf"):
        hf.load(GOLDEN / "longformerForSequenceClassification")
    assert not caplog.text


def test_without_pooler_there_is_no_pooler_output(copy):
    def damage(arrays):
        del arrays["pooler.dense.weight"], arrays["pooler.dense.bias"]

    assert hf.load(copy(tensors=damage))(IDS).pooler_output is None


def test_a_classifier_that_reads_the_pooler_needs_it(copy):
    def damage(arrays):
        del arrays["bert.pooler.dense.weight"]

    with pytest.raises(ValueError, match=r"Missing \(1\):\n  pooler\.dense\.weight"):
        hf.load(copy("bertForSequenceClassification", tensors=damage))


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("MaskedLM")])
def test_an_encoder_loads_from_a_file_with_a_head(name, caplog):
    encoder, model = hf.load(GOLDEN / name, task="encoder"), hf.load(GOLDEN / name)
    assert "another task's head" in caplog.text
    same(encoder, model.encoder)


def test_a_new_head_needs_rngs_and_gets_them(caplog):
    with pytest.raises(ValueError, match=r"Missing \(2\):\n  classifier\.bias \[7\]"):
        hf.load(GOLDEN / "bertModel", task="token_classification", num_labels=7)
    model = hf.load(GOLDEN / "bertModel", task="token_classification", num_labels=7, rngs=nnx.Rngs(0))
    assert "bertModel: new, randomly initialised: classifier.bias, classifier.weight" in caplog.text
    assert "ignored" not in caplog.text.replace("ignored pooler", "")
    assert model(IDS).logits.shape == (1, 6, 7)
    same(model.encoder, hf.load(GOLDEN / "bertModel", task="encoder"), ignore="pooler")


def test_untied_decoder_weights_count_whatever_the_config_says(copy, tmp_path):
    def untie(arrays):
        arrays["cls.predictions.decoder.weight"] = np.ones((23, 12), np.float32)
        arrays["cls.predictions.decoder.bias"] = np.arange(23, dtype=np.float32)

    model = hf.load(copy("bertForMaskedLM", tensors=untie))
    assert not model.config.tie_word_embeddings
    logits = model(IDS).logits[0, 0] - jnp.arange(23, dtype=jnp.float32)
    np.testing.assert_allclose(logits, jnp.full_like(logits, logits[0]), atol=1e-5)
    hf.save(model, tmp_path / "again")
    same(hf.load(tmp_path / "again"), model)


def test_tied_decoder_weights_in_a_file_are_the_word_embeddings(copy):
    def tie(arrays):
        arrays["cls.predictions.decoder.weight"] = arrays["bert.embeddings.word_embeddings.weight"].copy()
        arrays["cls.predictions.decoder.bias"] = arrays["cls.predictions.bias"].copy()

    model = hf.load(copy("bertForMaskedLM", tensors=tie))
    assert model.config.tie_word_embeddings
    same(model, hf.load(GOLDEN / "bertForMaskedLM"))


def test_layer_norms_may_have_their_tensorflow_names(copy):
    def rename(arrays):
        for key in [k for k in arrays if "LayerNorm" in k]:
            arrays[key.replace("weight", "gamma").replace("bias", "beta")] = arrays.pop(key)

    same(hf.load(copy(tensors=rename)), hf.load(GOLDEN / "bertModel"))


def test_a_pickle_is_refused_with_the_way_to_convert_it(copy):
    where = copy()
    (where / "model.safetensors").rename(where / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has pytorch_model\.bin, a pickle") as error:
        hf.load(where)
    assert "weights_only=True" in str(error.value)
    compile(str(error.value).split("where torch is installed:\n")[1], "advice", "exec")


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path, copy):
    with pytest.raises(FileNotFoundError, match=r"'allenai/x' is not a directory, and Longspan does not download"):
        hf.load("allenai/x")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json\. It contains: notes\.txt"):
        hf.load(tmp_path)
    where = copy()
    (where / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has neither model\.safetensors nor"):
        hf.load(where)


def test_a_cut_off_file_is_named(copy):
    where = copy()
    content = (where / "model.safetensors").read_bytes()
    (where / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
        hf.load(where)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_type="t5"), "has model_type='t5', but Longspan supports 'bert', 'big_bird', "),
        (dict(is_decoder=True), "has is_decoder=true, but Longspan supports only the encoders of this family"),
        (dict(position_embedding_type="relative_key"), "position_embedding_type='relative_key'"),
        (dict(hidden_act="xielu"), "hidden_act='xielu' is not one of"),
        (dict(num_attention_heads=5), "hidden_size=12 must be a multiple of num_attention_heads=5"),
    ],
)
def test_configs_that_cannot_work_are_refused(changes, message, copy):
    with pytest.raises(ValueError, match=re.escape(message)):
        hf.load(copy(config=lambda raw: raw.update(changes)))


def test_the_error_for_an_unknown_family_has_a_remedy_that_works(copy):
    where = copy(config=lambda raw: raw.update(model_type="my_bert"))
    with pytest.raises(
        ValueError, match=r"set `model_type` in config\.json to .* CONTRIBUTING\.md explains in 'Adding a model family'"
    ):
        hf.load(where)
    assert "## Adding a model family" in (GOLDEN.parent.parent / "CONTRIBUTING.md").read_text()
    raw = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps(raw | dict(model_type="bert")))
    same(hf.load(where), hf.load(GOLDEN / "bertModel"))


def test_wrong_choices_list_the_right_ones():
    with pytest.raises(ValueError, match=re.escape("random_blocks='none' is not one of 'trained', 'hf_eval'.")):
        hf.load(GOLDEN / "big_birdModel", random_blocks="none")
    with pytest.raises(ValueError, match="task='ner' is not one of 'encoder', 'masked_lm', 'sequence_classification'"):
        hf.load(GOLDEN / "bertModel", task="ner")
    with pytest.raises(ValueError, match="must be even"):
        hf.config.from_json(dict(model_type="longformer", attention_window=5))


def test_numbers_left_out_of_a_config_are_hugging_faces_defaults():
    config = hf.config.from_json(dict(model_type="longformer"))
    assert (config.window, config.layer_norm_eps, config.max_position_embeddings) == (256, 1e-12, 512)


@pytest.mark.parametrize("step", ["write", "first rename", "second rename"])
def test_an_interrupted_save_leaves_the_last_good_one(step, tmp_path, monkeypatch):
    good, other = hf.load(GOLDEN / "bertModel"), hf.load(GOLDEN / "robertaModel")
    hf.save(good, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")

    name, fatal = dict(write=("fsync", 1), **{"first rename": ("replace", 1), "second rename": ("replace", 2)})[step]
    real, calls = getattr(os, name), []

    def fail(*args):
        calls.append(args)
        if len(calls) == fatal:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(KeyboardInterrupt):
        hf.save(other, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors", "tokenizer.json"]
    same(hf.load(tmp_path), good)


def test_a_save_over_shards_is_what_loads_next(copy):
    where = copy()
    (where / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    model = hf.load(GOLDEN / "robertaModel")
    hf.save(model, where)
    assert not (where / "model.safetensors.index.json").exists()
    same(hf.load(where), model)


def test_labels_are_saved_if_there_are_not_two(tmp_path):
    config = models.RobertaConfig(vocab_size=7, hidden_size=6, num_attention_heads=2, num_hidden_layers=1, num_labels=5)
    hf.save(made(models.TokenClassifier, config), tmp_path)
    assert hf.load(tmp_path).config.num_labels == 5


def test_windows_of_zero_cannot_be_saved(tmp_path):
    config = models.LongformerConfig(vocab_size=7, hidden_size=6, num_attention_heads=2, num_hidden_layers=1, window=0)
    with pytest.raises(ValueError, match="window=0 cannot be saved"):
        hf.save(made(models.Encoder, config), tmp_path)


def same(a, b, ignore="nothing"):
    left, right = (dict(nnx.to_flat_state(nnx.state(m, nnx.Param))) for m in (a, b))
    drop = lambda flat: {k: v for k, v in flat.items() if ignore not in k}  # noqa: E731
    left, right = drop(left), drop(right)
    assert left.keys() == right.keys()
    for path in left:
        np.testing.assert_array_equal(left[path][...], right[path][...], err_msg=str(path))


def test_the_saved_dtype_is_the_parameters(tmp_path):
    hf.save(hf.load(GOLDEN / "bertModel", dtype="float16"), tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"
    hf.save(hf.load(tmp_path / "half", dtype="float32"), tmp_path / "whole")
    raw = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert raw["dtype"] == "float32" and "torch_dtype" not in raw


def test_a_question_answering_model_has_two_labels_whatever_it_was_made_from(tmp_path):
    model = hf.load(GOLDEN / "bertForSequenceClassification", task="question_answering", rngs=nnx.Rngs(0))
    assert model.config.num_labels != 2
    hf.save(model, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert len(raw["id2label"]) == len(raw["label2id"]) == 2
    same(hf.load(tmp_path), model)


def test_a_classifier_from_a_masked_lm_gets_a_new_pooler_too(caplog):
    model = hf.load(GOLDEN / "bertForMaskedLM", task="sequence_classification", num_labels=3, rngs=nnx.Rngs(0))
    logits = nnx.jit(lambda model: model(np.ones((1, 5), int)).logits)(model)
    assert logits.shape == (1, 3) and np.isfinite(logits).all()
    assert "pooler.dense.weight" in caplog.text
    with pytest.raises(ValueError, match=r"Missing \(4\):\n  classifier"):
        hf.load(GOLDEN / "bertForMaskedLM", task="sequence_classification")


@pytest.mark.parametrize("family", ["roberta", "longformer", "big_bird"])
@pytest.mark.parametrize("tasks", [("Sequence", "token"), ("Token", "sequence")], ids="-to-".join)
def test_another_tasks_head_of_the_same_name_is_ignored(family, tasks):
    where, task = GOLDEN / f"{family}For{tasks[0]}Classification", f"{tasks[1]}_classification"
    model = hf.load(where, task=task, num_labels=5, rngs=nnx.Rngs(0))
    assert model.classifier.kernel.shape[-1] == 5


def test_a_subclass_is_saved_as_what_it_is_made_from(tmp_path):
    class Mine(models.SequenceClassifier):
        pass

    config = models.BertConfig(vocab_size=7, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
    hf.save(Mine(config, rngs=nnx.Rngs(0)), tmp_path)
    assert type(hf.load(tmp_path)) is models.SequenceClassifier
    with pytest.raises(TypeError, match=r"Expected a model of longspan\.models, one of Encoder, MaskedLM"):
        task_of(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
