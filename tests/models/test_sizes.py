"""Sizes in a `config.json` are compared with the file's tensors before a model is made."""

import functools
import json
import resource
import signal
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from longspan import hf
from tests.golden import decoder_peers as peers

GOLDEN = peers.HERE.parent
ENCODERS = (
    "bert",
    "roberta",
    "longformer",
    "big_bird",
    "modernbert",
    "eurobert",
    "nomic_bert",
    "gte",
    "jina_embeddings_v3",
    "embedding_gemma",
)
DECODERS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "gemma3",
    "phi3",
    "smollm3",
    "olmo3",
    "mistral3",
)
HUGE = 10**9

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def checkpoint(tmp_path):
    """A golden checkpoint with a changed config; `tensors` changes the tensors of the file."""

    def make(name, *, tensors=None, **changes):
        config, arrays = golden(name)
        text = config.get("text_config")
        config = {**config, "text_config": text | changes} if text else {**config, **changes}
        where = peers.write(tmp_path / name, config, {})
        arrays = dict(arrays)
        if tensors:
            tensors(arrays)
        save_file(arrays, where / "model.safetensors")
        return where

    return make


@pytest.fixture(scope="module")
def rngs():
    return nnx.Rngs(0)


@pytest.fixture
def nothing_is_made(rngs):  # `rngs` starts JAX before the limits
    """Fails if the test allocates more than a few megabytes or takes half a minute, before it exhausts the machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**31, hard))

    def late(*_):
        raise TimeoutError("no answer in 30 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert peak < 2**24, f"{peak} bytes"


def refused(where, *words, **options):
    with pytest.raises(ValueError) as error:
        hf.load(where, **options)
    text = str(error.value)
    for word in (str(where / "config.json"), *words):
        assert word in text, (word, text)


OF_ENCODERS = {
    "vocab_size": "embeddings.word_embeddings.weight in model.safetensors is [",
    "hidden_size": "embeddings.word_embeddings.weight in model.safetensors is [",
    "max_position_embeddings": "embeddings.position_embeddings.weight in model.safetensors is [",
    "type_vocab_size": "embeddings.token_type_embeddings.weight in model.safetensors is [",
    "intermediate_size": "encoder.layer.0.intermediate.dense.weight in model.safetensors is [",
    "num_hidden_layers": "model.safetensors has the tensors of 2 layers",
}


def of_rotary(words, down, layers=2):
    """The sizes of an encoder without a table of positions: its word embeddings, and the MLP's last matrix."""
    return {
        "vocab_size": f"{words}.weight in model.safetensors is [",
        "hidden_size": f"{words}.weight in model.safetensors is [",
        "intermediate_size": f"{down}.weight in model.safetensors is [",
        "num_hidden_layers": f"model.safetensors has the tensors of {layers} layers",
    }


OF_ROTARY = {
    "modernbert": of_rotary("embeddings.tok_embeddings", "layers.0.mlp.Wo", 7),
    "eurobert": of_rotary("embed_tokens", "layers.0.mlp.down_proj"),
    "nomic_bert": of_rotary("embeddings.word_embeddings", "encoder.layers.0.mlp.fc2"),
    "gte": of_rotary("embeddings.word_embeddings", "encoder.layer.0.mlp.down_proj"),
    "jina_embeddings_v3": of_rotary("embeddings.word_embeddings", "encoder.layers.0.mlp.fc2"),
    "embedding_gemma": of_rotary("embed_tokens", "layers.0.mlp.down_proj", 3)
    | {
        "head_dim": "layers.0.self_attn.o_proj.weight in model.safetensors is [12, 18]",
        "num_key_value_heads": "layers.0.self_attn.k_proj.weight in model.safetensors is [6, 12]",
    },
}
OF_DECODERS = {
    "vocab_size": "embed_tokens.weight in model.safetensors is [29, 24]",
    "hidden_size": "embed_tokens.weight in model.safetensors is [29, 24]",
    "intermediate_size": "layers.0.mlp.down_proj.weight in model.safetensors is [24, ",
    "num_hidden_layers": "model.safetensors has the tensors of ",
    "head_dim": "layers.0.self_attn.o_proj.weight in model.safetensors is [24, ",
    "num_attention_heads": "layers.0.self_attn.o_proj.weight in model.safetensors is [24, ",
    "num_key_value_heads": "layers.0.self_attn.k_proj.weight in model.safetensors is [",
}


@pytest.mark.usefixtures("nothing_is_made")
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoders_sizes_that_the_file_does_not_have_allocate_nothing(name, checkpoint, rngs):
    windows = dict(attention_window=4) if name == "longformer" else {}
    for key, words in OF_ROTARY.get(name, OF_ENCODERS).items():
        for value in (HUGE, 2**31 - 1):
            where = checkpoint(name, **windows, **{key: value})
            refused(where, "does not fit the tensors in", f"{key}={value}", words)
            if name != "embedding_gemma":  # has no heads
                refused(where, f"{key}={value}", words, task="token_classification", rngs=rngs)


