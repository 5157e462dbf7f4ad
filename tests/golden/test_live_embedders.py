"""Embedders and sentence-transformers read each other's directories, with the release that is installed."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from longspan import hf, models
from tests.cli.checkpoints import words
from tests.golden import embedder_peers as peers
from tests.golden.test_embedders import WANT, assert_close
from tests.made import made

pytestmark = [
    pytest.mark.parity,
    # The warnings of other libraries are not errors here.
    pytest.mark.filterwarnings("default"),
]
TEXTS = list(peers.TEXTS)


@pytest.mark.parametrize("name", peers.EMBEDDINGS)
def test_sentence_transformers_gives_what_the_golden_file_says(name, tmp_path):
    case, theirs = peers.EMBEDDINGS[name], peers.write(name, tmp_path / "theirs", peers.checkpoint_of(name))
    want = peers.peer(theirs).encode(TEXTS, **case.call)
    assert_close(want, WANT[name])
    hf.save(hf.load_embedder(theirs, dtype="float32"), tmp_path / "ours")
    assert_close(peers.peer(tmp_path / "ours").encode(TEXTS, **case.call), want)


@pytest.mark.parametrize("name", [name for name, case in peers.EMBEDDINGS.items() if case.pooling is not None])
def test_we_load_what_sentence_transformers_saves(name, tmp_path):
    case = peers.EMBEDDINGS[name]
    peer = peers.peer(peers.write(name, tmp_path / "theirs", peers.checkpoint_of(name)))
    peer.save(str(tmp_path / "saved"))
    embedder = hf.load_embedder(tmp_path / "saved", dtype="float32")
    assert_close(embedder.embed(TEXTS, **case.call), peer.encode(TEXTS, **case.call))


@pytest.mark.parametrize("function", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities_are_equal(function, tmp_path):
    settings = dict(similarity_fn_name=function)
    theirs = peers.write("mean", tmp_path / "theirs", peers.checkpoint_of("mean"))
    (theirs / "config_sentence_transformers.json").write_text(json.dumps(settings))
    peer, embedder = peers.peer(theirs), hf.load_embedder(theirs)
    vectors = embedder.embed(TEXTS)
    assert_close(embedder.similarity(vectors[:3], vectors), peer.similarity(vectors[:3], vectors).numpy())


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_texts_are_truncated_on_the_same_side(side, tmp_path):
    theirs = peers.write("mean", tmp_path / "theirs", peers.checkpoint_of("mean"))
    config = json.loads((theirs / "tokenizer_config.json").read_text()) | dict(truncation_side=side)
    (theirs / "tokenizer_config.json").write_text(json.dumps(config))
    assert_close(hf.load_embedder(theirs).embed(TEXTS), peers.peer(theirs).encode(TEXTS))


@pytest.mark.parametrize("side", ["left", "right"])
def test_qwen3_embedding_in_the_layout_of_its_repository(side, tmp_path):
    """The config names a causal LM with untied embeddings; the tensors have no prefix, and there is no `lm_head`."""
    theirs = peers.write("qwen3", tmp_path / "theirs", peers.checkpoint_of("qwen3"))
    tensors = load_file(theirs / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, theirs / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((theirs / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and not config.get("tie_word_embeddings", False)
    tokenizer = json.loads((theirs / "tokenizer_config.json").read_text()) | dict(padding_side=side)
    (theirs / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    embedder = hf.load_embedder(theirs)
    assert_close(embedder.embed(TEXTS), peers.peer(theirs).encode(TEXTS))
    hf.save(embedder, tmp_path / "ours")
    assert_close(peers.peer(tmp_path / "ours").encode(TEXTS), WANT["qwen3"])


def test_an_embedder_made_here_is_saved_with_its_tokenizer(tmp_path):
    config = models.BertConfig(
        vocab_size=31, hidden_size=6, num_attention_heads=2, num_hidden_layers=2, intermediate_size=7,
        max_position_embeddings=40,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    layer = models.DenseLayer(
        kernel=rng.normal(size=(12, 5)).astype(np.float32), bias=np.ones(5, np.float32), activation="silu"
    )
    embedder = models.Embedder(
        made(models.Encoder, config),
        words(),
        (models.Pooling(size=6, modes=("weightedmean", "max")), layer, models.Normalize()),
        prompts=dict(query="w3 "),
        max_seq_length=11,
        do_lower_case=True,
        truncate_dim=4,
    )
    hf.save(embedder, tmp_path)
    peer = peers.peer(tmp_path)
    assert_close(embedder.embed(TEXTS, prompt_name="query"), peer.encode(TEXTS, prompt_name="query"))
    assert repr(hf.load_embedder(tmp_path)) == repr(embedder)
