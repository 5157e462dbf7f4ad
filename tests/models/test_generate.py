"""`ls.generate`: Hugging Face's greedy answers from golden files, sampling, compilations and errors."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import longspan as ls
from longspan import hf, models
from longspan.engines import pallas_tpu
from longspan.engines.cpu import library
from longspan.models import generate as generation
from longspan.models.decoders import steps
from longspan.models.decoders.sampling import Sampling, choose
from tests.golden import decoder_peers as peers
from tests.models.test_decoders import TOLERANCE, directory, golden, load
from tests.selection import only

needs_native = pytest.mark.skipif(library.missing() is not None, reason="the native library is not there")
NEW = peers.NEW


def greedy(model, prompts, count=NEW, **options):
    return [tokens.tolist() for tokens in ls.generate(model, prompts, max_new_tokens=count, stop_tokens=(), **options)]


@pytest.mark.parametrize("name", only(["mistral", "gemma2"], [*peers.MODELS, *peers.VISIONS]))
def test_greedy_answers_are_hugging_faces_token_for_token(name):
    want = [golden(name)[0][f"answer.{row}"].tolist() for row in range(2)]
    assert greedy(load(name), peers.prompts()) == want


@pytest.mark.check
@pytest.mark.parametrize("name", ["gemma2", "llama_dynamic"])
def test_a_row_does_not_depend_on_its_batch(name):
    model, prompts = load(name), [*peers.prompts(), np.array([7])]
    together = greedy(model, prompts)
    assert together == [greedy(model, [prompt])[0] for prompt in prompts]
    assert together == greedy(model, prompts[::-1])[::-1]


def test_the_size_of_chunks_changes_nothing():
    model, want = load("mistral"), greedy(load("mistral"), peers.prompts())
    for chunk in (1, 6, 64):
        assert greedy(model, peers.prompts(), prefill_chunk=chunk) == want


@pytest.mark.check
@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False], ids=["native", "xla"])
@pytest.mark.parametrize("name", ["llama3", "phi3", "qwen2", "gemma3_text", "olmo2", "ministral3"])
def test_a_step_that_reads_in_place_gives_what_copies_of_layers_give(name, native, monkeypatch):
    """Fused and separate projections, biases, tied heads, two norms; with and without the native library."""
    if not native:
        monkeypatch.setenv("LONGSPAN_NATIVE", "0")
        jax.clear_caches()  # otherwise a cached program with native calls would be used
    model = load(name)
    ids = np.stack([prompt[:3] for prompt in peers.prompts()])
    cache = model(np.stack([prompt[3:9] for prompt in peers.prompts()]), cache=model.init_cache(2, 20)).cache
    graph, params = nnx.split(model)

    def call(step):
        bound = nnx.merge(graph, params)
        vars(bound)["_reads_in_place"] = lambda count: step
        return bound(ids, np.array([[1, 1, 1], [1, 0, 0]]), cache=cache)

    got, want = call(True), call(False)
    mask = np.array([[1, 1, 1], [1, 0, 0]], bool)
    most = np.abs(np.asarray(want.logits)[mask]).max()
    np.testing.assert_allclose(
        np.asarray(got.logits)[mask], np.asarray(want.logits)[mask], rtol=0, atol=TOLERANCE * most
    )
    for ours, theirs in zip(got.cache, want.cache, strict=True):
        np.testing.assert_array_equal(ours.positions, theirs.positions)
        np.testing.assert_allclose(ours.k, theirs.k, rtol=0, atol=TOLERANCE * np.abs(theirs.k).max())


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    """JAX's default backend is named "tpu": caches have heads before slots, and XLA runs everything."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(pallas_tpu, "_device_kind", lambda: "TPU v5 lite")
    jax.clear_caches()  # otherwise a cached program with native calls would be used
    yield
    jax.clear_caches()


