"""`ls.generate` compiles for few sizes of batches and caches. Padding changes no token and takes no decode step."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
import pytest

import longspan as ls
from longspan.models import generate as generation
from longspan.models.decoders.requests import LENGTHS, ROWS, bucket, check_lengths
from tests.models.test_decoders import load
from tests.models.test_generate import small


@contextmanager
def programs() -> Iterator[Counter]:
    """The number of programs of each name that XLA compiles inside the block."""
    found: Counter = Counter()

    def listen(event: str, *_, fun_name: str = "", **__):
        if event == "/jax/core/compile/backend_compile_duration":
            found[fun_name] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def calls(seed: int) -> Iterator[dict]:
    """20 calls: 1 to 8 prompts of 3 to 30 tokens, 8 to 60 new tokens."""
    rng = np.random.default_rng(seed)
    for number in range(20):
        prompts = [rng.integers(0, 31, rng.integers(3, 31)) for _ in range(1 + number % 8)]
        yield dict(prompts=prompts, max_new_tokens=int(rng.integers(8, 61)), stop_tokens=(number,))


@pytest.mark.check
def test_twenty_calls_of_one_bucket_compile_at_most_eight_programs_of_the_model():
    model = small(num_hidden_layers=1)
    with programs() as found:
        for options in calls(seed=0):
            answers = ls.generate(model, **options)
            assert len(answers) == len(options["prompts"])
            assert all(1 <= len(tokens) <= options["max_new_tokens"] for tokens in answers)
    # Batches of 1, 2, 4 and 8 rows; the other program allocates caches.
    assert found == {"jit(allocate)": 4, "jit(prefill)": 4, "jit(decode_burst)": 4}
    with programs() as found:
        for options in calls(seed=1):
            ls.generate(model, **options)
    assert not found


def test_sizes_are_few_and_the_padding_is_bounded():
    rows, lengths = ({bucket(n, *sizes) for n in range(1, most)} for sizes, most in ((ROWS, 65), (LENGTHS, 8193)))
    assert sorted(rows) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert sorted(lengths) == [128, 256, 512, 1024, 2048, 4096, 6144, 8192]
    for n in range(1, 8193):
        assert n <= bucket(n, *LENGTHS) < max(129, min(2 * n, n + 2048))


def test_caches_are_never_longer_than_the_model_or_than_max_length():
    config, prompt = small(max_position_embeddings=300).config, np.zeros(250, np.int32)
    assert check_lengths(config, [prompt], 3, None) == 256
    assert check_lengths(config, [prompt], 50, None) == 300
    assert check_lengths(config, [prompt], 3, 257) == 257


PROMPTS = [np.arange(4, 7), np.arange(9, 28), np.array([5]), np.array([8, 8, 4, 11]), np.arange(28, 6, -1)]


@pytest.mark.check
@pytest.mark.parametrize(("name", "row"), [("gemma2", 4), ("llama_dynamic", 4), ("phi3_long", 0)])
def test_tokens_are_those_of_rows_alone_in_caches_of_their_exact_length(name, row):
    """Sampled with one key per row. Ropes that depend on the length use that of the prompt and its new tokens."""
    model, keys, new = load(name), jax.random.split(jax.random.key(7), 5), 11
    draw = dict(max_new_tokens=new, temperature=1.3, top_p=0.95, repetition_penalty=1.1, stop_tokens=())
    padded = ls.generate(model, PROMPTS, key=keys, **draw)
    exact = len(PROMPTS[row]) + new
    (alone,) = ls.generate(model, [PROMPTS[row]], key=keys[row : row + 1], max_length=exact, **draw)
    np.testing.assert_array_equal(padded[row], alone)


def test_a_row_draws_the_same_numbers_in_batches_of_every_size():
    model, draw = load("llama"), dict(max_new_tokens=9, temperature=1.5, stop_tokens=())
    most = ls.generate(model, PROMPTS, key=jax.random.key(2), **draw)
    for count in (1, 3):
        few = ls.generate(model, PROMPTS[:count], key=jax.random.key(2), **draw)
        for one, other in zip(few, most, strict=False):
            np.testing.assert_array_equal(one, other)
    each = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(2), np.arange(5))
    own = ls.generate(model, PROMPTS, key=each, **draw)
    np.testing.assert_array_equal(np.stack(own), np.stack(most))
    for key in (jax.random.key_data(each), np.asarray(jax.random.key_data(each))):
        np.testing.assert_array_equal(np.stack(ls.generate(model, PROMPTS, key=key, **draw)), np.stack(most))


def test_another_kind_of_keys_is_kept():
    model, draw = load("llama"), dict(max_new_tokens=4, temperature=1.5, stop_tokens=())
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 3)
    assert generation._row_keys(keys, 4).dtype == keys.dtype
    padded = ls.generate(model, PROMPTS[:3], key=keys, **draw)
    (alone,) = ls.generate(model, PROMPTS[:1], key=keys[:1], **draw)
    np.testing.assert_array_equal(padded[0], alone)


def test_rows_that_fill_a_batch_take_no_step_and_stream_nothing(monkeypatch):
    model, heard, left = load("llama"), [], []
    burst = generation.decode_burst

    def counted(*arguments):
        left.append(np.asarray(arguments[3].remaining).tolist())
        return burst(*arguments)

    monkeypatch.setattr(generation, "decode_burst", counted)
    want = ls.generate(model, PROMPTS, max_new_tokens=30, stop_tokens=())
    ends = [int(tokens[0]) for tokens in want]
    left.clear()
    options = dict(max_new_tokens=30, stop_tokens=ends, stream=lambda *both: heard.append(both))
    got = ls.generate(model, PROMPTS, **options)
    assert [tokens.tolist() for tokens in got] == [[end] for end in ends]
    assert heard == list(enumerate(ends))
    assert left == [[30] * 5 + [0] * 3]  # one call: rows that fill the batch up never have a token to decode


def test_an_unused_row_holds_no_position():
    """Its cache stays empty, so it cannot overflow."""
    model, seen = load("gemma2"), []
    check_cache = generation.check_cache

    def look(config, cache):
        seen.append({kind: np.asarray(slots.length).tolist() for kind, slots in cache.slots.items()})
        check_cache(config, cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "check_cache", look)
        ls.generate(model, PROMPTS[:3], max_new_tokens=10, stop_tokens=())
    assert all(lengths[3] == 0 for by_kind in seen for lengths in by_kind.values())
    assert {tuple(lengths) for lengths in seen[-1].values()} == {(3 + 9, 19 + 9, 1 + 9, 0)}
