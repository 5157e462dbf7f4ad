"""Checkpoints of mixtures of experts: the keys of their configs, a tensor per expert, and MXFP4."""

import json
import logging
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from longspan import hf, models
from longspan.hf.config import from_json, to_json
from longspan.hf.mxfp4 import dequantized
from tests.golden import decoder_peers as peers
from tests.models.test_decoders import assert_close, directory, golden, load, logits, real

MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
EXPERT = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w3.weight",
    "qwen3_moe": "model.layers.2.mlp.experts.3.up_proj.weight",
    "gpt_oss": "model.layers.1.mlp.experts.gate_up_proj_bias",
}
every_mixture = pytest.mark.parametrize("name", MIXTURES)


def changed(name, tmp_path, change, **keys):
    """A golden checkpoint whose tensors were changed."""
    _, config, arrays = golden(name)
    arrays = dict(arrays)
    change(arrays)
    return peers.write(tmp_path, config | keys, arrays)


@every_mixture
def test_a_missing_an_extra_and_a_wrong_tensor_of_an_expert_are_named(name, tmp_path):
    expert = EXPERT[name]
    with pytest.raises(ValueError, match=rf"Missing \(1\):\n  {expert.removeprefix('model.')} \["):
        hf.load(changed(name, tmp_path / "missing", lambda arrays: arrays.pop(expert)))
    extra = expert.replace("experts.3.", "experts.7.").replace("_bias", "_offset")
    with pytest.raises(ValueError, match=rf"Unexpected \(1\):\n  {extra}"):
        hf.load(changed(name, tmp_path / "extra", lambda arrays: arrays.update({extra: arrays[expert]})))
    with pytest.raises(ValueError, match=rf"Wrong shape \(1\):\n  {expert} is \["):
        hf.load(changed(name, tmp_path / "shape", lambda arrays: arrays.update({expert: arrays[expert][:-1]})))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mixtral", dict(num_experts_per_tok=6), "num_experts_per_tok=6 must be at most num_local_experts=5"),
        ("mixtral", dict(num_local_experts=0), "`num_local_experts` must be an int from 1"),
        ("mixtral", dict(num_experts_per_tok=0), "`num_experts_per_tok` must be an int from 1"),
        ("mixtral", dict(router_jitter_noise=0.1), r"router_jitter_noise=0.1 is not supported. .* Set router_jitter"),
        ("mixtral", dict(router_jitter_noise=-1), "`router_jitter_noise` must be a number that is at least 0"),
        ("mixtral", dict(n_shared_experts=1), "has 'n_shared_experts', which Longspan does not know in a mixtral"),
        ("mixtral", dict(quantization_config=dict(quant_method="awq")), r"\(awq\), but Longspan reads floats only"),
        ("qwen3_moe", dict(num_experts=4), "has num_experts=4 and num_local_experts=5, two names of one setting"),
        ("qwen3_moe", dict(num_local_experts=2), "num_experts_per_tok=3 must be at most num_experts=2"),
        ("qwen3_moe", dict(num_local_experts=0), "`num_experts` must be an int from 1"),
        ("qwen3_moe", dict(num_local_experts="5"), "`num_experts` must be an int from 1"),
        ("qwen3_moe", dict(norm_topk_prob=1), "`norm_topk_prob` must be True or False"),
        ("qwen3_moe", dict(decoder_sparse_step=0), "`decoder_sparse_step` must be an int from 1"),
        ("qwen3_moe", dict(mlp_only_layers=1), "`mlp_only_layers` must be a list of the numbers of layers, got 1"),
        ("qwen3_moe", dict(mlp_only_layers=[-1]), "`mlp_only_layers` must be a list of the numbers of layers"),
        ("qwen3_moe", dict(moe_intermediate_size=0), "`moe_intermediate_size` must be an int from 1"),
        ("qwen3_moe", dict(shared_expert_intermediate_size=4), "has 'shared_expert_intermediate_size', which"),
        ("qwen3_moe", dict(quantization_config=dict(quant_method="mxfp4")), r"\(mxfp4\), but Longspan reads floats"),
        ("gpt_oss", dict(quantization_config=dict(quant_method="fp8")), r"\(fp8\), but Longspan reads only floats and"),
        ("gpt_oss", dict(experts_per_token=3), "has num_experts_per_tok=2 and experts_per_token=3, two names of one"),
        ("gpt_oss", dict(swiglu_limit=0), "`swiglu_limit` must be a positive number"),
        ("gpt_oss", dict(swiglu_alpha="1"), "`swiglu_alpha` must be a positive number"),
        ("gpt_oss", dict(hidden_act="gelu"), "hidden_act='gelu' is not one of 'silu'"),
        ("gpt_oss", dict(attention_bias=None), "attention_bias=null, which a gpt_oss does not allow"),
        (
            "llama",
            dict(num_experts=8),
            "has num_experts=8, but Longspan does not support mixtures of experts in a llama",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_config_that_does_not_fit_is_refused(name, changes, words):
    with pytest.raises(ValueError, match=words):
        from_json({**golden(name)[1], **changes})


@every_mixture
@pytest.mark.usefixtures("unchecked")
def test_numbers_of_experts_that_the_file_does_not_have_are_refused_before_a_model_is_made(name, tmp_path, monkeypatch):
    monkeypatch.setattr(models.CausalLM, "__init__", None)  # would fail if it were called
    huge, router = 10**9, "mlp.router" if name == "gpt_oss" else "gate"
    for key, words in (
        ("num_local_experts", rf"num_local_experts={huge}, but model.layers.0.\S*{router}.weight in .* is \[5, 24\]"),
        ("moe_intermediate_size" if name == "qwen3_moe" else "intermediate_size", rf"intermediate_size={huge}, but "),
    ):
        with pytest.raises(ValueError, match=words):
            hf.load(changed(name, tmp_path, lambda arrays: None, **{key: huge}))


def test_the_size_of_an_mlp_that_no_layer_has_may_be_any(tmp_path):
    config = golden("qwen3_moe")[1] | dict(mlp_only_layers=[], num_hidden_layers=1, intermediate_size=10**6)
    arrays = {key: x for key, x in golden("qwen3_moe")[2].items() if "layers.1." not in key and "layers.2." not in key}
    assert hf.load(peers.write(tmp_path, config, arrays)).config.intermediate_size == 10**6


def test_which_layers_have_experts():
    sizes: dict[str, Any] = dict(num_hidden_layers=6, num_experts=4, num_experts_per_tok=1)

    def layers(**options):
        kinds = models.Qwen3MoeConfig(**sizes, **options).layer_kinds
        return [number for number, kind in enumerate(kinds) if kind.experts]

    assert layers() == [0, 1, 2, 3, 4, 5]
    assert layers(decoder_sparse_step=2) == [1, 3, 5]
    assert layers(decoder_sparse_step=2, mlp_only_layers=(3, 0, 17)) == [1, 5]
    assert layers(decoder_sparse_step=7) == []


def test_a_qwen3_moe_without_layers_with_experts_is_a_qwen3(tmp_path):
    options: dict[str, Any] = dict(
        vocab_size=29, hidden_size=24, num_attention_heads=4, num_hidden_layers=2, intermediate_size=20
    )
    model = models.CausalLM(models.Qwen3MoeConfig(**options, num_experts=8, decoder_sparse_step=3), rngs=nnx.Rngs(0))
    hf.save(model, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert not [key for key in file.keys() if "expert" in key]  # noqa: SIM118 - a file is no mapping
    inputs = peers.cases()["left"]
    np.testing.assert_array_equal(logits(hf.load(tmp_path), inputs), logits(model, inputs))


def test_keys_of_training_are_written_back():
    for name in MIXTURES:
        config = golden(name)[1] | dict(router_aux_loss_coef=0.02, output_router_logits=True)
        saved = to_json(from_json(config), "X")
        assert (saved["router_aux_loss_coef"], saved["output_router_logits"]) == (0.02, True)


def test_the_number_of_experts_is_written_under_both_names():
    saved = to_json(models.Qwen3MoeConfig(num_experts=6, num_experts_per_tok=2), "X")
    assert saved["num_experts"] == saved["num_local_experts"] == 6
    assert from_json(saved).num_experts == 6


def test_gpt_oss_has_yarn_unless_the_file_has_another_rotation():
    plain = from_json(dict(model_type="gpt_oss", rope_theta=1000.0)).rope_parameters
    assert (plain["rope_type"], plain["factor"], plain["rope_theta"]) == ("yarn", 32.0, 1000.0)
    assert models.GptOssConfig().rope_parameters["rope_theta"] == 150000.0
    scaled = from_json(dict(model_type="gpt_oss", rope_scaling=dict(rope_type="linear", factor=2.0))).rope_parameters
    assert (scaled["rope_type"], scaled["rope_theta"]) == ("linear", 150000.0)


def test_mxfp4_numbers_are_those_of_the_format():
    """All 16 numbers, in both halves of a byte, at all exponents."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    scales = np.full((1, 1, 16), 127, np.uint8)
    scales[..., -1] = 131
    got = dequantized(codes, scales)[0, :, 0]
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = [*magnitudes, *(-x for x in magnitudes)]
    want = [table[half] for byte in range(256) for half in (byte % 16, byte // 16)]
    np.testing.assert_array_equal(got[:-32], want[:-32])
    np.testing.assert_array_equal(got[-32:], 16 * np.array(want[-32:]))
    ends = dequantized(np.full((1, 1, 1, 16), 0x22, np.uint8), np.array([[[0]]], np.uint8))
    assert (ends == np.float32(2.0**-127)).all()


@pytest.mark.parametrize("case", ["right", "left"])
def test_mxfp4_files_are_read_as_floats(case):
    inputs = peers.cases()[case]
    assert_close(real(logits(load(peers.MXFP4), inputs), inputs), golden(peers.MXFP4)[0][f"logits.{case}"])


def test_mxfp4_is_saved_as_floats(tmp_path):
    model = load(peers.MXFP4)
    hf.save(model, tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert not [key for key in file.keys() if key.endswith(("_blocks", "_scales"))]  # noqa: SIM118
        shape = file.get_slice("model.layers.0.mlp.experts.gate_up_proj").get_shape()
    assert shape == [3, 64, 64]
    for a, b in zip(*(jax.tree.leaves(nnx.state(x, nnx.Param)) for x in (model, hf.load(tmp_path))), strict=True):
        np.testing.assert_array_equal(a, b)


DOWN = "model.layers.1.mlp.experts.down_proj"


def as_floats(arrays):
    arrays[DOWN] = np.ascontiguousarray(dequantized(arrays.pop(f"{DOWN}_blocks"), arrays.pop(f"{DOWN}_scales")))


def test_some_experts_of_an_mxfp4_file_may_be_floats(tmp_path):
    inputs = peers.cases()["left"]
    mixed = hf.load(changed(peers.MXFP4, tmp_path, as_floats))
    np.testing.assert_array_equal(logits(mixed, inputs), logits(load(peers.MXFP4), inputs))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda arrays: arrays.pop(f"{DOWN}_scales"), f"{DOWN}_scales is missing"),
        (lambda arrays: arrays.update({DOWN: np.zeros(3, np.float32)}), f"{DOWN} is there as floats too"),
        (
            lambda arrays: arrays.update({f"{DOWN}_blocks": arrays[f"{DOWN}_blocks"][..., :15]}),
            rf"{DOWN}_blocks is \[3, 64, 1, 15\] and {DOWN}_scales is \[3, 64, 1\], but blocks need a last axis of 16",
        ),
        (
            lambda arrays: arrays.update({f"{DOWN}_scales": arrays[f"{DOWN}_scales"].astype(np.float32)}),
            f"{DOWN}_blocks is U8 and {DOWN}_scales is F32, but both must be U8",
        ),
        (lambda arrays: arrays.pop(f"{DOWN}_blocks"), rf"Unexpected \(1\):\n  {DOWN}_scales"),
    ],
)
def test_mxfp4_tensors_that_do_not_fit_are_named(change, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        hf.load(changed(peers.MXFP4, tmp_path, change))


def test_mxfp4_tensors_without_the_config_that_names_them_are_unexpected(tmp_path):
    with pytest.raises(ValueError, match=r"Missing \(4\)(.|\n)*Unexpected \(8\)"):
        hf.load(changed(peers.MXFP4, tmp_path, lambda arrays: None, quantization_config=None))


def test_mxfp4_shards_load(tmp_path, caplog):
    from safetensors.numpy import save_file

    _, config, arrays = golden(peers.MXFP4)
    peers.write(tmp_path, config, {})
    (tmp_path / "model.safetensors").unlink()
    parts = {f"model-{i}.safetensors": dict(list(arrays.items())[i::2]) for i in range(2)}
    for file, some in parts.items():
        save_file(some, tmp_path / file)
    listed = {key: file for file, some in parts.items() for key in some}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=listed)))
    inputs = peers.cases()["left"]
    with caplog.at_level(logging.WARNING, logger="longspan.hf"):
        model = hf.load(tmp_path)
    assert not caplog.records
    np.testing.assert_array_equal(logits(model, inputs), logits(load(peers.MXFP4), inputs))


def test_experts_are_loaded_in_the_dtype_that_is_asked_for():
    model = hf.load(directory("gpt_oss"), dtype="bfloat16")
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {"bfloat16"}
    inputs = peers.cases()["left"]
    got, want = logits(model, inputs), golden("gpt_oss")[0]["logits.left"]
    assert np.abs(real(got, inputs).astype(np.float32) - want).mean() < 0.03 * np.abs(want).max()