@pytest.mark.usefixtures("nothing_is_made")
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoders_sizes_that_the_file_does_not_have_allocate_nothing(name, checkpoint):
    for key, words in OF_DECODERS.items():
        for value in (HUGE, 2 * HUGE):
            sizes = dict(head_dim=golden_head_dim(name)) | {key: value, "layer_types": None}
            if name == "phi3" and key == "num_key_value_heads":  # queries, keys and values are one matrix
                words = "the longest axis of all tensors in model.safetensors is 48"
            refused(checkpoint(name, **sizes), f"{key}={value}", words)


@pytest.mark.usefixtures("nothing_is_made")
def test_sizes_whose_tensor_is_missing_are_compared_with_all_others(checkpoint):
    def without(arrays):
        del arrays["model.layers.0.self_attn.o_proj.weight"], arrays["model.layers.0.self_attn.k_proj.weight"]
        del arrays["model.embed_tokens.weight"]

    def flat(arrays):
        arrays["model.layers.0.self_attn.o_proj.weight"] = np.zeros(3, np.float32)

    where = checkpoint("llama", tensors=without, head_dim=HUGE, hidden_size=HUGE)
    refused(
        where, f"head_dim={HUGE}, but the longest axis of all tensors in model.safetensors is", f"hidden_size={HUGE},"
    )
    refused(checkpoint("llama", tensors=flat, head_dim=HUGE), f"head_dim={HUGE}, but the longest axis")
    refused(checkpoint("llama", tensors=dict.clear, num_hidden_layers=HUGE), "has the tensors of 0 layers")


@pytest.mark.usefixtures("nothing_is_made")
@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "embedding_gemma"])
@pytest.mark.parametrize("task", ["Sequence", "Token"])
def test_labels_are_compared_with_the_head(name, task, checkpoint):
    where = checkpoint(f"{name}For{task}Classification", id2label=None, num_labels=HUGE)
    refused(where, f"num_labels={HUGE}, but classifier.", "weight in model.safetensors is [")
    refused(where, "num_labels=70000, but classifier.", num_labels=70_000)


@pytest.mark.usefixtures("nothing_is_made")
def test_a_new_head_is_not_larger_than_the_file(checkpoint, rngs):
    words = f"num_labels={HUGE}. The new head would have 13000000000 parameters, more than the"
    refused(checkpoint("bert", num_labels=HUGE), words, task="token_classification", rngs=rngs)


def test_a_new_head_is_as_large_as_the_caller_says(checkpoint, rngs):
    where = checkpoint("bert", num_labels=HUGE)
    model = hf.load(where, num_labels=3000, task="token_classification", rngs=rngs)
    assert model.classifier.kernel.shape == (12, 3000)


@pytest.mark.usefixtures("nothing_is_made")
def test_shards_are_named(checkpoint):
    where = checkpoint("llama", vocab_size=HUGE)
    arrays = load_file(where / "model.safetensors")
    (where / "model.safetensors").rename(where / "a.safetensors")
    content = dict(weight_map=dict.fromkeys(arrays, "a.safetensors"))
    (where / "model.safetensors.index.json").write_text(json.dumps(content))
    refused(where, f"vocab_size={HUGE}, but model.embed_tokens.weight in a.safetensors is [29, 24]")


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_size_that_is_a_little_wrong_is_in_the_one_report_with_all_else(name, checkpoint):
    key, tensor = ("vocab_size", "word_embeddings" if name == "bert" else "embed_tokens")

    def without(arrays):
        del arrays[next(name for name in arrays if "layer.1" in name or "layers.1" in name)]

    with pytest.raises(ValueError) as error:
        hf.load(checkpoint(name, tensors=without, vocab_size=11))
    text = str(error.value)
    assert f"Wrong size in config.json (1):\n  {key}=11, but" in text and tensor in text
    assert "Missing (1):" in text and "Wrong shape (" in text


def golden_head_dim(name):
    config, arrays = golden(name)
    config = config.get("text_config") or config
    out = next(array for key, array in arrays.items() if key.endswith("layers.0.self_attn.o_proj.weight"))
    return out.shape[1] // config["num_attention_heads"]


@functools.cache
def golden(name):
    """A config and its weights."""
    if name.startswith(ENCODERS):
        where = GOLDEN / (f"{name}Model" if name in ENCODERS else name)
        return json.loads((where / "config.json").read_text()), load_file(where / "model.safetensors")
    with safe_open(peers.HERE / f"{name}.safetensors", "np") as file:
        config, shapes = (json.loads(file.metadata()[key]) for key in ("config", "shapes"))
    return config, peers.weights(shapes, config["model_type"])
