"""Numbers in a `config.json` are checked: every invalid one is an error that names file and key."""

import functools
import json

import numpy as np
import pytest
from safetensors import safe_open

from longspan import models, rope
from longspan.hf.config import from_json
from tests.golden import decoder_peers as peers

# Without the shape checker, which users do not have.
pytestmark = pytest.mark.usefixtures("unchecked")

GOLDEN = peers.HERE.parent
FULL = ("full_attention",) * 3
MINISTRAL3 = peers.MINISTRAL3
NAN, INF = float("nan"), float("inf")
BERTS = ("bert", "roberta", "longformer", "big_bird")
ROTARY_BERTS = ("nomic_bert", "gte", "jina_embeddings_v3")
ENCODERS = (*BERTS, "modernbert", "eurobert", *ROTARY_BERTS, "embedding_gemma")
OLDER = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
DECODERS = (*OLDER, "smollm3", "olmo2", "olmo3", "granite", "ministral", "ministral3", *MIXTURES)
NO_COUNT = (-1, 0, True, "12", None, NAN, INF, 12.0, 10**30, [12], {})
NO_EPS = (-1e-6, True, "1e-5", None, NAN, INF, 1e39, 10**400, [])
NO_SHARE = (-0.1, 1.0, False, "", None, NAN)
NO_POSITIVE = (-2, 0, 0.0, False, True, "", "50", NAN, INF, 1e39, 1e-60, 10**400, [50], {})

