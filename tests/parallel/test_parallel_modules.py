"""Flax modules and models with sharded sequences equal those on one device."""

import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan import models, nn
from longspan.parallel.order import stored
from tests.parallel.families import MESHES, NAMED, mesh_of_other_names

T = 48
ROPE = dict(rope_type="default", rope_theta=100.0)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, 8)), jnp.float32)


def of_kind(kind, name, **fields):
    """A function (x, **arguments) that calls one kind of Flax module, always with the same parameters."""
    if kind == "nnx":
        layer = getattr(nn.nnx, name)(in_features=8, rngs=nnx.Rngs(0), **fields)
        return lambda x, **call: layer(x, **call)
    layer = getattr(nn.linen, name)(**fields)
    params = getattr(nn.linen, name)(**fields | dict(mesh=None, order="contiguous")).init(jax.random.key(0), X)
    return lambda x, **call: layer.apply(params, x, **call)


@pytest.mark.check
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_self_attention_on_devices_equals_one(kind, order):
    mesh = MESHES["dp2-tp2-sp2"]()
    at = stored(T, 2, order)
    fields = dict(num_heads=4, num_kv_heads=2, rope=ROPE, sinks=True)
    mask = ls.Causal() & ls.Window(7, 0)
    got = of_kind(kind, "SelfAttention", mesh=mesh, order=order, **fields)(X[:, at], mask=mask)
    want = of_kind(kind, "SelfAttention", **fields)(X, mask=mask)
    np.testing.assert_allclose(got, want[:, at], rtol=1e-4, atol=1e-5)


