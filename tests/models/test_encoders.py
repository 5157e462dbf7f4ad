"""Properties of the encoders that hold for all weights: padding, dropout, remat, dtypes, and errors of a call."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from longspan import models
from longspan.models import layers as plain_layers
from longspan.models.activations import ACTIVATIONS
from longspan.models.encoders.bigbird import random_blocks
from tests.made import made

SIZES = dict(
    vocab_size=19, hidden_size=12, num_attention_heads=3, num_hidden_layers=2, intermediate_size=10,
    max_position_embeddings=61, initializer_range=0.4,
)  # fmt: skip
CONFIGS = {
    "bert": models.BertConfig(**SIZES),
    "roberta": models.RobertaConfig(**SIZES),
    "longformer": models.LongformerConfig(**SIZES, window=3),
    "big_bird": models.BigBirdConfig(**SIZES, block_size=2, num_random_blocks=1),
    "modernbert": models.ModernBertConfig(
        **SIZES, local_attention=6, pad_token_id=0, embedding_dropout=0.1, attention_dropout=0.1, mlp_dropout=0.1,
        classifier_dropout=0.1,
    ),
    "gte": models.GteConfig(**SIZES, pad_token_id=0, attention_probs_dropout_prob=0.1),
    "gemma3_text": models.EmbeddingGemmaConfig(
        **SIZES | dict(initializer_range=0.2), head_dim=6, query_pre_attn_scalar=24, sliding_window=6,
        sliding_window_pattern=2, attention_dropout=0.1,
    ),
}  # fmt: skip
IDS = np.random.default_rng(0).integers(3, 19, (2, 29)).astype(np.int32)
every_family = pytest.mark.parametrize("family", CONFIGS)
PACKING = [name for name in CONFIGS if name not in ("longformer", "big_bird")]


def make(family, kind=models.Encoder, **changes):
    return made(kind, dataclasses.replace(CONFIGS[family], **changes), seed=1)


@nnx.jit
def encode(model, ids, mask=None):
    return model(ids, attention_mask=mask).last_hidden_state


def three_linears(biases=(True, True, True), dtype=jnp.float32):
    rngs = nnx.Rngs(3)
    return [
        nnx.Linear(12, 5, use_bias=bias, dtype=dtype, bias_init=nnx.initializers.normal(), rngs=rngs) for bias in biases
    ]


def products(layers, x) -> int:
    return str(jax.make_jaxpr(lambda x: plain_layers.concatenated_linear(layers, x))(x)).count("dot_general")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
def test_queries_keys_and_values_by_one_product_equal_three(bias, dtype):
    """On one device: values, and the gradients of the input and of all parameters."""
    layers = three_linears([bias] * 3, dtype)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 12)), jnp.float32)
    weights = np.random.default_rng(1).normal(size=(3, 2, 7, 5)).astype(np.float32)

    def loss(by):
        def of(layers, x):
            results = by(layers, x)
            return sum(jnp.vdot(y.astype(jnp.float32), w) for y, w in zip(results, weights, strict=True)), results

        return nnx.jit(nnx.value_and_grad(of, argnums=(0, 1), has_aux=True))

    got = loss(plain_layers.concatenated_linear)(layers, x)
    want = loss(lambda layers, x: [layer(x) for layer in layers])(layers, x)

    def close(a, b):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=2 * float(jnp.finfo(dtype).eps) * np.abs(b).max())

    jax.tree.map(close, got, want)
    assert products(layers, x) == 1


def test_layers_that_differ_in_their_biases_are_multiplied_one_by_one():
    layers, x = three_linears((True, False, True)), jnp.zeros((2, 7, 12))
    assert products(layers, x) == 3


@pytest.mark.mesh
def test_on_several_devices_queries_keys_and_values_are_three_products():
    """If kernels are sharded by columns, one product would gather them."""
    assert products(three_linears(), jnp.zeros((2, 7, 12))) == 3


@every_family
def test_padding_changes_no_token(family):
    model = make(family)
    # All blocks attend to BigBird's last block, so only padding inside it keeps the pattern.
    short = IDS[:, :27] if family == "big_bird" else IDS[:, :20]
    T = short.shape[1]
    mask = np.broadcast_to(np.arange(29)[None] < T, IDS.shape)
    padded = np.where(mask, IDS, np.int32(CONFIGS[family].pad_token_id))
    extent = 28 if family == "big_bird" else 29
    got = np.asarray(encode(model, padded[:, :extent], mask[:, :extent]))
    np.testing.assert_allclose(got[:, :T], encode(model, short), atol=1e-5)


@pytest.mark.parametrize("family", PACKING)
def test_packed_documents_are_encoded_like_each_alone(family):
    """Also if the attention mask hides the last token of a document, or the first one."""
    model, segments = make(family), np.repeat([[3, 0, 8, -1], [1, 5, 5, 2]], [7, 11, 5, 6], axis=1)
    mask = np.arange(29) != np.array([[17], [5]])
    packed = np.asarray(run_packed(model, IDS, mask, segments))
    for row, number in ((0, 0), (0, 3), (0, 8), (1, 5)):
        (places,) = np.nonzero((segments[row] == number) & mask[row])
        alone = encode(model, IDS[row, places][None])
        np.testing.assert_allclose(packed[row, places], alone[0], atol=1e-5)


@nnx.jit
def run_packed(model, ids, mask, segments):
    return model(ids, mask, segment_ids=segments).last_hidden_state


def test_documents_are_not_packed_where_they_cannot_be():
    segments = np.zeros(IDS.shape, np.int32)
    for family in ("longformer", "big_bird"):
        with pytest.raises(ValueError, match=f"`segment_ids` is not supported by a {family} model"):
            make(family)(IDS, segment_ids=segments)
    with pytest.raises(ValueError, match="`segment_ids` was given, but a SequenceClassifier gives one result per row"):
        make("modernbert", models.SequenceClassifier)(IDS, segment_ids=segments)


@every_family
def test_masks_may_be_bools_ints_or_floats(family):
    model, mask = make(family), IDS % 5 != 0
    want = encode(model, IDS, mask)
    for dtype in (jnp.int32, jnp.float32):
        np.testing.assert_array_equal(encode(model, IDS, mask.astype(dtype)), want)


@every_family
def test_word_embeddings_may_replace_ids(family):
    model = make(family)
    embeds = model.embeddings.word(IDS)
    if CONFIGS[family].family.name == "Gemma3Text":  # given embeddings are not scaled, as in Hugging Face
        embeds = embeds * 12**0.5
    got, want = nnx.jit(lambda m, e: m(inputs_embeds=e).last_hidden_state)(model, embeds), encode(model, IDS)
    np.testing.assert_allclose(got, want, atol=1e-5)


@every_family
def test_dropout_draws_from_the_calls_rngs(family):
    has_head = any(task.model is models.TokenClassifier for task in CONFIGS[family].family.tasks)
    kind, field = (models.TokenClassifier, "logits") if has_head else (models.Encoder, "last_hidden_state")
    model = make(family, kind)
    run = nnx.jit(lambda m, rngs: getattr(m(IDS, deterministic=False, rngs=rngs), field))
    a, b, c = (run(model, nnx.Rngs(dropout=seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert not np.allclose(a, c, atol=1e-3)
    rates = [f.name for f in dataclasses.fields(CONFIGS[family]) if "dropout" in f.name]
    none = make(family, kind, **dict.fromkeys(rates, 0.0))
    np.testing.assert_allclose(getattr(none(IDS, deterministic=False), field), getattr(model(IDS), field), atol=1e-5)
    with pytest.raises(ValueError, match=re.escape("Pass `rngs=nnx.Rngs(dropout=seed)`")):
        model(IDS, deterministic=False)


@every_family
def test_remat_changes_no_gradient(family):
    model = make(family)

    def gradient(remat):
        loss = lambda m: jnp.sum(jnp.sin(m(IDS, remat=remat).last_hidden_state))  # noqa: E731
        return nnx.jit(nnx.grad(loss))(model)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-4), gradient(True), gradient(False))


def test_new_masks_and_globals_do_not_retrace():
    model, traces = make("longformer"), []

    @nnx.jit
    def run(model, mask, globals_):
        traces.append(1)
        return model(IDS, attention_mask=mask, global_attention_mask=globals_).last_hidden_state

    outputs = [run(model, IDS % n != 0, n == IDS % 7) for n in (2, 3)]
    assert len(traces) == 1
    assert not np.allclose(*outputs)


def test_calls_outside_of_jit_compile_once():
    model = make("longformer")
    model(IDS)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax._src.compiler, "backend_compile_and_load", None)  # would fail if it were called
        model(IDS + 0)


def test_a_longformers_layers_may_differ_in_their_windows():
    model = make("longformer", num_hidden_layers=4, window=(2, 2, 0, 28))
    same = make("longformer", num_hidden_layers=4, window=28)
    nnx.update(same, nnx.state(model, nnx.Param))
    # The windows of the first layers matter; the last layer attends to everything.
    other = np.where(np.arange(29) == 0, 3, IDS)
    of_model, of_same = (np.asarray(encode(m, IDS)) - np.asarray(encode(m, other)) for m in (model, same))
    assert not np.allclose(of_model[:, -1], of_same[:, -1], atol=1e-3)
    assert np.abs(of_model[:, -1]).max() > 1e-3


def test_bigbird_switches_attention_for_one_call():
    model = make("big_bird")
    sparse = encode(model, IDS)
    full = model(IDS, attention_type="original_full").last_hidden_state
    assert not np.allclose(sparse, full, atol=1e-2)
    # A short input is dense, and the next long one is sparse again.
    model(IDS[:, :14])
    np.testing.assert_allclose(model(IDS, attention_type="block_sparse").last_hidden_state, sparse, atol=1e-5)
    dense = make("big_bird", attention_type="original_full")
    nnx.update(dense, nnx.state(model, nnx.Param))
    np.testing.assert_allclose(dense(IDS).last_hidden_state, full, atol=1e-5)


def test_bigbirds_random_blocks_differ_by_layer_or_are_the_first_one():
    config = CONFIGS["big_bird"]
    blocks = random_blocks(config, 30)
    assert blocks.shape == (2, 3, 13, 1)
    assert (blocks[0] != blocks[1]).any()
    assert not random_blocks(dataclasses.replace(config, random_blocks="hf_eval"), 30).any()


def test_a_longformer_classifiers_first_token_is_global_by_default():
    model = make("longformer", models.SequenceClassifier, num_hidden_layers=1, num_labels=4)
    far = np.where(np.arange(29) == 28, 3, IDS)
    assert not np.allclose(model(IDS).logits, model(far).logits)
    none = np.zeros_like(IDS)
    local = [model(ids, global_attention_mask=none).logits for ids in (IDS, far)]
    np.testing.assert_array_equal(*local)


def test_a_longformers_questions_are_global_by_default():
    model = make("longformer", models.QuestionAnswering, sep_token_id=18)
    ids = np.where(IDS == 18, 17, IDS)
    ids[0, 4] = ids[1, 9] = 18
    question = np.arange(29)[None] < np.array([[4], [9]])
    np.testing.assert_array_equal(model(ids).start_logits, model(ids, global_attention_mask=question).start_logits)


@every_family
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_half_precision_stays_close_and_finite(family, dtype):
    config = CONFIGS[family]
    model = made(models.Encoder, config, seed=1)
    half = made(models.Encoder, config, seed=1, dtype=dtype)
    mask = IDS % 5 != 0
    mask[1] = False
    got = encode(half, IDS, mask)
    assert got.dtype == dtype
    want = np.asarray(encode(model, IDS, mask))
    np.testing.assert_allclose(np.asarray(got, np.float32)[0], want[0], atol=0.3)
    # A norm of attention's output multiplies the gradients of padding, where it is 0, by 1/√eps. Float16 overflows.
    counted = mask[..., None] if config.family.name == "Gemma3Text" else True

    def loss(model):
        return jnp.sum(jnp.where(counted, model(IDS, mask).last_hidden_state, 0).astype(jnp.float32))

    gradient = nnx.jit(nnx.grad(loss))(half)
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in jax.tree.leaves(gradient))


@pytest.mark.usefixtures("unchecked")
def test_wrong_calls_say_what_to_do():
    model = make("bert")
    with pytest.raises(ValueError, match="either `input_ids` or `inputs_embeds`, got neither"):
        model()
    with pytest.raises(ValueError, match="either `input_ids` or `inputs_embeds`, got both"):
        model(IDS, inputs_embeds=jnp.ones((2, 29, 12)))
    with pytest.raises(ValueError, match=re.escape("`input_ids` must have shape [B, T] with no axis of length 0")):
        model(IDS[0])
    with pytest.raises(ValueError, match=r"has 62 tokens, but this model has positions for 61.*hf\.extend"):
        model(jnp.ones((1, 62), int))
    with pytest.raises(ValueError, match="`global_attention_mask` is not supported by a bert model"):
        model(IDS, global_attention_mask=IDS)
    with pytest.raises(ValueError, match="`attention_type` is not supported by a longformer model"):
        make("longformer")(IDS, attention_type="original_full")
    with pytest.raises(ValueError, match="attention_type='dense' is not one of 'block_sparse', 'original_full'"):
        make("big_bird")(IDS, attention_type="dense")
    with pytest.raises(ValueError, match="one for each of the 2 layers"):
        models.LongformerConfig(**SIZES, window=(1, 2, 3))
    with pytest.raises(ValueError, match="`segment_ids` must be ints, got float32"):
        model(IDS, segment_ids=IDS.astype(np.float32))
    modern = make("modernbert")
    with pytest.raises(ValueError, match="`token_type_ids` is not supported by this modernbert model"):
        modern(IDS, token_type_ids=IDS)
    with pytest.raises(ValueError, match="`position_ids` must be ints, got float32"):
        modern(IDS, position_ids=IDS.astype(np.float32))
    with pytest.raises(ValueError, match="`global_attention_mask` is not supported by a modernbert model"):
        modern(IDS, global_attention_mask=IDS)
    with pytest.raises(ValueError, match="`pooler=True` was given, but a modernbert has no pooler"):
        models.Encoder(CONFIGS["modernbert"], pooler=True, rngs=nnx.Rngs(0))


def test_few_global_tokens_have_the_gradients_of_many(monkeypatch):
    model = make("longformer")
    graph, parameters = nnx.split(model)
    flags = np.zeros(IDS.shape, np.int32)
    flags[0, 4] = flags[1, 0] = flags[1, 17] = 1
    valid = np.arange(29)[None] < np.array([[29], [23]])
    cotangent = np.random.default_rng(2).normal(size=(*IDS.shape, 12)).astype(np.float32)

    def gradients(few):
        monkeypatch.setattr("longspan.models.encoders.longformer.FEW_GLOBALS", few)
        jax.clear_caches()

        def loss(parameters):
            out = nnx.merge(graph, parameters)(IDS, valid, global_attention_mask=flags).last_hidden_state
            return jnp.vdot(out, cotangent)

        return jax.jit(jax.grad(loss))(parameters)

    # Two global tokens are few, or too many for `global_rows`.
    few, many = gradients(8), gradients(1)
    jax.clear_caches()
    for got, want in zip(jax.tree.leaves(few), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * max(1.0, np.abs(np.asarray(want)).max()))
    assert np.abs(np.asarray(few["layers"]["attention"]["query_global"]["kernel"][...])).max() > 1e-3


@pytest.mark.parametrize("batch", [1, 3])
def test_feed_forward_by_pieces_is_the_same(monkeypatch, batch):
    monkeypatch.setattr(plain_layers, "PIECE_TOKENS", 8)
    monkeypatch.setattr(plain_layers, "MIN_PIECE_LENGTH", 5)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(batch, 37, 3)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(3, 3)), jnp.float32)
    shapes = []

    def function(weights, x):
        shapes.append(x.shape)
        return jnp.tanh(x @ weights)

    @partial(jax.jit, static_argnums=1)
    def gradient(weights, run):
        return jax.value_and_grad(lambda w: jnp.sum(run(partial(function, w), jnp.asarray(x) + 0 * w[0, 0]) ** 2))(
            weights
        )

    whole, pieces = (gradient(weights, run) for run in (lambda f, x: f(x), plain_layers.by_pieces))
    for a, b in zip(whole, pieces, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert {shape[1] for shape in shapes} == {37, 8 if batch == 1 else 5}


@pytest.mark.parametrize("count", [0, 1, 12])
def test_values_of_padding_change_no_token(count):
    model = make("longformer")
    valid = np.arange(29)[None] < np.array([[29], [17]])
    embeds = np.random.default_rng(0).normal(size=(2, 29, 12)).astype(np.float32)
    flags = np.broadcast_to(np.arange(29)[None] < count, (2, 29))

    @nnx.jit
    def run(model, given):
        return model(inputs_embeds=given, attention_mask=valid, global_attention_mask=flags).last_hidden_state

    def encode(padding):
        given = np.where(valid[..., None], embeds, np.float32(padding))
        return np.asarray(run(model, given))[valid]

    np.testing.assert_array_equal(encode(np.nan), encode(0.0))


@pytest.mark.parametrize("name", ["gelu", "gelu_new"])
def test_gelu_in_16_bits_is_the_rounded_one(name):
    x = jnp.linspace(-5, 5, 401, dtype=jnp.bfloat16)
    exact = ACTIVATIONS[name](x.astype(jnp.float32))
    np.testing.assert_array_equal(ACTIVATIONS[name](x), exact.astype(jnp.bfloat16))


def test_windows_may_come_as_any_ints():
    for window in ([2, 3], np.array([2, 3]), (2, np.int64(3))):
        assert models.LongformerConfig(num_hidden_layers=2, window=window).windows == (2, 3)
    assert hash(models.LongformerConfig(window=np.int64(3))) == hash(models.LongformerConfig(window=3))


@pytest.mark.parametrize("use_bias", [True, False])
def test_concatenated_projections_are_the_same(use_bias):
    """Also of different sizes, as those of grouped keys and values."""
    make = partial(plain_layers.linear, CONFIGS["bert"], 12, dtype=jnp.float32, param_dtype=jnp.float32)
    layers = [make(size, use_bias=use_bias, rngs=nnx.Rngs(size)) for size in (8, 4, 6)]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 12)), jnp.float32)
    for got, layer in zip(plain_layers.concatenated_linear(layers, x), layers, strict=True):
        np.testing.assert_allclose(got, layer(x), rtol=1e-6, atol=1e-6)
