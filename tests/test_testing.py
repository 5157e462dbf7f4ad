"""`longspan.testing` detects wrong results, also NaN, which a maximum may drop and NumPy treats as equal to NaN."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.testing import Shape, assert_matches_reference, make_qkv
from longspan.testing.parity import _assert_usable, _by_part, _cotangents, _values_and_gradients
from longspan.testing.truth import attention_in_float64

SHAPE = Shape(B=1, T=7, S=9, N=2, K=1, H=5)
Q, K, V = make_qkv(SHAPE, jnp.float32)


def spoiled(what, value):
    """`attention` with one number of its output or lse changed."""

    def run(*args, **kwargs):
        out, lse = ls.attention(*args, **kwargs)
        return (out.at[0, 3, 1, 2].add(value), lse) if what == "out" else (out, lse.at[0, 3, 1].add(value))

    return run


@pytest.mark.parametrize("what", ["out", "lse"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e-3])
def test_one_wrong_number_is_detected(what, value):
    with pytest.raises(
        AssertionError, match=r"reference: \w+: (NaN or infinite where the exact result is finite|off by)"
    ):
        assert_matches_reference("reference", Q, K, V, ls.Causal(), run=spoiled(what, value))


def test_a_reference_with_nan_is_an_error():
    with pytest.raises(AssertionError, match=r"the reference returns NaN\. Does a query attend to a NaN\?"):
        assert_matches_reference("xla", Q, K.at[0, 2].set(jnp.nan), V, ls.Causal())


def test_a_reference_that_overflows_is_an_error():
    with pytest.raises(AssertionError, match="the reference overflows in the tested dtype, but not in float64"):
        _assert_usable("dk", np.array([1.0, np.inf]), np.array([1.0, 7e4]))
    _assert_usable("lse", np.array([1.0, -np.inf]), np.array([1.0, -np.inf]))


DROPPED = dict(dropout_rate=0.3, dropout_key=jax.random.key(5))
DISTANT = dict(q_positions=np.arange(7)[::-1].copy(), kv_positions=np.arange(9) * 2)
NORMAL = np.random.default_rng(3).normal
FEATURES = {
    "plain": {},
    "scale and cap": dict(scale=0.7, soft_cap=2.5),
    "sinks": dict(sinks=NORMAL(size=4)),
    "biases by head and by query": dict(bias=(NORMAL(size=(1, 4, 1, 9)), NORMAL(size=(2, 1, 7, 1)))),
    "a bias with -inf": dict(bias=np.where(NORMAL(size=(7, 9)) < 0.8, NORMAL(size=(7, 9)), -np.inf)),
    "dropout and positions": DROPPED | DISTANT,
    "alibi": dict(bias=ls.alibi(np.array([0.1, 0.3, 0.5, 0.2]))) | DISTANT,
    "relative": dict(bias=(ls.relative_bias(NORMAL(size=(16, 4)), max_distance=19), NORMAL(size=(7, 9)))),
    "score": dict(bias=ls.ScoreBias(lambda b, h, q, k, table: table[h, (q + k + b) % 5], NORMAL(size=(4, 5)))),
    "all": dict(sinks=NORMAL(size=4), bias=NORMAL(size=(2, 4, 7, 9)), soft_cap=3.0) | DROPPED,
}


@pytest.mark.parametrize("feature", FEATURES)
def test_float64_in_numpy_equals_the_reference_in_float64(feature):
    """Values and gradients of each feature, with queries that attend to no key and NaN in keys that no query uses."""
    mask = ls.Causal(-1) & ls.Segments(np.array([[0, 0, 0, 1, 1, 1, -1]]), np.array([[0, 0, 1, 1, 1, 2, 2, 1, -1]]))
    rng = np.random.default_rng(0)
    operands = dict(q=rng.normal(size=(2, 7, 4, 5)), k=rng.normal(size=(2, 9, 2, 5)), v=rng.normal(size=(2, 9, 2, 3)))
    operands["k"][:, 8] = operands["v"][:, 8] = np.nan
    features = dict(FEATURES[feature])
    operands |= {name: features.pop(name) for name in ("bias", "sinks") if name in features}
    cotangents = _cotangents(operands["q"], operands["v"])
    truth = attention_in_float64(operands, mask, features, cotangents)
    got = {"out": truth.out, "lse": truth.lse, **_by_part(truth.gradients)}
    with jax.enable_x64(True):
        wide = jax.tree.map(jnp.asarray, operands)
        call = lambda floats, **arguments: ls.attention(**floats, **arguments)  # noqa: E731
        want = jax.jit(lambda wide: _values_and_gradients(call, "reference", wide, mask, features))(wide)
        assert all(x.dtype == np.float64 for x in want.values())
    assert got.keys() == want.keys()
    for part, exact in want.items():
        np.testing.assert_allclose(got[part], np.asarray(exact), rtol=1e-12, atol=1e-13, err_msg=part)


def test_float64_in_numpy_counts_a_tile_as_often_as_the_layout_lists_it():
    once = ls.Full().layout(4, 4, q_tile=2, kv_tile=2)
    starts, stops = np.array([[[[0, 0], [0, 1]]]], np.int32), np.array([[[[2, 1], [1, 2]]]], np.int32)
    twice = replace(once, starts=starts, stops=stops, repeats=True)  # queries 0 and 1 count keys 0 and 1 twice
    q, k = np.zeros((1, 4, 1, 1)), np.zeros((1, 4, 1, 1))
    v = np.array([6.0, 6.0, 3.0, 3.0]).reshape(1, 4, 1, 1)
    truth = attention_in_float64(dict(q=q, k=k, v=v), twice, {}, (np.zeros((1, 4, 1, 1)), np.zeros((1, 4, 1))))
    np.testing.assert_allclose(truth.out[0, :, 0, 0], [5, 5, 4.5, 4.5], rtol=1e-15)
    np.testing.assert_allclose(truth.lse[0, :, 0], np.log([6, 6, 4, 4]), rtol=1e-15)
