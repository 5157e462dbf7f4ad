"""Our decoders agree with Hugging Face's to 1e-5 of the greatest logit: compared with golden files, without torch."""

import atexit
import functools
import json
import re
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from longspan import hf, models
from longspan.hf.config import from_json
from longspan.hf.save import tensors_of
from longspan.models.decoders.runs import LayerRun, layer_runs
from tests.golden import decoder_peers as peers
from tests.selection import only

TOLERANCE = 1e-5
every_model = pytest.mark.parametrize("name", peers.MODELS)
every_case = pytest.mark.parametrize("case", ["right", "left"])


@every_model
@pytest.mark.parametrize("case", only(["right"], ["right", "left"]))
def test_logits_agree_with_hugging_face(name, case):
    inputs, (want, _, _) = peers.cases()[case], golden(name)
    got = real(logits(load(name), inputs), inputs)
    assert_close(got, want[f"logits.{case}"])


@pytest.mark.parametrize("name", only(["gemma3_text", "phi3_long"], peers.MODELS))
def test_both_spellings_of_a_config_mean_the_same(name, tmp_path):
    want, config, arrays = golden(name)
    peers.write(tmp_path, peers.version_4(config), arrays)
    inputs = peers.cases()["left"]
    assert_close(real(logits(hf.load(tmp_path), inputs), inputs), want["logits.left"])


@pytest.mark.parametrize("name", only(["gemma3_text"], peers.MODELS))
@every_case
def test_a_cached_pass_is_the_full_pass(name, case):
    """A prompt in two ragged pieces, padded as the case is, and then token by token."""
    model, inputs = load(name), peers.cases()[case]
    ids, lengths = rows_of(inputs), np.array(peers.LENGTHS)
    cache, got = model.init_cache(2, peers.T), [[], []]
    for counts in ([11, 2], [19, 14], *[[1, 1]] * 7):
        taken = [len(row) for row in got]
        new = [ids[row][taken[row] : taken[row] + count] for row, count in enumerate(counts)]
        batch = padded(new, case)
        output = call(model, batch["input_ids"], batch["attention_mask"], cache)
        cache = output.cache
        for row in range(2):
            got[row].extend(np.asarray(output.logits)[row][batch["attention_mask"][row].astype(bool)])
    want = golden(name)[0][f"logits.{case}"]
    assert [len(row) for row in got] == lengths.tolist()
    assert_close(np.concatenate(got), want)


@pytest.mark.parametrize("name", only(["gemma2"], peers.MODELS))
def test_gradients_agree_with_hugging_face(name):
    (want, _, arrays), inputs = golden(name), peers.cases()["left"]
    bearer = gradient_of(load(name), inputs, remat=False)
    for key, ours in tensors_of(bearer).items():
        # Without rotations a key bias has no gradient; with them it is a sum of terms that nearly cancel.
        theirs, got = want[f"grad.{key}"], peers.summary(ours, arrays[key])
        terms = want[f"grad.{key.removesuffix('bias')}weight"] if key.endswith("k_proj.bias") else theirs
        np.testing.assert_allclose(got, theirs, rtol=0, atol=1e-4 * terms[1], err_msg=key)


@pytest.mark.parametrize("name", only(["gemma3_text", "phi3"], peers.MODELS))
def test_saved_files_have_hugging_faces_names_and_numbers_and_load_again(name, tmp_path):
    _, config, arrays = golden(name)
    hf.save(load(name), tmp_path)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(arrays)
        for key in file.keys():  # noqa: SIM118 - a file is no mapping
            np.testing.assert_array_equal(file.get_tensor(key), arrays[key], err_msg=key)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {key: saved.get(key) for key in config} == config
    assert hf.load(tmp_path).config.rope_parameters == load(name).config.rope_parameters


def test_missing_keys_have_hugging_faces_defaults():
    defaults = json.loads((peers.HERE / "defaults.json").read_text())
    for theirs in defaults.values():
        ours, named = (from_json(raw) for raw in (dict(model_type=theirs["model_type"]), theirs))
        resolved = dict.fromkeys(("head_dim", "num_key_value_heads", "layer_types", "sliding_window"))
        resolved |= dict(extra="", no_rope_layers=None)
        assert {**vars(ours), **resolved} == {**vars(named), **resolved}
        masks = [[config.mask(kind) for kind in config.kinds] for config in (ours, named)]
        assert (ours.heads, ours.layer_kinds, ours.scale) == (named.heads, named.layer_kinds, named.scale)
        assert masks[0] == masks[1]


