"""Values with another head size than keys: the parity matrix has them; here is what surrounds it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.testing import Shape, assert_matches_reference, make_qkv
from tests.engines import every_engine

SHAPE = Shape(B=2, T=37, S=37, N=6, K=3, H=24, Hv=7)


@pytest.mark.check
@pytest.mark.parametrize("sizes", [(24, 7), (192, 128), (5, 256), (256, 1)])
@pytest.mark.parametrize("queries", [1, 37, 150])
def test_engines_match_the_reference(sizes, queries):
    H, Hv = sizes
    q, k, v = make_qkv(Shape(B=2, T=queries, S=150, N=4, K=2, H=H, Hv=Hv), jnp.float32)
    mask = ls.Causal(150 - queries) & ls.Window(90, 0)
    assert_matches_reference(["cpu", "xla"], q, k, v, mask, soft_cap=5.0)


@every_engine
def test_results_have_the_values_head_size(engine):
    q, k, v = make_qkv(SHAPE, jnp.float32)
    out, lse = ls.attention(q, k, v, mask=ls.Causal(), engine=engine, return_lse=True)
    assert out.shape == (2, 37, 6, 7) and lse.shape == (2, 37, 6)
    nothing = ls.attention(q[:, :0], k, v, engine=engine)
    assert nothing.shape == (2, 0, 6, 7)
    assert ls.attention(q, k[:, :0], v[:, :0], engine=engine).shape == (2, 37, 6, 7)


@every_engine
def test_vmap_scan_and_remat(engine):
    q, k, v = make_qkv(SHAPE, jnp.float32)
    attend = jax.checkpoint(lambda q, k, v: ls.attention(q, k, v, mask=ls.Window(3, 2), engine=engine))
    want = np.asarray(attend(q, k, v))
    each = jax.vmap(lambda q, k, v: attend(q[None], k[None], v[None])[0])(q, k, v)
    np.testing.assert_allclose(np.asarray(each), want, atol=1e-6)
    _, scanned = jax.lax.scan(lambda c, x: (c, attend(*(a[None] for a in x))[0]), 0, (q, k, v))
    np.testing.assert_allclose(np.asarray(scanned), want, atol=1e-6)
    dq, dk, dv = jax.grad(lambda *x: jnp.sum(attend(*x) ** 2), (0, 1, 2))(q, k, v)
    assert dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape


def test_merged_pieces_equal_the_whole():
    q, k, v = make_qkv(SHAPE, jnp.float32)
    parts = [ls.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 11), slice(11, None))]
    out, _ = ls.merge(*zip(*parts, strict=True))
    np.testing.assert_allclose(np.asarray(out), np.asarray(ls.attention(q, k, v)), atol=1e-6)


def test_explain_counts_both_products():
    q, k, v = make_qkv(Shape(B=1, T=64, S=64, N=2, K=1, H=24, Hv=8), jnp.float32)
    told = ls.explain(q, k, v, mask=ls.Full())
    assert told.useful_flops == 2 * (24 + 8) * 2 * 64 * 64
    assert told.array_bytes == 4 * (64 * 2 * (24 + 8) + 64 * (24 + 8)) + 4 * 64 * 2


def test_sizes_that_do_not_fit():
    q, k, v = make_qkv(SHAPE, jnp.float32)
    with pytest.raises(ValueError, match="`k` and `v` must have the same batch, length and heads"):
        ls.attention(q, k, v[:, :-1])
    wide = jnp.ones((2, 37, 3, 257))
    with pytest.raises(NotImplementedError, match="a head dimension of at most 256, not 257"):
        ls.attention(q, k, wide, engine="cpu")
    assert ls.attention(q, k, wide).shape == (2, 37, 6, 257)