@pytest.mark.check
@pytest.mark.parametrize("kind", [pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_longformers_module_on_devices_equals_one(kind):
    mesh, at = MESHES["sp4"](), stored(T, 4, "zigzag")
    fields = dict(num_heads=2, window=3, rope=ROPE, engine="reference")
    kinds = np.zeros((2, T), int)
    kinds[0, 5], kinds[1, 40:] = 1, -1
    got = of_kind(kind, "LongformerSelfAttention", mesh=mesh, order="zigzag", **fields)(
        X[:, at], token_kinds=kinds[:, at]
    )
    want = of_kind(kind, "LongformerSelfAttention", **fields)(X, token_kinds=kinds)
    np.testing.assert_allclose(got, want[:, at], rtol=1e-4, atol=1e-5)


@pytest.mark.check
def test_bigbirds_module_on_devices_equals_one():
    fields = dict(num_heads=2, block_size=4, num_random_blocks=1, engine="reference")
    got = of_kind("linen", "BigBirdSelfAttention", mesh=MESHES["sp4"](), **fields)(X)
    np.testing.assert_allclose(got, of_kind("linen", "BigBirdSelfAttention", **fields)(X), rtol=1e-4, atol=1e-5)


NAMES = {
    "SelfAttention": (dict(sinks=True, rope=ROPE), dict(mask=ls.Causal() & ls.Window(7, 0))),
    "LongformerSelfAttention": (dict(window=3, rope=ROPE), dict(token_kinds=np.where(np.arange(T) % 20, 0, 1)[None])),
    "BigBirdSelfAttention": (dict(block_size=4, num_random_blocks=1), {}),
}


@pytest.mark.check
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_modules_take_meshes_whose_axes_have_other_names(kind, name, monkeypatch):
    own, call = NAMES[name]
    fields = dict(num_heads=4, num_kv_heads=2, engine="reference", **own)
    specs = noted_specs(monkeypatch)
    got = of_kind(kind, name, mesh=mesh_of_other_names(), **NAMED, **fields)(X, **call)
    assert specs and set(specs) == {P("rows", "tokens", "model")}
    np.testing.assert_allclose(got, of_kind(kind, name, **fields)(X, **call), rtol=1e-4, atol=1e-5)


def noted_specs(monkeypatch):
    """A list of how the outputs of `ls.parallel.attention` are sharded, which grows with every call."""
    specs = []

    def noting(*operands, **options):
        out = ls.parallel.attention(*operands, **options)
        specs.append(out.sharding.spec)
        return out

    for module in ("parallel.sequence_sharding", "patterns.longformer", "patterns.bigbird"):
        monkeypatch.setattr(importlib.import_module(f"longspan.{module}"), "parallel_attention", noting)
    return specs


def test_the_names_of_axes_are_those_of_parallel_attention():
    wanted = inspect.signature(ls.parallel.attention).parameters
    shared_by_all = nn.nnx.SelfAttention.__base__.__init__
    for constructor in (shared_by_all, *(getattr(nn.linen, name) for name in NAMES)):
        names = inspect.signature(constructor).parameters
        for argument in ("axis", "order", "batch_axes", "head_axis"):
            assert names[argument].default == wanted[argument].default


def test_a_cache_and_a_mesh_are_refused_together():
    layer = nn.nnx.SelfAttention(num_heads=2, in_features=8, mesh=MESHES["sp4"](), rngs=nnx.Rngs(0))
    cache = ls.cache.init(ls.cache.plan(ls.Causal(), 9), 2, 2, 4, jnp.float32)
    with pytest.raises(ValueError, match="`cache` and `mesh` were both given, but decoding with a cache runs on one"):
        layer(X[:, :3], cache=cache)


DECODER = dict(vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=2, intermediate_size=16)
TEXT = jnp.asarray(np.random.default_rng(1).integers(0, 11, (2, T)), jnp.int32)
DOCUMENTS = np.sort(np.random.default_rng(2).integers(0, 3, (2, T)), axis=1)


@pytest.mark.check
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_decoder_on_devices_equals_one(packed, order):
    mesh, at = MESHES["sp4"](), stored(T, 4, order)
    model = models.CausalLM(models.MistralConfig(**DECODER, sliding_window=5), rngs=nnx.Rngs(0))
    ids = dict(segment_ids=DOCUMENTS) if packed else {}
    want = model(TEXT, **ids).logits
    got = model(TEXT[:, at], **{name: x[:, at] for name, x in ids.items()}, mesh=mesh, order=order).logits
    np.testing.assert_allclose(got, want[:, at], rtol=1e-4, atol=1e-5)


@pytest.mark.check
def test_a_decoder_in_another_order_scales_queries_by_their_positions_in_documents():
    mesh, at = MESHES["sp4"](), stored(T, 4, "zigzag")
    rope = dict(ROPE, llama_4_scaling_beta=0.7, original_max_position_embeddings=5)
    config = models.Ministral3Config(**DECODER, head_dim=4, rope_parameters=rope, initializer_range=0.5)
    model = models.CausalLM(config, rngs=nnx.Rngs(0))
    want = model(TEXT, segment_ids=DOCUMENTS).logits
    got = model(TEXT[:, at], segment_ids=DOCUMENTS[:, at], mesh=mesh, order="zigzag").logits
    np.testing.assert_allclose(got, want[:, at], rtol=1e-4, atol=1e-4)


@pytest.mark.check
@pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit], ids=str)
def test_a_mixture_of_experts_on_devices_equals_one(kind):
    mesh = jax.make_mesh((4,), ("sp",), axis_types=(kind,), devices=jax.devices()[:4])
    sizes = dict(moe_intermediate_size=5, num_experts=6, num_experts_per_tok=2, initializer_range=0.5)
    model = models.CausalLM(models.Qwen3MoeConfig(**DECODER, **sizes), rngs=nnx.Rngs(0))
    want = model(TEXT).logits
    for given in (dict(input_ids=TEXT), ls.parallel.shard_batch(dict(input_ids=TEXT), mesh)):
        got = model(**given, mesh=mesh).logits
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_decoder_with_a_cache_and_a_mesh_is_refused():
    model = models.CausalLM(models.LlamaConfig(**DECODER), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="`cache` and `mesh` were both given"):
        model(TEXT[:, :3], cache=model.init_cache(batch=2, length=9), mesh=MESHES["sp4"]())


