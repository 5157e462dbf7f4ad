"""The example that trains a byte-level decoder, at toy size. Its packed mask equals the mask of its caches."""

import re
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from longspan import models
from tests.made import made

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "byte_decoder.py"


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        yield


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


def make(example, **changes):
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2) | changes
    return made(models.CausalLM, example["Bytes"](**sizes, initializer_range=0.3))


def test_it_learns(example, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(example["train"].__globals__["time"], "perf_counter", lambda: next(clock))
    losses = example["train"](make(example), seconds=12, report=lambda *_, **__: None)
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5


def test_packed_documents_attend_to_the_keys_in_the_cache_of_one(example):
    """The text is several windows long, so only pinned tokens remain of its beginning."""
    model, rng = make(example, num_hidden_layers=1), np.random.default_rng(0)
    lengths = [300, 212]
    ids = rng.integers(0, 256, (1, 512))
    documents = np.repeat([1, 2], lengths)[None]
    packed = np.asarray(model(ids, segment_ids=documents).logits)[0]

    @nnx.jit
    def alone(model, ids):
        prompt = model(ids[:, :-1], cache=model.init_cache(1, 512))
        return prompt, model(ids[:, -1:], cache=prompt.cache)

    for start, count in zip((0, 300), lengths, strict=True):
        prompt, last = alone(model, ids[:, start : start + count])
        got = np.concatenate([np.asarray(prompt.logits)[0], np.asarray(last.logits)[0]])
        np.testing.assert_allclose(got, packed[start : start + count], rtol=0, atol=1e-5 * np.abs(got).max())


def test_it_runs_from_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["byte_decoder.py", "--seconds", "0.1", "--width", "16", "--answer", "20"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out, err = capsys.readouterr()
    for what in ("the training step", "the decoder"):
        assert re.search(rf"^compiling {what} \.\.\.\ncompiled {what} and ran it once in \d+\.\d s$", err, re.M)
    assert "Each layer's cache stores 132 keys for 1,000 tokens and 132 for 1,000,000." in out
    assert len(out.split("def main(self):\n    ")[1]) == 21


def test_it_is_short():
    assert len(EXAMPLE.read_text("utf-8").splitlines()) < 115
