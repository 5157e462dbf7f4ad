"""`longspan.testing` notices what is wrong, NaN included: a maximum may drop it, and NaN equals NaN to NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.testing import Shape, _assert_usable, assert_matches_reference, make_qkv

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
def test_one_wrong_number_is_noticed(what, value):
    with pytest.raises(AssertionError, match=r"reference: \w+: (not finite where the reference is|off by)"):
        assert_matches_reference("reference", Q, K, V, ls.Causal(), run=spoiled(what, value))


def test_a_reference_that_gives_nan_judges_nothing():
    with pytest.raises(AssertionError, match="the reference itself gives NaN"):
        assert_matches_reference("xla", Q, K.at[0, 2].set(jnp.nan), V, ls.Causal())


def test_a_reference_that_overflows_judges_nothing():
    with pytest.raises(AssertionError, match="the reference overflows in the dtype under test, not in float64"):
        _assert_usable("dk", np.array([1.0, np.inf]), np.array([1.0, 7e4]))
    _assert_usable("lse", np.array([1.0, -np.inf]), np.array([1.0, -np.inf]))
