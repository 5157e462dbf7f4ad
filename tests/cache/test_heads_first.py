"""Caches with heads before slots: the same results as in the other order, whatever happens to the cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls

B, N, K, H, V, LENGTH, CHUNK = 3, 15, 5, 7, 11, 61, 17
MASKS = {
    "ring": ls.Causal() & ls.Window(8, 0),
    "pinned keys and a ring": ls.Causal() & (ls.Window(8, 0) | ls.Prefix(2)),
    "table": ls.Causal() & (ls.Window(8, 0) | ls.Global((3, 30))),
    "everything": ls.Causal(),
}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def empty(mask, heads_first, dtype=jnp.float32):
    plan = ls.cache.plan(mask, LENGTH, slack=2)
    return ls.cache.init(plan, B, K, H, dtype, v_head_dim=V, heads_first=heads_first)


def new(seed, count=1):
    rng = np.random.default_rng(seed)
    sizes = (N, H), (K, H), (K, V)
    return [jnp.asarray(rng.normal(size=(B, count, *size)), jnp.float32) for size in sizes]


def step(cache, q, k, v, lengths, mask):
    cache, view = cache.append(k, v, lengths)
    return cache, ls.attention(q, **view.of(mask))


def assert_same(cache, other):
    """The same cache, with heads first and with slots first."""
    assert cache.heads_first and not other.heads_first
    assert cache.k.shape == (B, K, cache.plan.capacity, H) and cache.v.shape == (B, K, cache.plan.capacity, V)
    for name in ("k", "v"):
        np.testing.assert_array_equal(getattr(cache, name).swapaxes(1, 2), getattr(other, name))
    for name in ("positions", "length", "furthest", "overflowed"):
        np.testing.assert_array_equal(getattr(cache, name), getattr(other, name))


@every_mask
@pytest.mark.parametrize("how", ["eager", "in place"])
def test_appends_rollbacks_and_forks_give_the_same_results(mask, how):
    run = functools.partial(step, mask=mask)
    if how == "in place":
        run = jax.jit(run, donate_argnums=0)
    caches = [empty(mask, True), empty(mask, False)]

    def append(seed, count, lengths):
        results = [run(cache, *new(seed, count), jnp.array(lengths, np.int32)) for cache in caches]
        outs = [np.asarray(out) for _, out in results]
        for row, n in enumerate(lengths):
            np.testing.assert_array_equal(outs[0][row, :n], outs[1][row, :n])
            assert np.isfinite(outs[0][row, :n]).all()
        caches[:] = [cache for cache, _ in results]
        assert_same(*caches)

    append(0, CHUNK, [CHUNK, 0, 9])
    append(1, CHUNK, [5, 13, 1])
    for i in range(12):  # more than the ring has slots
        append(2 + i, 1, [1, i % 2, 1])
    caches = [cache.rollback(np.array([2, 0, 1])) for cache in caches]
    assert_same(*caches)
    append(20, 3, [3, 3, 0])
    caches = [cache.fork(np.array([2, 0, 2])) for cache in caches]
    assert_same(*caches)
    append(21, 1, [1, 1, 1])
    assert caches[0].show() == caches[1].show()


def test_arguments_and_views_keep_their_order_and_the_bytes_are_those_of_the_plan():
    cache = empty(MASKS["ring"], True)
    _, k, v = new(0, 3)
    after, view = cache.append(k, v)
    assert view.k.shape == (B, cache.plan.capacity, K, H) and view.v.shape == (B, cache.plan.capacity, K, V)
    np.testing.assert_array_equal(view.k, after.k.swapaxes(1, 2))
    np.testing.assert_array_equal(view.k[:, :3], k)
    assert cache.k.nbytes + cache.v.nbytes == cache.plan.nbytes(B, K, H, jnp.float32, v_head_dim=V)


@pytest.mark.check
@every_mask
def test_a_scan_and_a_vmap_give_the_same_results(mask):
    def body(cache, token):
        return step(cache, *token, None, mask)

    tokens = [jnp.stack(x) for x in zip(*(new(i) for i in range(13)), strict=True)]
    scan = jax.jit(lambda cache: jax.lax.scan(body, cache, tokens), donate_argnums=0)
    (cache, outs), (other, wanted) = scan(empty(mask, True)), scan(empty(mask, False))
    np.testing.assert_array_equal(outs, wanted)
    assert_same(cache, other)

    def mapped(cache):
        caches = jax.tree.map(lambda x: jnp.stack([x, x]), cache)
        two = [x[:2] for x in tokens]
        return jax.vmap(lambda cache, *token: step(cache, *token, None, mask)[1])(caches, *two)

    np.testing.assert_allclose(mapped(cache), mapped(other), rtol=0, atol=1e-6)


@pytest.mark.check
@every_mask
@pytest.mark.parametrize("count", [1, CHUNK])
def test_gradients_of_a_step_are_the_same(mask, count):
    filled = [step(empty(mask, heads_first), *new(0, 9), None, mask)[0] for heads_first in (True, False)]

    def loss(kv, qkv, cache):
        k, v = kv
        if cache.heads_first:
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        cache = jax.tree.unflatten(jax.tree.structure(cache), [k, v, *jax.tree.leaves(cache)[2:]])
        return jnp.sum(jnp.sin(step(cache, *qkv, None, mask)[1]))

    kv = filled[1].k, filled[1].v
    got, want = (jax.jit(jax.grad(loss, (0, 1)))(kv, new(1, count), cache) for cache in filled)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