@pytest.mark.parametrize("name", only(["gemma3_text"], ["llama", "gemma2", "gemma3_text", "phi3"]))
def test_caches_as_on_a_tpu_give_the_same_tokens(name, as_on_a_tpu, monkeypatch):
    orders = []

    def allocate(*arguments):
        cache, last_hidden = steps.allocate(*arguments)
        orders.append(cache.heads_first)
        return cache, last_hidden

    monkeypatch.setattr(generation, "allocate", allocate)
    model, prompts = load(name), peers.prompts()
    got = greedy(model, prompts, prefill_chunk=6)
    monkeypatch.undo()
    jax.clear_caches()
    assert orders == [True]
    assert got == greedy(model, prompts) == [golden(name)[0][f"answer.{row}"].tolist() for row in range(2)]


@pytest.mark.check
@needs_native
def test_layers_that_were_replaced_are_called():
    """A LoRA layer in a stack, a head with a bias: replaced layers are called, not only their kernels multiplied."""
    model, rngs = small(num_hidden_layers=2, initializer_range=0.4), nnx.Rngs(3)

    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def adapter(rngs):
        return nnx.LoRA(16, 3, 16, b_initializer=nnx.initializers.normal(1.0), rngs=rngs)

    base = model.layers[0].attention.query
    model.layers[0].attention.query = nnx.Sequential(adapter(rngs), base)
    model.head = nnx.Linear(16, 31, bias_init=nnx.initializers.normal(9.0), rngs=rngs)
    ids = np.array([[3, 7, 5, 2]])
    want = model(ids).logits[:, -1]
    output = model(ids[:, :3], cache=model.init_cache(1, 9))
    got = model(ids[:, 3:], cache=output.cache).logits[:, 0]
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())
    (tokens,), row = greedy(model, ids, 5), ids[0].tolist()
    for token in tokens:
        assert token == int(np.argmax(np.asarray(model(np.array([row])).logits)[0, -1]))
        row.append(token)


@pytest.mark.check
def test_16_bits_generate_too():
    model = hf.load(directory("mistral"), dtype=jnp.bfloat16)
    ids = np.stack([prompt[:20] for prompt in peers.prompts()])
    (first, _) = greedy(model, ids, 1)
    assert first[0] == int(np.argmax(np.asarray(model(ids).logits, np.float32)[0, -1]))
    assert all(len(tokens) == 30 for tokens in greedy(model, ids, 30))


