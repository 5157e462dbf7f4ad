"""`longspan encode`: documents in, vectors out; what it prints; parts of a killed run that another one continues."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from longspan import hf
from longspan.cli import documents
from longspan.cli.parts import digest_of
from longspan.models import DenseLayer, Embedder, Normalize, Pooling
from tests.cli.asserts import assert_one_line

pytestmark = pytest.mark.usefixtures("unchecked")


def text_of(count, first=0):
    return " ".join(f"w{(first + n) % 27}" for n in range(count))


def plain_vector(model, count, pooling, first=0, **more):
    """The vector of a document of `count` words, encoded alone and without padding."""
    ids = np.array([[2, *(4 + (first + n) % 27 for n in range(count)), 3]])
    hidden = np.asarray(model(ids, **{k: f(ids) for k, f in more.items()}).last_hidden_state)[0]
    return hidden.mean(axis=0) if pooling == "mean" else hidden[0]


def first_is_global(ids):
    return (np.arange(ids.shape[1]) == 0)[None].astype(int)


@pytest.mark.check
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("name", ["bert", "longformer"])
def test_encode_gives_one_vector_per_document_whatever_it_is_batched_with(run, saved, tmp_path, name, pooling):
    counts = [1, 80, 60]
    for number, count in enumerate(counts):
        (tmp_path / f"{number}.txt").write_text(text_of(count, number))
    files = [tmp_path / f"{number}.txt" for number in range(len(counts))]
    out = tmp_path / "vectors.npy"
    code, printed, err = run("encode", "--model", saved(name), *files, "--out", out, "--pooling", pooling)
    assert code == 0 and printed == (
        f"modules: {name}, {pooling} pooling; prompt: none; dimension: 6; longest input: 90 tokens\n"
        f"wrote {out}: 3 vectors of size 6, from {sum(counts) + 6} tokens\n"
    )
    assert all(line.startswith(("compiling the encoder", "compiled the encoder")) for line in err.splitlines())
    model = hf.load(saved(name))
    more = dict(global_attention_mask=first_is_global) if (name, pooling) == ("longformer", "cls") else {}
    expected = [plain_vector(model, count, pooling, number, **more) for number, count in enumerate(counts)]
    np.testing.assert_allclose(np.load(out), expected, rtol=0, atol=2e-5)


def test_encode_reads_lines_and_splits_or_truncates_what_is_too_long(run, saved, tmp_path):
    path, out = tmp_path / "lines.txt", tmp_path / "vectors.npy"
    path.write_text(f"{text_of(5)}\n\n{text_of(200)}\n")
    command = ("encode", "--model", saved("bert"), path, "--lines", "--out", out, "--json")
    assert_one_line(
        run(*command),
        f"{path}, line 3, has 202 tokens, but the model takes at most 90. Encode the document in parts with --split",
    )
    assert sorted(tmp_path.iterdir()) == [path]
    model = hf.load(saved("bert"))
    assert run(*command, "--truncate")[0] == 0
    np.testing.assert_allclose(np.load(out)[1], plain_vector(model, 88, "mean"), rtol=0, atol=2e-5)
    assert json.loads(run(*command, "--split")[1])["shape"] == [2, 6]
    parts = [(88, 0), (88, 88), (24, 176)]
    vectors = [plain_vector(model, count, "mean", first) for count, first in parts]
    weighted = np.average(vectors, axis=0, weights=[count + 2 for count, _ in parts])
    np.testing.assert_allclose(np.load(out)[1], weighted, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def embedder(saved, tmp_path_factory):
    """A sentence-transformers directory, and its embedder."""
    rng = np.random.default_rng(0)
    plain = hf.load_embedder(saved("bert"))
    modules = (
        Pooling(6, ("cls", "max"), include_prompt=False),
        DenseLayer(kernel=rng.normal(size=(12, 5)).astype(np.float32)),
        Normalize(),
    )
    made = Embedder(
        plain.model, plain.tokenizer, modules, prompts=dict(query="w3 w4 ", passage="w9 "), max_seq_length=9
    )
    hf.save(made, directory := tmp_path_factory.mktemp("embedder"))
    return directory, hf.load_embedder(directory)


def test_encode_runs_the_modules_and_prints_them(run, embedder, tmp_path):
    (directory, loaded), path, out = embedder, tmp_path / "a.txt", tmp_path / "v.npy"
    path.write_text("w1 w2\nw5 w6 w7\n")
    command = ("encode", "--model", directory, path, "--lines", "--out", out)
    code, printed, _ = run(*command, "--prompt-name", "query", "--truncate-dim", 3)
    modules = "modules: bert, cls and max pooling without the prompt, Dense 12 to 5, Normalize; "
    assert code == 0
    assert printed.startswith(f"{modules}prompt: 'w3 w4 '; dimension: 3; longest input: 9 tokens\nwrote ")
    want = loaded.embed(["w1 w2", "w5 w6 w7"], prompt="w3 w4 ", truncate_dim=3)
    np.testing.assert_array_equal(np.load(out), want)
    found = json.loads(run(*command, "--json", "--prompt", "w1 ")[1])
    assert found["modules"] == [str(module) for module in loaded.modules]
    assert (found["prompt"], found["dimension"], found["longest_input"], found["model"]) == ("w1 ", 5, 9, "bert")
    np.testing.assert_array_equal(np.load(out), loaded.embed(["w1 w2", "w5 w6 w7"], prompt="w1 "))


def test_split_documents_are_normalised_again_and_only_their_beginning_has_the_prompt(run, embedder, tmp_path):
    (directory, loaded), path, out = embedder, tmp_path / "a.txt", tmp_path / "v.npy"
    path.write_text(text_of(11))
    command = ("encode", "--model", directory, path, "--out", out, "--json", "--prompt-name", "query")
    assert_one_line(run(*command), f"{path} has 15 tokens, but the model takes at most 9.")
    assert run(*command, "--split")[0] == 0
    (first,) = loaded.embed([text_of(5)], prompt_name="query")
    (second,) = loaded.embed([text_of(6, 5)])
    mean = (9 * first + 8 * second) / 17
    np.testing.assert_allclose(np.load(out), [mean / np.linalg.norm(mean)], rtol=0, atol=1e-6)


def test_a_tokenizer_that_truncates_on_the_left_changes_truncate_but_not_split(run, embedder, tmp_path):
    """Parts begin at the beginning of the document, where the prompt is."""
    (directory, loaded), path, out = embedder, tmp_path / "a.txt", tmp_path / "v.npy"
    path.write_text(text_of(11))
    command = ("encode", path, "--out", out, "--json", "--prompt-name", "query", "--model")
    assert run(*command, directory, "--split")[0] == 0
    right = np.load(out)
    left = Embedder(
        loaded.model, loaded.tokenizer, loaded.modules, prompts=loaded.prompts, max_seq_length=9, truncation_side="left"
    )
    hf.save(left, tmp_path / "left")
    assert run(*command, tmp_path / "left", "--split")[0] == 0
    np.testing.assert_array_equal(np.load(out), right)
    assert run(*command, tmp_path / "left", "--truncate")[0] == 0
    np.testing.assert_array_equal(np.load(out), left.embed([text_of(11)], prompt_name="query"))
    assert np.abs(np.load(out) - loaded.embed([text_of(11)], prompt_name="query")).max() > 1e-3


def test_pooling_replaces_the_modules_with_a_printed_line(run, embedder, saved, tmp_path):
    (directory, _), path, out = embedder, tmp_path / "a.txt", tmp_path / "v.npy"
    path.write_text("w1 w2 w3")
    code, printed, err = run("encode", "--model", directory, path, "--out", out, "--pooling", "mean")
    line = (
        f"longspan: --pooling mean replaces the modules that {directory} lists after the model: Pooling (1_Pooling), "
        "Dense (2_Dense), Normalize (3_Normalize).\n"
    )
    assert code == 0 and err.startswith(line) and "mean pooling; prompt: none; dimension: 6" in printed
    np.testing.assert_array_equal(np.load(out), hf.load_embedder(saved("bert")).embed(["w1 w2 w3"]))


def test_a_directory_that_cannot_be_run_is_refused_unless_pooling_is_named(run, saved, tmp_path):
    model, path, out = tmp_path / "model", tmp_path / "a.txt", tmp_path / "v.npy"
    hf.save(hf.load_embedder(saved("bert")), model)
    listed = json.loads((model / "modules.json").read_text())
    listed += [dict(idx=2, name="2", path="2_LSTM", type="sentence_transformers.models.LSTM")]
    (model / "modules.json").write_text(json.dumps(listed))
    path.write_text("w1 w2 w3")
    command = ("encode", "--model", model, path, "--out", out, "--json")
    assert_one_line(run(*command), "modules.json lists LSTM (2_LSTM) where Longspan supports only Dense or Normalize.")
    code, _, err = run(*command, "--pooling", "max")
    assert code == 0 and err.count("\n") == 1 and "Pooling (1_Pooling), LSTM (2_LSTM)." in err
    listed[0]["path"] = "../other"
    (model / "modules.json").write_text(json.dumps(listed))
    assert_one_line(run(*command, "--pooling", "max"), "outside of the directory")


@pytest.mark.check
def test_a_decoder_encodes_too(run, saved, tmp_path):
    path, out = tmp_path / "a.txt", tmp_path / "v.npy"
    path.write_text("some text")
    assert run("encode", "--model", saved("llama"), path, "--out", out, "--pooling", "lasttoken", "--json")[0] == 0
    model = hf.load(saved("llama"))
    hidden = model(np.array([list(map(int, hf.load_embedder(saved("llama")).tokenizer.encode("some text").ids))]))
    np.testing.assert_allclose(np.load(out), np.asarray(hidden.last_hidden_state)[:, -1], rtol=0, atol=2e-5)


def test_bad_documents_are_one_line(run, saved, tmp_path):
    (tmp_path / "binary").write_bytes(b"w1\nw2\xff\xfe\x00")
    (tmp_path / "good").write_text("w1")
    (tmp_path / "blank").write_text("\n\n")
    command = ("encode", "--model", saved("bert"), "--json", "--out", tmp_path / "out.npy")
    assert_one_line(run(*command, tmp_path / "binary"), "is not UTF-8 text, at byte 5")
    assert_one_line(run(*command, tmp_path / "binary", "--lines"), "is not UTF-8 text, at byte 5")
    assert_one_line(run(*command, tmp_path / "missing"), "missing: No such file or directory")
    assert_one_line(run(*command, tmp_path), "Is a directory")
    assert_one_line(
        run(*command, tmp_path / "good", tmp_path / "blank"), "blank is empty, and an empty document has no vector"
    )
    (tmp_path / "link").symlink_to(tmp_path / "good")
    assert_one_line(run(*command[:-1], tmp_path / "link", tmp_path / "good"), "link is one of the documents")
    assert (tmp_path / "good").read_text() == "w1"
    assert_one_line(
        run(*command, tmp_path / "blank", "--lines"), "The files contain no document. Give files with text."
    )
    assert_one_line(run(*command, tmp_path / "good", "--split", "--truncate"), "Give one of them")
    assert_one_line(run(*command, tmp_path / "good", "--pooling", "median"), "median")
    assert_one_line(run(*command, tmp_path / "good", "--global-tokens", 2), "a bert has no global tokens")
    assert_one_line(run(*command, tmp_path / "good", "--prompt", "a", "--prompt-name", "b"), "were both given")
    assert_one_line(run(*command, tmp_path / "good", "--prompt-name", "b"), "It has no prompts.")
    assert_one_line(run(*command, tmp_path / "good", "--truncate-dim", 7), "a number of features from 1 to 6")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["binary", "blank", "good", "link"]


def test_every_kind_of_line_end_is_one(tmp_path):
    text = "a\nb\r\nc\rd\x0be\u2028f\n\n  \ng"
    (tmp_path / "a").write_bytes(text.encode())
    found = list(documents.read_documents([tmp_path / "a"], lines=True))
    assert [document.text for document in found] == [line for line in text.splitlines() if line.strip()]
    assert [document.name.split()[-1] for document in found] == ["1,", "2,", "3,", "4,", "5,", "6,", "9,"]


def test_parts_are_limited_in_documents_and_in_bytes(monkeypatch):
    monkeypatch.setattr(documents, "PART_DOCUMENTS", 3)
    monkeypatch.setattr(documents, "PART_BYTES", 10)
    given = [documents.Document("", text) for text in ("a", "b", "c", "d", "ee" * 5, "f", "é" * 5, "g")]
    parts = list(documents.parts_of(given))
    assert [len(part.documents) for part in parts] == [3, 2, 2, 1]
    assert [document for part in parts for document in part.documents] == given


@pytest.fixture
def unfinished(run, saved, tmp_path, monkeypatch):
    """The command of a run that stopped after two of three parts, and the bytes of one that did not stop."""
    monkeypatch.setattr(documents, "PART_DOCUMENTS", 2)
    path, out = tmp_path / "lines.txt", tmp_path / "v.npy"
    path.write_text("".join(f"{text_of(n, n)}\n" for n in (3, 50, 1, 7, 20)))
    command = ["encode", "--model", saved("bert"), path, "--lines", "--json", "--out", out]
    assert run(*command)[0] == 0
    whole = out.read_bytes()
    out.unlink()
    path.write_bytes(path.read_bytes() + b"\xff")
    code, printed, err = run(*command)
    assert (code, printed) == (2, "")
    assert "has the vectors of 4 documents. Continue with --resume." in err and "is not UTF-8 text" in err
    path.write_bytes(path.read_bytes()[:-1])
    return command, path, whole


def test_a_run_is_resumed_with_the_same_bytes(run, unfinished, tmp_path):
    command, _, whole = unfinished
    assert sorted(path.name for path in (tmp_path / "v.npy.parts").iterdir()) == [
        "00000.npy",
        "00001.npy",
        "index.json",
    ]
    assert_one_line(
        run(*command), "v.npy.parts has the vectors of an unfinished run. Continue it with --resume, or delete"
    )
    code, printed, err = run(*command, "--resume", "--batch-tokens", 300)
    assert (code, err) == (0, "") and json.loads(printed)["documents"] == 5
    assert (tmp_path / "v.npy").read_bytes() == whole
    assert not (tmp_path / "v.npy.parts").exists()
    assert run(*command, "--resume")[0] == 0, "nothing to resume: a new run"


def test_finished_parts_are_not_computed_again(run, unfinished, monkeypatch, tmp_path):
    command, _, whole = unfinished
    calls = []
    compute = Embedder.run
    monkeypatch.setattr(Embedder, "run", lambda self, batch: calls.append(len(batch.texts)) or compute(self, batch))
    assert run(*command, "--resume")[0] == 0
    assert calls == [1] and (tmp_path / "v.npy").read_bytes() == whole


def test_a_run_with_other_texts_another_model_or_other_options_is_not_resumed(run, unfinished, saved, tmp_path):
    command, path, _ = unfinished
    before, parts = path.read_text(), sorted((tmp_path / "v.npy.parts").iterdir())
    path.write_text(before.replace("w1 w2\n", "w1 w3\n").replace("\nw1\n", "\nw2\n"))
    assert_one_line(run(*command, "--resume"), "has the vectors of other texts: documents 3 to 4 have changed since")
    path.write_text(before.splitlines()[0] + "\n" + before.splitlines()[1])
    assert_one_line(run(*command, "--resume"), "has the vectors of more documents than there are now")
    path.write_text(before)
    for changes, what in (
        (["--pooling", "cls"], "another modules"),
        (["--prompt", "w1 "], "another prompt"),
        (["--truncate-dim", 3], "another dimension"),
        (["--truncate"], "another truncate"),
        (["--split"], "another split"),
    ):
        assert_one_line(run(*command, "--resume", *changes), f"was written with {what}, so its vectors do not belong")
    other = [saved("longformer") if argument == saved("bert") else argument for argument in command]
    assert_one_line(run(*other, "--resume"), "was written with another model")
    (tmp_path / "v.npy.parts" / "index.json").write_text("{}")
    assert_one_line(run(*command, "--resume"), "is not the index of an unfinished run")
    assert sorted((tmp_path / "v.npy.parts").iterdir()) == parts and not (tmp_path / "v.npy").exists()


def test_a_damaged_part_is_found_before_anything_is_computed(run, unfinished, tmp_path):
    command, _, _ = unfinished
    folder = tmp_path / "v.npy.parts"
    part, index = folder / "00001.npy", json.loads((folder / "index.json").read_text())
    whole = part.read_bytes()
    for damage in (lambda: part.write_bytes(whole[:-4]), lambda: part.write_bytes(b""), part.unlink):
        damage()
        assert_one_line(run(*command, "--resume"), "00001.npy is not the file that index.json lists, with the vectors")
    np.save(part, np.zeros((1, 6), np.float32))
    assert_one_line(run(*command, "--resume"), "with the vectors of 2 documents. Delete the folder to start again.")
    part.write_bytes(whole)
    index["parts"][0]["file"] = "../other.npy"
    for content in (index, dict(run=3, parts=[]), [], dict(run={}, parts=3)):
        (folder / "index.json").write_text(json.dumps(content))
        assert_one_line(run(*command, "--resume"), "Delete the folder to start again.")


def test_a_run_that_was_killed_while_it_deleted_its_parts_starts_again(run, unfinished, monkeypatch, tmp_path):
    command, _, whole = unfinished
    parts = tmp_path / "v.npy.parts"

    def killed(folder):
        (folder / "00000.npy").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        assert run(*command, "--resume")[0] == 130
    assert (tmp_path / "v.npy").read_bytes() == whole and (parts / "00001.npy").exists()
    assert run(*command, "--resume")[0] == 0
    assert (tmp_path / "v.npy").read_bytes() == whole and not parts.exists()


def test_encode_leaves_nothing_half_written_when_interrupted(run, saved, tmp_path, monkeypatch):
    path, out = tmp_path / "a.txt", tmp_path / "vectors.npy"
    path.write_text("w1 w2")
    out.write_bytes(b"of an earlier run")

    def interrupted(file, array):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", interrupted)
    assert run("encode", "--model", saved("bert"), path, "--out", out, "--json")[:2] == (130, "")
    assert out.read_bytes() == b"of an earlier run"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "vectors.npy"]


@pytest.mark.check
def test_a_run_that_was_killed_is_resumed_with_the_same_bytes(saved, tmp_path):
    """Killed with a signal that no process can handle, while it computes."""
    path, killed, whole = tmp_path / "lines.txt", tmp_path / "killed.npy", tmp_path / "whole.npy"
    path.write_text("".join(f"{text_of(1 + n % 80, n)}\n" for n in range(2500)))
    command = [sys.executable, "-m", "longspan", "encode", "--model", saved("bert"), path, "--lines", "--json", "--out"]
    process = subprocess.Popen([*command, killed], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (tmp_path / "killed.npy.parts" / "00000.npy").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not killed.exists()
    subprocess.run([*command, killed, "--resume"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*command, whole], check=True, stdout=subprocess.DEVNULL)
    assert killed.read_bytes() == whole.read_bytes()


def test_a_pipe_is_a_document(run, saved, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=["w1 w2\nw3\n"])
    writer.start()
    code, printed, _ = run("encode", "--model", saved("bert"), pipe, "--lines", "--out", tmp_path / "v.npy", "--json")
    writer.join()
    assert code == 0 and json.loads(printed)["shape"] == [2, 6]


def test_the_digest_of_a_model_is_that_of_its_files(saved, tmp_path):
    model = tmp_path / "model"
    hf.save(hf.load_embedder(saved("bert")), model)
    before = digest_of(model)
    for folder in ("my_vectors.npy.parts", "1_Vectors.npy.parts"):
        (model / folder).mkdir()
        (model / folder / "index.json").write_text("{}")
    assert digest_of(model) == before
    config = model / "1_Pooling" / "config.json"
    config.write_text(config.read_text().replace("true", "false"))
    assert digest_of(model) != before


def test_the_digest_of_a_model_has_all_folders_of_its_modules(saved, tmp_path):
    """Whatever their names."""
    model = tmp_path / "model"
    hf.save(hf.load_embedder(saved("bert")), model)
    (model / "1_Pooling").rename(model / "pool")
    listed = (model / "modules.json").read_text()
    (model / "modules.json").write_text(listed.replace("1_Pooling", "./pool"))
    before = digest_of(model)
    (model / "pool" / "config.json").write_text("{}")
    assert digest_of(model) != before


def test_a_device_takes_the_vectors(run, saved, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("w1 w2")
    code, printed, _ = run("encode", "--model", saved("bert"), path, "--out", "/dev/null", "--json")
    assert code == 0 and json.loads(printed)["shape"] == [1, 6]
    assert list(tmp_path.iterdir()) == [path]
