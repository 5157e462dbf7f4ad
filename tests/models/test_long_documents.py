"""The fine-tuning example at toy size: one global token makes the difference."""

import importlib.util
from pathlib import Path

import jax
import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "long_documents.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("long_documents", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow  # `longspan demo` shows it too, and its test
def test_clues_at_both_ends_are_learned_with_a_global_token_and_not_without(example):
    toy = dict(length=256, window=4, steps=100, batch=16, report=lambda line: None)
    # Optax raises floats to the power of ints, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert example.train(with_global_token=True, **toy) > 0.95
        # The beginning of a document alone gives an accuracy of one half.
        assert example.train(with_global_token=False, **toy) < 0.6


def test_the_example_is_read_in_one_sitting():
    assert len(EXAMPLE.read_text("utf-8").splitlines()) < 170
