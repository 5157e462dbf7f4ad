"""`models.compiled`: a model's call as one program that takes the parameters and does not return them."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from longspan import hf, models
from longspan.models.encoders import encoder
from tests.made import made

SIZES = dict(
    vocab_size=19, hidden_size=12, num_attention_heads=3, num_hidden_layers=2, intermediate_size=10,
    max_position_embeddings=61, initializer_range=0.4,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(3, 19, (2, 29))
MASK = np.arange(29)[None] < np.array([[29], [17]])
CONFIGS = {
    "longformer": models.LongformerConfig(**SIZES, window=3),
    "big_bird": models.BigBirdConfig(**SIZES, block_size=2, num_random_blocks=1),
    "modernbert": models.ModernBertConfig(**SIZES, local_attention=6),
}


def make(kind=models.TokenClassifier, family="longformer", seed=1):
    return made(kind, CONFIGS[family], seed=seed)


@pytest.fixture
def traces(monkeypatch):
    """The list has an entry for each time that an encoder was traced or called."""
    calls, real = [], encoder.Encoder.__call__
    monkeypatch.setattr(encoder.Encoder, "__call__", lambda *args, **kw: calls.append(1) or real(*args, **kw))
    jax.clear_caches()
    return calls


@pytest.mark.parametrize("kind", [models.Encoder, models.MaskedLM, models.SequenceClassifier, models.QuestionAnswering])
def test_it_has_the_models_arguments_and_outputs(kind):
    model = make(kind)
    run = models.compiled(model)
    assert inspect.signature(run) == inspect.signature(model.__call__)
    got, want = (call(IDS, MASK, global_attention_mask=MASK & (IDS == 5)) for call in (run, model))
    assert type(got) is models.Output
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def test_static_arguments_choose_a_program():
    model = make(family="big_bird")
    run = models.compiled(model)
    for kind in ("block_sparse", "original_full"):
        got, want = (call(IDS, attention_type=kind, remat=True).logits for call in (run, model))
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert not np.allclose(run(IDS, attention_type="original_full").logits, run(IDS).logits, atol=1e-3)


def test_packed_documents_are_an_argument():
    model = make(family="modernbert")
    run, segments = models.compiled(model), np.repeat([[0, 1], [4, -1]], [13, 16], axis=1)
    got, want = (call(IDS, MASK, segment_ids=segments).logits for call in (run, model))
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert not np.allclose(got, run(IDS, MASK).logits, atol=1e-3)


def test_changed_parameters_take_effect_and_compile_nothing(traces):
    model, other = make(), make(seed=2)
    run = models.compiled(model)
    before = run(IDS).logits
    nnx.update(model, nnx.state(other, nnx.Param))
    after = run(IDS).logits
    # Another model of the same structure runs the same program.
    np.testing.assert_array_equal(models.compiled(other)(IDS).logits, after)
    assert len(traces) == 1
    assert not np.allclose(before, after, atol=1e-3)


def test_checkpoints_of_one_structure_share_a_program(traces, tmp_path):
    outputs = []
    for seed in (1, 2):
        hf.save(make(seed=seed), tmp_path / str(seed))
        model = hf.load(tmp_path / str(seed))
        outputs.append(models.compiled(model)(IDS).logits)
        assert model.source == model.encoder.source == str((tmp_path / str(seed)).resolve())
        np.testing.assert_allclose(outputs[-1], make(seed=seed)(IDS).logits, atol=1e-5)
    assert len(traces) == 1 + 2, "one program, and two calls outside of it"


def test_a_changed_structure_takes_effect():
    model, rngs = make(), lambda: nnx.Rngs(dropout=3)
    run = models.compiled(model)
    plain = run(IDS).logits
    model.train()
    np.testing.assert_allclose(run(IDS, rngs=rngs()).logits, model(IDS, rngs=rngs()).logits, atol=1e-5)
    with pytest.raises(ValueError, match=re.escape("needs `rngs`")):
        run(IDS)
    model.eval()
    np.testing.assert_array_equal(run(IDS).logits, plain)


def test_dropout_advances_its_stream():
    run, one, other = models.compiled(make()), nnx.Rngs(dropout=3), nnx.Rngs(dropout=3)
    a, b = (run(IDS, deterministic=False, rngs=one).logits for _ in range(2))
    assert not np.allclose(a, b, atol=1e-3)
    for want in (a, b):
        np.testing.assert_allclose(make()(IDS, deterministic=False, rngs=other).logits, want, atol=1e-5)
    assert int(one.dropout.count[...]) == int(other.dropout.count[...])


def test_no_parameter_leaves_the_program():
    model = make()
    jaxpr = jax.make_jaxpr(lambda ids: models.compiled(model)(ids).logits)(jnp.asarray(IDS))
    calls = [eqn for eqn in jaxpr.eqns if eqn.params.get("name") == "_call_model"]
    assert len(calls) == 1
    shapes = [v.aval.shape for v in calls[0].outvars]
    assert shapes == [(2, 29, 12), (2, 29, 2)]


@pytest.mark.usefixtures("unchecked")
def test_it_has_the_checks_of_a_call():
    run = models.compiled(make())
    with pytest.raises(ValueError, match="`input_ids` must be from 0 to 18"):
        run(IDS + 10)
    with pytest.raises(ValueError, match="`attention_mask` must have the shape of the input"):
        run(IDS, MASK[:1])
    with pytest.raises(TypeError, match="`rngs` must be an nnx"):
        run(IDS, rngs=0)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'labels'"):
        run(IDS, labels=IDS)
    with pytest.raises(
        TypeError,
        match=re.escape(
            "takes an encoder of longspan.models, with or without a head, got Linear. Use `nnx.jit` for other models."
        ),
    ):
        models.compiled(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))


def test_it_runs_inside_of_jit_and_grad():
    graph, state = nnx.split(make())

    def loss(state):
        return jnp.sum(models.compiled(nnx.merge(graph, state))(IDS).logits ** 2)

    want = jax.jit(jax.grad(lambda state: jnp.sum(nnx.merge(graph, state)(IDS).logits ** 2)))(state)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), jax.jit(jax.grad(loss))(state), want
    )
