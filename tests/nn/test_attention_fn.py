"""`attention_fn` plugs Longspan into Flax's own attention modules."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import longspan as ls
from longspan.masks import rule
from longspan.nn import linen
from longspan.nn import nnx as in_nnx
from tests.users_masks import Near

B, T, D, N = 2, 9, 12, 3
X = jax.device_put(np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32))
MASK = ls.Causal() & ls.Window(3, 0)
DENSE = MASK.dense(T, T)


@functools.cache
def linen_params():
    return jax.jit(nn.MultiHeadDotProductAttention(N).init)(jax.random.key(1), X)


def of_linen(**options):
    """An apply function of Flax's linen module with fixed parameters, taking an `attention_fn` or not."""
    params = linen_params()

    def run(fn=None, x=X, **call):
        own = {} if fn is None else dict(attention_fn=fn)
        return nn.MultiHeadDotProductAttention(N, **own, **options).apply(params, x, **call)

    return run


def of_nnx(**options):
    def run(fn=None, x=X, **call):
        own = {} if fn is None else dict(attention_fn=fn)
        sizes = dict(num_heads=N, in_features=D, decode=False)
        return nnx.MultiHeadAttention(**sizes, **own, **options, rngs=nnx.Rngs(0))(x, **call)

    return run


KINDS = pytest.mark.parametrize("of", [of_linen, of_nnx], ids=["linen", "nnx"])


def test_both_modules_offer_the_same_function():
    assert linen.attention_fn is in_nnx.attention_fn


@KINDS
def test_a_longspan_mask_equals_flax_with_the_dense_mask(of):
    run = of()
    np.testing.assert_allclose(run(linen.attention_fn(MASK)), run(mask=DENSE), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "flax_bias", [None, np.linspace(-1, 1, T, dtype=np.float32).reshape(1, 1, 1, T)], ids=["alone", "with flax's"]
)
def test_a_bias_of_positions_is_added(flax_bias):
    q, k, v = (times * X.reshape(B, T, N, 4) for times in (1.0, 2.0, 3.0))
    slopes = np.array([0.5, 0.25, 0.1], np.float32)
    places = np.arange(T, dtype=np.float32)
    dense = -slopes.reshape(1, N, 1, 1) * abs(places.reshape(1, 1, T, 1) - places.reshape(1, 1, 1, T))
    got = linen.attention_fn(MASK, bias=ls.alibi(slopes))(q, k, v, bias=flax_bias)
    wanted = nn.dot_product_attention(q, k, v, bias=dense if flax_bias is None else dense + flax_bias, mask=DENSE)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@KINDS
@pytest.mark.parametrize("dtype", [bool, jnp.float32, jnp.int32])
def test_flax_s_own_mask_holds_too(of, dtype):
    run, keep = of(), np.arange(T).reshape(1, 1, 1, T) < np.array([9, 5]).reshape(B, 1, 1, 1)  # keys, not queries
    keep = np.broadcast_to(keep, (B, 1, T, T))
    both = keep & np.asarray(DENSE)
    wanted, seen = np.asarray(run(mask=jnp.asarray(both, bool))), both.any(-1)[:, 0]
    got = np.asarray(run(linen.attention_fn(MASK), mask=jnp.asarray(keep.astype(dtype), dtype)))
    np.testing.assert_allclose(got[seen], wanted[seen], rtol=1e-5, atol=1e-6)


@KINDS
def test_without_a_mask_it_is_flax_s_attention(of):
    run = of()
    np.testing.assert_allclose(run(linen.attention_fn()), run(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(linen.attention_fn(), mask=DENSE), run(mask=DENSE), rtol=1e-5, atol=1e-6)


def test_is_causal_of_nnx_holds():
    run = of_nnx()
    got = run(linen.attention_fn(ls.Window(3, 5)), is_causal=True)
    np.testing.assert_allclose(got, run(mask=DENSE), rtol=1e-5, atol=1e-6)


@KINDS
def test_a_maskinfo_brings_its_segments_and_positions(of):
    ids = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 1]], np.int32)
    info = ls.MaskInfo.from_segments(np.repeat(ids, B, axis=0)).apply_causal()
    run, dense = of(), (ls.Segments(ids) & ls.Causal()).dense(T, T)
    np.testing.assert_allclose(run(linen.attention_fn(info)), run(mask=dense), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(linen.attention_fn(info), mask=DENSE), run(mask=dense & DENSE), rtol=1e-5, atol=1e-6)