COUNTS = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
NOT_NULL = tuple(value for value in NO_COUNT if value is not None)
GEMMAS = ("gemma2", "gemma3_text", "embedding_gemma")
# Families, keys, and values that are wrong for each of them.
TABLE = [
    (ENCODERS + DECODERS, (*COUNTS, "max_position_embeddings"), NO_COUNT),
    (ENCODERS + DECODERS, ("tie_word_embeddings",), (0, 1, "", "no", None, [])),
    ((*BERTS, "nomic_bert", "jina_embeddings_v3"), ("type_vocab_size",), NO_COUNT),
    (("gte",), ("type_vocab_size",), (-1, True, "12", None, 1.0)),
    (ENCODERS, ("initializer_range",), NO_EPS),
    (BERTS + ROTARY_BERTS, ("layer_norm_eps",), NO_EPS),
    (BERTS + ROTARY_BERTS, ("hidden_dropout_prob", "attention_probs_dropout_prob"), NO_SHARE),
    (("eurobert", *ROTARY_BERTS), ("rope_theta",), NO_POSITIVE),
    (("eurobert", *ROTARY_BERTS), ("rope_scaling", "rope_parameters"), (0, 5, False, "", "x", [])),
    (("eurobert", *ROTARY_BERTS), ("head_dim",), (0, 3, True, "4", 4.5, [4], {})),
    (("eurobert", "embedding_gemma"), ("num_key_value_heads",), (*NOT_NULL, 2)),
    (("eurobert", "embedding_gemma"), ("rms_norm_eps",), NO_EPS),
    (("eurobert",), ("attention_dropout",), NO_SHARE),
    (("embedding_gemma",), ("attention_dropout",), [value for value in NO_SHARE if value is not None]),
    (("embedding_gemma",), ("head_dim", "sliding_window_pattern"), NO_COUNT),
    (("embedding_gemma",), ("sliding_window",), (-1, True, "12", None, NAN, 12.0, 10**30, [12])),
    (("embedding_gemma",), ("rope_theta", "rope_local_base_freq"), NO_POSITIVE),
    (("embedding_gemma",), ("rope_scaling", "rope_parameters"), (0, 5, False, "", "x", [])),
    (("embedding_gemma",), ("attention_bias",), (0, 1, "", None)),
    (("embedding_gemma",), ("use_bidirectional_attention",), (1, "yes", [0])),
    (("embedding_gemma",), ("attn_logit_softcapping",), (50.0, 0, False, "x", {})),
    (("embedding_gemma",), ("layer_types",), (5, "full_attention", [None], [["x"]], {}, True, ["chunked"] * 3)),
    (("eurobert",), ("classifier_pooling",), (0, None, "", "cls", ["late"])),
    (("eurobert",), ("attention_bias", "mlp_bias"), (0, 1, "", None)),
    (("modernbert",), ("norm_eps",), NO_EPS),
    (("modernbert",), ("attention_dropout", "embedding_dropout", "mlp_dropout", "classifier_dropout"), NO_SHARE),
    (("modernbert",), ("global_rope_theta", "local_rope_theta"), NO_POSITIVE),
    (("modernbert",), ("rope_scaling", "rope_parameters"), (0, 5, False, "", "x", [])),
    (("modernbert",), ("global_attn_every_n_layers",), NO_COUNT),
    (("modernbert",), ("local_attention", "sliding_window"), (-1, True, "12", None, NAN, 12.0, 10**30, [12])),
    (("modernbert",), ("attention_bias", "mlp_bias", "norm_bias", "decoder_bias", "classifier_bias"), (0, 1, "", None)),
    (("modernbert",), ("hidden_activation", "classifier_activation"), (0, None, "", "x", ["silu"])),
    (("modernbert",), ("classifier_pooling",), (0, None, "", "max", "late", ["cls"])),
    (("modernbert",), ("layer_types",), (5, "full_attention", [None], [["x"]], {}, True, ["chunked"] * 7)),
    (DECODERS, ("rms_norm_eps", "initializer_range"), NO_EPS),
    (DECODERS, ("head_dim", "num_key_value_heads"), NOT_NULL),
    (OLDER, ("rope_theta",), NO_POSITIVE),
    (("smollm3", "olmo2", "olmo3", "granite", "ministral"), ("rope_theta",), NO_POSITIVE),
    (DECODERS, ("rope_scaling", "rope_parameters"), (0, 5, False, "", "x", [])),
    (("gemma2",), ("attn_logit_softcapping", "final_logit_softcapping"), NO_POSITIVE),
    (("gemma3_text",), ("final_logit_softcapping", "rope_local_base_freq"), NO_POSITIVE),
    (("gemma3_text",), ("sliding_window_pattern",), NO_COUNT),
    (GEMMAS, ("query_pre_attn_scalar",), (*NO_POSITIVE, None)),
    (GEMMAS, ("hidden_activation",), (0, False, "", "x", ["silu"])),
    (("mistral", "phi3", "gemma2"), ("sliding_window",), NOT_NULL),
    (("qwen2",), ("sliding_window",), tuple(value for value in NOT_NULL if value != 0)),
    (("qwen3",), ("max_window_layers",), (-1, True, "2", None, NAN, 1.0)),
    (("qwen2",), ("use_sliding_window",), (0, 1, "", None)),
    (("gemma2", "qwen3"), ("layer_types",), (5, "full_attention", [None], [["x"]], {}, True)),
    (("smollm3",), ("no_rope_layers",), (5, "110", [None] * 3, [1, 0, 2], [True] * 2, [1.5] * 3, {}, True)),
    (("smollm3",), ("no_rope_layer_interval",), NO_COUNT),
    (("smollm3",), ("use_sliding_window",), (0, 1, "", None)),
    (("smollm3", "olmo2", "olmo3", "granite"), ("attention_bias",), (0, 1, "", None)),
    (("smollm3", "granite"), ("mlp_bias",), (0, 1, "", None)),
    (("smollm3", "olmo3", "ministral"), ("layer_types",), (5, "full_attention", [None], [["x"]], {}, True)),
    (("smollm3", "olmo3", "ministral", "ministral3"), ("sliding_window",), NOT_NULL),
    (("granite",), ("embedding_multiplier", "attention_multiplier"), (*NO_POSITIVE, None)),
    (("granite",), ("residual_multiplier", "logits_scaling"), (*NO_POSITIVE, None)),
    (MIXTURES, ("num_experts_per_tok",), NO_COUNT),
    (("mixtral", "gpt_oss"), ("num_local_experts", "intermediate_size"), NO_COUNT),
    (("mixtral", "gpt_oss"), ("sliding_window",), NOT_NULL),
    (("mixtral",), ("router_jitter_noise",), (0.5, *NO_EPS)),
    (("qwen3_moe",), ("moe_intermediate_size", "decoder_sparse_step"), NO_COUNT),
    (("qwen3_moe",), ("num_experts",), tuple(value for value in NO_COUNT if value is not None)),
    (("qwen3_moe",), ("norm_topk_prob", "use_sliding_window", "attention_bias"), (0, 1, "", None)),
    (("qwen3_moe",), ("mlp_only_layers",), (5, "1", [None], [-1], [True], [1.0], {"a": 1}, True)),
    (("gpt_oss",), ("swiglu_alpha", "swiglu_limit"), (*NO_POSITIVE, None)),
    (("gpt_oss",), ("attention_bias",), (0, 1, "", None)),
    (("gpt_oss",), ("layer_types",), (5, "full_attention", [None], [["x"]], {}, True)),
    (("gpt_oss",), ("hidden_act",), (0, "", "gelu", ["silu"])),
    (("phi3",), ("original_max_position_embeddings",), NO_COUNT),
    (("longformer",), ("attention_window",), (*NO_COUNT, 3, [8, None], [True, 2])),
    (("big_bird",), ("block_size",), NO_COUNT),
    (("big_bird",), ("num_random_blocks",), (-1, True, "3", None, 1.5)),
    (("roberta",), ("pad_token_id",), (-1, True, "1", None, 1.0)),
    (("bert",), ("position_embedding_type",), (0, False, "", "rotary")),
    (("bert",), ("num_labels",), (0, False, "", -1, 2.0, NAN)),
    (("bert",), ("architectures",), (0, False, "", {}, [3])),
    (("llama",), ("quantization_config",), ("awq", 5, [1])),
]
WRONG = [(name, key, value) for names, keys, values in TABLE for name in names for key in keys for value in values]


