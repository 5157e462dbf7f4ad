"""Broken checkpoints, by accident or on purpose: one error that names the file, the key and the value."""

import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from longspan import hf, models

GOLDEN = Path(__file__).parent.parent / "golden"

# Without the shape checker, which users do not have.
pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def copy(tmp_path):
    """A copy of a golden checkpoint to break: changes of its config, and a function that changes its tensors."""

    def make(name="bertModel", *, tensors=None, **changes):
        where = tmp_path / name
        shutil.copytree(GOLDEN / name, where)
        raw = json.loads((where / "config.json").read_text())
        (where / "config.json").write_text(json.dumps(raw | changes))
        if tensors:
            arrays = dict(load_file(where / "model.safetensors"))
            tensors(arrays)
            save_file(arrays, where / "model.safetensors", metadata={"format": "pt"})
        return where

    return make


@pytest.fixture
def shards(copy):
    """A copy in two shards, and a function that rewrites its index."""
    where = copy()
    arrays = dict(load_file(where / "model.safetensors"))
    names = sorted(arrays)
    weight_map = dict.fromkeys(names[::2], "a.safetensors") | dict.fromkeys(names[1::2], "b.safetensors")
    for file in ("a.safetensors", "b.safetensors"):
        save_file({k: arrays[k] for k in names if weight_map[k] == file}, where / file)
    (where / "model.safetensors").unlink()

    def index(**changes):
        content = {"metadata": {}, "weight_map": weight_map | changes}
        (where / "model.safetensors.index.json").write_text(json.dumps(content))
        return where

    return index


def test_a_tensor_comes_from_the_shard_that_the_index_names(shards, caplog):
    where, name = shards(), "embeddings.LayerNorm.bias"
    assert json.loads((where / "model.safetensors.index.json").read_text())["weight_map"][name] == "a.safetensors"
    stale = dict(load_file(where / "b.safetensors")) | {name: np.full(12, 7, np.float32)}
    save_file(stale, where / "b.safetensors")
    got = hf.load(where).embeddings.norm.bias[...]
    np.testing.assert_array_equal(got, hf.load(GOLDEN / "bertModel").embeddings.norm.bias[...])
    assert f"ignored {name} (b.safetensors) (the index does not list this tensor in this file)" in caplog.text


def test_a_tensor_that_is_not_in_the_shard_that_the_index_names_is_an_error(shards):
    message = r"index\.json lists tensors that their files do not contain: embeddings\.LayerNorm\.bias \(b\.safetensors"
    with pytest.raises(ValueError, match=message):
        hf.load(shards(**{"embeddings.LayerNorm.bias": "b.safetensors"}))


@pytest.mark.parametrize(
    "how", ["../outside.safetensors", "sub/../../outside.safetensors", "{absolute}", "..\\x", "C:x"]
)
def test_an_index_cannot_lead_out_of_its_directory(how, shards, tmp_path):
    save_file({"embeddings.LayerNorm.bias": np.zeros(12, np.float32)}, tmp_path / "outside.safetensors")
    name = how.format(absolute=tmp_path / "outside.safetensors")
    with pytest.raises(ValueError, match=r"index\.json lists files outside of its directory: " + re.escape(repr(name))):
        hf.load(shards(**{"embeddings.LayerNorm.bias": name}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must contain a JSON object, {...}, but contains a list"),
        ("{}", "must have a `weight_map`, an object that maps tensor names to file names, got None"),
        ('{"weight_map": ["a"]}', "got ['a']"),
        ('{"weight_map": {"a": 3}}', "got {'a': 3}"),
        ("[" * 100_000, "is not JSON"),
    ],
    ids=["cut off", "list", "empty", "list inside", "number inside", "deep"],
)
def test_an_invalid_index_is_named(content, message, shards):
    where = shards()
    (where / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"safetensors\.index\.json " + ".*" + re.escape(message)):
        hf.load(where)


def test_two_names_of_one_parameter_are_an_error(copy):
    def both(arrays):
        arrays["embeddings.LayerNorm.gamma"] = arrays["embeddings.LayerNorm.weight"] + 1

    message = r"has both embeddings\.LayerNorm\.(gamma|weight) and embeddings\.LayerNorm\.(weight|gamma)"
    with pytest.raises(ValueError, match=message):
        hf.load(copy(tensors=both))


@pytest.mark.parametrize("rngs", [None, 0], ids=["", "new head"])
@pytest.mark.parametrize("name", ["bertModel", "longformerModel"])
def test_more_layers_than_tensors_are_refused_at_once(name, rngs, copy):
    where = copy(name, num_hidden_layers=10**9, **(dict(attention_window=4) if name == "longformerModel" else {}))
    with pytest.raises(
        ValueError, match=r"num_hidden_layers=1000000000, but model\.safetensors has the tensors of 2 layers"
    ):
        hf.load(where, rngs=None if rngs is None else nnx.Rngs(rngs))


