"""Edge cases on every engine: empty inputs, numbers of unusual types, rules by row and head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.masks import Mask, rule
from longspan.testing import Shape, make_qkv
from tests.engines import every_engine, every_sparse_engine

SHAPE = Shape(B=2, T=9, S=9, N=4, K=2, H=5)
IDS = np.where(np.arange(9) < np.array([[4], [9]]), 0, -1)


@rule
class ByRow(Mask):
    """Keys that a table of flags [B, S] allows. Like many users' rules it has no `extents`."""

    flags: object

    def allowed(self, q, kv):
        return (q.index >= 0) & kv.take(self.flags)


@rule
class ByHead(Mask):
    """Query i of head n sees the first i + n + 1 keys."""

    def allowed(self, q, kv):
        return kv.index <= q.side.head + q.index


@pytest.mark.parametrize("mask", [ByRow(np.random.default_rng(0).random((2, 9)) < 0.5), ByHead()], ids=["row", "head"])
@every_sparse_engine
def test_a_users_rule_by_row_or_head(engine, mask):
    q, k, v = make_qkv(SHAPE, jnp.float32)
    got, want = (ls.attention(q, k, v, mask=mask, engine=name) for name in (engine, "reference"))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@every_engine
def test_heads_computed_side_by_side_keep_their_own_rules(engine):
    q, k, v = make_qkv(Shape(2, 7, 31, 8, 4, 5), jnp.float32)

    def gradients(name):
        loss = lambda *x: jnp.sum(ls.attention(*x, mask=ByHead(), engine=name) ** 2)  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(q, k, v)

    for got, want in zip(gradients(engine), gradients("reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@every_engine
def test_a_loss_of_lse_beside_rows_without_keys_has_no_nan(engine):
    q, k, v = make_qkv(SHAPE, jnp.float32)

    def loss(q, k, v, sinks):
        lse = ls.attention(q, k, v, mask=ls.Segments(IDS), sinks=sinks, engine=engine, return_lse=True)[1]
        return jnp.sum(jnp.where(IDS[..., None] >= 0, lse**2, 0))

    for sinks in (None, jax.device_put(np.full(4, -np.inf, np.float32))):
        gradients = jax.grad(loss, (0, 1, 2) if sinks is None else (0, 1, 2, 3))(q, k, v, sinks)
        assert all(np.isfinite(gradient).all() for gradient in jax.tree.leaves(gradients))


MANY = np.iinfo(np.int64).max
SAME = {
    "small unsigned windows": (ls.Window(np.array([2, 3], np.uint8), 0), ls.Window(np.array([2, 3]), 0)),
    "merged with a band": (ls.Causal() & ls.Window(np.array([2, 3], np.uint8), 0), ls.Window(np.array([2, 3]), 0)),
    "lengths beyond 32 bits": (ls.KvLengths(np.array([MANY, 4])), ls.KvLengths(np.array([9, 4]))),
    "query lengths beyond 32 bits": (ls.QLengths(np.array([MANY, 4])), ls.QLengths(np.array([9, 4]))),
    "unsigned lengths": (ls.KvLengths(np.array([2**32 - 1, 4], np.uint32)), ls.KvLengths(np.array([9, 4]))),
    "far and dilated": (ls.Window(10**9, 0, dilation=np.array(4)), ls.Window(10**9, 0, dilation=4)),
    "ids of 8 bits": (ls.Segments(IDS.astype(np.int8)), ls.Segments(IDS)),
}


@every_engine
@pytest.mark.parametrize("name", SAME)
def test_numbers_of_any_width_mean_the_same(engine, name):
    q, k, v = make_qkv(SHAPE, jnp.float32)
    got, want = (
        ls.attention(q, k, v, mask=mask, engine=e) for mask, e in zip(SAME[name], (engine, "reference"), strict=True)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_ids_beyond_32_bits_are_errors():
    with pytest.raises(ValueError, match=r"Segments\.q_ids must fit into 32 bits.*Renumber them"):
        ls.Segments(np.array([[2**31 + 5, 7]]))
    with pytest.raises(ValueError, match="must fit into 32 bits"):
        ls.TokenTypes(np.array([[2**32 - 1, 7]], np.uint32))


EMPTY = {
    "segments": lambda B, T: ls.Segments(np.zeros((B, T), np.int32)),
    "flags": lambda B, T: ls.Global(q_flags=np.zeros((B, T), bool)),
    "types": lambda B, T: ls.TokenTypes(np.zeros((B, T), np.int32)),
    "lengths": lambda B, T: ls.KvLengths(np.zeros(B, np.int32)),
    "query lengths": lambda B, T: ls.QLengths(np.ones(B, np.int32)),
    "between": lambda B, T: ls.Between(np.zeros((B, T), int), np.ones(T, int)),
    "block causal": lambda B, T: ls.BlockCausal(3),
    "dense at": lambda B, T: ls.Dense(np.ones((3, 3), bool), 1, np.ones(B, int)),
    "blocks": lambda B, T: ls.Blocks(np.zeros((1, -(-T // 4), 1), np.int32), 4),
    "causal": lambda B, T: ls.Causal(),
}


@every_engine
@pytest.mark.parametrize("mask", EMPTY)
@pytest.mark.parametrize("shape", [Shape(0, 4, 4, 2, 1, 3), Shape(2, 0, 0, 2, 1, 3)], ids=str)
def test_empty_inputs_give_empty_outputs(engine, mask, shape):
    q, k, v = make_qkv(shape, jnp.float32)
    rule = EMPTY[mask](shape.B, shape.T)
    out, lse = ls.attention(q, k, v, mask=rule, engine=engine, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    report = ls.explain(q, k, v, mask=rule, engine=engine)
    assert report.tiles_total == report.useful_flops == 0


@every_engine
def test_positions_have_as_many_rows_as_the_batch(engine):
    q, k, v = make_qkv(SHAPE._replace(B=1), jnp.float32)
    with pytest.raises(ValueError, match="q_positions has 3 batch rows, but the call has 1"):
        ls.attention(q, k, v, q_positions=np.zeros((3, 9), np.int32), engine=engine)


@every_sparse_engine
def test_the_gradient_of_a_traced_scale_ignores_queries_that_see_nothing(engine):
    q, k, v = make_qkv(SHAPE, jnp.float32)

    def loss(scale, q, engine):
        return jnp.sum(ls.attention(q, k, v, mask=ls.Segments(IDS), scale=scale, engine=engine) ** 2)

    gradient, with_nan = jax.jit(jax.grad(loss), static_argnums=2), np.array(q)
    with_nan[0, 5] = np.nan
    got = gradient(np.float32(0.3), with_nan, engine)
    np.testing.assert_allclose(got, gradient(np.float32(0.3), q, "reference"), rtol=1e-4)


def test_explain_inside_jit_counts_static_masks():
    q, k, v = make_qkv(SHAPE, jnp.float32)
    for mask in (ls.Segments(jnp.asarray(IDS)), ls.Custom(lambda q, k: q >= k), ls.Dense(jnp.ones((9, 9), bool))):
        reports = []

        @jax.jit
        def call(q, mask=mask, reports=reports):
            reports.append(ls.explain(q, k, v, mask=mask, engine="xla"))
            return q

        call(q)
        assert reports[0].useful_flops == ls.explain(q, k, v, mask=mask, engine="xla").useful_flops > 0


def test_a_bias_must_be_an_array():
    q, k, v = make_qkv(SHAPE, jnp.float32)
    with pytest.raises(TypeError, match="`bias` must be an array, got list"):
        ls.attention(q, k, v, bias=[[0.0]])


LOW_SINKS = [-1e20, -1e30, -3e38, -np.inf]


@every_engine
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("sink", LOW_SINKS)
def test_a_row_without_keys_has_the_sinks_logit_however_low(engine, sink, with_bias):
    q, k, v = make_qkv(SHAPE, jnp.float32)
    sinks = jax.device_put(np.array([sink, 0.5, sink, -1.0], np.float32))
    bias = jax.device_put(np.zeros((9, 9), np.float32)) if with_bias else None

    def gradients(name):
        def loss(q, k, v, sinks):
            x = dict(mask=ls.Band(None, -3), bias=bias, sinks=sinks, engine=name, return_lse=True)
            out, lse = ls.attention(q, k, v, **x)
            return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), jnp.tanh(lse), 0)), (out, lse)

        return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, sinks)

    (got, (out, lse)), (want, _) = gradients(engine), gradients("reference")
    np.testing.assert_array_equal(np.asarray(lse)[:, :3], np.broadcast_to(sinks, (2, 3, 4)))
    assert not np.asarray(out)[:, :3].any()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@every_engine
@pytest.mark.parametrize("sink", [np.inf, np.nan])
def test_a_sink_that_is_no_number_leaves_rows_without_keys_at_zero(engine, sink):
    q, k, v = make_qkv(SHAPE, jnp.float32)
    sinks = jnp.asarray([sink, 0.5, sink, -1.0], jnp.float32)

    def loss(q, k, v, sinks, mask):
        out, lse = ls.attention(q, k, v, mask=mask, sinks=sinks, engine=engine, return_lse=True)
        return jnp.sum(out**2), (out, lse)

    gradients = jax.grad(loss, (0, 1, 2, 3), has_aux=True)
    (dq, *_), (out, lse) = gradients(q, k, v, sinks, ls.Band(None, -3))
    assert not np.asarray(out[:, :3]).any() and not np.asarray(dq[:, :3]).any()
    np.testing.assert_array_equal(lse[:, :3], np.broadcast_to(sinks, (2, 3, 4)))
    assert np.isfinite(np.asarray(out[:, :, 1::2])).all()
    _, (alone, _) = loss(q, k, v, sinks, ls.Band(None, -3))  # without a gradient, few queries take the decoding path
    np.testing.assert_allclose(alone, out, atol=1e-6)
    for gradient in gradients(q, k, v, sinks, ls.Empty())[0]:
        assert not np.asarray(gradient).any()
