"""`longformer_attention` against the specification."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.patterns.longformer import _global_rows, _local_layout, _sort_tokens
from tests.engines import every_engine
from tests.patterns import plain

B, T, N, K, H = 2, 23, 6, 3, 5


@pytest.fixture
def engine():
    """The engine for most tests; tests of features that an engine may get wrong run on every engine."""
    return "auto"


def arrays(B=B, T=T, N=N, K=K, H=H, dtype=jnp.float32, seed=0):
    """q, k, v, q_global, k_global, v_global."""
    rng = np.random.default_rng(seed)
    sizes = ((B, T, n, H) for n in (N, K, K, N, K, K))
    return tuple(jnp.asarray(rng.normal(size=size, scale=1.5).astype(dtype), dtype) for size in sizes)


def assert_close(got, wanted, units=64):
    units = units * np.finfo(np.float32).eps
    most = np.abs(np.asarray(wanted)).max(initial=0)
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(wanted), rtol=units, atol=units * most)


def some_kinds(B=B, T=T, seed=0, padding=0.2, globals=0.15):
    rng = np.random.default_rng(seed)
    kinds = np.where(rng.random((B, T)) < globals, 1, 0)
    return np.where(rng.random((B, T)) < padding, -1, kinds).astype(np.int32)


def right_padded(lengths, kinds=0):
    return np.where(np.arange(T)[None] < np.array(lengths)[:, None], kinds, -1).astype(np.int32)


KINDS = {
    "no kinds": None,
    "all local": np.zeros((B, T), np.int32),
    "one global": np.eye(1, T, dtype=np.int32),
    "mixed": some_kinds(),
    "padding on the right": right_padded([17, 5]),
    "padding on the left": right_padded([17, 5])[:, ::-1],
    "late globals": np.where(np.arange(T) >= T - 3, 1, 0)[None] * np.ones((B, 1), np.int32),
    "all global": np.ones((B, T), np.int32),
    "all global but padding": np.where(some_kinds(padding=0.4) < 0, -1, 1).astype(np.int32),
    "a padded row": np.array([[-1], [1]], np.int32) * np.ones((1, T), np.int32),
    "different counts": np.where(np.arange(T)[None] < np.array([[1], [9]]), 1, 0).astype(np.int32),
}


@every_engine
@pytest.mark.parametrize("kinds", KINDS)
def test_matches_the_plain_oracle(engine, kinds):
    x, kinds = arrays(), KINDS[kinds]
    got = ls.longformer_attention(*x, window=3, token_kinds=kinds, engine=engine)
    assert_close(got, plain.longformer(*x, 3, kinds))


@pytest.mark.check
@every_engine
@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
@pytest.mark.parametrize(
    ("window", "dilation"),
    [(0, 1), (2, 2), (2, (1, 2, 3, 1, 2, 5)), (T, 1), (40, 3)],
    ids=["itself", "dilated", "dilated by head", "as wide as long", "wider than long"],
)
def test_windows_dilation_and_causality_match_the_plain_oracle(engine, window, dilation, causal):
    x, kinds = arrays(), some_kinds()
    got = ls.longformer_attention(*x, window=window, token_kinds=kinds, dilation=dilation, causal=causal, engine=engine)
    assert_close(got, plain.longformer(*x, window, kinds, dilation, causal))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_lengths_below_the_window_work(engine, length):
    x, kinds = arrays(T=length), some_kinds(T=length, seed=2)
    got = ls.longformer_attention(*x, window=4, token_kinds=kinds, engine=engine)
    assert_close(got, plain.longformer(*x, 4, kinds))


@every_engine
def test_lengths_over_several_tiles_match_the_plain_oracle(engine):
    x, kinds = arrays(B=1, T=300, N=2, K=1, H=3), np.zeros((1, 300), np.int32)
    kinds[:, [0, 140, 299]], kinds[:, 250:270] = 1, -1
    got = ls.longformer_attention(*x, window=17, token_kinds=kinds, engine=engine)
    assert_close(got, plain.longformer(*x, 17, kinds))


def test_window_may_be_an_array_with_one_size_per_row(engine):
    x, kinds, windows = arrays(), some_kinds(), np.array([1, 6])
    run = jax.jit(partial(ls.longformer_attention, engine=engine))
    assert_close(run(*x, window=jnp.asarray(windows), token_kinds=kinds), plain.longformer(*x, windows, kinds))


def seen_keys(kinds, engine, **options):
    """How often each query counts each key, [B, T, T], with equal weights and one-hot values."""
    rows, length = kinds.shape
    zero = np.zeros((rows, length, 1, length), np.float32)
    v = zero + np.eye(length, dtype=np.float32)[None, :, None]
    zero, v = jax.device_put((zero, v))
    out = ls.longformer_attention(zero, zero, v, zero, zero, v, token_kinds=kinds, engine=engine, **options)
    share = np.asarray(out)[:, :, 0]
    unit = share.min(-1, keepdims=True, where=share > 1e-6, initial=1)
    return np.rint(share / unit).astype(int)


def test_a_global_key_inside_the_window_counts_once(engine):
    seen = seen_keys(np.array([[0, 1, 0, 0, 0, -1, 1]]), engine, window=1)[0]
    assert ["".join(map(str, row)) for row in seen] == [
        "1100001",
        "1111101",
        "0111001",
        "0111101",
        "0101101",
        "0000000",
        "1111101",
    ]


def test_causal_limits_global_queries_and_global_keys(engine):
    seen = seen_keys(np.array([[0, 0, 1, 0, 0, 1]]), engine, window=1, causal=True)[0]
    assert ["".join(map(str, row)) for row in seen] == ["100000", "110000", "111000", "001100", "001110", "111111"]


def test_padding_beats_global_and_its_output_is_zero(engine):
    seen = seen_keys(np.array([[1, 0, -1, 0, -1]]), engine, window=4)[0]
    assert ["".join(map(str, row)) for row in seen] == ["11010", "11010", "00000", "11010", "00000"]


def test_padding_never_changes_valid_tokens(engine):
    x, kinds = arrays(), some_kinds(padding=0)
    plain_length = ls.longformer_attention(*x, window=3, token_kinds=kinds, engine=engine)
    padded = [jnp.concatenate([a, jnp.full((B, 8, *a.shape[2:]), np.nan)], axis=1) for a in x]
    more_kinds = np.concatenate([kinds, np.full((B, 8), -1)], axis=1)
    out = ls.longformer_attention(*padded, window=3, token_kinds=more_kinds, engine=engine)
    assert_close(out[:, :T], plain_length)
    assert not np.asarray(out[:, T:]).any()


def test_batch_rows_are_independent(engine):
    x, kinds = arrays(), some_kinds()
    run = partial(ls.longformer_attention, window=3, engine=engine)
    assert_close(run(*(a[1:] for a in x), token_kinds=kinds[1:]), run(*x, token_kinds=kinds)[1:])


def test_all_global_is_full_attention_with_the_global_projections(engine):
    x = arrays()
    got = ls.longformer_attention(*x, window=1, token_kinds=np.ones((B, T), np.int32), engine=engine)
    assert_close(got, ls.attention(*x[3:], engine="reference"))


def test_a_window_over_everything_is_full_attention(engine):
    x = arrays()
    got = ls.longformer_attention(*x, window=T - 1, token_kinds=np.zeros((B, T), np.int32), engine=engine)
    assert_close(got, ls.attention(*x[:3], engine="reference"))


def test_without_kinds_the_global_projections_may_be_left_out(engine):
    q, k, v, *_ = arrays()
    got = ls.longformer_attention(q, k, v, None, None, None, window=2, engine=engine)
    assert_close(got, plain.longformer(q, k, v, q, k, v, 2))


@pytest.mark.parametrize("dtype", [bool, np.int8, np.float32], ids=lambda d: d.__name__)
def test_kinds_may_be_bools_ints_or_floats(engine, dtype):
    x, kinds = arrays(), some_kinds(padding=0)
    got = ls.longformer_attention(*x, window=3, token_kinds=kinds.astype(dtype), engine=engine)
    assert_close(got, plain.longformer(*x, 3, kinds))


@every_engine
def test_new_kinds_do_not_retrace(engine):
    x, traces = arrays(), []

    @jax.jit
    def run(kinds, *x):
        traces.append(1)
        return ls.longformer_attention(*x, window=3, token_kinds=kinds, engine=engine)

    for seed, share in [(0, 0), (1, 0.2), (2, 0.9)]:
        kinds = some_kinds(seed=seed, globals=share)
        assert_close(run(jnp.asarray(kinds), *x), plain.longformer(*x, 3, kinds))
    assert len(traces) == 1


@every_engine
def test_gradients_match_a_dense_softmax(engine):
    x, kinds = arrays(), some_kinds()
    local = np.asarray(ls.longformer(3, token_kinds=kinds).dense(T, T))
    weights = np.random.default_rng(4).normal(size=x[0].shape).astype(np.float32)

    def dense(*x):
        out, out_global = (ls.attention(*qkv, mask=jnp.asarray(local), engine="reference") for qkv in (x[:3], x[3:]))
        return jnp.where(jnp.asarray(kinds > 0)[:, :, None, None], out_global, out)

    sparse = partial(ls.longformer_attention, window=3, token_kinds=kinds, engine=engine)
    losses = [lambda *x, f=f: (f(*x) * weights).sum() for f in (sparse, dense)]
    got, wanted = (jax.jit(jax.grad(loss, tuple(range(6))))(*x) for loss in losses)
    for mine, theirs in zip(got, wanted, strict=True):
        assert_close(mine, theirs, units=256)


@pytest.mark.check
@every_engine
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
def test_gradients_are_finite_in_every_dtype(engine, dtype):
    x = arrays(dtype=dtype)
    kinds = some_kinds()
    kinds[0] = -1

    def loss(q, *others):
        return (
            ls.longformer_attention(20 * q, *others, window=2, token_kinds=kinds, engine=engine).astype("float32").sum()
        )

    for gradient in jax.grad(loss, tuple(range(6)))(*x):
        assert gradient.dtype == dtype and np.isfinite(np.asarray(gradient, np.float32)).all()


def test_dropout_acts_on_local_and_global_queries_and_keeps_the_mean(engine):
    x, kinds = arrays(T=9), some_kinds(T=9, padding=0, globals=0.4)
    run = partial(ls.longformer_attention, *x, window=2, token_kinds=kinds, engine=engine)
    keys = jax.random.split(jax.random.key(0), 600)
    draws = np.asarray(jax.lax.map(lambda key: run(dropout_rate=0.3, dropout_key=key), keys))
    mean, error = draws.mean(0), draws.std(0) / np.sqrt(len(keys)).astype(np.float32)
    assert (np.abs(mean - run()) < 6 * error + 1e-3).all()
    assert (error > 0).any(axis=(2, 3)).all()
    np.testing.assert_array_equal(run(dropout_rate=0.0, dropout_key=keys[0]), run())


def visits_of(positions, length=4096, window=64):
    """The number of 128x128 tiles that both calls visit if the tokens at these positions are global."""
    kinds = np.zeros((1, length), np.int32)
    kinds[:, positions] = 1
    tokens = _sort_tokens(jnp.asarray(kinds))
    near = ls.Window(window, window)
    local = _local_layout(tokens, window, 1, False, near, (128, 128)).visits()
    rows = _global_rows(tokens, False).layout(length, length, q_positions=tokens.order).visits()
    return local, rows


def test_the_work_depends_on_the_number_of_globals_not_on_their_places():
    tiles = 4096 // 128
    window = 3 * tiles - 2
    none = visits_of([])
    assert none == (window, 0)
    assert visits_of([0])[1] == tiles
    first, scattered = visits_of(np.arange(40)), visits_of(np.arange(40) * 100 + 7)
    assert first[1] == scattered[1] == tiles
    for local, _ in (first, scattered):
        assert none[0] <= local <= none[0] + 3 * tiles
    many = visits_of(np.arange(0, 4096, 8))  # 512 global tokens, 4 tiles of them
    assert many[1] == 4 * tiles
    assert none[0] <= many[0] <= none[0] + 6 * tiles


def test_sorting_tokens_does_not_change_the_dropped_pairs():
    x, kinds = arrays(T=9), some_kinds(T=9, padding=0.1, globals=0.4)
    options = dict(dropout_rate=0.3, dropout_key=jax.random.key(1))
    mask = ls.longformer(2, token_kinds=kinds)
    got = ls.longformer_attention(*x[:3], *x[:3], window=2, token_kinds=kinds, **options)
    assert_close(got, ls.attention(*x[:3], mask=mask, **options))


def test_empty_sequences_work(engine):
    x = arrays(T=0)
    out = ls.longformer_attention(*x, window=2, token_kinds=np.zeros((B, 0), np.int32), engine=engine)
    assert out.shape == (B, 0, N, H)


def test_vmap_over_rows(engine):
    x, kinds = arrays(), some_kinds()

    def run(kinds, *x):
        x = (a[None] for a in x)
        return ls.longformer_attention(*x, window=3, token_kinds=kinds[None], engine=engine)[0]

    assert_close(jax.vmap(run)(jnp.asarray(kinds), *x), plain.longformer(*x, 3, kinds))


def test_float64_is_exact_to_float64(engine):
    with jax.enable_x64(True):
        x, kinds = arrays(dtype=jnp.float64), jnp.asarray(some_kinds())
        got = ls.longformer_attention(*x, window=3, token_kinds=kinds, engine=engine)
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, plain.longformer(*x, 3, kinds), rtol=1e-12, atol=1e-12)


def test_huge_windows_and_dilations_do_not_overflow(engine):
    x, kinds = arrays(), some_kinds()
    for window, dilation in [(2**40, 1), (2**30, 2**30), (2, 2**30)]:
        got = ls.longformer_attention(*x, window=window, dilation=dilation, token_kinds=kinds, engine=engine)
        assert_close(got, plain.longformer(*x, min(window, T), kinds, dilation))
