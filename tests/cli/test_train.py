"""`longspan train`: its folder, its tasks, and one line for every wrong input."""

import errno
import json
import shutil

import jax
import numpy as np
import pytest

from longspan import hf, models, train
from longspan.train.embedder_module import TrainableEmbedder
from longspan.train.sources import standard_library
from longspan.train.survey import held_out_examples
from tests.cli import checkpoints
from tests.cli.asserts import assert_one_line
from tests.cli.docstrings import docstring_pairs, recalls
from tests.made import made

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def write_texts(folder, count=10, longest=40):
    """Good documents contain a word that bad ones do not."""
    rng = np.random.default_rng(0)
    for label, own in (("good", "w1"), ("bad", "w2")):
        (folder / label).mkdir(parents=True)
        for number in range(count):
            words = [own if n < 12 else f"w{n}" for n in rng.integers(3, 27, rng.integers(5, longest))]
            (folder / label / f"{number}.txt").write_text(" ".join(words), "utf-8")
    return folder


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts")


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]


BAD = {
    "nothing is given": ((), "Give MODEL_DIR, or --new CONFIG.json, or --resume RUN; got none of them."),
    "a model and a config": (("MODEL", "--new", "CONFIG", "--out", "RUN"), "got both."),
    "no folder": (("MODEL", "--data", "TEXTS"), "--out is missing. Name a new folder for the run."),
    "no data": (("MODEL", "--out", "RUN"), "--data is missing. Name a folder of text files, or a file of JSON lines."),
    "no such data": (("MODEL", "--out", "RUN", "--data", "nothing"), "nothing does not exist. Give a folder of text"),
    "both cures": (
        ("MODEL", "--data", "TEXTS", "--out", "RUN", "--split", "--truncate"),
        "--split and --truncate were both given, but they exclude each other. Give one of them.",
    ),
    "another family's task": (
        ("MODEL", "--data", "TEXTS", "--out", "RUN", "--task", "causal_lm"),
        "--task causal_lm is not supported for a bert. Its tasks are sequence_classification, masked_lm, embeddings.",
    ),
    "too long for the model": (
        ("MODEL", "--data", "TEXTS", "--out", "RUN", "--length", 91),
        "--length 91 is more than the 90 tokens that <MODEL> takes. Give at most 90.",
    ),
    "parts of rows": (
        ("MODEL", "--data", "TEXTS", "--out", "RUN", "--batch", 6, "--accumulate", 4),
        "--batch 6 cannot be divided into 4 parts (--accumulate) on 1 devices (--dp, --fsdp). Give a multiple of 4.",
    ),
    "parts of documents": (
        ("MODEL", "--data", "TEXTS", "--out", "RUN", "--length", 15, "--sp", 2, "--truncate"),
        "Rows of 15 tokens cannot be divided over 2 devices (--sp). Short rows have 32, 64 or another power of two of "
        "tokens, the longest have --length 15. Give another --sp or --length.",
    ),
    "buckets of documents": (
        ("MODEL", "--data", "TEXTS", "--out", "RUN", "--length", 90, "--sp", 3, "--batch", 4),
        "Rows of 32 tokens cannot be divided over 3 devices (--sp).",
    ),
    "a warm-up of all steps": (
        ("MODEL", "--data", "TEXTS", "--out", "RUN", "--steps", 5, "--warm-up", 5),
        "--warm-up 5 must be less than the 5 steps of the run. Warm up for fewer.",
    ),
    "patience without evaluations": (
        ("MODEL", "--data", "TEXTS", "--out", "RUN", "--patience", 2, "--hold-out", 0),
        "--patience 2 needs evaluations, but no example is held out. Give a larger --hold-out, or leave out",
    ),
    "processes without devices": (
        ("MODEL", "--data", "TEXTS", "--out", "RUN", "--processes", 2, "--dp", 3),
        "= 3 devices cannot be divided among --processes 2. Give a multiple, for example --dp 2.",
    ),
    "a document that is too long": (
        ("MODEL", "--data", "TEXTS", "--out", "RUN", "--length", 7),
        "tokens, but a text may have at most 7 (--length, and the model's limit). Use it in parts with --split, or "
        "only its beginning with --truncate.",
    ),
    "no mask token": (
        ("MODEL", "--data", "TEXTS", "--out", "RUN", "--task", "masked_lm"),
        "The tokenizer of <MODEL> has no mask token, only no special token. A masked LM needs one.",
    ),
    "not a run": (("--resume", "TEXTS"), "<TEXTS> is not a run of `longspan train`: it has no run.json."),
    "an existing folder": (
        ("MODEL", "--data", "TEXTS", "--out", "TEXTS"),
        "<TEXTS> exists and is not empty. Continue the run in it with --resume <TEXTS>, or name another --out.",
    ),
    "options of a resumed run": (
        ("MODEL", "--resume", "RUN", "--batch", 3, "--seed", 1),
        "--resume and MODEL_DIR, --batch, --seed were both given, but a run keeps its arguments, which are in "
        "run.json. Only --steps and the options for devices (--dp, --fsdp, --tp, --sp, --processes) may change.",
    ),
    "a file as folder": (
        ("MODEL", "--data", "TEXTS", "--out", "CONFIG"),
        "<CONFIG> is a file. Name a folder as --out.",
    ),
    "a config of nothing": (("--new", "CONFIG", "--out", "RUN"), "has model_type=None, but Longspan supports"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_arguments_are_one_line_and_leave_nothing(run, saved, texts, tmp_path, case):
    arguments, message = BAD[case]
    (tmp_path / "config.json").write_text("{}")
    places = dict(MODEL=saved("bert"), TEXTS=texts, RUN=tmp_path / "run", CONFIG=tmp_path / "config.json")
    for name, place in places.items():
        message = message.replace(f"<{name}>", str(place))
    before = sorted(tmp_path.rglob("*"))
    assert_one_line(run("train", *(places.get(each, each) for each in arguments)), message)
    assert sorted(tmp_path.rglob("*")) == before


def bad_data(folder):
    """Data that cannot be used, by name, each with its message and options."""
    lines = [dict(text="w1 w2", label="a"), dict(text="w3", label="b")]
    folder.mkdir()
    (folder / "empty").mkdir()
    (folder / "no-pairs").mkdir()
    (folder / "no-pairs" / "a.txt").write_text("")
    (folder / "bytes").mkdir()
    (folder / "bytes" / "a.txt").write_bytes(b"w1 \xff")
    write_lines(folder / "one-label.jsonl", [lines[0], lines[0]])
    write_lines(folder / "no-label.jsonl", [lines[0], dict(text="w1")])
    write_lines(folder / "no-field.jsonl", [lines[0], dict(body="w1")])
    write_lines(folder / "no-positive.jsonl", [dict(anchor="w1")])
    (folder / "no-json.jsonl").write_text('{"text": "w1", "label": "a"}\n{"text": "w2"\n')
    write_lines(folder / "plain.jsonl", [dict(text="w1"), dict(text="w2")])
    write_lines(folder / "pairs.jsonl", [dict(anchor="w1", positive="w2")] * 4)
    write_lines(folder / "few-pairs.jsonl", [dict(anchor="w1", positive="w2")] * 4)
    write_lines(folder / "labels.jsonl", [lines[0], dict(text="w3 w4 w5 w6", label="b")] * 4)
    return folder


BAD_DATA = {
    "empty": ((), "has no documents. Give a folder with text files, or a file with JSON lines."),
    "no-pairs": (("--task", "embeddings"), "is a text file, but pairs are read from JSON lines"),
    "bytes": ((), "is not UTF-8 text, at byte 3. Remove it from the folder."),
    "one-label.jsonl": ((), "have the label 'a', but a classifier needs two or more labels. Add examples"),
    "no-label.jsonl": ((), "line 2 has no label. Put documents into subfolders with the names of their labels, or"),
    "no-field.jsonl": ((), "line 2 has no field 'text', only 'body'. Name the field of the text with --text-field."),
    "no-positive.jsonl": (("--task", "embeddings"), "line 1 has no field 'positive', only 'anchor'."),
    "no-json.jsonl": ((), "line 2 is not JSON ("),
    "plain.jsonl": (
        (),
        "has no labels and no pairs, and MODEL is not a masked LM. Give --task, one of sequence_classification, "
        "masked_lm, embeddings.",
    ),
    "pairs.jsonl": (
        ("--split",),
        "--split was given, but the parts of an anchor do not belong to the parts of its positive. Give --truncate.",
    ),
    "few-pairs.jsonl": (("--batch", 4), "A batch of 4 pairs is more than the 3 pairs to train on. Give a smaller"),
    "labels.jsonl": (("--length", 4), "has 6 tokens, but a text may have at most 4 (--length, and the model's limit)."),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_data_that_cannot_be_used_are_one_line(run, saved, tmp_path, case):
    options, message = BAD_DATA[case]
    data = bad_data(tmp_path / "data") / case
    result = run("train", saved("bert"), "--data", data, "--out", tmp_path / "run", *options)
    assert_one_line(result, message.replace("MODEL", str(saved("bert"))))
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_used_is_one_line(run, saved, texts, tmp_path):
    options = ("--data", texts, "--out", tmp_path / "run")
    for name, message in (
        ("tokenizer.json", "has no tokenizer.json."),
        ("config.json", "has no config.json. Name the directory of a checkpoint."),
    ):
        copy = tmp_path / name.partition(".")[0]
        shutil.copytree(saved("bert"), copy)
        (copy / name).unlink()
        assert_one_line(run("train", copy, *options), f"{copy} {message}")
    copy = tmp_path / "weights"
    shutil.copytree(saved("bert"), copy)
    (copy / "model.safetensors").unlink()
    assert_one_line(run("train", copy, *options), f"{copy} has neither model.safetensors nor model.safetensors.index")
    assert not (tmp_path / "run").exists(), "the same command can be given again"
    copy = tmp_path / "labels"
    shutil.copytree(saved("bert"), copy)
    config = json.loads((copy / "config.json").read_text("utf-8"))
    config |= dict(architectures=["BertForSequenceClassification"], id2label={"0": "x", "1": "y"})
    (copy / "config.json").write_text(json.dumps(config))
    assert_one_line(run("train", copy, *options), f"{copy} classifies into x, y, but {texts} has the labels bad, good.")
    copy = tmp_path / "words"
    shutil.copytree(saved("bert"), copy)
    checkpoints.byte_level().save(str(copy / "tokenizer.json"))
    assert_one_line(run("train", copy, *options), "The tokenizer has token 255, but the model has only 31 tokens.")


def test_a_folder_that_cannot_be_written_is_one_line(run, saved, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("longspan.cli.train.run.os.access", lambda path, mode: path != tmp_path)
    out = tmp_path / "runs" / "one"
    message = f"{out} cannot be created: {tmp_path} is not writable. Name another --out."
    assert_one_line(run("train", saved("bert"), "--data", texts, "--out", out), message)
    assert not out.parent.exists()


def test_a_disk_that_is_full_at_the_start_is_exit_code_4(run, saved, texts, tmp_path, monkeypatch):
    def full(self, path, *_):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("longspan.cli.train.settings.RunFile.write", full)
    out = tmp_path / "run"
    code, _, err = run("train", saved("bert"), "--data", texts, "--out", out)
    assert (code, err) == (
        4,
        f"longspan train: The disk is full: {out / 'run.json'} could not be written. Free some space.\n",
    )


def test_held_out_examples_without_a_token_are_left_out(run, tmp_path, monkeypatch):
    """Of three documents, the one that is held out is empty; a masked LM has no target in short texts."""
    monkeypatch.setattr(train, "fit", lambda *_, **options: _stop_without_evaluations(options))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dict(model_type="bert", **checkpoints.SMALL)))
    for name, held_out in (("empty", ""), ("short", "a")):
        texts = ["some text of some bytes"] * 3
        texts[min(held_out_examples(3, 0.1, 512, 0))] = held_out
        data = write_lines(tmp_path / f"{name}.jsonl", [dict(text=text) for text in texts])
        code, _, err = run("train", "--new", config, "--data", data, "--out", tmp_path / name)
        assert code == 130, err
        assert "no example is held out, so the model is not evaluated." in err
        assert ("examples without a token: 1. They are left out." in err) == (name == "empty")


def _stop_without_evaluations(options):
    assert "eval_batches" not in options
    raise train.Interrupted(0)


@pytest.mark.parametrize("left", [None, "full", "interrupted"])
def test_the_end_of_a_run_decides_the_exit_code(run, saved, texts, tmp_path, monkeypatch, left):
    ends = dict(full=train.DiskFull("The disk is full: x could not be written."), interrupted=train.Interrupted(7))

    def fit(*_, **options):
        assert options["resume"] and options["steps"] == 5
        if left is not None:
            raise ends[left]
        (options["out"] / "metrics.jsonl").write_text('{"step": 1, "loss": null, "loss_hex": "nan"}\n')
        raise FloatingPointError("The loss of step 1 is nan.")

    monkeypatch.setattr(train, "fit", fit)
    out = tmp_path / "run"
    options = ("--data", texts, "--out", out, "--steps", 5, "--hold-out", 0)
    code, _, err = run("train", saved("bert"), *options)
    said = dict(
        full="The disk is full: x could not be written.", interrupted=f"Continue with: longspan train --resume {out}"
    )
    assert code == {None: 2, "full": 4, "interrupted": 130}[left]
    assert said.get(str(left), "The loss of step 1 is nan.") in err
    # What the run started from may not change before it is resumed.
    (texts / "good" / "0.txt").write_text("w1")
    assert_one_line(run("train", "--resume", out), f"{texts} changed since {out} was started")
    (out / "run.json").write_text("[]")
    assert_one_line(run("train", "--resume", out), "run.json is not a file that `longspan train` wrote.")


def test_the_defaults_of_a_new_model_are_the_standard_library(run, tmp_path, monkeypatch):
    few = [example for example, _ in zip(standard_library(), range(3), strict=False)]
    monkeypatch.setattr("longspan.cli.train.inputs.standard_library", lambda: few)
    monkeypatch.setattr(train, "fit", lambda *_, **__: (_ for _ in ()).throw(train.Interrupted(0)))
    for kind, task in (("llama", "causal_lm"), ("bert", "masked_lm")):
        config, out = tmp_path / f"{kind}.json", tmp_path / kind
        config.write_text(json.dumps(dict(model_type=kind, **checkpoints.SMALL | dict(hidden_size=8))))
        assert run("train", "--new", config, "--out", out, "--hold-out", 0)[0] == 130
        found = json.loads((out / "run.json").read_text("utf-8"))["arguments"]
        assert (found["task"], found["steps"], found["learning_rate"], found["data"]) == (task, 1000, 1e-3, None)
        assert found["new"]["model_type"] == kind


def test_a_classifier_is_trained_saved_and_not_overwritten(run, saved, tmp_path):
    texts, out = write_texts(tmp_path / "texts", longest=25), tmp_path / "run"
    options = ("--data", texts, "--out", out, "--steps", 12, "--batch", 8, "--learning-rate", 0.02, "--eval-every", 6)
    code, printed, err = run("train", saved("bert"), *options)
    assert (code, printed) == (0, "")
    names = {"run.json", "metrics.jsonl", "checkpoints", "model", "best", "loss.png"}
    assert {path.name for path in out.iterdir()} == names
    found = records(out)
    assert [record["step"] for record in found if "loss" in record] == list(range(1, 13))
    assert [record["step"] for record in found if "eval_loss" in record] == [6, 12]
    assert all(0 <= record["accuracy"] <= 1 for record in found if "eval_loss" in record)
    for folder in ("model", "best"):
        config = json.loads((out / folder / "config.json").read_text("utf-8"))
        assert (config["id2label"], config["label2id"]) == ({"0": "bad", "1": "good"}, {"bad": 0, "good": 1})
        assert config["architectures"] == ["BertForSequenceClassification"]
        assert (out / folder / "tokenizer.json").is_file()
    last = [record["loss"] for record in found if "loss" in record][-1]
    assert last < found[0]["loss"]
    arguments = json.loads((out / "run.json").read_text("utf-8"))["arguments"]
    assert {name: arguments[name] for name in ("task", "steps", "batch", "length", "save_every")} == dict(
        task="sequence_classification", steps=12, batch=8, length=32, save_every=6
    )
    assert "before training: " in err and "step 12 of 12: loss" in err and f"the model is in {out / 'model'}" in err
    assert_one_line(run("train", saved("bert"), *options), f"{out} exists and is not empty.")
    assert_one_line(run("train", "--resume", out, "--steps", 3), f"--steps 3: {out} already has 12 steps.")


@pytest.mark.slow
def test_a_new_embedder_finds_more_bodies_of_docstrings_after_training(run, tmp_path, capsys):
    sizes = dict(hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=192)
    config, out = tmp_path / "config.json", tmp_path / "run"
    config.write_text(json.dumps(dict(model_type="bert", max_position_embeddings=256, **sizes)))
    pairs = write_lines(tmp_path / "pairs.jsonl", docstring_pairs())
    options = (
        "--data",
        pairs,
        "--truncate",
        "--steps",
        150,
        "--batch",
        32,
        "--learning-rate",
        2e-3,
        "--eval-every",
        50,
    )
    code, _, err = run("train", "--new", config, "--out", out, *options)
    assert code == 0, err
    before, found = recalls(out, err)
    with capsys.disabled():
        print(f"\nrecall@1: before {before:.3f}, after 50, 100 and 150 steps {found}")
    assert found[-1] > before + 0.03


@pytest.mark.check
def test_embeddings_keep_the_modules_of_their_directory(run, tmp_path):
    sizes = dict(vocab_size=len(checkpoints.WORDS), max_position_embeddings=90, hidden_dropout_prob=0)
    config = models.BertConfig(**sizes, attention_probs_dropout_prob=0, **checkpoints.SMALL)
    rng = np.random.default_rng(0)
    dense = models.DenseLayer(rng.normal(size=(12, 5)).astype(np.float32), activation="tanh")
    modules = (models.Pooling(6, ("cls", "mean")), dense, models.Normalize())
    prompts = dict(prompts=dict(query="w7 w8 "), default_prompt_name="query", max_seq_length=11)
    embedder = models.Embedder(made(models.Encoder, config), checkpoints.words(), modules, **prompts)
    hf.save(embedder, tmp_path / "start")
    pairs = [dict(anchor=f"w{n}", positive=f"w{n + 10} w3") for n in range(9)]
    data = write_lines(tmp_path / "pairs.jsonl", [*pairs, dict(anchor="w1", positive="w2 " * 30)])
    out = tmp_path / "run"
    options = ("--data", data, "--steps", 4, "--batch", 4, "--learning-rate", 0.1)
    assert_one_line(
        run("train", tmp_path / "start", *options, "--out", out), "but a text may have at most 11 (--length"
    )
    code, _, err = run("train", tmp_path / "start", *options, "--out", out, "--truncate", "--hold-out", 0.3)
    assert code == 0, err
    assert "recall_at_1" in err
    before, after = hf.load_embedder(tmp_path / "start"), hf.load_embedder(out / "model")
    assert repr(before) == repr(after) and after.prompts == before.prompts
    assert np.abs(after.modules[1].kernel - dense.kernel).max() > 0.01, "the Dense layer is trained too"
    # The vectors of training are those of `embed`, with the prompt.
    texts = ["w1 w2", "w3"]
    tokens = [after.tokenizer.encode(f"w7 w8 {text}").ids for text in texts]
    ids, mask = np.zeros((2, 7), np.int32), np.zeros((2, 7), np.int32)
    for row, own in enumerate(tokens):
        ids[row, : len(own)], mask[row, : len(own)] = own, 1
    found = TrainableEmbedder(after, after.prompt())(ids, mask)
    np.testing.assert_allclose(np.asarray(found), after.embed(texts), rtol=0, atol=1e-5)
