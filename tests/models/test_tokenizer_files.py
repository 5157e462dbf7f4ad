"""The other files of `save`: the tokenizer, labels and the generation config; and leftovers of killed saves."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from longspan import hf, models
from tests.made import made

GOLDEN = Path(__file__).parent.parent / "golden"
BERTS = {"vocab.txt": "[PAD]\n", "tokenizer_config.json": '{"a": 1}', "special_tokens_map.json": "{}"}
OTHER = {"tokenizer.json": "{}", "tokenizer_config.json": '{"b": 2}'}


@pytest.fixture
def source(tmp_path):
    """A checkpoint with a tokenizer and generation settings."""
    where = tmp_path / "source"
    shutil.copytree(GOLDEN / "bertForSequenceClassification", where)
    return put(where, BERTS | {"generation_config.json": '{"top_k": 3}', "README.md": "hello"})


def put(where, files):
    where.mkdir(exist_ok=True)
    for name, content in files.items():
        (where / name).write_text(content)
    return where


def beside(where):
    """The files of a directory other than the model's."""
    ours = {"config.json", "model.safetensors", "cases.safetensors"}
    return {p.name: p.read_text() for p in where.iterdir() if p.name not in ours}


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_the_tokenizer_comes_along_from_where_the_model_was_loaded(source, tmp_path):
    hf.save(hf.load(source), tmp_path / "new")
    assert beside(tmp_path / "new") == BERTS | {"generation_config.json": '{"top_k": 3}'}


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nnx.merge(*nnx.split(model)),
        lambda model: nnx.clone(model),
        lambda model: nnx.jit(lambda m: m)(model),
        lambda model: model.encoder,
        lambda model: hf.extend(model, max_positions=100, window=3),
        lambda model: hf.extend(model, max_positions=100, window=3).encoder,
    ],
    ids=["split and merge", "clone", "jit", "encoder", "extend", "extended encoder"],
)
def test_a_model_keeps_its_source_after_changes(change, source, tmp_path):
    model = change(hf.load(source))
    assert model.source == str(source.resolve())
    hf.save(model, tmp_path / "new")
    assert beside(tmp_path / "new").keys() == BERTS.keys() | {"generation_config.json"}


def test_a_directory_is_no_parameter(source):
    model = hf.load(source)
    assert len(jax.tree.leaves(nnx.state(model))) == len(jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert made(models.Encoder, models.BertConfig(**SIZES)).source is None


def test_a_tokenizer_that_is_there_stays(source, tmp_path):
    hf.save(hf.load(source), put(tmp_path / "new", OTHER))
    assert beside(tmp_path / "new") == OTHER | {"generation_config.json": '{"top_k": 3}'}


def test_a_given_tokenizer_replaces_an_existing_one(source, tmp_path):
    named, new = put(tmp_path / "named", BERTS | {"notes.txt": ""}), put(tmp_path / "new", OTHER | {"mine.txt": "x"})
    model = hf.load(source)
    hf.save(model, new, tokenizer=named)
    # No file of the old tokenizer is left.
    assert beside(new) == BERTS | {"mine.txt": "x", "generation_config.json": '{"top_k": 3}'}
    with pytest.raises(FileNotFoundError, match="must be a directory with a tokenizer, one of"):
        hf.save(model, tmp_path / "newer", tokenizer=tmp_path / "nowhere")
    assert not (tmp_path / "newer").exists()


def test_no_tokenizer_is_a_warning(source, tmp_path):
    model = made(models.Encoder, models.BertConfig(**SIZES))
    with pytest.warns(UserWarning, match=r"No tokenizer is saved: the model was not loaded.*Pass `tokenizer=`"):
        hf.save(model, tmp_path / "made")
    with pytest.warns(UserWarning, match=r"No tokenizer is saved: .*bertModel has none"):
        hf.save(hf.load(GOLDEN / "bertModel"), tmp_path / "bare")
    hf.save(model, tmp_path / "made", tokenizer=source)
    assert beside(tmp_path / "made") == BERTS
    model = hf.load(source)
    shutil.rmtree(source)
    with pytest.warns(UserWarning, match="No tokenizer is saved"):
        hf.save(model, tmp_path / "orphan")


def test_a_model_is_saved_where_it_was_loaded_from(source):
    before, model = beside(source), hf.load(source)
    model.classifier.bias[...] = model.classifier.bias[...] + 1
    hf.save(model, source)
    assert beside(source) == before
    np.testing.assert_array_equal(hf.load(source).classifier.bias[...], model.classifier.bias[...])
    hf.save(model, source, tokenizer=source)
    assert beside(source) == before


def test_labels_come_along_or_are_given(source, tmp_path):
    model = hf.load(source)
    count = model.config.num_labels
    for given in ([f"kind {i}" for i in range(count)], {i: f"kind {i}" for i in range(count)}):
        hf.save(model, tmp_path / "named", id2label=given)
        raw = json.loads((tmp_path / "named" / "config.json").read_text())
        assert raw["id2label"] == {str(i): f"kind {i}" for i in range(count)}
        assert raw["label2id"] == {f"kind {i}": i for i in range(count)}
    hf.save(hf.load(tmp_path / "named"), tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["id2label"] == raw["id2label"]
    with pytest.raises(
        ValueError, match=f"`id2label` must have a string for each of the {count} labels, 0 to {count - 1}, got"
    ):
        hf.save(model, tmp_path / "named", id2label=["one"])
    with pytest.raises(ValueError, match=f"`id2label` must have {count} different names"):
        hf.save(model, tmp_path / "named", id2label=["one"] * count)


@pytest.mark.parametrize("fatal", range(1, 6))
def test_an_interrupted_save_leaves_the_old_tokenizer_too(fatal, source, tmp_path, monkeypatch):
    new = put(tmp_path / "new", OTHER)
    hf.save(hf.load(GOLDEN / "robertaModel"), new)
    before = {p.name: p.read_bytes() for p in new.iterdir()}
    real, calls = os.replace, []

    def fail(*args):
        calls.append(args)
        if len(calls) == fatal:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        hf.save(hf.load(source), new, tokenizer=source)
    assert {p.name: p.read_bytes() for p in new.iterdir()} == before


def test_leftovers_of_killed_saves_are_removed_by_the_next_save(source):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    host, day = socket.gethostname(), 24 * 3600
    dead, alive, elsewhere, old = (
        put(source / f".saving-{name}-x1_y", {"x": "y"})
        for name in (f"{host}-{process.pid}", f"{host}-{os.getpid()}", f"other-{host}-{process.pid}", "another-7")
    )
    os.utime(old, (time.time() - 2 * day,) * 2)
    hf.save(hf.load(source), source)
    assert [folder.exists() for folder in (dead, alive, elsewhere, old)] == [False, True, True, False]


def test_leftovers_of_a_killed_save_stay_until_a_save_succeeds(source, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    left = put(source / f".saving-{socket.gethostname()}-{process.pid}-abc", {"x": "y"})
    model = hf.load(source)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        hf.save(model, source)
    assert left.exists()


SIZES = dict(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1, intermediate_size=5)