@KINDS
def test_several_batch_axes_and_none_work(of):
    run, fn = of(), linen.attention_fn(MASK)
    wanted = run(fn)
    np.testing.assert_allclose(run(fn, x=X[:, None])[:, 0], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(fn, x=X[0]), wanted[0], rtol=1e-5, atol=1e-6)
    keep = jnp.broadcast_to(DENSE, (B, 1, T, T))
    np.testing.assert_allclose(
        run(linen.attention_fn(), x=X[:, None], mask=keep[:, None])[:, 0], wanted, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(run(linen.attention_fn(), x=X[0], mask=keep[0]), wanted[0], rtol=1e-5, atol=1e-6)


def test_grouped_heads_of_nnx_work():
    run, fn = of_nnx(num_kv_heads=1), linen.attention_fn(MASK)
    np.testing.assert_allclose(run(fn), run(mask=DENSE), rtol=1e-5, atol=1e-6)


def test_dropout_follows_the_module():
    keyed = dict(rngs={"dropout": jax.random.key(0)})
    run, fn = of_linen(dropout_rate=0.5), linen.attention_fn(MASK)
    dropped = run(fn, deterministic=False, **keyed)
    np.testing.assert_array_equal(dropped, run(fn, deterministic=False, **keyed))
    np.testing.assert_array_equal(run(fn, deterministic=True), of_linen()(fn))
    assert np.abs(dropped - run(fn, deterministic=True)).max() > 0.01
    run = of_nnx(dropout_rate=0.5)
    assert np.abs(run(fn, deterministic=False) - run(fn, deterministic=True)).max() > 0.01


@KINDS
def test_dtype_of_the_module_is_kept(of):
    assert of(dtype=jnp.bfloat16)(linen.attention_fn(MASK)).dtype == jnp.bfloat16


@KINDS
def test_gradients_equal_flax_s(of):
    run = of()
    mine, theirs = (
        jax.jit(jax.grad(lambda x, c=c: (run(x=x, **c) ** 2).sum()))(X)
        for c in (dict(fn=linen.attention_fn(MASK)), dict(mask=DENSE))
    )
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@KINDS
def test_what_longspan_cannot_do_is_refused(of):
    with pytest.raises(NotImplementedError, match="`sow_weights` needs the attention weights"):
        of()(linen.attention_fn(MASK), sow_weights=True)
    with pytest.raises(NotImplementedError, match="precision='high' for float32 on a cpu is not supported: Longspan's"):
        of(precision="high")(linen.attention_fn(MASK))
    with pytest.raises(
        NotImplementedError, match="precision='highest' for bfloat16 on a cpu is not supported: Longspan's"
    ):
        of(precision="highest", dtype=jnp.bfloat16)(linen.attention_fn(MASK))
    with pytest.raises(TypeError, match="`mask` must be a Mask or a MaskInfo, got"):
        linen.attention_fn(DENSE)


@KINDS
@pytest.mark.parametrize(
    "precision", [None, "default", "highest", "float32", jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST], ids=str
)
def test_the_precision_that_float32_has_anyway_may_be_named(of, precision):
    run = of(precision=precision)
    np.testing.assert_allclose(run(linen.attention_fn(MASK)), run(mask=DENSE), rtol=1e-5, atol=1e-6)


def test_flax_s_decoding_is_refused_where_positions_would_be_wrong():
    layer = nn.MultiHeadDotProductAttention(N, decode=True, attention_fn=linen.attention_fn(ls.Causal()))
    plain = nn.MultiHeadDotProductAttention(N, decode=True, attention_fn=linen.attention_fn())
    flax_s = nn.MultiHeadDotProductAttention(N, decode=True)
    variables = jax.jit(flax_s.init)(jax.random.key(0), X)
    with pytest.raises(NotImplementedError, match=r"query's position, so Causal\(\) would use position 0"):
        layer.apply(variables, X[:, :1], mutable=["cache"])
    got, wanted = (m.apply(variables, X[:, :1], mutable=["cache"])[0] for m in (plain, flax_s))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "mask",
    [
        ls.Global((0,)),
        ls.Global((0,), columns=False),
        ls.KvLengths(3) & ~ls.Chunk(2),
        Near(3),
        ls.PerHead((Near(3),) * N),
    ],
    ids=repr,
)
def test_flax_s_decoding_is_refused_for_every_rule_that_may_read_the_query_s_position(mask):
    one, many = X[:, :1].reshape(B, 1, N, 4), X.reshape(B, T, N, 4)
    with pytest.raises(NotImplementedError, match=r"a call with Flax's `decode=True`. .* would use position 0"):
        linen.attention_fn(mask)(one, many, many)


@pytest.mark.parametrize(
    "mask",
    [ls.Prefix(3), ls.Global((0,), rows=False), ls.KvLengths(4) & ls.Prefix(6), ls.Full()],
    ids=repr,
)
def test_flax_s_decoding_works_where_the_query_s_position_does_not_matter(mask):
    one, many = X[:, :1].reshape(B, 1, N, 4), X.reshape(B, T, N, 4)
    wanted = ls.attention(one, many, many, mask=mask.dense(1, T), engine="reference")
    np.testing.assert_allclose(linen.attention_fn(mask)(one, many, many), wanted, rtol=1e-5, atol=1e-6)


@rule
class BySlot(ls.Mask):
    """A user's causal rule that declares that it compares slots."""

    reads = frozenset({"slot"})

    def allowed(self, q, kv):
        return kv.index <= q.index


@pytest.mark.parametrize(
    ("mask", "is_causal"),
    [(BySlot(), False), (None, True), (ls.MaskInfo.from_mask(ls.Causal(), 1, 1, 8), False)],
    ids=["a rule by slot", "is_causal", "a MaskInfo without positions"],
)
def test_one_query_of_a_cache_is_never_taken_for_the_first(mask, is_causal):
    q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 8, 2, 4))
    with pytest.raises(NotImplementedError, match=r"look like a call with Flax's `decode=True`.*`q_positions`"):
        linen.attention_fn(mask)(q, k, k, is_causal=is_causal)


def test_a_mask_info_with_positions_says_where_its_query_stands():
    q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 8, 2, 4))
    info = ls.MaskInfo.from_mask(ls.Causal(), 1, 1, 8, q_positions=np.array([[5]]))
    assert linen.attention_fn(info)(q, k, k).shape == q.shape
