"""EuroBERT, NomicBERT, GTE and Jina v3: other repositories' names, poolings, and configs that are refused."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from longspan import hf, models
from longspan.hf.config import from_json
from tests.golden import peers
from tests.golden.test_golden import HERE, load
from tests.made import made

SIZES = dict(
    vocab_size=19, hidden_size=12, num_attention_heads=3, intermediate_size=10, num_hidden_layers=1,
    initializer_range=0.4,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(3, 19, (2, 29)).astype(np.int32)
GPT2_NAMES = dict(
    hidden_size="n_embd", num_attention_heads="n_head", intermediate_size="n_inner", num_hidden_layers="n_layer",
    max_position_embeddings="n_positions", layer_norm_eps="layer_norm_epsilon", hidden_dropout_prob="resid_pdrop",
    attention_probs_dropout_prob="attn_pdrop",
)  # fmt: skip
# From nomic-embed-text's repository, from memory: no published file was compared.
NOMIC = dict(
    activation_function="swiglu", causal=False, prenorm=False, qkv_proj_bias=False, rotary_emb_fraction=1.0,
    rotary_scaling_factor=None, use_rms_norm=False, embd_pdrop=0.0, use_flash_attn=True, rotary_emb_base=1000,
)  # fmt: skip


def copy(name, where, *, rename=None, **changes):
    """A golden checkpoint with changed keys and, if `rename` is given, renamed tensors."""
    raw = json.loads((HERE / name / "config.json").read_text()) | changes
    (where / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    arrays = load_file(HERE / name / "model.safetensors")
    save_file({(rename or str)(key): value for key, value in arrays.items()}, where / "model.safetensors")
    return where


def test_a_nomic_config_in_gpt2s_words_means_the_same(tmp_path):
    native = json.loads((HERE / "nomic_bertModel" / "config.json").read_text())
    words = {new: native[old] for old, new in GPT2_NAMES.items()}
    gone = dict.fromkeys([*GPT2_NAMES, "rope_parameters", "hidden_act"], ...)
    copy("nomic_bertModel", tmp_path, **gone, **words, **NOMIC | dict(rotary_emb_base=50.0))
    config, want = hf.load(tmp_path).config, load("nomic_bertModel", False).config
    assert dataclasses.replace(config, extra="{}") == dataclasses.replace(want, extra="{}")
    hf.save(made(models.Encoder, config), tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["hidden_size"] == 12 and not set(GPT2_NAMES.values()) & set(written)


def test_a_gte_of_the_original_repository_has_another_prefix(tmp_path):
    """Hugging Face renames it too."""
    where = copy("gteForMaskedLM", tmp_path, rename=lambda name: name.replace("gte.", "new."))
    got, want = hf.load(where), load("gteForMaskedLM", False)
    np.testing.assert_array_equal(
        got.encoder.embeddings.word.embedding[...], want.encoder.embeddings.word.embedding[...]
    )


@nnx.jit
def _logits(model, ids, mask):
    return model(ids, mask).logits


def test_a_eurobert_classifier_pools_in_three_ways():
    """Padding on either side changes nothing, and the three ways differ."""
    right, left = np.arange(29)[None] < 20, np.arange(29)[None] >= 9
    results = {}
    for pooling in ("bos", "mean", "late"):
        config = models.EuroBertConfig(**SIZES, num_key_value_heads=1, classifier_pooling=pooling)
        model = made(models.SequenceClassifier, config, seed=1)
        inputs = [(IDS, right), (np.roll(IDS, 9, axis=1), left)]
        results[pooling] = [np.asarray(_logits(model, ids, np.broadcast_to(mask, IDS.shape))) for ids, mask in inputs]
        np.testing.assert_allclose(*results[pooling], atol=1e-5)
        first = np.asarray(_logits(model, IDS[:, :1], np.ones((2, 1), bool)))
        tokens = model(IDS[:, :1], np.ones((2, 1), int)).last_hidden_state
        want = model.classifier(jax.nn.gelu(model.dense(tokens[:, 0]), approximate=False))
        np.testing.assert_allclose(first, want, atol=1e-5)  # one token: all three are the same
    for a, b in (("bos", "mean"), ("mean", "late"), ("bos", "late")):
        assert not np.allclose(results[a][0], results[b][0], atol=1e-2)


def test_a_pooler_reads_the_first_token_on_either_side_of_the_padding():
    model = made(models.Encoder, models.JinaEmbeddingsV3Config(**SIZES), seed=1)
    run = nnx.jit(lambda model, ids, mask: model(ids, mask).pooler_output)
    right, left = (np.broadcast_to(mask, IDS.shape) for mask in (np.arange(29) < 20, np.arange(29) >= 9))
    np.testing.assert_allclose(run(model, IDS, right), run(model, np.roll(IDS, 9, axis=1), left), atol=1e-5)


@pytest.mark.parametrize(("config", "has_pooler"), [
    (models.NomicBertConfig, False), (models.GteConfig, False), (models.JinaEmbeddingsV3Config, True),
])  # fmt: skip
def test_encoders_have_the_poolers_of_hugging_face(config, has_pooler):
    assert (made(models.Encoder, config(**SIZES)).pooler is not None) == has_pooler
    assert made(models.Encoder, config(**SIZES), pooler=True).pooler is not None


@pytest.mark.check
@pytest.mark.parametrize("name", ["eurobert_biasedModel", "nomic_bertModel", "jina_embeddings_v3Model"])
def test_packed_documents_are_encoded_like_each_alone(name):
    """Also if the attention mask hides a token, which keeps its place. `test_encoders.py` has the other families."""
    model, segments = load(name, False), np.repeat([[3, 0, -1], [1, 5, 2]], [7, 17, 5], axis=1)
    mask = np.arange(29) != np.array([[17], [5]])
    run = models.compiled(model)
    packed = np.asarray(run(IDS, mask, segment_ids=segments).last_hidden_state)
    for row, number in ((0, 3), (0, 0), (1, 5)):
        (places,) = np.nonzero(segments[row] == number)
        shown = mask[row, places]
        alone = np.asarray(run(IDS[row, places][None], shown[None]).last_hidden_state)
        np.testing.assert_allclose(packed[row, places[shown]], alone[0, shown], atol=2e-5)


def radius_of(config):
    """The number of keys on each side that change a query of a single layer."""
    model = made(models.Encoder, config, seed=1)
    changed = IDS[:1].copy()
    changed[0, 14] = 3 + (changed[0, 14] - 2) % 16
    run = nnx.jit(lambda model, ids: model(ids).last_hidden_state)
    before, after = (np.asarray(run(model, ids)) for ids in (IDS[:1], changed))
    (seen_by,) = np.nonzero(np.abs(before - after)[0].max(axis=1) > 0)
    assert seen_by.tolist() == list(range(14 - len(seen_by) // 2, 15 + len(seen_by) // 2))
    return len(seen_by) // 2


@pytest.mark.parametrize(("window", "radius"), [(0, 0), (1, 0), (10, 5), (11, 5)])
def test_a_query_of_an_embedding_gemma_sees_half_of_its_window_on_each_side(window, radius):
    assert radius_of(models.EmbeddingGemmaConfig(**SIZES, head_dim=4, sliding_window=window)) == radius


def test_an_embedding_gemma_loads_with_both_namings_and_is_no_decoder(tmp_path):
    where = copy("embedding_gemmaModel", tmp_path, rename=lambda name: f"model.{name}")
    got, want = hf.load(where), load("embedding_gemmaModel", False)
    assert type(got) is type(want) is models.Encoder
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(model, nnx.Param) for model in (got, want)))
    (tmp_path / "decoder").mkdir()
    decoder = hf.load(copy("embedding_gemmaModel", tmp_path / "decoder", use_bidirectional_attention=False))
    assert type(decoder) is models.CausalLM
    with pytest.raises(ValueError, match="task='causal_lm' is not one of 'encoder'"):
        hf.load(HERE / "embedding_gemmaModel", task="causal_lm")
    with pytest.raises(ValueError, match="has use_bidirectional_attention=False, which must be true for an encoder"):
        hf.load(HERE / "embedding_gemmaModel", config=dict(use_bidirectional_attention=False))


def test_a_family_without_a_head_refuses_to_make_one():
    config = models.EmbeddingGemmaConfig(**SIZES)
    with pytest.raises(
        ValueError, match=r"TokenClassifier does not support a gemma3_text, .* Longspan has Encoder for"
    ):
        models.TokenClassifier(config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="QuestionAnswering does not support a nomic_bert"):
        models.QuestionAnswering(models.NomicBertConfig(**SIZES), rngs=nnx.Rngs(0))


REFUSED = [
    ("embedding_gemma", dict(altup_num_inputs=4), "has 'altup_num_inputs', which Longspan does not know in a gemma3_"),
    ("embedding_gemma", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0 is not supported: Gemma 3 has"),
    ("embedding_gemma", dict(num_key_value_heads=4), "num_attention_heads=2 must be a multiple of num_key_value_heads"),
    ("embedding_gemma", dict(use_bidirectional_attention="yes"), "has use_bidirectional_attention='yes', which must"),
    ("embedding_gemma", dict(sliding_window=None), "has sliding_window=null, which a gemma3_text does not allow"),
    ("embedding_gemma", dict(num_local_experts=8), "has num_local_experts=8, but Longspan does not support mixtures"),
    ("embedding_gemma", dict(layer_types=["full_attention"]), "`layer_types` must have an entry for each of num_hidd"),
    ("embedding_gemma", dict(rope_parameters=dict(rope_theta=3.0)), "must have the keys 'full_attention' and 'slidi"),
    ("embedding_gemma2", {}, "has model_type='embedding_gemma2', which Longspan does not support. It lacks the layers"),
    ("embedding_gemma2_text", {}, "has model_type='embedding_gemma2_text', which Longspan does not support. It lacks"),
    ("nomic_bert", dict(num_experts=8), "has 'num_experts', which Longspan does not know in a nomic_bert"),
    ("nomic_bert", dict(rotary_scaling_factor=2), "has rotary_scaling_factor=2, but Longspan supports only None in a"),
    ("nomic_bert", dict(activation_function="gelu"), "has activation_function='gelu', but Longspan supports only"),
    ("nomic_bert", dict(prenorm=True), "has prenorm=True, but Longspan supports only False"),
    ("nomic_bert", dict(embd_pdrop=0.1), "has embd_pdrop=0.1, which must be equal to the residual dropout rate (re"),
    ("nomic_bert", dict(n_embd=24), "has both n_embd and hidden_size, two spellings of one setting"),
    ("nomic_bert", dict(head_dim=8), "has head_dim=8, but Longspan supports only hidden_size / num_att"),
    ("gte", dict(rope_scaling=dict(type="ntk", factor=8.0)), "rope_type='ntk' is not one of 'default', 'linear'"),
    ("gte", dict(logn_attention_scale=True), "has 'logn_attention_scale', which Longspan does not know in a gte"),
    ("gte", dict(rope_scaling=peers.YARN, rope_parameters=dict(rope_theta=3.0)), "has both rope_parameters and"),
    ("gte", dict(is_decoder=True), "has is_decoder=true, but Longspan supports only the encoders of this family"),
    ("jina_embeddings_v3", dict(lora_rank=4), "has 'lora_rank', which Longspan does not know in a jina_embeddings_v3"),
    ("jina_embeddings_v3", dict(position_embedding_type="relative_key"), "has position_embedding_type='relative_key'"),
    ("eurobert", dict(clf_pooling="mean"), "has clf_pooling='mean', but Hugging Face reads classifier_pooling='late'"),
    ("eurobert", dict(num_key_value_heads=4), "num_attention_heads=2 must be a multiple of num_key_value_heads=4"),
    ("eurobert", dict(classifier_pooling="cls"), "classifier_pooling='cls' is not one of 'bos', 'mean', 'late'"),
    ("eurobert", dict(quantization_config=dict(quant_method="awq")), "has a quantization_config (awq), but Longspan"),
    ("eurobert", dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor=0.5 is not supported"),
    ("new", {}, "has model_type='new', but Longspan supports"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("family", "changes", "message"), REFUSED, ids=[f"{name}-{'-'.join(keys)}" for name, keys, _ in REFUSED]
)
def test_a_config_that_is_not_understood_is_refused_by_name(family, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        from_json(peers.written(family, changes), where="some/config.json")
    assert str(error.value).startswith("some/config.json ")


@pytest.mark.usefixtures("unchecked")
def test_a_config_from_python_has_the_same_checks():
    with pytest.raises(ValueError, match=r"`rope_parameters` must be a mapping as in `ls\.rope\.frequencies`, got 'x'"):
        models.NomicBertConfig(rope_parameters="x")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("jina_embeddings_v3Model", "encoder.layers.0.mixer.Wqkv.parametrizations.weight.0.lora_A"),
        ("nomic_bertModel", "encoder.layers.1.mlp.experts.mlp.w1"),
        ("nomic_bertModel", "encoder.layers.0.attn.Wqkv.bias"),
        ("gteModel", "encoder.layer.0.mlp.up_gate_proj.bias"),
        ("eurobertModel", "layers.0.self_attn.q_norm.weight"),
        ("embedding_gemmaModel", "lm_head.weight"),
        ("embedding_gemmaModel", "layers.1.self_attn.q_proj.bias"),
    ],
)
def test_a_tensor_that_is_not_understood_is_refused_by_name(name, tensor, tmp_path):
    copy(name, tmp_path)
    arrays = load_file(tmp_path / "model.safetensors")
    save_file(arrays | {tensor: np.zeros((2, 3), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(f"Unexpected (1):\n  {tensor}")):
        hf.load(tmp_path)


def test_a_gte_without_token_types_takes_none():
    model = load("gteModel", False)
    assert model.config.token_types == 0 and model.embeddings.token_type is None
    with pytest.raises(ValueError, match="`token_type_ids` is not supported by this gte model"):
        model(IDS, token_type_ids=np.zeros_like(IDS))
