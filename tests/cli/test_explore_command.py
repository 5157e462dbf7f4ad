"""`longspan explore`: the page, its options, and the files that it does not overwrite."""

import json

import numpy as np
import pytest

import longspan as ls
from longspan.cli.explore import read_tokens
from tests.cli.asserts import assert_one_line
from tests.explorer.test_explore import document_of

pytestmark = pytest.mark.usefixtures("unchecked")


def test_it_writes_the_page_of_the_library(run, tmp_path):
    path, tokens = tmp_path / "mask.html", tmp_path / "tokens.txt"
    texts = ["<b>", "</script>", "", *"abcdef", "日本"]
    tokens.write_text("\n".join(texts) + "\n", "utf-8")
    arguments = ("Causal() & Window(3, 0)", "--html", path, "--diff", "Causal()", "--tokens", tokens)
    assert run("explore", *arguments) == (0, f"wrote {path}; open it in a browser\n", "")
    mask = ls.Causal() & ls.Window(3, 0)
    assert path.read_text("utf-8") == mask.explore(10, tokens=texts, other=ls.Causal()).html
    assert sorted(found.name for found in tmp_path.iterdir()) == ["mask.html", "tokens.txt"]


def test_lengths_heads_and_rows(run, tmp_path):
    path = tmp_path / "mask.html"
    expression = "PerHead((Causal(), Segments([[0, 0, 1], [0, 1, 1]], [[0, 1], [0, 1]])))"
    code, out, _ = run("explore", expression, "--html", path, "--head", 1, "--batch", 1, "--json")
    facts, found = json.loads(out), document_of(path.read_text("utf-8"))
    assert code == 0 and (facts["queries"], facts["keys"], facts["files"]) == (3, 2, [str(path)])
    assert (found["q_len"], found["kv_len"], found["head"], found["batch"]) == (3, 2, 1, 1)
    assert run("explore", "Causal()", "-T", 7, "-S", 5, "--html", path)[0] == 0
    found = document_of(path.read_text("utf-8"))
    assert (found["q_len"], found["kv_len"]) == (7, 5)


def test_tokens_of_two_sides_give_the_lengths(run, tmp_path):
    path, tokens = tmp_path / "mask.html", tmp_path / "tokens.json"
    tokens.write_text(json.dumps([["a", "b\n"], ["c", "d", "e"]]))
    assert run("explore", "Causal()", "--html", path, "--tokens", tokens)[0] == 0
    found = document_of(path.read_text("utf-8"))
    assert found["tokens"] == dict(q=["a", "b\n"], kv=["c", "d", "e"])
    assert (found["q_len"], found["kv_len"]) == (2, 3)


def test_lines_of_a_file_are_tokens(tmp_path):
    path = tmp_path / "tokens.txt"
    for text, wanted in [
        ("", []),
        ("a", ["a"]),
        ("a\n", ["a"]),
        ("a\n\n", ["a", ""]),
        ("a\u2028b\x0cc\n d", ["a\u2028b\x0cc", " d"]),
    ]:
        path.write_text(text, "utf-8", newline="")
        assert read_tokens(path) == wanted


def test_only_pages_are_overwritten(run, tmp_path):
    path, ids = tmp_path / "mask.html", tmp_path / "ids.npy"
    for expression in ("Causal()", "Full()"):
        assert run("explore", expression, "-T", 4, "--html", path)[0] == 0
    assert "<title>Full()</title>" in path.read_text("utf-8")
    np.save(ids, np.zeros((1, 4), int))
    before = ids.read_bytes()
    result = run("explore", f"Segments('{ids}')", "--html", ids)
    assert_one_line(result, f"{ids} exists and is not an HTML page. Name another file.")
    assert ids.read_bytes() == before
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("a\nb\n")
    assert_one_line(run("explore", "Causal()", "--html", tokens, "--tokens", tokens), "is not an HTML page")
    assert tokens.read_text() == "a\nb\n"


BAD = {
    "no file": (["Causal()"], "Missing option '--html'"),
    "no mask": (["Cusal()", "--html", "a.html"], "'Cusal' is not a mask"),
    "no other mask": (["Causal()", "--html", "a.html", "--diff", "Cusal()"], "'Cusal' is not a mask"),
    "no folder": (["Causal()", "--html", "no/a.html"], "no is not a directory, so a.html cannot be written there"),
    "a folder": (["Causal()", "--html", "."], "is a directory"),
    "no tokens": (["Causal()", "--html", "a.html", "--tokens", "no.txt"], "'no.txt' does not exist"),
    "few tokens": (
        ["Causal()", "-T", "4", "--html", "a.html", "--tokens", "three.txt"],
        "each of the 4 queries, got 3",
    ),
    "bytes": (["Causal()", "--html", "a.html", "--tokens", "bytes.txt"], "bytes.txt is not UTF-8 text, at byte 1."),
    "not JSON": (["Causal()", "--html", "a.html", "--tokens", "broken.json"], "broken.json is not JSON"),
    "other JSON": (["Causal()", "--html", "a.html", "--tokens", "other.json"], "must contain a list of strings"),
    "head": (["PerHead((Causal(), Full()))", "--head", "2", "--html", "a.html"], "head=2 is out of range"),
    "length": (["Causal()", "-T", "-1", "--html", "a.html"], "Invalid value for '-T' / '--queries'"),
    "fixed length": (["Segments([[0, 0, 1]])", "-T", "5", "--html", "a.html"], "Segments.q_ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_writes_nothing(run, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "three.txt").write_text("a\nb\nc\n")
    (tmp_path / "bytes.txt").write_bytes(b"a\xff")
    (tmp_path / "broken.json").write_text("[")
    (tmp_path / "other.json").write_text('["a", 1]')
    before = sorted(tmp_path.iterdir())
    arguments, words = BAD[name]
    assert_one_line(run("explore", *arguments), words)
    assert sorted(tmp_path.iterdir()) == before
