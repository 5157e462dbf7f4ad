"""`hf.load`: the dtypes of computation and parameters, and keys of `config.json` that a caller overrides."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from longspan import hf
from tests.golden import decoder_peers as peers
from tests.selection import one_in

GOLDEN = peers.HERE.parent
ENCODERS = [
    f"{name}{task}"
    for name in ("bert", "roberta", "longformer", "big_bird", "modernbert", "eurobert", "gte")
    for task in ("Model", "ForMaskedLM")
] + ["embedding_gemmaModel"]
DENSE = ("smollm3", "olmo2", "olmo3", "granite", "ministral", "ministral3")
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", *DENSE, *MIXTURES)
IDS = np.array([[5, 9, 7, 11, 4, 13]])
EVERY_SECOND = (*("full_attention", "sliding_attention") * 3, "full_attention")
MIXED = dict(dtype="bfloat16", param_dtype="float32")

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def write(name):
        if name not in DECODERS:
            return GOLDEN / name
        with safe_open(peers.HERE / f"{name}.safetensors", "np") as file:
            config, shapes = (json.loads(file.metadata()[key]) for key in ("config", "shapes"))
        return peers.write(tmp_path_factory.mktemp(name), config, peers.weights(shapes, config["model_type"]))

    return write


def dtypes(model):
    return {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))}


@pytest.mark.parametrize("name", one_in(5, [*ENCODERS, *DECODERS]))
def test_every_family_computes_in_bfloat16_with_parameters_of_float32(name, checkpoint):
    model = hf.load(checkpoint(name), **MIXED)
    assert dtypes(model) == {"float32"} and model.dtype == jnp.bfloat16
    graph, state = nnx.split(model)

    def call(state):
        model = nnx.merge(graph, state)
        cache = model.init_cache(1, 9) if name in DECODERS else None
        return model(IDS), model(IDS, cache=cache) if cache else None

    def loss(state):
        return jnp.sum(call(state)[0].last_hidden_state.astype(jnp.float32))

    # Traced, not run: that gives the dtypes, and strict promotion rejects mixtures.
    outputs = [output for output in jax.eval_shape(call, state) if output is not None]
    for output in outputs:
        assert {leaf.dtype.name for leaf in jax.tree.leaves((output.last_hidden_state, output.logits))} == {"bfloat16"}
    gradients = jax.eval_shape(jax.grad(loss), state)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"float32"}


@pytest.mark.parametrize("name", ["bertModel", "llama"])
def test_numbers_in_bfloat16_are_near_those_in_float32(name, checkpoint):
    exact, mixed = hf.load(checkpoint(name), dtype="float32"), hf.load(checkpoint(name), **MIXED)
    for ours, theirs in zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (exact, mixed)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    want, got = (np.asarray(model(IDS).last_hidden_state, np.float32) for model in (exact, mixed))
    error = np.abs(got - want).max()
    assert 0 < error < 0.05 * np.abs(want).max()


def test_param_dtype_is_what_is_saved_and_survives_extend(checkpoint, tmp_path):
    long = hf.extend(hf.load(checkpoint("bertModel"), **MIXED), max_positions=100, window=4)
    assert dtypes(long) == {"float32"} and long.dtype == jnp.bfloat16
    hf.save(long, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("options", "computation", "storage"),
    [
        (dict(), "bfloat16", "bfloat16"),
        (dict(dtype="float32"), "float32", "float32"),
        (dict(param_dtype="float32"), "bfloat16", "float32"),
        (dict(dtype=jnp.float16, param_dtype=np.float32), "float16", "float32"),
        (dict(dtype="float32", param_dtype=jnp.bfloat16), "float32", "bfloat16"),
    ],
)
def test_dtype_is_of_the_computation_and_param_dtype_of_the_parameters(options, computation, storage, tmp_path):
    hf.save(hf.load(GOLDEN / "bertModel", dtype="bfloat16"), tmp_path)
    model = hf.load(tmp_path, **options)
    assert (model.dtype.name, dtypes(model)) == (computation, {storage})


@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
@pytest.mark.parametrize("value", ["int8", "float3", object])
def test_a_dtype_that_is_not_of_floats_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name}=.* is not one of 'float16', 'bfloat16', 'float32', 'float64'"):
        hf.load(GOLDEN / "bertModel", **{name: value})


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("bertModel", dict(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.25), {}),
        ("bertModel", dict(hidden_act="relu", classifier_dropout=0.3), {}),
        ("longformerModel", dict(attention_window=[4, 6]), dict(window=(2, 3))),
        ("longformerModel", dict(attention_window=np.int64(4)), dict(windows=(2, 2))),
        ("big_birdModel", dict(attention_type="original_full", num_random_blocks=0), {}),
        ("modernbertModel", dict(local_attention=8, classifier_pooling="mean"), {}),
        ("modernbertModel", dict(sliding_window=2), dict(local_attention=4)),
        ("modernbertModel", dict(global_attn_every_n_layers=2), dict(kinds=EVERY_SECOND)),
        ("embedding_gemmaModel", dict(sliding_window=512), dict(sliding_radius=256)),
        ("mistral", dict(sliding_window=None), dict(kinds=("full_attention",) * 3)),
        ("gemma2", dict(final_logit_softcapping=None, hidden_activation="silu"), dict(hidden_act="silu")),
        ("qwen2", dict(layer_types=["full_attention"] * 3), dict(kinds=("full_attention",) * 3)),
        ("phi3", dict(max_position_embeddings=64), {}),
    ],
)
def test_keys_of_the_config_are_overridden_under_hugging_faces_names(name, overrides, expected, checkpoint, tmp_path):
    plain, model = (hf.load(checkpoint(name), config=config) for config in (None, overrides))
    for key, value in (expected or overrides).items():
        assert getattr(model.config, key) == value != getattr(plain.config, key)
    hf.save(model, tmp_path)
    again = hf.load(tmp_path)
    for key in expected or overrides:
        assert getattr(again.config, key) == getattr(model.config, key)


def test_the_text_of_a_larger_model_is_overridden(tmp_path):
    with safe_open(peers.HERE / "gemma3.safetensors", "np") as file:
        config, shapes = (json.loads(file.metadata()[key]) for key in ("config", "shapes"))
    where = peers.write(tmp_path, config, peers.weights(shapes, config["model_type"]))
    assert hf.load(where, config=dict(final_logit_softcapping=7.0)).config.final_soft_cap == 7.0


LINEAR = dict(rope_type="linear", rope_theta=500.0, factor=2.0)


@pytest.mark.parametrize("both", [False, True], ids=["version 5", "both spellings"])
def test_a_rope_is_overridden_whole_whatever_spellings_the_file_has(both, checkpoint, tmp_path):
    where = checkpoint("llama")
    if both:
        hf.save(hf.load(where, config=dict(rope_parameters=dict(LINEAR, factor=4.0))), tmp_path)
        where = tmp_path
    assert dict(hf.load(where, config=dict(rope_parameters=LINEAR)).config.rope_parameters) == LINEAR
    for key, value in (
        ("rope_theta", 500.0),
        ("rope_scaling", dict(type="linear", factor=2.0)),
        ("rope_scaling", None),
    ):
        with pytest.raises(ValueError, match=rf"`{key}` is overridden, but the config also has `rope_parameters`"):
            hf.load(where, config={key: value})
    with pytest.raises(ValueError, match="has rope_parameters without `rope_theta`"):
        hf.load(where, config=dict(rope_parameters=dict(rope_type="linear", factor=2.0)))


def test_a_rope_of_version_4_is_overridden_in_its_spelling(checkpoint, tmp_path):
    raw = json.loads((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(checkpoint("llama") / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(peers.version_4(raw)))
    theta = hf.load(tmp_path).config.rope_parameters["rope_theta"]
    scaled = hf.load(tmp_path, config=dict(rope_scaling=dict(type="linear", factor=2.0))).config.rope_parameters
    assert (scaled["rope_type"], scaled["factor"], scaled["rope_theta"]) == ("linear", 2.0, theta)
    assert hf.load(tmp_path, config=dict(rope_theta=77.0)).config.rope_parameters["rope_theta"] == 77.0
    assert dict(hf.load(tmp_path, config=dict(rope_parameters=LINEAR)).config.rope_parameters) == LINEAR


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            "bertModel",
            dict(hidden_dropout_prob=2),
            "`hidden_dropout_prob` must be a number that is at least 0 and less than 1, got 2",
        ),
        ("bertModel", dict(hidden_dropout_prob=None), "has hidden_dropout_prob=null"),
        ("bertModel", dict(vocab_size=10**9), "vocab_size=1000000000, but embeddings.word_embeddings.weight in model."),
        (
            "bertModel",
            dict(num_hidden_layers=1),
            "Wrong size in config.json (1):\n  num_hidden_layers=1, but model.saf",
        ),
        ("gemma2", dict(final_logit_softcapping=0), "`final_logit_softcapping` must be None (null in config.json) or"),
        ("llama", dict(rope_parameters=dict(LINEAR, factor="2")), "has rope_parameters.factor='2'"),
    ],
)
def test_overrides_are_checked_like_the_files_keys(name, overrides, message, checkpoint):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        hf.load(checkpoint(name), config=overrides)
    assert f"config.json with config={overrides!r}" in str(error.value)


def test_keys_that_a_family_does_not_read_are_refused_by_name():
    where = GOLDEN / "bertModel"
    with pytest.raises(
        ValueError, match=r"`config` has 'hidden_dropout', 'x', which a bert model does not read.*The model reads att"
    ):
        hf.load(where, config=dict(hidden_dropout=0, hidden_act="relu", x=1))
    for key in ("num_labels", "random_blocks", "dtype"):
        with pytest.raises(ValueError, match=f"'{key}'.*`{key}` is an argument of `hf.load`"):
            hf.load(where, config={key: 3})
    for wrong in ([("hidden_act", "relu")], "hidden_act", {3: 4}, hf.load(where).config):
        with pytest.raises(TypeError, match=r"`config` must be a dict of keys of config\.json to override"):
            hf.load(where, config=wrong)
    assert hf.load(where, config={}).config == hf.load(where).config