@pytest.mark.check
@pytest.mark.parametrize("name", peers.VISIONS)
@every_case
def test_the_text_part_of_a_multimodal_model_agrees_with_hugging_face(name, case, caplog):
    inputs, (want, _, arrays) = peers.cases()[case], golden(name)
    assert any("vision_tower" in key for key in arrays)
    with caplog.at_level("INFO", logger="longspan.hf"):
        model = hf.load(directory(name))
    assert "of the larger model that contains this one" in caplog.text
    assert_close(real(logits(model, inputs), inputs), want[f"logits.{case}"])


@pytest.mark.check
@pytest.mark.parametrize("name", peers.VISIONS)
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_model_is_saved_as_a_text_model(prefix, name, tmp_path):
    _, config, arrays = golden(name)
    renamed = {key.replace("language_model.model.", prefix): x for key, x in arrays.items()}
    model = hf.load(peers.write(tmp_path / "theirs", config, renamed))
    hf.save(model, tmp_path / "ours")
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    expected = {"gemma3": ("gemma3_text", "Gemma3ForCausalLM"), "mistral3": ("ministral3", "Ministral3ForCausalLM")}
    assert (saved["model_type"], *saved["architectures"]) == expected[name]
    assert "vision_config" not in saved
    inputs = peers.cases()["left"]
    again = hf.load(tmp_path / "ours")
    np.testing.assert_array_equal(logits(again, inputs), logits(model, inputs))


def test_a_larger_models_shared_keys_are_checked():
    config = golden("gemma3")[1]
    with pytest.raises(ValueError, match=r"quantization_config \(gptq\)"):
        from_json({**config, "quantization_config": dict(quant_method="gptq")})
    with pytest.raises(ValueError, match="text_config=None, which must be an object"):
        from_json({**config, "text_config": None})


def test_packed_documents_give_the_logits_of_each_alone():
    for name in peers.MODELS:
        model, ids = load(name), peers.cases()["right"]["input_ids"][:1]
        if any(model.config.rope(kind)["rope_type"] in ("dynamic", "longrope") for kind in model.config.kinds):
            continue  # their frequencies depend on the length of a row
        segments = np.repeat([[3, 0, 7, -1]], [9, 17, 6, 5], axis=1)
        packed = real(logits(model, dict(input_ids=ids, segment_ids=segments)), dict(attention_mask=segments >= 0))
        alone = padded([ids[0, a:b] for a, b in ((0, 9), (9, 26), (26, 32))], "right")  # one program for three lengths
        assert_close(packed, real(logits(model, alone), alone))