# Compilations, copies and steps.


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the programs that XLA compiles inside the block."""
    found: list[str] = []

    def listen(event: str, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def small(dtype=jnp.float32, **changes) -> models.CausalLM:
    sizes = dict(vocab_size=31, hidden_size=16, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1)
    config = models.MistralConfig(
        **{**sizes, "num_hidden_layers": 3, "sliding_window": 64, "max_position_embeddings": 5000, **changes}
    )
    return models.CausalLM(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))


@pytest.mark.check
def test_fifty_lengths_cost_at_most_eight_compilations():
    model, rng = small(), np.random.default_rng(0)
    lengths = [1, 4096, *rng.integers(1, 4097, 48)]
    with compilations() as found:
        for number, length in enumerate(lengths):
            prompt = rng.integers(0, 31, length)
            ls.generate(model, [prompt], max_new_tokens=2 + number % 3, max_length=4200, stop_tokens=(number % 31,))
    assert 3 <= len(found) <= 8
    with compilations() as found:
        heard: list[tuple[int, int]] = []
        ls.generate(model, [[1, 2]], max_new_tokens=9, max_length=4200, stream=lambda *both: heard.append(both))
    assert len(heard) == 9 and not found


def loop(model: models.CausalLM, batch: int = 1, *, heads_first: bool = False) -> tuple:
    """The arguments of the decode loop, `steps.decode_burst`, before the first token."""
    graph, params = nnx.split(model)
    program = steps.ProgramKey(generation.HashedGraph(graph), model._reads_in_place(batch))
    cache, last_hidden = steps.allocate(model.config, batch, 4096, model.dtype, heads_first)
    ropes = generation._ropes(model, [np.zeros(5)] * batch, 9)
    settings = steps.DecodeSettings(Sampling(), generation._padded(()), None, ropes)
    zeros = np.zeros(batch, np.int32)
    return program, params, cache, steps.DecodeState(last_hidden, zeros, zeros + 9, np.int32(0), None), settings


@pytest.mark.check
@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("batch", "heads_first"), [(1, False), (3, False), (3, True)])
def test_decoding_copies_neither_parameters_nor_caches(batch, heads_first, dtype):
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=5, sliding_window=512)
    model = small(dtype, **sizes)
    arguments = loop(model, batch, heads_first=heads_first)
    memory = steps.decode_burst.lower(*arguments).compile().memory_analysis()
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(arguments[2].stacks))
    one_layer = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model.layers))) // 5
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < min(one_layer, cache_bytes // 5) // 2


@pytest.mark.check
@needs_native
@pytest.mark.parametrize("kind", [models.LlamaConfig, models.Gemma2Config, models.Gemma3Config])
def test_the_loop_of_48_layers_is_as_long_as_that_of_6(kind):
    def sizes(layers):
        config = kind(vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=layers)
        traced = steps.decode_burst.trace(*loop(models.CausalLM(config, rngs=nnx.Rngs(0))))
        return str(traced.jaxpr).count(" = "), traced.lower().as_text().count("\n")

    (equations, lines), (most_equations, most_lines) = sizes(6), sizes(48)
    assert most_equations == equations and most_lines == lines


def test_the_loop_ends_when_all_rows_have_finished(monkeypatch):
    model, calls = load("llama"), []
    burst = generation.decode_burst
    monkeypatch.setattr(generation, "decode_burst", lambda *args: (calls.append(1), burst(*args))[1])
    answers = [tokens.tolist() for tokens in ls.generate(model, peers.prompts(), max_new_tokens=30, stop_tokens=())]
    assert len(calls) == 1 + -(-29 // steps.BURST)  # the first call returns one token
    ends = tuple({tokens[2] for tokens in answers})
    calls.clear()
    stopped = ls.generate(model, peers.prompts(), max_new_tokens=30, stop_tokens=ends)
    for tokens, got in zip(answers, stopped, strict=True):
        first = next(i for i, token in enumerate(tokens) if token in ends)
        assert got.tolist() == tokens[: first + 1]
    assert len(calls) <= 2


def test_tokens_stream_in_order():
    heard: list[tuple[int, int]] = []
    want = greedy(load("qwen3"), peers.prompts(), 11)
    got = greedy(load("qwen3"), peers.prompts(), 11, stream=lambda row, token: heard.append((row, token)))
    assert got == want
    assert heard == [(row, want[row][step]) for step in range(11) for row in range(2)]


def test_stop_tokens_are_the_checkpoints(tmp_path):
    _, config, arrays = golden("llama")
    (answer,) = greedy(load("llama"), peers.prompts()[:1])
    end, other = answer[3], next(token for token in range(peers.VOCAB) if token not in answer)
    want = answer[: answer.index(end) + 1]
    where = peers.write(tmp_path, {**config, "eos_token_id": [other, end]}, arrays)

    def answer_of(model, **options):
        return ls.generate(model, peers.prompts()[:1], max_new_tokens=NEW, **options)[0].tolist()

    assert answer_of(hf.load(where)) == want
    (where / "generation_config.json").write_text(json.dumps(dict(eos_token_id=other)))
    assert answer_of(hf.load(where)) == answer
    assert answer_of(hf.load(where), stop_tokens=end) == want
    assert answer_of(hf.load(where), stop_tokens=np.array([end, other])) == want
    (where / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json cannot be read"):
        answer_of(hf.load(where))


# Sampling.


@given(st.data())
def test_samples_are_tokens_that_the_rules_keep(data):
    logits = np.array(data.draw(st.lists(st.integers(-8, 8), min_size=7, max_size=7)), np.float32) / 4
    rules = dict(
        temperature=np.float32(data.draw(st.sampled_from([0.5, 1.0, 1.7]))),
        top_k=data.draw(st.none() | st.integers(1, 12)),
        top_p=data.draw(st.none() | st.sampled_from([0.1, 0.5, 0.77, 1.0])),
        min_p=data.draw(st.none() | st.sampled_from([0.05, 0.4, 1.0])),
    )
    kept = allowed(logits, **rules)
    keys = jax.random.split(jax.random.key(data.draw(st.integers(0, 99))), 64)
    sampling = Sampling(**{name: None if value is None else np.float32(value) for name, value in rules.items()})
    drawn = chosen(sampling, jnp.broadcast_to(logits, (64, 7)), None, keys, np.int32(0))
    assert set(np.asarray(drawn).tolist()) <= set(np.flatnonzero(kept).tolist())


chosen = jax.jit(choose)


def allowed(logits, temperature, top_k, top_p, min_p):
    """By sorting; ties with the last kept one are kept."""
    scores = logits.astype(np.float64) / float(temperature)
    if top_k is not None:
        scores = np.where(scores < np.sort(scores)[-min(top_k, len(scores))], -np.inf, scores)
    if top_p is not None:
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        order = np.argsort(-scores, kind="stable")
        count = 1 + int(np.sum(np.cumsum(weights[order])[:-1] < top_p - 1e-6))
        scores = np.where(scores < scores[order][count - 1], -np.inf, scores)
    if min_p is not None:
        scores = np.where(scores < scores.max() + np.log(min_p) - 1e-6, -np.inf, scores)
    return np.isfinite(scores)


def test_samples_have_the_models_frequencies():
    logits, draws = np.array([1.0, -0.5, 0.2, -3.0, 0.9], np.float32), 20000
    keys = jax.random.split(jax.random.key(3), draws)
    drawn = choose(Sampling(temperature=np.float32(0.7)), jnp.tile(logits, (draws, 1)), None, keys, np.int32(5))
    want = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    got = np.bincount(np.asarray(drawn), minlength=5) / draws
    assert np.all(np.abs(got - want) < 5 * np.sqrt(want / draws))


def test_every_token_that_the_rules_keep_is_sampled():
    logits = np.array([1.0, 0.9, 0.8, 0.1, 0.0], np.float32)
    keys = jax.random.split(jax.random.key(0), 500)
    for rules in (dict(top_k=3.0), dict(top_p=0.7), dict(min_p=0.8)):
        sampling = Sampling(temperature=np.float32(1), **{k: np.float32(v) for k, v in rules.items()})
        drawn = np.asarray(choose(sampling, jnp.tile(logits, (500, 1)), None, keys, np.int32(0)))
        assert set(drawn.tolist()) == {0, 1, 2}, rules


def test_repeated_tokens_become_less_likely():
    logits = jnp.array([[2.0, 1.5, -1.0]])
    seen = jnp.array([[True, False, True]])
    pick = lambda penalty: int(choose(Sampling(repetition_penalty=np.float32(penalty)), logits, seen, None, 0)[0])  # noqa: E731
    assert [pick(p) for p in (1.2, 1.4)] == [0, 1]
    model, prompt = load("llama"), np.arange(4, 14)
    (tokens,) = greedy(model, [prompt], 12, repetition_penalty=1e6)
    assert len({*tokens, *prompt.tolist()}) == 22


def test_keys_are_by_row_and_the_same_key_draws_the_same():
    model, (prompt, _) = load("llama"), peers.prompts()
    draw = dict(temperature=1.5, top_k=20, top_p=0.95, min_p=0.01)
    one = greedy(model, [prompt] * 3, key=jax.random.key(1), **draw)
    assert one == greedy(model, [prompt] * 3, key=jax.random.key(1), **draw)
    assert len({tuple(tokens) for tokens in one}) == 3
    assert one != greedy(model, [prompt] * 3, key=jax.random.key(2), **draw)
    keys = jax.random.split(jax.random.key(5), 3)
    each = greedy(model, [prompt] * 3, key=keys, **draw)
    assert each[1:] == greedy(model, [prompt] * 2, key=keys[1:], **draw)
    assert each == greedy(model, [prompt] * 3, key=jax.random.key_data(keys), **draw)


# Errors.


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(prompts=[[]]), ValueError, "Prompt 0 is empty"),
        (dict(prompts=[[1], [2, 29]]), ValueError, "Prompt 1 has the token id 29.*0 to 28"),
        (dict(prompts=[[-1]]), ValueError, "token id -1"),
        (dict(prompts=[[1.5]]), ValueError, "must be token ids"),
        (dict(prompts=[[[1]]]), ValueError, "must be token ids"),
        (dict(prompts=[[1, [2, 3]]]), ValueError, "must be token ids"),
        (dict(temperature="hot"), ValueError, "temperature"),
        (dict(temperature=None), ValueError, "temperature"),
        (dict(prompts=[1, 2]), ValueError, r"`\[prompt\]`"),
        (dict(prompts="hello"), TypeError, "list of arrays of token ids"),
        (dict(prompts=["hello"]), ValueError, "must be token ids"),
        (dict(max_new_tokens=70), ValueError, "max_position_embeddings=71"),
        (dict(max_length=12), ValueError, "max_length=12"),
        (dict(max_new_tokens=-1), ValueError, "max_new_tokens"),
        (dict(temperature=-1.0), ValueError, "temperature"),
        (dict(temperature=float("nan")), ValueError, "temperature"),
        (dict(temperature=1.0), ValueError, "needs a random `key`"),
        (dict(temperature=1.0, key=jax.random.split(jax.random.key(0), 3)), ValueError, r"one per prompt \[2\]"),
        (dict(temperature=1.0, key=7), ValueError, "one key"),
        (dict(top_p=0.9), ValueError, "`top_p` restricts sampling, but temperature=0"),
        (dict(temperature=1.0, key=jax.random.key(0), top_p=0.0), ValueError, "top_p"),
        (dict(temperature=1.0, key=jax.random.key(0), top_p=1.1), ValueError, "top_p"),
        (dict(temperature=1.0, key=jax.random.key(0), top_k=0), ValueError, "top_k"),
        (dict(temperature=1.0, key=jax.random.key(0), min_p=2), ValueError, "min_p"),
        (dict(repetition_penalty=0.0), ValueError, "repetition_penalty"),
        (dict(stop_tokens=[1.5]), ValueError, "stop_tokens"),
        (dict(prefill_chunk=0), ValueError, "prefill_chunk"),
    ],
)
def test_bad_input_is_a_clear_error(changes, error, message):
    options = dict(prompts=[[5, 6, 7], [8] * 11], max_new_tokens=4) | changes
    with pytest.raises(error, match=message):
        ls.generate(load("llama"), options.pop("prompts"), **options)


def test_an_encoder_does_not_generate():
    config = models.BertConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
    for other in (models.Encoder(config, rngs=nnx.Rngs(0)), SimpleNamespace()):
        with pytest.raises(TypeError, match="must be a decoder"):
            ls.generate(other, [[1]], max_new_tokens=1)


def test_generation_inside_jit_is_refused():
    graph, params = nnx.split(load("llama"))
    with pytest.raises(TypeError, match="outside of `jit`"):
        jax.jit(lambda params: ls.generate(nnx.merge(graph, params), [[1]], max_new_tokens=1))(params)


class Bound(models.LlamaConfig):
    """A prefix whose tokens attend to each other."""

    def mask(self, kind):
        return ls.Causal() | ls.Prefix(4)


def test_tokens_that_attend_to_each_other_must_be_computed_together():
    sizes = dict(vocab_size=31, hidden_size=16, intermediate_size=12, num_attention_heads=2, num_hidden_layers=1)
    model = models.CausalLM(Bound(**sizes), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="it decodes new tokens one at a time"):
        ls.generate(model, [[1, 2]], max_new_tokens=3)
    (tokens,), ids = greedy(model, [[1, 2, 3, 4, 5]], 3), [1, 2, 3, 4, 5]
    for token in tokens:
        assert token == int(np.argmax(np.asarray(model(np.array([ids])).logits)[0, -1]))
        ids.append(token)


class Kinds(models.LlamaConfig):
    """Layers whose caches are a ring of a window, pinned slots and a ring, a ring of a chunk, and a table."""

    masks = (
        ls.Causal() & ls.Window(2, 0),
        ls.Causal() & (ls.Window(3, 0) | ls.Prefix(2)),
        ls.Causal() & ls.Chunk(5),
        ls.Causal() & (ls.Window(1, 0) | ls.Global((1, 4))),
    )

    @property
    def kinds(self):
        return "0", "1", "2", "3"

    def mask(self, kind):
        return self.masks[int(kind)]


def test_every_form_of_cache_gives_the_tokens_of_full_passes():
    sizes = dict(vocab_size=31, hidden_size=16, intermediate_size=12, num_attention_heads=2, num_hidden_layers=4)
    model = models.CausalLM(Kinds(**sizes, initializer_range=0.5), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 31, length) for length in (1, 23, 8)]
    ids = np.zeros((3, 40), np.int32)
    answers = greedy(model, prompts, 14, prefill_chunk=6)
    for row, prompt, answer in zip(ids, prompts, answers, strict=True):
        row[: len(prompt) + 14] = [*prompt, *answer]
    best = np.argmax(np.asarray(model(ids).logits), axis=-1)
    for row, prompt, answer in zip(best, prompts, answers, strict=True):
        assert answer == row[len(prompt) - 1 :][:14].tolist()


def test_a_temperature_next_to_nothing_is_greedy():
    model, want = load("llama"), greedy(load("llama"), peers.prompts())
    assert greedy(model, peers.prompts(), temperature=1e-40, key=jax.random.key(0)) == want


def test_a_cache_may_be_narrower_than_the_model():
    model, ids = load("llama"), np.stack([prompt[:7] for prompt in peers.prompts()])
    output = model(ids, cache=model.init_cache(2, 20, dtype=jnp.bfloat16))
    assert output.cache[0].k.dtype == jnp.bfloat16
    want = np.asarray(model(ids).logits)
    np.testing.assert_allclose(output.logits, want, atol=0.05 * np.abs(want).max())


def test_a_large_chunk_computes_little_padding():
    assert generation.chunk_size(30, 2_000_000) < 60


def test_dynamic_rope_has_no_end():
    model = load("llama_dynamic")
    assert model.config.max_position_embeddings == 16
    (tokens,) = greedy(model, [np.arange(4, 20)], 40)
    assert len(tokens) == 40


def test_numpys_ints_are_ints_and_stop_tokens_may_lie_outside_of_the_vocabulary():
    model, prompt = load("llama"), [5, 6, 7]
    (tokens,) = ls.generate(model, [prompt], max_new_tokens=np.int64(2), stop_tokens=[2**40, -1, -(2**40)])
    assert tokens.tolist() == greedy(model, [prompt], 2)[0]


def test_no_prompts_or_no_new_tokens_give_no_tokens():
    assert ls.generate(load("llama"), [], max_new_tokens=3) == []
    (none,) = ls.generate(load("llama"), [[1, 2]], max_new_tokens=0)
    assert none.tolist() == [] and none.dtype == np.int32