ENCODER = dict(vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=2, intermediate_size=16)
ENCODERS = {
    "bert": lambda: models.BertConfig(**ENCODER, max_position_embeddings=64),
    "longformer": lambda: models.LongformerConfig(**ENCODER, max_position_embeddings=64, window=3),
    "bigbird": lambda: models.BigBirdConfig(**ENCODER, max_position_embeddings=64, block_size=4, num_random_blocks=1),
    "modernbert": lambda: models.ModernBertConfig(**ENCODER, local_attention=6, initializer_range=0.4),
    "gemma3_text": lambda: models.EmbeddingGemmaConfig(
        **ENCODER, head_dim=4, sliding_window=6, sliding_window_pattern=2, initializer_range=0.4
    ),
    "roberta": lambda: models.RobertaConfig(**ENCODER, max_position_embeddings=64),
    "eurobert": lambda: models.EuroBertConfig(**ENCODER, num_key_value_heads=1, initializer_range=0.4),
    "nomic_bert": lambda: models.NomicBertConfig(**ENCODER, initializer_range=0.4),
    "gte": lambda: models.GteConfig(**ENCODER, initializer_range=0.4),
    "jina_embeddings_v3": lambda: models.JinaEmbeddingsV3Config(**ENCODER, initializer_range=0.4),
}
SLOW = ("longformer", "bigbird", "roberta", "nomic_bert", "gte", "jina_embeddings_v3")


@pytest.mark.check
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in ENCODERS]
)
def test_an_encoder_on_devices_equals_one(family):
    encoder = models.Encoder(ENCODERS[family](), rngs=nnx.Rngs(0))
    mask, given = np.ones((2, T), int), {}
    mask[1, 40:] = 0
    if family == "longformer":
        given = dict(global_attention_mask=np.arange(T)[None].repeat(2, 0) % 30 == 0)
    want = encoder(TEXT, mask, **given).last_hidden_state
    got = encoder(TEXT, mask, **given, mesh=MESHES["sp4"]()).last_hidden_state
    there = mask.astype(bool)
    np.testing.assert_allclose(np.asarray(got)[there], np.asarray(want)[there], rtol=1e-4, atol=1e-4)


def test_an_encoder_in_another_order_needs_position_ids():
    encoder, at = models.Encoder(ENCODERS["bert"](), rngs=nnx.Rngs(0)), stored(T, 4, "zigzag")
    shared = dict(mesh=MESHES["sp4"](), order="zigzag")
    with pytest.raises(ValueError, match="`position_ids` is missing"):
        encoder(TEXT[:, at], **shared)
    got = encoder(TEXT[:, at], position_ids=at[None], **shared).last_hidden_state
    np.testing.assert_allclose(got, encoder(TEXT).last_hidden_state[:, at], rtol=1e-4, atol=1e-4)


@pytest.mark.check
def test_padding_stays_with_its_token_in_another_order():
    encoder, at = models.Encoder(ENCODERS["bert"](), rngs=nnx.Rngs(0)), stored(T, 4, "zigzag")
    mask = np.arange(T)[None] < np.array([[T], [31]])
    shared = dict(position_ids=at[None], mesh=MESHES["sp4"](), order="zigzag")
    got = np.asarray(encoder(TEXT[:, at], mask[:, at], **shared).last_hidden_state)
    want = np.asarray(encoder(TEXT, mask).last_hidden_state)[:, at]
    np.testing.assert_allclose(got[mask[:, at]], want[mask[:, at]], rtol=1e-4, atol=1e-4)


@pytest.mark.check
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_modernbert_in_another_order_counts_its_positions(packed):
    """Windows and rotations follow the tokens, not the slots, so no `position_ids` are needed."""
    model, at = models.TokenClassifier(ENCODERS["modernbert"](), rngs=nnx.Rngs(0)), stored(T, 4, "zigzag")
    given = dict(attention_mask=np.arange(T)[None] >= np.array([[0], [9]]))
    if packed:
        given["segment_ids"] = DOCUMENTS
    want = model(TEXT, **given).logits
    got = model(TEXT[:, at], **{k: x[:, at] for k, x in given.items()}, mesh=MESHES["sp4"](), order="zigzag").logits
    there = given["attention_mask"][:, at]
    np.testing.assert_allclose(np.asarray(got)[there], np.asarray(want)[:, at][there], rtol=1e-4, atol=1e-4)


