"""The demo at toy size: its sections, checks and pictures, and its exit code if a claim does not hold."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import longspan as ls
from longspan.cli import demo as command
from longspan.cli import main
from longspan.cli.comparison import compare_with_dense
from longspan.cli.stage import Stage

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def leave_out(monkeypatch, *sections):
    for name in sections:
        monkeypatch.setattr(command, name, lambda *_: None)


@pytest.mark.check
def test_every_section_runs_and_every_claim_holds(here, capsys):
    assert main(["demo", "--toy", "--seconds", "0.1"]) == 0
    out = capsys.readouterr().out
    for line in ("engine cpu", "Sparse and dense attention over 512 tokens", "Accuracy on new documents: ",
                 "bits per byte", "each layer stores 132 keys", "Next steps"):  # fmt: skip
        assert line in out
    assert "NOT TRUE" not in out and out.count("✓") >= 4
    assert re.search(r"The demo took \d+ s\.", out)
    names = {path.name for path in (here / "longspan-demo").iterdir()}
    pictures = {f"{name}.png" for name in ("decoder", "documents", "encoder", "bigbird", "training")}
    assert names == pictures | {"explorer.html"}
    page = (here / "longspan-demo" / "explorer.html").read_text("utf-8")
    assert "<title>Causal() &amp; (Window(31, 0) | Prefix(4))</title>" in page
    assert f"→ {Path('longspan-demo') / 'explorer.html'}\n" in out
    answer = out.split("def main(self):\n    ")[1]
    assert len(answer.split("\n\n")[0]) >= 20


def test_a_claim_that_does_not_hold_fails_it(here, capsys, monkeypatch):
    leave_out(monkeypatch, "_masks", "_clues", "_decoder", "_devices")
    monkeypatch.setattr(command, "_agree", lambda result: False)
    assert main(["demo", "--toy"]) == 1
    out = capsys.readouterr().out
    assert "✗ NOT TRUE: sparse and dense attention differ" in out and "1 of the demo's claims did not hold" in out


def test_the_comparison_notices_another_mask(monkeypatch):
    """The demo compares sparse attention with the dense mask, so it detects a wrong result."""
    mask = ls.Causal() & (ls.Window(6, 0) | ls.Prefix(2))
    done = []
    right = compare_with_dense(mask, 101, done.append)
    assert command._agree(right) and done[-1] == len(done)
    assert right.dense.bytes > 4 * 101**2 > right.sparse.bytes
    assert np.isfinite([right.dense.seconds, right.sparse.seconds]).all()
    attention = ls.attention
    monkeypatch.setattr(ls, "attention", lambda q, k, v, mask: attention(q, k, v, mask=ls.Causal() & ls.Window(6, 0)))
    wrong = compare_with_dense(mask, 101, done.append)
    assert not command._agree(wrong) and wrong.difference > 0.01


def test_numbers_that_are_none_do_not_agree():
    not_a_number = compare_with_dense(ls.Causal(), 40, lambda done: None)._replace(difference=float("nan"))
    assert not command._agree(not_a_number)


def test_without_matplotlib_masks_are_pages(here, monkeypatch, capsys):
    monkeypatch.setattr("longspan.cli.stage.is_installed", lambda module: False)
    Stage(here).draw("causal", ls.Causal(), 64, tile=16)
    assert [path.name for path in here.iterdir()] == ["causal.html"]
    assert "<svg" in (here / "causal.html").read_text("utf-8")
    assert "causal.html" in capsys.readouterr().out


def test_without_flax_or_examples_a_section_says_why_it_is_left_out(here, monkeypatch, capsys):
    stage = Stage(here)
    assert command._example(stage, "no_such_example") is None
    assert "Skipped: this installation has no examples/no_such_example.py." in capsys.readouterr().out

    def missing(room, module, extra):
        raise ImportError(f"{room} needs {module}: pip install 'longspan[{extra}]'")

    monkeypatch.setattr(command, "needs", missing)
    assert command._example(stage, "byte_decoder") is None
    assert "Skipped. This section needs flax: pip install 'longspan[flax]'" in capsys.readouterr().out


def test_each_run_has_a_folder_of_its_own_unless_one_is_named(here):
    assert [str(command._folder(None)) for _ in range(3)] == ["longspan-demo", "longspan-demo-2", "longspan-demo-3"]
    named = here / "a" / "b"
    assert command._folder(named) == command._folder(named) == named and named.is_dir()
