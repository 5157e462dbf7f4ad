"""`DecoderCache`: one pytree of all layers and one loop over them, in users' decode steps as in `ls.generate`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import longspan as ls
from longspan import models
from longspan.engines.cpu import library
from tests.models.test_decoders import TOLERANCE, assert_close, load

needs_native = pytest.mark.skipif(library.missing() is not None, reason="the native library is not there")
IDS = np.array([[3, 7, 5, 2, 9, 11], [1, 2, 8, 4, 5, 6]])
SIZES = dict(vocab_size=31, hidden_size=16, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1)


def small(**changes) -> models.CausalLM:
    config = models.MistralConfig(**{**SIZES, "num_hidden_layers": 3, "sliding_window": 4, **changes})
    return models.CausalLM(config, rngs=nnx.Rngs(0))


def step_of(model):
    """A user's jitted decode step, which donates its cache, and the parameters."""
    graph, params = nnx.split(model)

    def step(params, ids, cache):
        output = nnx.merge(graph, params)(ids, cache=cache)
        return output.logits, output.cache

    return jax.jit(step, donate_argnums=2), params


@pytest.mark.check
@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("kind", [models.LlamaConfig, models.Gemma3Config])
def test_a_users_step_is_as_long_with_48_layers_as_with_6(kind, count):
    def sizes(layers):
        config = kind(vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=layers)
        model = nnx.eval_shape(lambda: models.CausalLM(config, rngs=nnx.Rngs(0)))
        step, params = step_of(model)
        cache = jax.eval_shape(lambda: model.init_cache(2, 40))
        traced = step.trace(params, jax.ShapeDtypeStruct((2, count), jnp.int32), cache)
        return str(traced.jaxpr).count(" = "), traced.lower().as_text().count("\n")

    assert sizes(48) == sizes(6)


