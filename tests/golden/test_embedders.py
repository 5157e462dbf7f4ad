"""Our vectors agree with sentence-transformers' to 1e-5, compared with golden files, without torch."""

import json

import numpy as np
import pytest

from longspan import hf
from tests.golden import embedder_peers as peers
from tests.selection import only

TOLERANCE = 1e-5
WANT = json.loads(peers.GOLDEN.read_text())
FAST = ["mean", "six modes, Tanh", "prompt is not pooled", "residual"]


@pytest.mark.parametrize("name", only(FAST, peers.EMBEDDINGS))
def test_vectors_agree_with_sentence_transformers(name, tmp_path):
    embedder = hf.load_embedder(peers.write(name, tmp_path / "theirs", peers.checkpoint_of(name)), dtype="float32")
    vectors = embedder.embed(list(peers.TEXTS), **peers.EMBEDDINGS[name].call)
    assert vectors.dtype == np.float32
    assert_close(vectors, WANT[name])
    hf.save(embedder, tmp_path / "ours")
    again = hf.load_embedder(tmp_path / "ours")
    np.testing.assert_array_equal(again.embed(list(peers.TEXTS), **peers.EMBEDDINGS[name].call), vectors)
    assert repr(again) == repr(embedder)


def assert_close(got, want):
    """Equal to 1e-5 of the largest number."""
    want = np.asarray(want)
    assert np.shape(got) == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * max(1.0, np.abs(want).max()))