def test_a_size_that_the_file_does_not_have_allocates_nothing(copy):
    where = copy(vocab_size=2**31 - 1, intermediate_size=2**31 - 1)
    with pytest.raises(ValueError, match=r"vocab_size=2147483647, but embeddings\.word_embeddings\.weight in model\."):
        hf.load(where, task="token_classification", rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(layer_norm_eps=-1), "`layer_norm_eps` must be a number that is at least 0 and finite in float32, got -1"),
        (
            dict(layer_norm_eps=float("nan")),
            "`layer_norm_eps` must be a number that is at least 0 and finite in float32, got nan",
        ),
        (
            dict(layer_norm_eps="1e-5"),
            "`layer_norm_eps` must be a number that is at least 0 and finite in float32, got '1e-5'",
        ),
        (
            dict(initializer_range=float("inf")),
            "`initializer_range` must be a number that is at least 0 and finite in float32, got inf",
        ),
        (
            dict(hidden_dropout_prob=2.0),
            "`hidden_dropout_prob` must be a number that is at least 0 and less than 1, got 2.0",
        ),
        (
            dict(classifier_dropout=True),
            "`classifier_dropout` must be a number that is at least 0 and less than 1, got True",
        ),
        (dict(num_attention_heads=1.5), "`num_attention_heads` must be an int from 1 to 2147483647, got 1.5"),
        (dict(num_attention_heads=0), "`num_attention_heads` must be an int from 1 to 2147483647, got 0"),
        (dict(hidden_size="12"), "`hidden_size` must be an int from 1 to 2147483647, got '12'"),
        (dict(num_hidden_layers=True), "`num_hidden_layers` must be an int from 1 to 2147483647, got True"),
        (dict(vocab_size=10**30), "`vocab_size` must be an int from 1 to 2147483647, got 1000"),
        (dict(pad_token_id=[0]), "`pad_token_id` must be an int from -2147483647 to 2147483647, got [0]"),
        (dict(tie_word_embeddings="no"), "`tie_word_embeddings` must be True or False, got 'no'"),
        (dict(hidden_act=["gelu"]), "hidden_act=['gelu'] is not one of 'gelu'"),
        (dict(model_type=["bert"]), "has model_type=['bert'], but Longspan supports 'bert'"),
        (dict(architectures="BertModel"), "has architectures='BertModel', which must be a list of names"),
        (dict(id2label=["a"]), "has id2label=['a'], which must be an object that maps numbers to labels"),
        (dict(num_labels="3", id2label=None), "`num_labels` must be an int from 1 to 2147483647, got '3'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_error_names_the_key_and_its_value(changes, message, copy):
    with pytest.raises(ValueError, match=r"config\.json .*" + re.escape(message)):
        hf.load(copy(**changes))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("longformerModel", dict(attention_window="8"), "has attention_window='8'. A window must be even"),
        ("longformerModel", dict(attention_window=[8, 2.0]), "has attention_window=[8, 2.0]. A window must be even"),
        ("longformerModel", dict(attention_window=[4]), "has attention_window=[4]. A window must be even"),
        ("longformerModel", dict(attention_window=[]), "one for each of num_hidden_layers=2"),
        ("big_birdModel", dict(block_size=0), "`block_size` must be an int from 1"),
        ("big_birdModel", dict(num_random_blocks=-1), "`num_random_blocks` must be an int from 0"),
        ("big_birdModel", dict(use_bias=1), "`use_bias` must be True or False, got 1"),
        ("robertaModel", dict(pad_token_id=-1), "`pad_token_id` must be an int from 0"),
        ("robertaModel", dict(max_position_embeddings=2), "leaves no position for a token"),
    ],
)
def test_a_familys_own_keys_are_checked_too(name, changes, message, copy):
    with pytest.raises(ValueError, match=r"config\.json .*" + re.escape(message)):
        hf.load(copy(name, **changes))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000], ids=["empty", "cut", "list", "1", "deep"]
)
def test_a_config_that_is_not_a_json_object_is_named(content, copy):
    where = copy()
    (where / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json (is not JSON|must contain a JSON object)"):
        hf.load(where)


@pytest.mark.parametrize("name", ["embeddings.word_embeddings.weight", "encoder.layer.1.output.dense.bias"])
def test_a_tensor_of_integers_is_no_parameter(name, copy):
    def damage(arrays):
        arrays[name] = arrays[name].astype(np.int8)

    with pytest.raises(ValueError, match=rf"Wrong dtype \(1\):\n  {name} is I8, not one of F64, F32, BF16, F16"):
        hf.load(copy(tensors=damage))


def test_a_dtype_of_integers_is_refused():
    with pytest.raises(ValueError, match="dtype='int8' is not one of 'float16', 'bfloat16', 'float32', 'float64'"):
        hf.load(GOLDEN / "bertModel", dtype=jnp.int8)


def test_a_config_from_python_has_the_same_checks():
    with pytest.raises(
        ValueError, match=r"`hidden_dropout_prob` must be a number that is at least 0 and less than 1, got 1\.0"
    ):
        models.BertConfig(hidden_dropout_prob=1.0)
    config = models.BertConfig(hidden_size=np.int64(24), layer_norm_eps=np.float32(0.5))
    assert type(config.hidden_size) is int and type(config.layer_norm_eps) is float
