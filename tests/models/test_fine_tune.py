"""The script that fine-tunes on text files, with a tiny model and a tokenizer of a few words."""

import json
import re
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from longspan import hf, models
from tests.cli import checkpoints
from tests.made import made

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "fine_tune.py"

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def model(tmp_path):
    """A Longformer of two layers, without a head."""
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=2, window=4)
    shape = dict(vocab_size=len(checkpoints.WORDS), max_position_embeddings=200, pad_token_id=0)
    config = models.LongformerConfig(**shape, **sizes, initializer_range=0.2)
    (tmp_path / "model").mkdir()
    return checkpoints.save(made(models.Encoder, config), tmp_path / "model", checkpoints.words())


def write_texts(folder, shortest):
    """Good documents contain a word that bad ones do not."""
    rng = np.random.default_rng(0)
    for label, own in (("good", "w1"), ("bad", "w2")):
        (folder / label).mkdir(parents=True)
        for number in range(20):
            words = [own if n < 12 else f"w{n}" for n in rng.integers(3, 27, rng.integers(shortest, 110))]
            (folder / label / f"{number}.txt").write_text(" ".join(words), "utf-8")
    return folder


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fine_tune.py", *map(str, arguments)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.mark.check
def test_it_learns_and_saves_what_others_load(model, tmp_path, monkeypatch, capsys):
    texts, out = write_texts(tmp_path / "texts", 5), tmp_path / "out"  # lengths are of two buckets
    options = ("--length", 128, "--rows", 4, "--epochs", 6, "--learning-rate", 1e-2)
    run(monkeypatch, "--model", model, "--texts", texts, "--out", out, *options)
    printed = capsys.readouterr()
    assert "accuracy 1.000 on held-out data" in printed.out.splitlines()[-1]
    said = re.findall(r"compiled the training step for (\d+ x \d+) in \d+\.\d s", printed.err)
    assert len(said) == len(set(said)) > 1, "once for each shape"
    config = json.loads((out / "config.json").read_text("utf-8"))
    assert config["id2label"] == {"0": "bad", "1": "good"}
    assert config["architectures"] == ["LongformerForSequenceClassification"]
    tokenizer, again = Tokenizer.from_file(str(out / "tokenizer.json")), hf.load(out)
    for word, label in (("w1", 1), ("w2", 0)):
        ids = tokenizer.encode(f"w15 {word} w19 {word} {word} w24").ids
        assert int(again(np.array([ids])).logits.argmax()) == label


def test_it_is_short():
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 80


@pytest.mark.check
def test_a_short_model_becomes_a_long_one(tmp_path, monkeypatch, capsys):
    (tmp_path / "bert").mkdir()
    texts = write_texts(tmp_path / "texts", 65)  # one bucket, so one program
    bert, out = checkpoints.bert(tmp_path / "bert"), tmp_path / "out"  # of 90 tokens
    options = ("--length", 128, "--rows", 4, "--epochs", 1)
    run(monkeypatch, "--model", bert, "--texts", texts, "--out", out, *options)
    assert "on held-out data" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["LongformerForSequenceClassification"]
    assert hf.load(out).config.max_tokens == 128
    assert (out / "tokenizer.json").is_file()
