"""`bigbird_attention` against the specification, with tests for the mistakes of public translations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from tests.engines import every_engine
from tests.patterns import plain


@pytest.fixture
def engine():
    """The engine for most tests; tests of features that an engine may get wrong run on every engine."""
    return "auto"


def arrays(B, T, N, K, H, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    sizes = ((B, T, n, H) for n in (N, K, K))
    return tuple(jnp.asarray(rng.normal(size=size, scale=1.5).astype(dtype), dtype) for size in sizes)


def some_blocks(N, nb, r, seed=0):
    return np.random.default_rng(seed).integers(0, nb, (N, nb - 2, r)).astype(np.int32)


def assert_close(got, wanted):
    units = 64 * np.finfo(np.float32).eps
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=units, atol=units * np.abs(wanted).max())


def counts(rand_attn, nb, block_size=2, *, B=1, kv_mask=None, engine="auto"):
    """The number of times query block i counts key block j, [B, N, nb, nb], computed from the output.

    Keys are 0, so that all weights are equal, and the value of a key is the one-hot number of its block.
    """
    N, T = len(rand_attn), nb * block_size
    zero = np.zeros((B, T, N, nb), np.float32)
    v = zero + np.repeat(np.eye(nb, dtype=np.float32), block_size, axis=0)[None, :, None]
    zero, v = jax.device_put((zero, v))
    out = ls.bigbird_attention(
        zero, zero, v, block_size=block_size, rand_attn=rand_attn, kv_mask=kv_mask, engine=engine
    )
    share = np.asarray(out).reshape(B, nb, block_size, N, nb).swapaxes(2, 3).swapaxes(1, 2)[:, :, :, 0]
    unit = share.min(-1, keepdims=True, where=share > 1e-6, initial=1)
    return np.rint(share / unit).astype(int)


CASES = {
    "five blocks": (dict(B=1, T=10, N=2, K=2, H=3), 2, 1),
    "odd sizes": (dict(B=2, T=21, N=6, K=3, H=5), 3, 2),
    "one token a block": (dict(B=2, T=13, N=3, K=1, H=7), 1, 3),
    "no random blocks": (dict(B=3, T=35, N=2, K=1, H=5), 5, 0),
}
PADDING = {
    "none": lambda rng, shape: None,
    "right": lambda rng, shape: np.arange(shape[1])[None] < shape[1] - rng.integers(1, shape[1], (shape[0], 1)),
    "left": lambda rng, shape: np.arange(shape[1])[None] >= rng.integers(1, shape[1], (shape[0], 1)),
    "holes": lambda rng, shape: rng.random(shape) < 0.6,
    "all of the first row": lambda rng, shape: np.arange(shape[0])[:, None] + np.zeros(shape, int) > 0,
}


@every_engine
@pytest.mark.parametrize(
    ("case", "padding"),
    [("odd sizes", padding) for padding in PADDING] + [(case, "holes") for case in CASES if case != "odd sizes"],
)
def test_matches_the_plain_oracle(engine, case, padding):
    sizes, block_size, r = CASES[case]
    q, k, v = arrays(**sizes)
    blocks = some_blocks(sizes["N"], sizes["T"] // block_size, r)
    q_mask, kv_mask = (PADDING[padding](np.random.default_rng(seed), q.shape[:2]) for seed in (1, 2))
    got = ls.bigbird_attention(
        q, k, v, block_size=block_size, rand_attn=blocks, q_mask=q_mask, kv_mask=kv_mask, engine=engine
    )
    assert_close(got, plain.bigbird(q, k, v, block_size, blocks, q_mask, kv_mask))


@every_engine
def test_gradients_match_a_dense_softmax_over_the_multiset(engine):
    (B, T, N, K, H), size = (2, 21, 6, 3, 5), 3
    q, k, v = arrays(B, T, N, K, H)
    nb, blocks = T // size, some_blocks(N, T // size, 2)
    real = np.random.default_rng(3).random((B, T)) < 0.7
    times = np.zeros((N, nb, nb))
    for n, i in np.ndindex(N, nb):
        np.add.at(times, (n, i, plain.bigbird_blocks(i, nb, blocks[n].tolist())), 1)
    times = np.repeat(np.repeat(times, size, 1), size, 2)[None] * real[:, None, :, None] * real[:, None, None]

    def dense(q, k, v):
        k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
        powers = times.astype(np.float32) * jnp.exp(jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H).astype(np.float32))
        total = powers.sum(-1, keepdims=True)
        return jnp.einsum("bnts,bsnh->btnh", powers / jnp.where(total == 0, 1, total), v)

    sparse = partial(ls.bigbird_attention, block_size=size, rand_attn=blocks, q_mask=real, kv_mask=real, engine=engine)
    weights = np.random.default_rng(4).normal(size=q.shape).astype(np.float32)
    losses = [lambda *x, f=f: (f(*x) * weights).sum() for f in (sparse, dense)]
    got, wanted = (jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v) for loss in losses)
    for mine, theirs in zip(got, wanted, strict=True):
        units = 256 * np.finfo(np.float32).eps
        np.testing.assert_allclose(mine, theirs, rtol=units, atol=units * np.abs(theirs).max())


def test_mistake_first_and_last_block_attend_to_only_two_blocks(engine):
    seen = counts(some_blocks(2, 8, 1), 8, engine=engine)
    np.testing.assert_array_equal(seen[:, :, [0, -1]], 1)


def test_mistake_second_and_second_last_blocks_lack_far_global_and_random_blocks(engine):
    seen = counts(np.full((1, 7, 1), 5, np.int32), 9, engine=engine)[0, 0]
    assert seen[1].tolist() == [1, 1, 1, 0, 0, 1, 0, 0, 1]
    assert seen[7].tolist() == [1, 0, 0, 0, 0, 1, 1, 1, 1]


def test_mistake_random_row_is_off_by_one(engine):
    nb = 11
    blocks = np.array([[[(i + 5) % nb] for i in range(1, nb - 1)]], np.int32)  # row i-1 belongs to block i
    seen = counts(blocks, nb, engine=engine)[0, 0]
    near = [{0, i - 1, i, i + 1, nb - 1} for i in range(nb)]
    for i in range(1, nb - 1):
        extra = [j for j in range(nb) if seen[i, j] - (j in near[i]) > 0]
        assert extra == [(i + 5) % nb], i


def test_mistake_every_head_gets_all_heads_random_blocks(engine):
    blocks = np.stack([np.full((8, 1), 5 + n, np.int32) for n in range(3)])
    seen = counts(blocks, 10, engine=engine)[0]
    assert seen[:, 2].tolist() == [[1, 1, 1, 1, 0, *(int(j == n) for j in range(4)), 1] for n in range(3)]


def test_mistake_masked_random_block_keeps_a_score_of_zero(engine):
    nb, size = 9, 2
    kv_mask = np.ones((1, nb * size), int)
    kv_mask[:, 5 * size : 6 * size] = 0
    seen = counts(np.full((1, 7, 1), 5, np.int32), nb, size, kv_mask=kv_mask, engine=engine)[0, 0]
    assert seen[2].tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 1]


def test_mistake_global_and_random_keys_are_not_masked(engine):
    q, k, v = arrays(1, 18, 2, 2, 3)
    blocks, padded = np.full((2, 7, 1), 5, np.int32), np.array([1, 10, 17])  # in the first, a random and the last block
    kv_mask = np.ones((1, 18), bool)
    kv_mask[:, padded] = False
    run = partial(ls.bigbird_attention, q, block_size=2, rand_attn=blocks, kv_mask=kv_mask, engine=engine)
    garbage = [np.array(x) for x in (k, v)]
    for x in garbage:
        x[:, padded] = np.nan
    np.testing.assert_array_equal(run(k, v), run(*jax.device_put(garbage)))


def test_mistake_reshape_without_transpose_mixes_heads_and_blocks(engine):
    B, nb, size, N, H = 2, 7, 3, 4, 5
    zero = jnp.zeros((B, nb * size, N, H))
    row, head = np.arange(B).reshape(B, 1, 1, 1), np.arange(N).reshape(1, 1, N, 1)
    v = jnp.asarray(np.broadcast_to(10 * row + head, zero.shape), jnp.float32)
    out = ls.bigbird_attention(zero, zero, v, block_size=size, rand_attn=some_blocks(N, nb, 1), engine=engine)
    np.testing.assert_allclose(out, v, rtol=1e-5)


@every_engine
def test_mistake_python_loop_makes_programs_grow_with_the_length(engine):
    def program_size(nb):
        q, k, v = arrays(1, 4 * nb, 2, 2, 3)
        run = partial(ls.bigbird_attention, block_size=4, engine=engine)
        return len(jax.jit(run).lower(q, k, v, rand_attn=jnp.zeros((2, nb - 2, 1), jnp.int32)).as_text().splitlines())

    assert program_size(64) == program_size(16)


@every_engine
def test_mistake_shapes_depend_on_traced_values(engine):
    q, k, v = arrays(2, 16, 2, 1, 3)
    traces = []

    @jax.jit
    def run(q, k, v, blocks, mask):
        traces.append(1)
        return ls.bigbird_attention(q, k, v, block_size=2, rand_attn=blocks, q_mask=mask, kv_mask=mask, engine=engine)

    for seed in range(3):
        blocks, mask = some_blocks(2, 8, 2, seed), np.random.default_rng(seed).random((2, 16)) < 0.8
        assert_close(
            run(q, k, v, jnp.asarray(blocks), jnp.asarray(mask)), plain.bigbird(q, k, v, 2, blocks, mask, mask)
        )
    assert len(traces) == 1


@every_engine
def test_a_block_listed_twice_counts_twice(engine):
    blocks = np.array([[[7, 7], [7, 2], [0, 9], [3, 7], [1, 2], [6, 6], [5, 1], [9, 9]]], np.int32)
    wanted = np.zeros((10, 10), int)
    for i in range(10):
        np.add.at(wanted[i], plain.bigbird_blocks(i, 10, blocks[0].tolist()), 1)
    np.testing.assert_array_equal(counts(blocks, 10, engine=engine)[0, 0], wanted)


def test_all_zero_random_blocks_count_block_zero_once_more_each(engine):
    seen = counts(np.zeros((1, 6, 3), np.int32), 8, engine=engine)[0, 0]
    assert seen[1:-1, 0].tolist() == [4] * 6


def test_at_length_1024_the_last_block_may_be_drawn_and_counts_twice(engine):
    blocks = ls.bigbird_random_blocks(1024, block_size=64, num_random_blocks=3, num_heads=2, seed=0)
    assert (blocks == 15).any()
    seen = counts(blocks, 16, block_size=1, engine=engine)[0]
    np.testing.assert_array_equal(seen[:, 1:-1, 15], 1 + (blocks == 15).sum(-1))


def test_one_row_of_random_blocks_is_used_by_all_heads(engine):
    q, k, v = arrays(1, 14, 4, 2, 3)
    one = some_blocks(1, 7, 2)
    run = partial(ls.bigbird_attention, q, k, v, block_size=2, engine=engine)
    np.testing.assert_allclose(run(rand_attn=one), run(rand_attn=np.repeat(one, 4, 0)), rtol=1e-6)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32, np.float16], ids=str)
def test_masks_may_be_bools_ints_or_floats(engine, dtype):
    q, k, v = arrays(2, 15, 2, 1, 3)
    blocks, mask = some_blocks(2, 5, 1), np.random.default_rng(0).random((2, 15)) < 0.7
    got = ls.bigbird_attention(
        q, k, v, block_size=3, rand_attn=blocks, q_mask=mask.astype(dtype), kv_mask=mask.astype(dtype), engine=engine
    )
    assert_close(got, plain.bigbird(q, k, v, 3, blocks, mask, mask))


def test_padded_queries_and_queries_without_keys_give_zero(engine):
    q, k, v = arrays(2, 15, 2, 1, 3)
    q_mask = np.ones((2, 15), bool)
    q_mask[0, 4] = False
    kv_mask = np.array([[True], [False]]) & np.ones((1, 15), bool)
    out = ls.bigbird_attention(
        q, k, v, block_size=3, rand_attn=some_blocks(2, 5, 1), q_mask=q_mask, kv_mask=kv_mask, engine=engine
    )
    assert not np.asarray(out[0, 4]).any() and not np.asarray(out[1]).any() and np.asarray(out[0, 5]).all()


def test_batch_rows_are_independent(engine):
    q, k, v = arrays(3, 20, 2, 2, 3)
    blocks, mask = some_blocks(2, 5, 1), np.random.default_rng(0).random((3, 20)) < 0.7
    run = partial(ls.bigbird_attention, block_size=4, rand_attn=blocks, engine=engine)
    both = run(q, k, v, q_mask=mask, kv_mask=mask)
    alone = run(q[1:2], k[1:2], v[1:2], q_mask=mask[1:2], kv_mask=mask[1:2])
    np.testing.assert_allclose(both[1:2], alone, rtol=1e-5, atol=1e-6)


@every_engine
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
def test_gradients_are_finite_with_padding_in_every_dtype(engine, dtype):
    q, k, v = arrays(2, 20, 2, 1, 3, dtype)
    mask = np.ones((2, 20), bool)
    mask[0, 7:], mask[1] = False, False

    def loss(q, k, v):
        blocks = some_blocks(2, 5, 1)
        out = ls.bigbird_attention(
            20 * q, k, v, block_size=4, rand_attn=blocks, q_mask=mask, kv_mask=mask, engine=engine
        )
        return out.astype(jnp.float32).sum()

    for gradient in jax.grad(loss, (0, 1, 2))(q, k, v):
        assert gradient.dtype == dtype and np.isfinite(np.asarray(gradient, np.float32)).all()


def test_dropout_drops_a_repeated_pair_as_a_whole_and_keeps_the_mean(engine):
    q, k, v = arrays(1, 10, 2, 2, 3)
    run = partial(ls.bigbird_attention, q, k, v, block_size=2, rand_attn=np.full((2, 3, 2), 3, np.int32), engine=engine)
    keys = jax.random.split(jax.random.key(0), 600)
    draws = np.asarray(jax.lax.map(lambda key: run(dropout_rate=0.3, dropout_key=key), keys))
    mean, error = draws.mean(0), draws.std(0) / np.sqrt(len(keys)).astype(np.float32)
    assert (np.abs(mean - run()) < 6 * error + 1e-3).all()
    np.testing.assert_array_equal(run(dropout_rate=0.0, dropout_key=keys[0]), run())


@every_engine
def test_traced_numbers_outside_the_blocks_are_ignored(engine):
    q, k, v = arrays(1, 12, 1, 1, 3)
    run = jax.jit(partial(ls.bigbird_attention, block_size=2, engine=engine))
    with_strays = np.asarray(run(q, k, v, rand_attn=np.array([[[3, -1], [6, 5], [-9, 99], [1, 6]]])))
    one, none = (plain.bigbird(q, k, v, 2, r) for r in (np.array([[[3], [5], [0], [1]]]), np.zeros((1, 4, 0), int)))
    third = slice(6, 8)  # block 3 is left with no random block
    assert_close(np.delete(with_strays, third, axis=1), np.delete(one, third, axis=1))
    assert_close(with_strays[:, third], none[:, third])


def test_float64_is_exact_to_float64(engine):
    with jax.enable_x64(True):
        (q, k, v), blocks = arrays(2, 15, 2, 1, 3, jnp.float64), some_blocks(2, 5, 1)
        got = ls.bigbird_attention(q, k, v, block_size=3, rand_attn=jnp.asarray(blocks), engine=engine)
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, plain.bigbird(q, k, v, 3, blocks), rtol=1e-12, atol=1e-12)