def test_there_are_many_wrong_numbers():
    assert len(WRONG) > 1000 and {name for name, _, _ in WRONG} == {*ENCODERS, *DECODERS}


# One test per family: a thousand tests would take longer to report than to run.
@pytest.mark.parametrize("name", ENCODERS + DECODERS)
def test_a_wrong_number_is_an_error_that_names_file_and_key(name):
    for _, key, value in (case for case in WRONG if case[0] == name):
        # The numbers of layer norms and windows are checked whatever the file's rope is.
        raw = {**config(name), key: value}
        if key in ("rope_scaling", "rope_theta", "rope_local_base_freq", "global_rope_theta", "local_rope_theta"):
            raw.pop("rope_parameters")
        refused(raw, key, (key, value))


SCALED = {
    "linear": dict(factor=2.0),
    "dynamic": dict(factor=2.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    "yarn": dict(factor=2.0, original_max_position_embeddings=16, beta_fast=32, mscale=1.0, mscale_all_dim=1.0),
}
NUMBERS = sorted({key for numbers in SCALED.values() for key in numbers} | {"attention_factor", "rope_theta"})


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", SCALED)
def test_a_wrong_number_of_a_rope_is_an_error_that_names_file_and_key(kind, spelling):
    name = "llama"
    plain = {k: v for k, v in config(name).items() if k not in ("rope_parameters", "head_dim")} | dict(rope_theta=1e4)
    plain |= dict(hidden_size=32, num_attention_heads=4)  # dynamic needs 4 features
    right = {spelling: dict(rope_type=kind, **SCALED[kind])}
    assert from_json(plain | right).rope_parameters["rope_type"] == kind
    for key in NUMBERS:
        for value in NO_POSITIVE:
            if key.startswith("mscale") and value == 0 and not isinstance(value, bool):
                continue  # in Hugging Face, 0 means the same as a missing key
            refused(plain | {spelling: {**right[spelling], key: value}}, f"{spelling}.{key}", (kind, key, value))
    for key in {"factor", "low_freq_factor"} & set(SCALED[kind]) - ({"factor"} if kind == "yarn" else set()):
        refused(plain | {spelling: {**right[spelling], key: None}}, key, (kind, key))
    for value in (5, "", False, "spiral", ["linear"], {}):
        refused(plain | {spelling: {**right[spelling], "rope_type": value}}, "rope_type", value)


@pytest.mark.parametrize(
    ("name", "rope_", "key"),
    [
        ("llama", dict(rope_type="yarn", factor=2.0, truncate="no"), "truncate"),
        ("llama", dict(rope_type="yarn", factor=2.0, truncate=0), "truncate"),
        ("llama", dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=16.5), "original_max_position"),
        ("llama", dict(full_attention=dict(rope_type="default")), "one set of numbers, got one per layer type"),
        ("gemma3_text", dict(full_attention=5, sliding_attention={}), "rope_parameters.full_attention=5"),
        ("gemma3_text", dict(full_attention={}, sliding_attention="x"), "rope_parameters.sliding_attention='x'"),
        ("gemma3_text", dict(full_attention={}, sliding_attention=dict(rope_theta=0)), "attention.rope_theta=0"),
        ("gemma3_text", dict(full_attention=dict(factor="")), "rope_parameters.full_attention.factor=''"),
        ("gemma3_text", dict(rope_type="default"), "must have the keys 'full_attention' and 'sliding_attention'"),
        ("olmo3", dict(full_attention=5, sliding_attention={}), "rope_parameters.full_attention=5"),
        ("olmo3", dict(full_attention={}, sliding_attention=dict(rope_theta=0)), "attention.rope_theta=0"),
        ("ministral3", dict(MINISTRAL3, llama_4_scaling_beta=-1), "llama_4_scaling_beta"),
        ("ministral3", dict(MINISTRAL3, llama_4_scaling_beta=NAN), "llama_4_scaling_beta"),
        ("ministral3", dict(MINISTRAL3, llama_4_scaling_beta="1"), "llama_4_scaling_beta"),
        ("ministral3", dict(MINISTRAL3, llama_4_scaling_beta=True), "llama_4_scaling_beta"),
        ("ministral3", dict(MINISTRAL3, original_max_position_embeddings=0), "original_max_position_embeddings"),
        ("ministral3", dict(MINISTRAL3, original_max_position_embeddings=2.5), "original_max_position_embeddings"),
        ("phi3", dict(rope_type="longrope", short_factor="x", long_factor=[1.0] * 3), "short_factor"),
        ("phi3", dict(rope_type="longrope", short_factor=[True] * 3, long_factor=[1.0] * 3), "short_factor"),
        ("phi3", dict(rope_type="longrope", short_factor=[1.0] * 3, long_factor=[1.0, NAN, 2.0]), "long_factor"),
        ("phi3", dict(rope_type="longrope", short_factor=[1.0] * 3, long_factor=[1.0]), "long_factor"),
        ("phi3", dict(rope_type="default", partial_rotary_factor=0), "partial_rotary_factor=0"),
        ("phi3", dict(rope_type="default", partial_rotary_factor=True), "partial_rotary_factor=True"),
        ("phi3", dict(rope_type="default", partial_rotary_factor=1.5), "partial_rotary_factor"),
    ],
)  # fmt: skip
def test_an_invalid_rope_is_an_error_that_names_file_and_key(name, rope_, key):
    refused({**config(name), "rope_parameters": rope_}, key, rope_)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("gemma2", dict(final_logit_softcapping=None), dict(final_soft_cap=None)),
        ("gemma2", dict(attn_logit_softcapping=None), dict(soft_cap=None)),
        ("gemma2", dict(hidden_activation=None), dict(hidden_act="gelu_pytorch_tanh")),
        ("mistral", dict(sliding_window=None), dict(kinds=FULL)),
        ("phi3", dict(sliding_window=None), dict(kinds=FULL)),
        ("qwen2", dict(sliding_window=0, use_sliding_window=False, layer_types=None), dict(kinds=FULL)),
        ("llama", dict(num_key_value_heads=None), dict(num_key_value_heads=None)),
        ("llama", dict(head_dim=None), dict(head_dim=None)),
        ("llama", dict(rope_parameters=None, rope_scaling=None, rope_theta=None), dict(rope_parameters="default")),
        ("llama", dict(rope_parameters={}, rope_scaling={}), dict(rope_parameters="default")),
        ("llama", dict(quantization_config=None), dict(num_hidden_layers=3)),
        ("bert", dict(classifier_dropout=None), dict(classifier_dropout=None)),
        ("bert", dict(pad_token_id=None, position_embedding_type=None), dict(pad_token_id=0)),
        ("bert", dict(architectures=None, id2label=None, num_labels=None), dict(num_labels=2)),
        ("big_bird", dict(sep_token_id=None), dict(sep_token_id=66)),
        ("bert", dict(layer_norm_eps=0, hidden_dropout_prob=0, initializer_range=0), dict(layer_norm_eps=0)),
    ],
)  # fmt: skip
def test_null_and_zero_keep_what_they_mean_in_hugging_face(name, changes, expected):
    made = from_json({**config(name), **changes})
    for key, value in expected.items():
        got = getattr(made, key)
        assert (got["rope_type"] if key == "rope_parameters" else got) == value
        assert key != "rope_parameters" or got["rope_theta"] == 10000.0


