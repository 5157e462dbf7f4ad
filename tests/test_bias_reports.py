"""Biases in `explain`, their reprs, and the errors for invalid biases."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.biases import Distances
from longspan.masks import rule
from longspan.testing import make_qkv
from tests.test_biases import SHAPE, K, Q, V, close, floats


def test_a_function_goes_to_xla_and_explain_says_why():
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)
    report = ls.explain(x, x, x, bias=ls.ScoreBias(lambda q, k: q - k))
    assert report.engine == "xla"
    assert re.search("arrays and functions of the distance.*only JAX can call", report.refused["cpu"])


def test_arrays_whose_sum_would_be_larger_than_they_are_go_to_xla():
    q, k, v = make_qkv(SHAPE, jnp.float32)
    pair = (jnp.asarray(floats(1, 1, 37, 1)), jnp.asarray(floats(1, 6, 1, 41)))
    report = ls.explain(q, k, v, bias=pair)
    assert report.engine == "xla"
    assert "would have the larger shape (1, 6, 37, 41)" in report.refused["cpu"]
    got = jax.grad(lambda bias: jnp.sin(ls.attention(q, k, v, bias=bias, engine="xla")).sum())(pair)
    want = jax.grad(lambda bias: jnp.sin(ls.attention(q, k, v, bias=bias, engine="reference")).sum())(pair)
    jax.tree.map(lambda a, b: close(a, b, 10), got, want)
    alike = (jnp.ones((1, 6, 1, 41)), jnp.asarray(floats(1, 1, 1, 41)))
    assert "bias" not in ls.explain(q, k, v, bias=alike).refused.get("cpu", "")
    close(ls.attention(q, k, v, bias=alike), ls.attention(q, k, v, bias=sum(alike), engine="reference"))


def test_explain_takes_the_shapes_of_a_biass_arrays():
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)
    slopes, table = jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((32, 2), jnp.float32)
    bias = (ls.alibi(slopes), ls.relative_bias(table), ls.ScoreBias(lambda q, k, s: s[0] * 0, slopes))
    more = ls.explain(x, x, x, bias=bias, engine="xla").array_bytes - ls.explain(x, x, x, engine="xla").array_bytes
    assert more == 4 * (2 + 64 + 2)


def test_no_terms_are_no_bias():
    np.testing.assert_array_equal(ls.attention(Q, K, V, bias=()), ls.attention(Q, K, V))


def test_a_bias_prints_and_compares_by_value():
    assert repr(ls.alibi(np.ones(4, np.float32))) == "Alibi(slopes=f32[4])"
    assert ls.alibi(np.ones(4)) == ls.alibi(np.ones(4)) != ls.alibi(np.zeros(4))
    named = ls.relative_bias(np.ones((32, 2), np.float32))
    assert repr(named) == "Relative(table=f32[32,2], bidirectional=True, max_distance=128)"


REFUSED = [
    (TypeError, "`slopes` must be a float array [N], one per query head, got list", lambda: ls.alibi([0.5])),
    (TypeError, "`slopes` must hold floats, got int32", lambda: ls.alibi(np.ones(4, np.int32))),
    (ValueError, "`slopes` must be [N], one per query head, got shape (4, 1)", lambda: ls.alibi(np.ones((4, 1)))),
    (ValueError, "`slopes` must be finite, got [nan  1.]", lambda: ls.alibi(np.array([np.nan, 1.0]))),
    (TypeError, "`table` must hold floats, got int32", lambda: ls.relative_bias(np.ones((32, 4), np.int32))),
    (ValueError, "`table` must be [buckets, N]", lambda: ls.relative_bias(np.ones(32))),
    (ValueError, "`table` contains NaN", lambda: ls.relative_bias(np.full((32, 4), np.nan))),
    (ValueError, "at least 4 buckets for two directions", lambda: ls.relative_bias(np.ones((3, 4)))),
    (ValueError, "at least 2 buckets for one direction", lambda: ls.relative_bias(np.ones((1, 4)), bidirectional=False)),  # noqa: E501
    (ValueError, "`max_distance` must be greater than 8", lambda: ls.relative_bias(np.ones((32, 4)), max_distance=8)),
    (ValueError, "`max_distance` must be a Python int", lambda: ls.relative_bias(np.ones((32, 4)), max_distance=1.5)),
    (TypeError, "`bidirectional` must be a Python bool", lambda: ls.relative_bias(np.ones((32, 4)), bidirectional=1)),
    (TypeError, "ScoreBias needs a function of (q, k) or (b, h, q, k), got int", lambda: ls.ScoreBias(3)),
    (TypeError, "ScoreBias must have 2 required positional parameters, `(q, k)`, or 4, `(b, h, q, k)`", lambda: ls.ScoreBias(lambda b, q, k: 0)),  # noqa: E501
    (TypeError, "<lambda> has 2 required positional parameters. With 1 array, the function of ScoreBias must have 3", lambda: ls.ScoreBias(lambda q, k: 0, np.ones(2))),  # noqa: E501
    (TypeError, "`*args` and keywords do not count", lambda: ls.ScoreBias(lambda *places: 0)),
    (TypeError, "ScoreBias: `arrays[1]` must be an array, got float", lambda: ls.ScoreBias(lambda q, k, a, b: 0, np.ones(2), 1.0)),  # noqa: E501
]  # fmt: skip
REFUSED_CALLS = [
    (ValueError, "`alibi` has 3 slopes, but the call has 4 query heads. Give 4.", lambda: ls.alibi(np.ones(3))),
    (ValueError, "`relative_bias` has 2 columns in its table, but the call has 4", lambda: ls.relative_bias(np.ones((32, 2)))),  # noqa: E501
    (TypeError, "gives bools, but a bias is added to the scores", lambda: ls.ScoreBias(lambda q, k: q > k)),
    (TypeError, "must give real numbers, got complex64", lambda: ls.ScoreBias(lambda q, k: q.astype(jnp.complex64))),
    (ValueError, "gives values of shape (1, 37, 37), which must broadcast", lambda: ls.ScoreBias(lambda q, k: (q - k)[0])),  # noqa: E501
    (ValueError, "gives values of shape (5, 1, 1, 1)", lambda: ls.ScoreBias(lambda q, k, a: a, np.ones((5, 1, 1, 1)))),
    (TypeError, "`bias[1]` must be an array or a Bias, got NoneType", lambda: (ls.alibi(np.ones(4)), None)),
    (ValueError, "`bias[0]` must be broadcastable to [B, N, T, S]", lambda: (jnp.ones((3, 3)), ls.alibi(np.ones(4)))),
    (TypeError, "`bias` must be an array, got function", lambda: lambda q, k: 0),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "make"), REFUSED, ids=[r[1][:40] for r in REFUSED])
def test_invalid_biases_are_errors(error, message, make):
    with pytest.raises(error, match=re.escape(message)):
        make()


@pytest.mark.parametrize(("error", "message", "make"), REFUSED_CALLS, ids=[r[1][:40] for r in REFUSED_CALLS])
@pytest.mark.parametrize("call", [ls.attention, ls.explain], ids=["attention", "explain"])
def test_a_bias_that_does_not_fit_the_call_is_an_error(call, error, message, make):
    with pytest.raises(error, match=re.escape(message)):
        call(Q, K, V, bias=make())


@pytest.mark.parametrize(
    ("distances", "got"),
    [
        (Distances(), "nothing"),
        (Distances(slopes=np.ones(3)), r"slopes \(3,\)"),
        (Distances(table=np.ones((4, 6))), r"table \(4, 6\)"),
        (Distances(np.ones(4), np.ones((1, 5))), r"slopes \(4,\), table \(1, 5\)"),
    ],
    ids=["nothing", "heads", "even", "one head"],
)
def test_distances_that_do_not_fit_are_errors(distances, got):
    @rule
    class Odd(ls.Bias):
        number: float = 1.0

        def by_distance(self):
            return distances

    with pytest.raises(
        ValueError, match=rf"by_distance\(\) returned {got}. It must return slopes \[N\].*N = 4 query heads"
    ):
        ls.attention(Q, K, V, bias=Odd())


def test_a_bias_without_values_is_an_error():
    @rule
    class Silent(ls.Bias):
        number: float = 1.0

    with pytest.raises(NotImplementedError, match=r"Silent must define `at\(q, kv, dtype\)` or `by_distance\(\)`"):
        ls.attention(Q, K, V, bias=Silent())