def test_remat_changes_no_gradient():
    name, inputs = next(iter(peers.MODELS)), peers.cases()["left"]
    plain, again = (gradient_of(load(name), inputs, remat=remat) for remat in (False, True))
    for a, b in zip(*(jax.tree.leaves(nnx.state(x, nnx.Param)) for x in (plain, again)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_given_embeddings_of_a_granite_are_multiplied():
    """As in Hugging Face, whose Gemma scales inside its embedding layer, and whose Granite scales after it."""
    model, inputs = load("granite"), peers.cases()["left"]
    embedded = np.asarray(model.embed(jnp.asarray(inputs["input_ids"])))
    got = logits(model, dict(inputs_embeds=embedded, attention_mask=inputs["attention_mask"]))
    np.testing.assert_array_equal(got, logits(model, inputs))


def test_embeddings_may_be_given():
    model, inputs = load("llama"), peers.cases()["left"]
    embedded = np.asarray(model.embed(jnp.asarray(inputs["input_ids"])))
    got = logits(model, dict(inputs_embeds=embedded, attention_mask=inputs["attention_mask"]))
    np.testing.assert_array_equal(got, logits(model, inputs))


def test_positions_may_be_given_and_only_their_differences_count():
    model, ids = load("llama"), peers.cases()["right"]["input_ids"]
    plain = logits(model, dict(input_ids=ids))
    places = np.arange(peers.T)[None]
    assert_close(logits(model, dict(input_ids=ids, positions=places + 13)), plain)
    assert np.abs(logits(model, dict(input_ids=ids, positions=places * 2)) - plain).max() > 0.1


def test_layers_are_found_to_repeat():
    local, last = "abcdef", "xyz"
    assert [(run.kinds, run.count) for run in layer_runs("g" * 32)] == [(("g",), 32)]
    for count in (1, 8):
        assert layer_runs(("l" * 5 + "g") * count) == (LayerRun(0, tuple("lllllg"), count),)
    assert sum(len(run.kinds) for run in layer_runs(("l" * 5 + "g") * 4 + "ll")) == 7
    assert [(run.start, run.count) for run in layer_runs("f" * 21 + "s" * 7)] == [(0, 21), (21, 7)]
    for kinds in (local + last, "aab" * 3 + "ba" * 4, "a"):
        numbered = {n: kind for run in layer_runs(kinds) for p, kind in enumerate(run.kinds) for n in run.numbers(p)}
        assert numbered == dict(enumerate(kinds))


@pytest.mark.check
@pytest.mark.parametrize("kind", [models.LlamaConfig, models.Gemma2Config, models.Gemma3Config])
def test_the_program_of_48_layers_is_as_long_as_that_of_6(kind):
    def size(layers):
        config = kind(vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=layers)
        model = nnx.eval_shape(lambda: models.CausalLM(config, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(model)
        jaxpr = jax.make_jaxpr(lambda state, ids: nnx.merge(graph, state)(ids).logits)(
            state, jax.ShapeDtypeStruct((1, 7), jnp.int32)
        )
        return str(jaxpr).count(" = ")

    assert size(48) == size(6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(quantization_config=dict(quant_method="awq")), r"quantization_config \(awq\)"),
        (dict(rope_scaling=dict(rope_type="spiral")), "rope_type='spiral' is not one of"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not supported: a llama model rotates all"),
        (dict(num_local_experts=8), "does not support mixtures of experts"),
        (dict(hidden_act="mish"), "hidden_act='mish'"),
        (dict(num_attention_heads=5, head_dim=8), "multiple of num_key_value_heads=2"),
        (dict(hidden_size=25, head_dim=None), "multiple of num_attention_heads=4"),
        (dict(attention_bias="yes"), "`attention_bias` must be True or False"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_an_unsupported_config_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        from_json({**golden("llama")[1], **changes})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "gemma3_text",
            dict(attn_logit_softcapping=50.0),
            "attn_logit_softcapping=50.0 is not supported: Gemma 3 has no soft cap",
        ),
        (
            "gemma3_text",
            dict(rope_parameters=dict(rope_type="default")),
            "must have the keys 'full_attention' and 'sliding",
        ),
        ("gemma2", dict(use_bidirectional_attention=True), "use_bidirectional_attention=true"),
        (
            "gemma2",
            dict(layer_types=["full_attention"]),
            "`layer_types` must have an entry for each of num_hidden_layers=5",
        ),
        ("qwen2", dict(layer_types=["chunked_attention"] * 3), "`layer_types` has 'chunked_attention'"),
        ("qwen2", dict(sliding_window=None), "need a `sliding_window`, an int from 1 to 2147483647, got None"),
        ("mistral", dict(sliding_window=0), "need a `sliding_window`, an int from 1 to 2147483647, got 0"),
        ("phi3", dict(rope_parameters=dict(rope_type="linear", factor=2.0)), "rope_type='linear'"),
        ("smollm3", dict(no_rope_layers=[1, 2, 0]), "`no_rope_layers` must be a list of 0 and 1, one for each layer"),
        ("smollm3", dict(no_rope_layers=[1, 0]), "`no_rope_layers` must have an entry for each of num_hidden_layers=3"),
        ("smollm3", dict(sliding_window=None), "need a `sliding_window`"),
        ("olmo3", dict(rope_parameters=dict(rope_type="yarn")), "of an OLMo 3 must have the keys 'full_attention' and"),
        ("olmo3", dict(rope_scaling=dict(type="yarn", factor=2.0)), "has rope_scaling.type='yarn'.*does not. Call"),
        ("ministral", dict(sliding_window=None), "need a `sliding_window`"),
        (
            "ministral3",
            dict(rope_parameters=dict(rope_type="default", original_max_position_embeddings=8)),
            "must have `llama_4_scaling_beta`, a number that is at least 0, got None. With 0, queries",
        ),
        (
            "ministral3",
            dict(rope_parameters=dict(rope_type="default", llama_4_scaling_beta=0.1)),
            "must have `original_max_position_embeddings`, an int that is at least 1, got None",
        ),
        (
            "ministral3",
            dict(layer_types=["full_attention"] * 3),
            "has 'layer_types', which Longspan does not know",
        ),
    ],
)
def test_a_family_refuses_what_it_does_not_have(name, changes, words):
    with pytest.raises(ValueError, match=words):
        from_json({**golden(name)[1], **changes})


@pytest.mark.parametrize("name", ["smollm3", "olmo2", "olmo3", "granite", "ministral", "ministral3"])
def test_an_unknown_key_or_tensor_is_refused_by_name(name, tmp_path):
    _, config, arrays = golden(name)
    with pytest.raises(ValueError, match=rf"has 'attention_sinks', which Longspan does not know in a {name}\. Such a"):
        from_json(config | dict(attention_sinks=4))
    rope = json.loads(json.dumps(config["rope_parameters"]))
    rope.get("full_attention", rope)["mrope_section"] = [1, 1]
    with pytest.raises(ValueError, match=r"has 'rope_parameters.*\.?mrope_section', which Longspan does not know"):
        from_json(config | dict(rope_parameters=rope))
    for tensor in ("model.layers.0.self_attn.sinks", "lm_head.bias"):
        more = arrays | {tensor: np.zeros(4, np.float32)}
        with pytest.raises(ValueError, match=rf"Unexpected \(1\):\n  {re.escape(tensor)}"):
            hf.load(peers.write(tmp_path, config, more))


def test_an_olmo_3_of_version_4_has_its_base_in_full_layers_only():
    """As in Hugging Face's version 5, which was run; its version 4 used `rope_theta` in all layers."""
    config = {key: value for key, value in golden("olmo3")[1].items() if key != "rope_parameters"}
    thetas = [from_json(config | changes).rope_parameters for changes in (dict(rope_theta=100.0), {})]
    assert [[rope[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention")] for rope in thetas] == [
        [100.0, 500000.0], [500000.0, 500000.0]
    ]  # fmt: skip


def test_a_ministral_3_without_an_original_length_has_that_of_the_config():
    _, config, _ = golden("ministral3")
    rope = {key: value for key, value in config["rope_parameters"].items() if not key.startswith("original")}
    assert from_json(config | dict(rope_parameters=rope)).query_scaling == (0.5, 71)
    without = {key: value for key, value in config.items() if key != "rope_parameters"}
    assert from_json(without | dict(rope_theta=5.0)).rope_parameters["rope_theta"] == 1e6  # as in Hugging Face


def test_a_larger_models_ties_apply_to_its_text_part(tmp_path):
    """In Hugging Face `tie_word_embeddings` of the larger model decides, and its default is true."""
    for name in peers.VISIONS:
        config = {key: value for key, value in golden(name)[1].items() if key != "tie_word_embeddings"}
        untied = config | dict(text_config=config["text_config"] | dict(tie_word_embeddings=False))
        assert from_json(untied).tie_word_embeddings
        assert not from_json(config | dict(tie_word_embeddings=False)).tie_word_embeddings
    _, config, arrays = golden("mistral3")
    assert hf.load(directory("mistral3")).head is not None
    body = {key: x for key, x in arrays.items() if not key.startswith("language_model.lm_head")}
    assert hf.load(peers.write(tmp_path, config | dict(tie_word_embeddings=True), body)).head is None


def test_the_kind_of_a_larger_models_text_part_is_checked():
    config = golden("mistral3")[1]
    text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    text.pop("rope_parameters")
    assert from_json(config | dict(text_config=text)).model_type == "mistral"  # as in Hugging Face
    with pytest.raises(ValueError, match=r"text_config\.model_type='llama', but Longspan supports 'mistral', 'minist"):
        from_json(config | dict(text_config=text | dict(model_type="llama")))


@pytest.mark.parametrize("word", ["su", "yarn", "longrope"])
def test_old_names_of_longrope_are_read(word):
    config = {k: v for k, v in golden("phi3_long")[1].items() if k != "rope_parameters"}
    scaling = dict(type=word, short_factor=[1.1, 1.7, 2.0], long_factor=[3.0, 9.0, 4.0])
    old = from_json({**config, "rope_theta": 100.0, "rope_scaling": scaling})
    for length in (16, 17):
        ours, named = (c.frequencies("full_attention", length) for c in (old, load("phi3_long").config))
        np.testing.assert_array_equal(ours[0], named[0])
        assert ours[1] == named[1] > 1


def test_sliding_layers_store_one_window():
    capacity = {name: slots(load(name).init_cache(2, 1000)) for name in ("llama", "mistral", "qwen2", "gemma3_text")}
    assert capacity["llama"] == [1000] * 3
    assert capacity["mistral"] == [5] * 3
    assert capacity["qwen2"] == [1000, 5, 5]
    assert capacity["gemma3_text"] == [5, 5, 1000] * 3 + [5, 5]


def slots(caches):
    return [cache.k.shape[1] for cache in caches]


def test_an_extended_decoder_is_refused():
    with pytest.raises(
        ValueError, match="turns a bert, roberta, xlm-roberta or camembert model into a Longformer, got a llama"
    ):
        hf.extend(load("llama"))


@pytest.mark.check
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_a_file_of_16_bits_is_computed_in_float32_on_a_cpu_unless_asked(name, tmp_path):
    hf.save(hf.load(directory(name), dtype="bfloat16"), tmp_path)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118
    inputs = peers.cases()["left"]
    for dtype, used in ((None, "float32"), ("bfloat16", "bfloat16")):
        model = hf.load(tmp_path, dtype=dtype)
        assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {used}
        got = logits(model, inputs)
        assert got.dtype == used
        want = golden(name)[0]["logits.left"]
        assert np.abs(real(got, inputs).astype(np.float32) - want).mean() < 0.03 * np.abs(want).max()


def test_a_base_models_file_loads_where_logits_are_tied_and_misses_a_head_otherwise(tmp_path):
    for name in ("llama3", "llama"):
        _, config, arrays = golden(name)
        body = {key.removeprefix("model."): x for key, x in arrays.items() if key != "lm_head.weight"}
        peers.write(tmp_path / name, config, body)
    inputs = peers.cases()["left"]
    assert_close(real(logits(hf.load(tmp_path / "llama3"), inputs), inputs), golden("llama3")[0]["logits.left"])
    with pytest.raises(ValueError, match=r"Missing \(1\):\n  lm_head.weight"):
        hf.load(tmp_path / "llama")
    assert hf.load(tmp_path / "llama", rngs=nnx.Rngs(0)).head.kernel.shape == (24, 29)


@every_case
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_hidden_states_are_those_after_the_last_norm_and_need_no_logits(prefix, case, tmp_path, monkeypatch):
    """Files of embedding models have no head, and name the body's tensors without a prefix."""
    want, config, arrays = golden("qwen3")
    body = {prefix + key.removeprefix("model."): x for key, x in arrays.items() if key != "lm_head.weight"}
    model = hf.load(peers.write(tmp_path, config | dict(tie_word_embeddings=True), body))
    monkeypatch.setattr(models.CausalLM, "_logits", None)  # would fail if it were called
    inputs = peers.cases()[case]
    output = model(**inputs, logits=False)
    assert output.logits is None
    assert_close(real(np.asarray(output.last_hidden_state), inputs), want[f"hidden.{case}"])


def test_a_cached_call_without_logits_returns_the_cache():
    model, ids = load("llama"), peers.cases()["right"]["input_ids"]
    output = jax.eval_shape(lambda: model(ids, cache=model.init_cache(2, peers.T), logits=False))
    assert output.logits is None and output.last_hidden_state.shape == (2, peers.T, 24)
    assert isinstance(output.cache, models.DecoderCache)


def test_shards_load(tmp_path):
    from safetensors.numpy import save_file

    _, config, arrays = golden("llama")
    peers.write(tmp_path, config, {})
    (tmp_path / "model.safetensors").unlink()
    parts = {f"model-{i}.safetensors": dict(list(arrays.items())[i::3]) for i in range(3)}
    for file, some in parts.items():
        save_file(some, tmp_path / file)
    listed = {key: file for file, some in parts.items() for key in some}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=listed)))
    inputs = peers.cases()["left"]
    np.testing.assert_array_equal(logits(hf.load(tmp_path), inputs), logits(load("llama"), inputs))


def test_old_tables_of_frequencies_are_ignored(tmp_path):
    _, config, arrays = golden("llama")
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32) for i in range(3)}
    assert hf.load(peers.write(tmp_path, config, arrays | tables)).config.num_hidden_layers == 3


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(), ValueError, "`input_ids` or `inputs_embeds`"),
        (dict(input_ids=np.ones((2, 3), int), positions=np.ones((3, 2), int)), ValueError, "`positions` must have"),
        (dict(input_ids=np.ones((2, 3), int), positions=np.ones((2, 3))), ValueError, "`positions` must be ints"),
        (dict(input_ids=np.full((2, 3), 29)), ValueError, "vocab_size=29"),
        (dict(input_ids=np.ones((2, 3), int), cache=()), TypeError, "`model.init_cache"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_wrong_call_is_an_error(arguments, error, words):
    with pytest.raises(error, match=words):
        load("llama")(**arguments)


def test_a_cache_that_is_too_small_is_an_error():
    model, ids = load("llama"), np.ones((2, 3), int)
    with pytest.raises(ValueError, match="made for 2 tokens per row, but this call needs 3"):
        model(ids, cache=model.init_cache(2, 2))
    with pytest.raises(ValueError, match="3 rows and the input has 2"):
        model(ids, cache=model.init_cache(3, 5))
    for name in ("positions", "segment_ids"):
        with pytest.raises(ValueError, match=f"`{name}` and `cache` were both given"):
            model(ids, cache=model.init_cache(2, 5), **{name: ids})
    filled = model(ids, np.array([[1, 1, 0], [0, 1, 1]]), cache=model.init_cache(2, 2)).cache
    assert filled[0].length.tolist() == [2, 2]


def test_labels_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`id2label` was given, but a llama has no labels"):
        hf.save(load("llama"), tmp_path, id2label=["no", "yes"])


@functools.cache
def golden(name):
    """Hugging Face's results, its config and its weights."""
    with safe_open(peers.HERE / f"{name}.safetensors", "np") as file:
        results = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        config, shapes = (json.loads(file.metadata()[key]) for key in ("config", "shapes"))
    if "gradients" in results:
        results |= {f"grad.{key}": row for key, row in zip(shapes, results.pop("gradients"), strict=True)}
    return results, config, peers.weights(shapes, config["model_type"])


@functools.cache
def directory(name):
    _, config, arrays = golden(name)
    where = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, where, ignore_errors=True)
    return peers.write(where, config, arrays)