def test_configs_from_python_have_the_same_checks():
    for cap in (0, False, "30", NAN):
        with pytest.raises(
            ValueError, match=r"`final_logit_softcapping` must be None \(null in config\.json\) or a positive num"
        ):
            models.Gemma2Config(final_logit_softcapping=cap)
    with pytest.raises(
        ValueError, match="`query_pre_attn_scalar` must be a positive number that is finite in float32, got 0"
    ):
        models.Gemma3Config(query_pre_attn_scalar=0)
    for kind in (models.LlamaConfig, models.Phi3Config):
        with pytest.raises(
            ValueError, match=r"`rope_parameters` must be a mapping as in `ls\.rope\.frequencies`, got 'x'"
        ):
            kind(rope_parameters="x")
    with pytest.raises(ValueError, match="`rope_parameters` of a Gemma 3 must have the keys 'full_attention'"):
        models.Gemma3Config(rope_parameters=dict(full_attention=3, sliding_attention={}))
    with pytest.raises(ValueError, match=r"`window` must be an int from 0 to 2147483647, or one for each"):
        models.LongformerConfig(window=2**31)
    config_ = models.Gemma2Config(final_logit_softcapping=np.float32(2), query_pre_attn_scalar=np.int64(64))
    assert (type(config_.final_logit_softcapping), config_.scale) == (float, 0.125)


def test_frequencies_that_float32_cannot_hold_are_refused():
    huge = dict(rope_type="dynamic", rope_theta=1e4, factor=1e38)
    with pytest.raises(ValueError, match=r"RoPE of type 'dynamic' with .*factor=1e\+38.* not finite in float32"):
        rope.frequencies(huge, 8, max_position_embeddings=16)
    with pytest.raises(ValueError, match="rope_type='' is not one of"):
        rope.frequencies(dict(rope_type="", rope_theta=1e4), 8)


def refused(raw, key, what):
    """The error names the file and the key."""
    try:
        from_json(raw, where="some/config.json")
    except ValueError as error:
        text = str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    else:
        raise AssertionError(f"{what} is accepted")
    assert text.startswith("some/config.json ") and key in text, (what, text)


@functools.cache
def config(name):
    if name in ENCODERS:
        return json.loads((GOLDEN / f"{name}Model" / "config.json").read_text())
    with safe_open(peers.HERE / f"{name}.safetensors", "np") as file:
        return json.loads(file.metadata()["config"])