def asked(model):
    """Texts whose question has 15 tokens."""
    end = model.config.sep_token_id
    return jnp.where(end == TEXT, 1, TEXT).at[:, 15].set(end)


@pytest.mark.check
@pytest.mark.parametrize("family", ["longformer", "bigbird"])
def test_the_question_is_found_by_token_not_by_slot(family):
    model, at = models.QuestionAnswering(ENCODERS[family](), rngs=nnx.Rngs(0)), stored(T, 4, "zigzag")
    text = asked(model)
    np.testing.assert_array_equal(model.question(text[:, at], at), np.asarray(model.question(text))[:, at])
    assert 15 <= int(model.question(text)[0].sum()) <= 16


@pytest.mark.check
@pytest.mark.slow
def test_answers_in_another_order_are_the_same():
    model, at = models.QuestionAnswering(ENCODERS["longformer"](), rngs=nnx.Rngs(0)), stored(T, 4, "zigzag")
    text = asked(model)
    got = model(text[:, at], position_ids=at[None], mesh=MESHES["sp4"](), order="zigzag").start_logits
    want = model(text, position_ids=np.arange(T)[None]).start_logits[:, at]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_models_refuse_meshes_as_attention_does():
    model, mesh = models.QuestionAnswering(ENCODERS["longformer"](), rngs=nnx.Rngs(0)), MESHES["sp4"]()
    with pytest.raises(ValueError, match="needs a multiple of 8 tokens, got 45"):
        model(TEXT[:, :45], position_ids=np.arange(45)[None], mesh=mesh, order="zigzag")
    with pytest.raises(ValueError, match="axis='x' is not in the mesh"):
        model(TEXT, position_ids=np.arange(T)[None], mesh=mesh, axis="x", order="zigzag")


@pytest.mark.check
def test_a_compiled_encoder_takes_a_mesh_too():
    run = models.compiled(models.Encoder(ENCODERS["bert"](), rngs=nnx.Rngs(0)))
    got, want = run(TEXT, mesh=MESHES["sp4"]()), run(TEXT)
    np.testing.assert_allclose(got.last_hidden_state, want.last_hidden_state, rtol=1e-4, atol=1e-4)


@pytest.mark.check
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_models_shard_rows_and_heads_over_the_named_axes(kind):
    if kind == "encoder":
        model = models.MaskedLM(ENCODERS["bert"](), rngs=nnx.Rngs(0))
    else:
        model = models.CausalLM(models.MistralConfig(**DECODER, sliding_window=5), rngs=nnx.Rngs(0))
    axes = dict(axis="seq", batch_axes=["rows"], head_axis="heads")
    got = model(TEXT, mesh=auto_mesh(rows=2, seq=2, heads=2), **axes).logits
    np.testing.assert_allclose(got, model(TEXT).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="3 batch rows"):
        model(jnp.concatenate([TEXT, TEXT[:1]]), mesh=auto_mesh(rows=2, seq=4), **axes)
    with pytest.raises(ValueError, match="2 query heads"):
        model(TEXT, mesh=auto_mesh(seq=2, heads=4), **axes)


@pytest.mark.check
@pytest.mark.parametrize("family", ["longformer", "bigbird"])
def test_patterns_shard_rows_and_heads_over_the_named_axes(family):
    encoder = models.Encoder(ENCODERS[family](), rngs=nnx.Rngs(0))
    given = dict(global_attention_mask=np.ones_like(TEXT)) if family == "longformer" else {}
    axes = dict(mesh=auto_mesh(seq=2, heads=4), axis="seq", head_axis="heads")
    with pytest.raises(ValueError, match="2 query heads"):
        encoder(TEXT, **given, **axes)


@pytest.mark.check
def test_a_compiled_encoder_takes_a_list_of_batch_axes():
    run = models.compiled(models.Encoder(ENCODERS["bert"](), rngs=nnx.Rngs(0)))
    axes = dict(mesh=auto_mesh(rows=2, seq=4), axis="seq", batch_axes=["rows"])
    np.testing.assert_allclose(run(TEXT, **axes).last_hidden_state, run(TEXT).last_hidden_state, rtol=1e-4, atol=1e-4)


def auto_mesh(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