@functools.cache
def load(name):
    return hf.load(directory(name))


@nnx.jit
def _jitted(model, inputs):
    return model(**inputs).logits


def logits(model, inputs):
    return np.asarray(_jitted(model, inputs))


@nnx.jit
def call(model, ids, mask, cache):
    return model(ids, mask, cache=cache)


def hidden_states(model, inputs):
    return np.asarray(_jitted_hidden_states(model, inputs))


@nnx.jit
def _jitted_hidden_states(model, inputs):
    return model(**inputs, logits=False).last_hidden_state


def gradient_of(model, inputs, *, remat):
    """A model whose parameters are the gradient of the golden loss."""

    @nnx.jit
    def gradient(model):
        return nnx.grad(lambda m: jnp.sum(m(**inputs, remat=remat).logits * peers.cotangent(inputs)))(model)

    bearer = nnx.clone(model)
    nnx.update(bearer, gradient(model))
    return bearer


def real(values, inputs):
    return values[inputs["attention_mask"].astype(bool)]


def rows_of(inputs):
    return [ids[mask.astype(bool)] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]


def padded(rows, side):
    """Rows of different lengths as one batch."""
    most = max(map(len, rows))
    ids, mask = np.zeros((len(rows), most), np.int32), np.zeros((len(rows), most), np.int32)
    for row, tokens in enumerate(rows):
        place = slice(0, len(tokens)) if side == "right" else slice(most - len(tokens), most)
        ids[row, place], mask[row, place] = tokens, 1
    return dict(input_ids=ids, attention_mask=mask)


def assert_close(got, want):
    assert got.shape == want.shape
    worst = np.abs(got - want).max() / np.abs(want).max()
    assert worst <= TOLERANCE, f"{worst:.1e} of the greatest logit"
