"""`merge`: results over disjoint sets of keys become the result over their union, for every split."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import longspan as ls
from longspan.combine import Result, combine
from longspan.testing import Shape, assert_matches_reference, make_qkv

pytestmark = pytest.mark.quick

SHAPE = Shape(B=2, T=5, S=13, N=6, K=3, H=7)
MASK = ls.Causal(4) & ls.Window(6, 9)


def parts_of(q, k, v, slots, **features):
    """(outs, lses) of attention over the keys in some lists of slots."""
    results = [
        ls.attention(
            q,
            k[:, s],
            v[:, s],
            mask=MASK,
            kv_positions=np.asarray(s, np.int32),
            return_lse=True,
            **features,
        )
        for s in slots
    ]
    return tuple(zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["f32", "bf16", "f16"])
def test_any_split_of_the_keys_merges_to_the_whole_values_lse_and_gradients(dtype):
    q, k, v = make_qkv(SHAPE, dtype)
    sinks = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE.N).astype(dtype), dtype)
    slots = [[11, 2, 3], [], [0, 1, 4, 12, 5], [6, 7, 8, 9, 10]]

    def merged(q, k, v, *, mask, engine, return_lse, sinks):
        return ls.merge(*parts_of(q, k, v, slots, engine=engine), sinks=sinks)

    if dtype == jnp.float32:
        assert_matches_reference("reference", q, k, v, MASK, run=merged, sinks=sinks)
        return
    # Each part's output is rounded to 16 bits before it is merged.
    whole = ls.attention(q, k, v, mask=MASK, sinks=sinks, return_lse=True)
    run = jax.jit(partial(merged, mask=MASK, engine="reference", return_lse=True))
    got = run(q, k, v, sinks=sinks)
    assert got[0].dtype == dtype and got[1].dtype == jnp.float32
    unit = float(jnp.finfo(dtype).eps) * float(np.abs(np.asarray(v, np.float32)).max())
    for a, b, atol in zip(got, whole, (2 * unit, 1e-5), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0, atol=atol)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 5))
def test_splits_into_any_number_of_parts_some_of_them_empty(seed, count):
    rng = np.random.default_rng(seed)
    q, k, v = (np.asarray(x, np.float64) for x in make_qkv(Shape(1, 3, 8, 2, 1, 4), jnp.float32, seed % 97))
    owner, seen = rng.integers(0, count, 8), rng.random((3, 8)) < 0.5
    scores = np.einsum("btnh,bsh->btns", q, k[:, :, 0])

    def attend(keys):
        powers = np.where(seen & keys, np.exp(scores.transpose(0, 2, 1, 3)), 0).transpose(0, 2, 1, 3)
        total = powers.sum(-1)
        out = np.einsum("btns,bsh->btnh", powers, v[:, :, 0]) / np.where(total, total, 1)[..., None]
        with np.errstate(divide="ignore"):
            return out.astype(np.float32), np.log(total).astype(np.float32)

    outs, lses = zip(*(attend(owner == part) for part in range(count)), strict=True)
    out, lse = ls.merge(outs, lses)
    want, want_lse = attend(np.full(8, True))
    np.testing.assert_allclose(np.asarray(out), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=1e-5, atol=1e-5)


def test_a_query_without_keys_gives_zero_and_no_nan_in_any_gradient():
    q, k, v = make_qkv(Shape(1, 3, 4, 2, 1, 4), jnp.float32)

    def loss(floats, sinks):
        parts = [
            ls.attention(q, k, v, mask=ls.Empty() if empty else ls.Causal(-1), return_lse=True, engine="xla")
            for q, k, v in [floats]
            for empty in (True, False)
        ]
        out, lse = ls.merge(*zip(*parts, strict=True), sinks=sinks)
        return out.sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    for sinks in (None, np.array([0.5, -1.0], np.float32)):
        grads, (out, lse) = jax.jit(jax.grad(loss, has_aux=True))((q, k, v), sinks)
        assert not np.asarray(out)[:, 0].any()
        np.testing.assert_array_equal(np.asarray(lse)[0, 0], [-np.inf] * 2 if sinks is None else np.asarray(sinks))
        assert all(np.isfinite(np.asarray(g)).all() for g in grads)


def test_nan_in_a_part_without_keys_changes_nothing():
    out, lse = np.ones((1, 2, 1, 3), np.float32), np.zeros((1, 2, 1), np.float32)
    nothing = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
    got, level = ls.merge((nothing[0], out), (nothing[1], lse))
    np.testing.assert_array_equal(np.asarray(got), out)
    np.testing.assert_array_equal(np.asarray(level), lse)


def test_nan_in_a_part_with_keys_reaches_the_result():
    q, k, v = make_qkv(Shape(1, 3, 8, 2, 1, 4), jnp.float32)
    k = k.at[:, 2].set(jnp.nan)
    parts = [ls.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 5), slice(5, 8))]
    out, lse = ls.merge(*zip(*parts, strict=True))
    assert np.isnan(np.asarray(out)).all() and np.isnan(np.asarray(lse)).all()


def test_levels_far_apart_and_far_from_zero_do_not_overflow():
    out = np.ones((1, 1, 1, 2), np.float32)
    for low, high in ((-3e38, 3e38), (-1e9, -1e9 + 64), (1e4, 1.0)):
        got, lse = ls.merge(
            (out * 2, out * 4), (np.full((1, 1, 1), low, np.float32), np.full((1, 1, 1), high, np.float32))
        )
        assert np.isfinite(np.asarray(got)).all() and np.isfinite(np.asarray(lse)).all()
        np.testing.assert_allclose(
            np.asarray(lse), np.logaddexp(np.float64(low), np.float64(np.float32(high))), rtol=1e-6
        )


@pytest.mark.parametrize("sink", [np.inf, np.nan, -np.inf])
def test_a_query_without_keys_gives_zero_for_every_sink(sink):
    empty = Result(jnp.full((1, 2, 1, 3), jnp.nan), jnp.full((1, 2, 1), -jnp.inf), jnp.zeros((1, 2, 1)))
    found = combine([empty, Result(None, jnp.full((1, 2, 1), sink, jnp.float32))])
    assert not np.asarray(found.out).any() and not np.asarray(found.lse_residual).any()
    np.testing.assert_array_equal(found.lse, np.full((1, 2, 1), sink, np.float32))


def test_the_lse_residual_keeps_the_logarithm_that_a_low_lse_loses():
    """With scores of -1e9, a float32 lse loses the logarithm of the number of keys."""
    parts = [Result(jnp.full((1, 1, 1, 2), x), jnp.full((1, 1, 1), -1e9), jnp.log(jnp.full((1, 1, 1), n)))
             for x, n in ((1.0, 3.0), (5.0, 1.0))]  # fmt: skip
    found = combine(parts)
    np.testing.assert_allclose(found.out, np.full((1, 1, 1, 2), 2.0), rtol=1e-6)
    np.testing.assert_allclose(found.lse_residual, np.log(np.full((1, 1, 1), 4.0)), rtol=1e-6)


@pytest.mark.parametrize(
    ("error", "message", "outs", "lses", "sinks"),
    [
        (ValueError, "as many `outs` as `lses`", [], [], None),
        (ValueError, "as many `outs` as `lses`, at least one, got 1 and 2", [(1, 2, 3, 4)], [(1, 2, 3)] * 2, None),
        (
            ValueError,
            r"`outs` must all have one shape \[B, T, N, H\]",
            [(1, 2, 3, 4), (1, 2, 3, 5)],
            [(1, 2, 3)] * 2,
            None,
        ),
        (ValueError, r"`lses` must all have one shape \[B, T, N\] = \[1, 2, 3\]", [(1, 2, 3, 4)], [(1, 3, 2)], None),
        (ValueError, r"one float logit per query head, shape \[3\]", [(1, 2, 3, 4)], [(1, 2, 3)], (2,)),
    ],
)
def test_bad_parts_are_refused(unchecked, error, message, outs, lses, sinks):
    with pytest.raises(error, match=message):
        ls.merge(
            [np.zeros(shape, np.float32) for shape in outs],
            [np.zeros(shape, np.float32) for shape in lses],
            sinks=None if sinks is None else np.zeros(sinks, np.float32),
        )
