"""ModernBERT: spellings of its config, its window, the pooling of its classifiers, and configs that are refused."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from flax import nnx

from longspan import hf, models
from longspan.hf.config import from_json
from tests.golden import peers
from tests.golden.test_golden import HERE, load
from tests.made import made

RAW = dict(model_type="modernbert", **peers.SPELLED)
SIZES = dict(
    vocab_size=19, hidden_size=12, num_attention_heads=3, intermediate_size=10, num_hidden_layers=1,
    initializer_range=0.4,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(3, 19, (2, 29)).astype(np.int32)


def _spellings():
    stored = json.loads((HERE / "spellings.json").read_text())
    for family, raws in peers.SPELLINGS.items():
        for raw, want in zip(raws, stored[family], strict=True):
            yield pytest.param(family, raw, want, id=f"{family}-{'-'.join(raw) or 'defaults'}"[:90])


@pytest.mark.parametrize(("family", "raw", "want"), list(_spellings()))
def test_spellings_mean_what_they_mean_in_hugging_face(family, raw, want, tmp_path):
    """Also after a round trip through `hf.save`, which writes the spellings of versions 4 and 5."""
    config = from_json(peers.written(family, raw))
    hf.save(made(models.Encoder, config), tmp_path)
    for read in (config, hf.load(tmp_path).config):
        assert list(read.kinds) == want["kinds"]
        for kind in set(read.kinds):
            frequencies, factor = read.frequencies(kind)
            np.testing.assert_allclose(frequencies, want[kind][0], rtol=1e-6)
            np.testing.assert_allclose(factor, want[kind][1], rtol=1e-6)
            assert read.window(kind) == (want["window"] if kind == "sliding_attention" else None)


def test_version_4_reads_regular_layers_and_bases(tmp_path):
    """It knows neither `layer_types` nor `rope_parameters`."""
    kinds = ["full_attention", "sliding_attention"] * 3
    config = from_json(RAW | dict(layer_types=kinds, rope_parameters=dict(full_attention=dict(rope_theta=500.0))))
    hf.save(made(models.Encoder, config), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert [written[key] for key in ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta")] == [
        2, 500.0, 10000.0,
    ]  # fmt: skip


@pytest.mark.parametrize(("local_attention", "radius"), [(0, 0), (1, 0), (9, 4), (10, 5), (11, 5)])
def test_a_query_sees_half_of_local_attention_on_each_side(local_attention, radius):
    config = models.ModernBertConfig(**SIZES, local_attention=local_attention, layer_types=["sliding_attention"])
    model = made(models.Encoder, config, seed=1)
    changed = IDS[:1].copy()
    changed[0, 14] = 3 + (changed[0, 14] - 2) % 16
    before, after = (np.asarray(_encode(model, ids)) for ids in (IDS[:1], changed))
    (seen_by,) = np.nonzero(np.abs(before - after)[0].max(axis=1) > 0)
    assert seen_by.tolist() == list(range(14 - radius, 15 + radius))


@nnx.jit
def _encode(model, ids):
    return model(ids).last_hidden_state


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_classifier_gives_the_same_on_either_side_of_the_padding(pooling):
    """Hugging Face reads the first slot for "cls", which is padding on the left; here it is the first token."""
    config = models.ModernBertConfig(**SIZES | dict(num_hidden_layers=2), classifier_pooling=pooling, local_attention=6)
    model = made(models.SequenceClassifier, config, seed=1)
    right, left = np.arange(29)[None] < 20, np.arange(29)[None] >= 9
    shifted = np.roll(IDS, 9, axis=1)
    run = nnx.jit(lambda model, ids, mask: model(ids, mask).logits)
    masks = [np.broadcast_to(mask, IDS.shape) for mask in (right, left)]
    results = [np.asarray(run(model, ids, mask)) for ids, mask in zip((IDS, shifted), masks, strict=True)]
    np.testing.assert_allclose(*results, atol=1e-5)
    none = np.asarray(run(model, IDS, np.zeros(IDS.shape, bool)))
    assert np.isfinite(none).all()


def test_a_classifier_of_either_pooling_reads_what_it_says():
    model = load("modernbert_biasedForSequenceClassification", False)
    assert model.config.pooling == "mean"
    first = made(models.SequenceClassifier, dataclasses.replace(model.config, classifier_pooling="cls"))
    nnx.update(first, nnx.state(model, nnx.Param))
    assert not np.allclose(*(np.asarray(m(IDS).logits) for m in (model, first)), atol=1e-2)


def test_scanned_layers_are_compiled_once():
    """A repeating pattern is one loop, so a deep model compiles no more layers than a shallow one."""
    programs = []
    for layers in (4, 22):
        model = made(models.Encoder, models.ModernBertConfig(**SIZES | dict(num_hidden_layers=layers)))
        graph, state = nnx.split(model)
        programs.append(str(jax.make_jaxpr(lambda s, g=graph: nnx.merge(g, s)(IDS).last_hidden_state)(state)))
    counts = [program.count("dot_general") for program in programs]
    assert counts[0] == counts[1]


REFUSED = [
    (dict(conv_bias=True, z=1), "has 'conv_bias', 'z', which Longspan does not know in a modernbert. Such a key may"),
    (dict(partial_rotary_factor=0.5), "has 'partial_rotary_factor', which Longspan does not know"),
    (dict(is_decoder=True), "has is_decoder=true, but Longspan supports only the encoders"),
    (dict(position_embedding_type="relative_key"), "has position_embedding_type='relative_key'"),
    (dict(rope_parameters=dict(rope_type="default", rope_theta=3.0)), "has rope_parameters with the keys 'rope_type'"),
    (dict(rope_parameters=dict(chunked={})), "has rope_parameters with the keys 'chunked', but a modernbert has one"),
    (dict(rope_parameters=dict(full_attention={}), rope_scaling=dict(rope_type="yarn")), "has both rope_parameters"),
    (dict(rope_scaling=dict(type="yarn", factor=2.0)), "has rope_scaling.type='yarn', which Hugging Face ignores in a"),
    (dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), "rope_type='dynamic' is not one of 'default'"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=2.0, partial_rotary_factor=0.5)), "partial_rotary_factor=0.5"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=0)), "has rope_scaling.factor=0"),
    (dict(rope_parameters=dict(full_attention=dict(rope_theta=-1))), "has rope_parameters.full_attention.rope_theta"),
    (dict(sliding_window=2**31 - 1), "has sliding_window=2147483647, which must be an int from 0 to 1073741823. It"),
    (dict(layer_types=["full_attention"]), "`layer_types` must have an entry for each of num_hidden_layers=6 layers"),
    (dict(layer_types=["chunked_attention"] * 6), "`layer_types` has 'chunked_attention', which is not one of"),
    (dict(classifier_pooling="max"), "classifier_pooling='max' is not one of 'cls', 'mean'"),
    (dict(hidden_size=25), "hidden_size=25 must be a multiple of num_attention_heads=2"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=["-".join(changes) for changes, _ in REFUSED])
def test_a_config_that_is_not_understood_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        from_json(RAW | changes, where="some/config.json")
    assert str(error.value).startswith("some/config.json ")


@pytest.mark.usefixtures("unchecked")
def test_a_config_from_python_has_the_same_checks():
    for wrong in ("x", dict(full_attention=3, sliding_attention={}), dict(rope_type="default")):
        with pytest.raises(ValueError, match="`rope_parameters` of a modernbert must have the keys 'full_attention'"):
            models.ModernBertConfig(rope_parameters=wrong)


@pytest.mark.usefixtures("unchecked")
def test_tensors_that_are_not_understood_are_refused_by_name(tmp_path):
    from safetensors.numpy import load_file, save_file

    where = HERE / "modernbertModel"
    (tmp_path / "config.json").write_text((where / "config.json").read_text())
    arrays = load_file(where / "model.safetensors")
    extra = {
        "layers.1.attn.q_norm.weight": arrays["layers.1.attn_norm.weight"],
        "cls.weight": arrays["final_norm.weight"],
    }
    arrays["layers.0.attn_norm.weight"] = arrays["layers.1.attn_norm.weight"]
    save_file(arrays | extra, tmp_path / "model.safetensors")
    unexpected = ("Unexpected (3):", "cls.weight", "layers.0.attn_norm.weight", "layers.1.attn.q_norm.weight")
    with pytest.raises(ValueError, match=re.escape("\n  ".join(unexpected))):
        hf.load(tmp_path)


def test_overridden_keys_replace_those_of_the_other_spelling():
    where = HERE / "modernbertModel"
    with pytest.raises(ValueError, match="`local_rope_theta` is overridden, but the config also has `rope_parameters`"):
        hf.load(where, config=dict(local_rope_theta=5.0))
    ropes = dict(full_attention=dict(rope_theta=5.0), sliding_attention=dict(rope_theta=7.0))
    config = hf.load(where, config=dict(rope_parameters=ropes)).config
    assert [config.rope(kind)["rope_theta"] for kind in ("full_attention", "sliding_attention")] == [5.0, 7.0]
