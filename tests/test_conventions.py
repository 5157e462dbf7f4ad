"""The fixed conventions of attention, on every engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.testing import Shape, make_qkv
from tests.engines import every_engine

SHAPE = Shape(B=2, T=5, S=7, N=6, K=3, H=4)
Q, K, V = make_qkv(SHAPE, jnp.float32)
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]

pytestmark = every_engine


def supported(engine, **arguments):
    try:
        return ls.attention(**arguments, engine=engine)
    except NotImplementedError as reason:
        pytest.skip(str(reason))


def grads(engine, q, k, v, **arguments):
    def loss(q, k, v):
        out = ls.attention(q, k, v, engine=engine, **arguments)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_without_keys_gives_zeros_and_zero_gradient(engine, dtype):
    q, k, v = make_qkv(SHAPE, dtype)
    mask = ls.Segments(np.array([[0, -1, 0, 0, 0]] * 2), np.zeros((2, 7), int))
    out, lse = supported(engine, q=q, k=k, v=v, mask=mask, return_lse=True)
    out, lse = np.asarray(out, np.float32), np.asarray(lse)
    assert not np.any(out[:, 1])
    assert np.all(lse[:, 1] == -np.inf) and np.all(np.isfinite(lse[:, 2]))
    assert lse.shape == (2, 5, 6) and lse.dtype == np.float32
    dq, dk, dv = (np.asarray(d, np.float32) for d in grads(engine, q, k, v, mask=mask))
    assert not np.any(dq[:, 1])
    assert all(np.all(np.isfinite(d)) for d in (dq, dk, dv))


@pytest.mark.parametrize("dtype", DTYPES)
def test_garbage_where_nobody_looks_changes_nothing(engine, dtype):
    q, k, v = make_qkv(SHAPE, dtype)
    q_ids, kv_ids = np.zeros((2, 5), int), np.zeros((2, 7), int)
    q_ids[:, 2], kv_ids[0, 3], kv_ids[1, 6] = -1, -1, -1
    mask = ls.Segments(q_ids, kv_ids)
    clean = supported(engine, q=q, k=k, v=v, mask=mask), *grads(engine, q, k, v, mask=mask)
    for garbage in (np.nan, np.inf):
        dirty = [np.array(x) for x in (q, k, v)]
        for x, unseen in zip(dirty, (q_ids < 0, kv_ids < 0, kv_ids < 0), strict=True):
            x[unseen] = garbage
        dirty_q, dirty_k, dirty_v = jax.device_put(dirty)
        dirty = ls.attention(dirty_q, dirty_k, dirty_v, mask=mask, engine=engine)
        dirty = dirty, *grads(engine, dirty_q, dirty_k, dirty_v, mask=mask)
        for a, b in zip(clean, dirty, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_a_bias_of_minus_infinity_is_a_masked_key(engine):
    truth = np.random.default_rng(0).random((2, 6, 5, 7)) < 0.6
    truth[0, 1, 2] = False
    bias = jnp.where(truth, 0.0, -jnp.inf)
    a = supported(engine, q=Q, k=K, v=V, bias=bias, return_lse=True)
    b = ls.attention(Q, K, V, mask=truth, engine=engine, return_lse=True)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    for x, y in zip(grads(engine, Q, K, V, bias=bias), grads(engine, Q, K, V, mask=truth), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("q_len, kv_len", [(0, 7), (5, 0), (0, 0)])
def test_no_queries_and_no_keys_work(engine, q_len, kv_len):
    q, k, v = Q[:, :q_len], K[:, :kv_len], V[:, :kv_len]
    sinks = jnp.arange(6.0)
    out, lse = supported(engine, q=q, k=k, v=v, mask=ls.Causal(), return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    assert not np.any(out) and np.all(np.asarray(lse) == -np.inf)
    _, lse = ls.attention(q, k, v, sinks=sinks, engine=engine, return_lse=True)
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks, (2, q_len, 6)))
    assert all(not np.any(d) for d in grads(engine, q, k, v, mask=ls.Causal()))


def test_lse_includes_the_sink_and_is_the_sink_without_keys(engine):
    sinks = jnp.asarray([0.5, -1.0, 2.0, 0.0, 30.0, -30.0])
    mask = ls.Segments(np.array([[0, -1, 0, 0, 0]] * 2), np.zeros((2, 7), int))
    _, plain = supported(engine, q=Q, k=K, v=V, mask=mask, return_lse=True)
    out, lse = ls.attention(Q, K, V, mask=mask, sinks=sinks, engine=engine, return_lse=True)
    np.testing.assert_allclose(lse, np.logaddexp(plain, np.broadcast_to(sinks, plain.shape)), rtol=1e-6)
    np.testing.assert_array_equal(lse[:, 1], np.broadcast_to(sinks, (2, 6)))
    assert not np.any(out[:, 1])


def test_scores_are_capped_before_the_bias_is_added(engine):
    bias = jnp.where(np.eye(5, 7, dtype=bool), 0.0, -1e4)[None, None]
    out = supported(engine, q=Q, k=K, v=V, bias=bias, soft_cap=2.0)
    repeated = jnp.repeat(V[:, :5], 2, axis=2)
    np.testing.assert_allclose(out, repeated, rtol=1e-5)


def test_dropout_keeps_the_mean_and_lse_and_never_drops_the_sink(engine):
    sinks = jnp.ones(6)
    arguments = dict(q=Q, k=K, v=V, mask=ls.Causal(2), sinks=sinks)
    out, lse = supported(engine, **arguments, return_lse=True)
    runs = []
    for seed in range(200):
        key = jax.random.key(seed)
        dropped, same = ls.attention(**arguments, dropout_rate=0.4, dropout_key=key, engine=engine, return_lse=True)
        np.testing.assert_array_equal(same, lse)
        runs.append(dropped)
    spread = np.std(runs, axis=0) / np.sqrt(len(runs))
    assert np.max(np.abs(np.mean(runs, axis=0) - out) / (spread + 1e-3)) < 5


def test_dropout_is_the_same_for_any_engine_and_tiling(engine):
    arguments = dict(q=Q, k=K, v=V, dropout_rate=0.3, dropout_key=jax.random.key(3))
    wanted = ls.attention(**arguments, mask=ls.Causal(2), engine="reference")
    np.testing.assert_allclose(supported(engine, **arguments, mask=ls.Causal(2)), wanted, rtol=1e-4, atol=1e-5)
    for q_tile, kv_tile in ((1, 1), (2, 3), (8, 4)):
        layout = ls.Causal(2).layout(5, 7, q_tile=q_tile, kv_tile=kv_tile)
        np.testing.assert_allclose(supported(engine, **arguments, mask=layout), wanted, rtol=1e-4, atol=1e-5)
    assert np.any(ls.attention(**arguments | dict(dropout_key=jax.random.key(4)), engine=engine) != wanted)


def test_grouped_queries_use_their_own_key_value_head(engine):
    out = supported(engine, q=Q, k=K, v=V)
    repeated = ls.attention(Q, *jax.device_put([np.repeat(x, 2, axis=2) for x in (K, V)]), engine=engine)
    np.testing.assert_allclose(out, repeated, rtol=1e-5, atol=1e-6)


def test_it_agrees_with_jax_nn(engine):
    out = supported(engine, q=Q, k=K, v=V, scale=0.3, mask=np.tri(5, 7, 1, dtype=bool))
    mask = jnp.asarray(np.tri(5, 7, 1, dtype=bool))[None, None]
    np.testing.assert_allclose(out, jax.nn.dot_product_attention(Q, K, V, mask=mask, scale=0.3), rtol=1e-5, atol=1e-6)


def test_positions_drive_the_rule(engine):
    q, kv_positions = Q[:, 3:4], np.array([[4, 5, 6, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
    mask = ls.Causal() & ls.Window(2, 0)
    out = supported(engine, q=q, k=K, v=V, mask=mask, q_positions=np.array([3]), kv_positions=kv_positions)
    ordered = [np.take_along_axis(np.asarray(x), np.argsort(kv_positions)[:, :, None, None], axis=1) for x in (K, V)]
    wanted = ls.attention(q, *jax.device_put(ordered), mask=mask, q_positions=np.array([3]), engine="reference")
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)


def test_a_traced_scale_is_differentiable(engine):
    def loss(scale):
        return jnp.sum(ls.attention(Q, K, V, scale=scale, engine=engine) ** 2)

    supported(engine, q=Q, k=K, v=V)
    slope = jax.grad(loss)(jnp.float32(0.3))
    rise = (loss(jnp.float32(0.301)) - loss(jnp.float32(0.299))) / 0.002
    np.testing.assert_allclose(slope, rise, rtol=1e-2)


def test_a_layout_planned_once_gives_what_the_mask_gives(engine):
    mask = ls.Window(2, 1) | ls.Global((0,))
    wanted = supported(engine, q=Q, k=K, v=V, mask=mask)
    for layout in (mask.layout(5, 7, q_tile=2, kv_tile=3), jax.jit(lambda: mask.layout(5, 7, q_tile=3, kv_tile=1))()):
        np.testing.assert_allclose(ls.attention(Q, K, V, mask=layout, engine=engine), wanted, rtol=1e-5, atol=1e-6)


def test_queries_keys_and_values_without_a_batch_axis_are_one_row(engine):
    """All else broadcasts as for B = 1, and gradients have the arguments' own shapes."""
    q, k, v = (x[0] for x in (Q, K, V))
    arguments = dict(
        mask=ls.Causal(1) & ls.Segments(np.zeros((1, 5), int), np.array([[0, 0, 0, 0, 0, 0, -1]])),
        bias=jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 5, 7)), jnp.float32),
        q_positions=np.array([0, 2, 1, 4, 3]),
        kv_positions=np.arange(7)[None],
    )
    (out, lse), (wanted, wanted_lse) = (
        supported(engine, q=a, k=b, v=c, return_lse=True, **arguments)
        for a, b, c in ((q, k, v), (q[None], k[None], v[None]))
    )
    assert out.shape == (5, 6, 4) and lse.shape == (5, 6)
    np.testing.assert_array_equal(out, wanted[0])
    np.testing.assert_array_equal(lse, wanted_lse[0])
    for got, x, many in zip(
        grads(engine, q, k, v, **arguments),
        (q, k, v),
        grads(engine, q[None], k[None], v[None], **arguments),
        strict=True,
    ):
        assert got.shape == x.shape
        np.testing.assert_allclose(got, many[0], rtol=1e-6, atol=1e-6)
    dense = np.ones((5, 7), bool)
    jitted = jax.jit(lambda q: ls.attention(q, k, v, mask=dense, scale=jnp.float32(0.3), engine=engine))
    wanted = ls.attention(Q, K, V, mask=dense, scale=0.3, engine=engine)[0]
    np.testing.assert_allclose(jitted(q), wanted, rtol=1e-5, atol=1e-6)
    assert ls.attention(np.asarray(q), np.asarray(k), np.asarray(v), engine=engine).shape == q.shape


def test_rows_without_a_batch_axis_can_be_mapped(engine):
    one = jax.vmap(lambda q, k, v, n: ls.attention(q, k, v, mask=ls.KvLengths(n), engine=engine))
    wanted = ls.attention(Q, K, V, mask=ls.KvLengths(np.array([3, 6])), engine=engine)
    np.testing.assert_allclose(one(Q, K, V, np.array([3, 6])), wanted, rtol=1e-5, atol=1e-6)


def test_a_call_without_a_batch_axis_is_explained(engine):
    shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (Q, K, V)]
    report = ls.explain(*shapes, mask=ls.Causal(), engine=engine)
    assert report == ls.explain(Q[:1], K[:1], V[:1], mask=ls.Causal(), engine=engine)