@pytest.mark.check
@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("heads_first", [False, True])
def test_a_users_step_copies_neither_parameters_nor_the_cache(dtype, heads_first):
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=5, sliding_window=512)
    config = models.MistralConfig(**{**SIZES, **sizes})
    model = models.CausalLM(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    step, params = step_of(model)
    cache = model.init_cache(1, 4096, heads_first=heads_first)
    memory = step.lower(params, IDS[:1, :1], cache).compile().memory_analysis()
    one_layer = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model.layers))) // 5
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < min(one_layer, cache.nbytes // 5) // 2


def test_it_has_a_cache_for_each_layer():
    cache = load("gemma3_text").init_cache(2, 1000)
    assert len(cache) == len(list(cache)) == 11
    assert [layer.plan.capacity for layer in cache] == [5, 5, 1000] * 3 + [5, 5]
    assert cache[-1].k.shape == cache[10].k.shape == (2, 5, 2, 10)
    assert cache.nbytes == sum(x.nbytes for layer in cache for x in (layer.k, layer.v))
    assert (cache.length.tolist(), cache.max_length) == ([0, 0], 1000)
    with pytest.raises(IndexError):
        cache[11]


def test_layers_equal_a_cache_of_each():
    """The keys of each layer are in the slots of its plan, and evicted keys are gone."""
    model = load("gemma3_text")
    cache = model(IDS, cache=model.init_cache(2, 50)).cache
    kinds = model.config.kinds
    for number in (0, 2, 9):
        plan = ls.cache.plan(model.config.mask(kinds[number]), 50)
        alone = ls.cache.init(plan, 2, 2, 10, jnp.float32)
        alone, _ = alone.append(jnp.ones((2, 6, 2, 10)), jnp.ones((2, 6, 2, 10)))
        np.testing.assert_array_equal(cache[number].positions, alone.positions)
        assert (np.abs(np.asarray(cache[number].k)).sum((2, 3)) > 0).tolist() == (alone.k.sum((2, 3)) > 0).tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_forked_rows_decode_like_their_originals(name):
    model = load(name)
    cache = model(IDS[:, :4], cache=model.init_cache(2, 20)).cache
    want = np.asarray(model(IDS[:, 4:], cache=cache).logits)
    rows = np.array([1, 0, 1])
    got = model(IDS[rows, 4:], cache=cache.fork(rows))
    np.testing.assert_allclose(got.logits, want[rows], rtol=0, atol=TOLERANCE * np.abs(want).max())
    assert got.cache.length.tolist() == [6, 6, 6]
    with pytest.raises(ValueError, match="`rows` must lie between 0 and 1"):
        cache.fork(np.array([2]))


def test_rolled_back_tokens_leave_no_trace():
    model = load("llama")
    cache = model(IDS[:, :4], cache=model.init_cache(2, 20)).cache
    want = np.asarray(model(IDS[:, 4:], cache=cache).logits)
    further = model(IDS[:, :3], cache=cache).cache.rollback(np.array([3, 3]))
    assert further.length.tolist() == [4, 4]
    assert_close(np.asarray(model(IDS[:, 4:], cache=further).logits), want)
    sliding = small()
    full = sliding(IDS, cache=sliding.init_cache(2, 20)).cache
    with pytest.raises(ValueError, match="Row 0 cannot be rolled back to 5 tokens: it once held 6"):
        full.rollback(1)


def test_slack_lets_sliding_layers_roll_back():
    model = small()
    cache = model(IDS[:, :4], cache=model.init_cache(2, 20, slack=2)).cache
    want = np.asarray(model(IDS[:, 4:], cache=cache).logits)
    further = model(IDS[:, :2], cache=cache).cache.rollback(2)
    assert_close(np.asarray(model(IDS[:, 4:], cache=further).logits), want)
    with pytest.raises(ValueError, match="Plan with `slack=3` or more"):
        further.rollback(1)


def test_saved_layers_make_a_cache_again(tmp_path):
    model = load("gemma3_text")
    cache = model(IDS[:, :4], cache=model.init_cache(2, 20)).cache
    for number, layer in enumerate(cache):
        layer.save(tmp_path / f"{number}.safetensors")
    layers = [ls.cache.restore(tmp_path / f"{number}.safetensors", cache[number].plan) for number in range(len(cache))]
    again = model.init_cache(1, 20).with_layers(layers)
    assert jax.tree.structure(again) == jax.tree.structure(cache)
    got, want = (model(IDS[:, 4:], cache=one).logits for one in (again, cache))
    np.testing.assert_array_equal(got, want)
    reordered = model.init_cache(1, 20, heads_first=True).with_layers(layers)
    assert reordered.heads_first and all(layer.heads_first for layer in reordered)
    for layer, original in zip(reordered, cache, strict=True):
        np.testing.assert_array_equal(layer.k.swapaxes(1, 2), original.k)
    assert_close(np.asarray(model(IDS[:, 4:], cache=reordered).logits), np.asarray(want))


@pytest.mark.parametrize(
    "native",
    [pytest.param(True, marks=needs_native), pytest.param(False, marks=pytest.mark.check)],
    ids=["native", "xla"],
)
def test_heads_before_slots_give_the_same_logits(native, monkeypatch):
    """A prompt with padding, then tokens one by one in place, a fork and a rollback; windows and full attention."""
    if not native:
        monkeypatch.setenv("LONGSPAN_NATIVE", "0")
        jax.clear_caches()  # otherwise a cached program with native calls would be used
    model = load("gemma3_text")
    caches = [model.init_cache(2, 20, heads_first=heads_first) for heads_first in (True, False)]
    assert [cache.stacks[0][0].shape for cache in caches] == [(3, 2, 2, 5, 10), (3, 2, 5, 2, 10)]
    assert caches[0].nbytes == caches[1].nbytes
    steps = [(IDS, np.array([[1] * 6, [1] * 2 + [0] * 4]))] + [(IDS[:, i : i + 1], None) for i in range(4)]
    for ids, mask in steps:
        outputs = [model(ids, mask, cache=cache) for cache in caches]
        caches = [output.cache for output in outputs]
        valid = np.ones(ids.shape, bool) if mask is None else mask.astype(bool)
        assert_close(*(np.asarray(output.logits)[valid] for output in outputs))
        for layer, other in zip(*caches, strict=True):
            np.testing.assert_array_equal(layer.positions, other.positions)
            assert_close(np.asarray(layer.k.swapaxes(1, 2)), np.asarray(other.k))
    caches = [cache.fork(np.array([1, 0, 1])) for cache in caches]
    assert_close(*(np.asarray(model(IDS[[0, 1, 0], :1], cache=cache).logits) for cache in caches))
    llama = load("llama")
    caches = [llama.init_cache(2, 20, heads_first=heads_first) for heads_first in (True, False)]
    caches = [llama(IDS, cache=cache).cache.rollback(np.array([1, 3])) for cache in caches]
    assert_close(*(np.asarray(llama(IDS[:, :1], cache=cache).logits) for cache in caches))


@pytest.mark.usefixtures("unchecked")
def test_the_order_of_heads_and_slots_is_a_bool():
    with pytest.raises(TypeError, match="`heads_first` must be True or False, a Python bool, got 'yes'"):
        small().init_cache(2, 20, heads_first="yes")


@pytest.mark.usefixtures("unchecked")
def test_layers_that_do_not_belong_together_are_refused():
    model = small()
    empty = model.init_cache(2, 20)
    layers = list(model(IDS, cache=empty).cache)
    with pytest.raises(ValueError, match="`layers` must be 3 caches, one per layer, got 2"):
        empty.with_layers(layers[:2])
    with pytest.raises(TypeError, match=r"`longspan\.cache\.Cache`, like `cache\[i\]`, got int"):
        empty.with_layers([1, 2, 3])
    with pytest.raises(
        ValueError,
        match=r"Layer 0 has the plan CachePlan\(4 of 20.* `layers` must come from a cache with the same model, length",
    ):
        model.init_cache(2, 30).with_layers(layers)
    with pytest.raises(ValueError, match="Layers 0 and 2 are both of kind 'sliding_attention', but hold different"):
        empty.with_layers([*layers[:2], empty[2]])


def test_a_cache_of_another_model_is_refused():
    model = small()
    kinds = r"its layers differ from this model's in number or in kind \('full_attention' or 'sliding_attention'\)"
    for changes in (dict(num_hidden_layers=2), dict(sliding_window=None)):
        with pytest.raises(ValueError, match=f"`cache` was made for another model: {kinds}. Make one with `init_cache"):
            model(IDS, cache=small(**changes).init_cache(2, 20))


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(("changes", "sizes"), [(dict(head_dim=4), (1, 4)), (dict(num_key_value_heads=2), (2, 8))])
def test_a_cache_of_other_heads_is_refused(changes, sizes, heads_first):
    other = small(**changes).init_cache(2, 20, heads_first=heads_first)
    assert other.kv_sizes == sizes
    text = (
        f"`cache` was made for another model: it has num_key_value_heads={sizes[0]} and head_dim={sizes[1]}, but this "
        "model has num_key_value_heads=1 and head_dim=8. Make one with `init_cache(batch, length)` of this model."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        small()(IDS, cache=other)


@pytest.mark.check
@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False])
@pytest.mark.parametrize("heads_first", [False, True])
def test_gradients_and_vmap_of_cached_calls_are_those_of_a_full_pass(native, heads_first, monkeypatch):
    """Chunks of 3, 2 and 1 tokens in windows of 4."""
    if not native:
        monkeypatch.setenv("LONGSPAN_NATIVE", "0")
    model = small(initializer_range=0.4)
    graph, params = nnx.split(model)

    def cached(params, ids):
        bound = nnx.merge(graph, params)
        cache, found = bound.init_cache(ids.shape[0], 10, heads_first=heads_first), []
        for begin, end in ((0, 3), (3, 5), (5, 6)):
            output = bound(ids[:, begin:end], cache=cache)
            cache = output.cache
            found.append(output.logits)
        return jnp.concatenate(found, axis=1)

    def full(params, ids):
        return nnx.merge(graph, params)(ids).logits

    def gradient(of):
        return jax.jit(jax.grad(lambda params: jnp.sum(jnp.sin(of(params, IDS)))))(params)

    for got, want in zip(*(jax.tree.leaves(gradient(of)) for of in (cached, full)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())
    mapped = jax.jit(jax.vmap(lambda ids: cached(params, ids[None])))(IDS)[:, 0]
    want = np.asarray(full(params, IDS))
    np.testing.assert_allclose(mapped, want, rtol=0, atol=TOLERANCE * np.abs(want).max())
