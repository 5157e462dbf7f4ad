"""`SelfAttention` with a cache: a text split into several calls gives the result of one call, in linen and NNX."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_rope_modules import SIZES, YARN, B, D, H, K, both

import longspan as ls

pytestmark = pytest.mark.check

T, MAX_LENGTH = 13, 19
X = jnp.asarray(np.random.default_rng(5).normal(size=(B, T, D)), jnp.float32)
OPTIONS = dict(rope=YARN, qk_norm=True, sinks=True)
MASKS = {
    "causal": ls.Causal(),
    "window and pinned": ls.Causal() & (ls.Window(3, 0) | ls.Prefix(2)),
    "chunk": ls.Causal() & ls.Chunk(5),
}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def empty(mask, dtype=jnp.float32):
    return ls.cache.init(ls.cache.plan(mask, MAX_LENGTH), B, K, H, dtype)


def kinds(**more):
    """Functions (x, **arguments) that call the linen and the NNX module."""
    layer, params, twin = both("SelfAttention", **OPTIONS, **more)
    return (lambda x, **call: layer.apply({"params": params}, x, **call)), twin


@every_mask
def test_decoding_step_by_step_equals_the_full_pass(mask):
    for run in kinds():
        whole, cache, parts = run(X, mask=mask), empty(mask), []
        # A prompt that passes the window, some tokens at once, then one by one.
        for start, stop in ((0, 6), (6, 8), *((t, t + 1) for t in range(8, T))):
            out, cache = run(X[:, start:stop], mask=mask, cache=cache)
            parts.append(out)
        np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, rtol=0, atol=2e-5)
        assert cache.length.tolist() == [T] * B


def test_a_generation_is_one_trace_in_both_kinds(unchecked):  # `nnx.jit` rebuilds a cache with placeholders
    mask = MASKS["window and pinned"]
    layer, params, twin = both("SelfAttention", **OPTIONS)
    tokens = X.swapaxes(0, 1)[:, :, None]

    def by_linen(cache, x):
        out, cache = layer.apply({"params": params}, x, cache=cache)
        return cache, out[:, 0]

    cache, outs = jax.jit(lambda cache: jax.lax.scan(by_linen, cache, tokens))(empty(mask))
    want = layer.apply({"params": params}, X, mask=mask)
    np.testing.assert_allclose(outs.swapaxes(0, 1), want, rtol=0, atol=2e-5)
    assert not cache.overflowed.any()
    step = nnx.jit(lambda twin, x, cache: twin(x, cache=cache))
    cache = empty(mask)
    for t in range(3):
        out, cache = step(twin, X[:, t : t + 1], cache)
        np.testing.assert_allclose(out[:, 0], want[:, t], rtol=0, atol=2e-5)


def test_rows_of_a_batch_have_their_own_lengths():
    mask, lengths = MASKS["window and pinned"], jnp.asarray([7, 4])
    for run in kinds():
        padded, cache = run(X[:, :7], cache=empty(mask), lengths=lengths)
        following = jnp.stack([X[0, 7:9], X[1, 4:6]])
        after, cache = run(following, cache=cache)
        assert cache.length.tolist() == [9, 6]
        for row, length in enumerate([7, 4]):
            want = run(X[row : row + 1, : length + 2], mask=mask)
            got = jnp.concatenate([padded[row, :length], after[row]])
            np.testing.assert_allclose(got, want[0], rtol=0, atol=2e-5)


def test_frequencies_of_a_call_rotate_cached_keys_too():
    pair = ls.rope.frequencies(dict(rope_theta=50.0), H)
    for run in kinds():
        whole = run(X, mask=ls.Causal(), rope=pair)
        first, cache = run(X[:, :9], cache=empty(ls.Causal()), rope=pair)
        second, _ = run(X[:, 9:], cache=cache, rope=pair)
        np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, rtol=0, atol=2e-5)
        assert np.abs(whole - run(X, mask=ls.Causal())).max() > 0.001


def test_keys_are_stored_rotated():
    layer, params, _ = both("SelfAttention", **OPTIONS)
    x = jnp.repeat(X[:, :1], 5, axis=1)  # one token five times: only positions tell its keys apart
    _, cache = layer.apply({"params": params}, x, cache=empty(ls.Causal()))
    assert np.abs(cache.k[:, 1:5] - cache.k[:, :1]).max() > 0.1
    np.testing.assert_allclose(cache.v[:, 1:5], jnp.repeat(cache.v[:, :1], 4, axis=1), rtol=1e-6)
    inv_freq, factor = ls.rope.frequencies(YARN, H)
    plain = cache.k[:, :1] / jnp.asarray([factor] * 4 + [1.0] * (H - 4), jnp.float32).reshape(1, 1, 1, H)
    want = ls.rope.rotate(jnp.repeat(plain, 5, axis=1), jnp.arange(5), inv_freq, attention_factor=factor)
    np.testing.assert_allclose(cache.k[:, :5], want, rtol=0, atol=1e-5)


def test_gradients_flow_through_a_cached_call():
    mask = MASKS["window and pinned"]
    layer, params, _ = both("SelfAttention", **OPTIONS)

    def cut(params):
        first, cache = layer.apply({"params": params}, X[:, :6], cache=empty(mask))
        second, _ = layer.apply({"params": params}, X[:, 6:], cache=cache)
        return (jnp.concatenate([first, second], axis=1) ** 2).sum()

    def whole(params):
        return (layer.apply({"params": params}, X, mask=mask) ** 2).sum()

    for a, b in zip(jax.tree.leaves(jax.grad(cut)(params)), jax.tree.leaves(jax.grad(whole)(params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (dict(lengths=jnp.asarray([1, 2])), ValueError, "`lengths` are the numbers of new tokens that a `cache`"),
        (dict(cache={}), TypeError, "`cache` must be a Cache, made by `ls.cache.init(plan, ...)`, got"),
        (dict(cache=empty(ls.Causal()), positions=jnp.arange(T)), ValueError, "`positions` and `cache` were both"),
        (dict(cache=empty(ls.Causal()), mask=np.ones((T, T), bool)), TypeError, "`mask` must be a Mask, got ndarray"),
        (dict(cache=empty(ls.Band(-2, 0)), mask=ls.Causal()), ValueError, "Plan the cache with the mask of the call"),
    ],
)  # fmt: skip
def test_what_a_cached_call_cannot_take_is_explained(unchecked, call, error, text):
    for run in kinds():
        with pytest.raises(error, match=re.escape(text)):
            run(X, **call)


def test_a_cache_of_other_sizes_is_explained():
    plan = ls.cache.plan(ls.Causal(), MAX_LENGTH)
    assert SIZES["num_kv_heads"] == K
    for run in kinds():
        with pytest.raises(ValueError, match=re.escape(f"this cache's B, K and H = {B}, {K + 1} and {H}")):
            run(X, cache=ls.cache.init(plan, B, K + 1, H, jnp.float32))
