"""Calls of the encoders: the errors for wrong arguments, and how dropout is switched and gets its random keys."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from longspan import models
from tests.made import made

SIZES = dict(
    vocab_size=19, hidden_size=12, num_attention_heads=3, num_hidden_layers=2, intermediate_size=10,
    max_position_embeddings=61, initializer_range=0.4,
)  # fmt: skip
IDS = jnp.asarray(np.random.default_rng(0).integers(3, 19, (2, 13)))


def make(kind=models.TokenClassifier, **changes):
    return made(kind, models.LongformerConfig(**SIZES, window=3, **changes), seed=1)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", [models.Encoder, models.SequenceClassifier])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(attention_mask=IDS[:1]), "`attention_mask` must have the shape of the input, (2, 13), got (1, 13)."),
        (dict(attention_mask=IDS[:, :5]), "`attention_mask` must have the shape of the input, (2, 13), got (2, 5)."),
        (dict(attention_mask=IDS[:, None, None]), "`attention_mask` must have the shape of the input, (2, 13)"),
        (dict(attention_mask=[[1] * 13] * 2), "`attention_mask` must be a NumPy or JAX array, got a list."),
        (
            dict(global_attention_mask=IDS.T),
            "`global_attention_mask` must have the shape of the input, (2, 13), got (13",
        ),
        (dict(token_type_ids=IDS[0] * 0), "`token_type_ids` must have the shape of the input, (2, 13), got (13,)."),
        (
            dict(token_type_ids=IDS),
            "`token_type_ids` must be from 0 to 0, because the config has type_vocab_size=1; got 3 to",
        ),
        (
            dict(position_ids=IDS[:, :1]),
            "`position_ids` must have the shape of the input, (2, 13) or (1, 13), got (2, 1).",
        ),
        (
            dict(position_ids=IDS * 9),
            "`position_ids` must be from 0 to 60, because the config has max_position_embeddings=61",
        ),
        (
            dict(input_ids=IDS.at[1, 3].set(19)),
            "`input_ids` must be from 0 to 18, because the config has vocab_size=19; got 3",
        ),
        (
            dict(input_ids=IDS.at[1, 3].set(-1)),
            "`input_ids` must be from 0 to 18, because the config has vocab_size=19; got -1 to",
        ),
        (dict(input_ids=np.full((2, 13), 2**32)), "got 4294967296 to 4294967296"),
        (dict(input_ids=IDS.astype(jnp.float32)), "`input_ids` must be ints, got float32."),
        (
            dict(input_ids=[[1, 2]]),
            "`input_ids` must be a NumPy or JAX array, got a list. Convert it with `np.asarray`",
        ),
        (
            dict(input_ids=None, inputs_embeds=jnp.ones((2, 13, 5))),
            "[B, T, hidden_size=12] with no axis of length 0, got",
        ),
        (dict(input_ids=None, inputs_embeds=jnp.ones((2, 13, 12), int)), "`inputs_embeds` must be floats, got int32."),
        (dict(rngs=0), "`rngs` must be an nnx.Rngs, one of its streams or a JAX key, got 0."),
        (dict(deterministic=False, rngs=0), "`rngs` must be an nnx.Rngs, one of its streams or a JAX key, got 0."),
        (dict(deterministic=False, rngs=nnx.Rngs(params=0)), "`rngs` has no stream 'dropout', only params."),
        (dict(deterministic=False), "Dropout (`deterministic=False`, or after `model.train()`) needs `rngs`."),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(kind, arguments, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make(kind)(**{"input_ids": IDS, **arguments})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", [models.Encoder, models.SequenceClassifier])
def test_a_model_is_not_made_from_a_number(kind):
    with pytest.raises(TypeError, match=re.escape("`rngs` must be an nnx.Rngs, got 0. Pass `rngs=nnx.Rngs(seed)`.")):
        kind(models.BertConfig(**SIZES), rngs=0)


def test_traced_ids_are_not_checked_and_give_nan_outside_of_the_vocabulary():
    run = nnx.jit(lambda model, ids: model(ids).last_hidden_state)
    got = np.asarray(run(make(models.Encoder), IDS.at[1, 3].set(19)))
    assert np.isnan(got[1, 3]).all() and np.isfinite(got[0]).all()


def test_train_and_eval_switch_dropout_and_a_call_may_differ():
    model, rngs = make(), lambda: nnx.Rngs(dropout=3)
    plain, dropped = (model(IDS, deterministic=flag, rngs=rngs()).logits for flag in (True, False))
    assert not np.allclose(plain, dropped, atol=1e-3)
    np.testing.assert_array_equal(model(IDS, rngs=rngs()).logits, plain)
    model.train()
    np.testing.assert_array_equal(model(IDS, rngs=rngs()).logits, dropped)
    np.testing.assert_array_equal(model(IDS, deterministic=True).logits, plain)
    inside = nnx.jit(lambda m, rngs: m(IDS, rngs=rngs).logits)
    np.testing.assert_allclose(inside(model, rngs()), dropped, atol=1e-5)
    model.eval()
    np.testing.assert_array_equal(model(IDS).logits, plain)
    np.testing.assert_allclose(inside(model, rngs()), plain, atol=1e-5)


def passed_on(model, rngs):
    return nnx.value_and_grad(lambda m, r: jnp.sum(m(IDS, rngs=r).logits ** 2))(model, rngs)[0]


def drawn_before(model, rngs):
    key = rngs.dropout()
    return nnx.value_and_grad(lambda m: jnp.sum(m(IDS, rngs=key).logits ** 2))(model)[0]


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("step", [passed_on, drawn_before])
def test_every_training_step_has_new_dropout(step, jitted):
    model, rngs = make(hidden_dropout_prob=0.5), nnx.Rngs(dropout=0)
    model.train()
    run = nnx.jit(step) if jitted else step
    losses = [float(run(model, rngs)) for _ in range(3)]
    assert len(set(losses)) == 3
    again = nnx.Rngs(dropout=0)
    np.testing.assert_array_equal([float(run(model, again)) for _ in range(3)], losses)
    assert int(again.dropout.count[...]) == int(rngs.dropout.count[...]) == (3 if step is drawn_before else 6)


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_a_loss_that_closes_over_rngs_is_refused_with_the_way_in(jitted):
    """Inside `grad`, Flax cannot advance a stream from outside."""

    def closed_over(model, rngs):
        return nnx.value_and_grad(lambda m: jnp.sum(m(IDS, rngs=rngs).logits ** 2))(model)[0]

    model, rngs = make(hidden_dropout_prob=0.5), nnx.Rngs(dropout=0)
    model.train()
    words = r"outside of the function that Flax transforms .*`nnx.value_and_grad\(loss\)\(model, rngs\)`"
    with pytest.raises(ValueError, match=words):
        (nnx.jit(closed_over) if jitted else closed_over)(model, rngs)
    assert int(rngs.dropout.count[...]) == 0


def test_rngs_held_by_a_module_work_under_jit_and_grad():
    class Held(nnx.Module):
        def __init__(self):
            self.model, self.rngs = make(hidden_dropout_prob=0.5), nnx.Rngs(dropout=0)

        def __call__(self, ids):
            return self.model(ids, rngs=self.rngs).logits

    held = Held()
    held.train()
    step = nnx.jit(lambda m: nnx.value_and_grad(lambda m: jnp.sum(m(IDS) ** 2))(m)[0])
    assert float(step(held)) != float(step(held))


def test_rngs_from_outside_of_jit_are_refused_with_the_way_in():
    model, rngs = make(), nnx.Rngs(dropout=0)
    with pytest.raises(ValueError, match="Pass `rngs` to the function as an argument") as error:
        nnx.jit(lambda m: m(IDS, deterministic=False, rngs=rngs).logits)(model)
    assert "made outside of the function that Flax transforms" in str(error.value)


def test_dropout_may_draw_from_a_key_or_a_stream():
    model, key = make(), jax.random.key(7)
    got = jax.jit(lambda key: model(IDS, deterministic=False, rngs=key).logits)(key)
    np.testing.assert_allclose(got, model(IDS, deterministic=False, rngs=nnx.Rngs(dropout=key)).logits, atol=1e-5)
    stream = nnx.Rngs(dropout=key).dropout
    np.testing.assert_allclose(got, model(IDS, deterministic=False, rngs=stream).logits, atol=1e-5)
    assert int(stream.count[...]) == 2
