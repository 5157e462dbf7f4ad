"""Numbers, positions and ids at the limits of what engines count with: refused, or the same in every engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.testing import Shape, make_qkv

ENGINES = ("cpu", "xla", "reference")
Q, K, V = make_qkv(Shape(B=2, T=7, S=7, N=2, K=1, H=4), jnp.float32)


def weights(mask, engine, **positions):
    """The output for values that are unit vectors: what each query takes of each key."""
    units = jnp.broadcast_to(jnp.eye(7)[None, :, None], (2, 7, 1, 7))
    q, k = (jnp.zeros((2, 7, n, 7)) for n in (2, 1))
    return ls.attention(q, k, units, mask=mask, engine=engine, **positions)


def seen(mask, engine, **positions):
    return weights(mask, engine, **positions) > 0


CLAMPED = {
    "chunk": (lambda n: ls.Chunk(n - 1), ls.Chunk(1)),
    "window": (lambda n: ls.Window(n - 3, n - 2) & ls.Causal(), ls.Window(0, 0)),
    "window, last int": (lambda n: ls.Window(n * np.int32(-(2**31)), 2), ls.Window(0, 2)),
    "dilation": (lambda n: ls.Window(2, 1, dilation=n - 1), ls.Window(2, 1)),
    "reach": (lambda n: ls.Window(n - 2, n, dilation=n + 1), ls.Window(0, 1, dilation=2)),
    "prefix": (lambda n: ls.Prefix(n - 4), ls.Empty()),
    "far": (lambda n: ls.Window(2**40, 0) & ls.Window(n + 2, 0), ls.Window(3, 0)),
    "far and causal": (lambda n: ls.Causal(2**40) & ls.Band(-(2**50), n) & ls.Causal(-n), ls.Causal(-1)),
}


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CLAMPED)
def test_a_traced_number_that_is_too_small_stands_for_the_least_legal_one(name, engine, shape):
    of, meaning = CLAMPED[name]
    got = jax.jit(lambda n: seen(of(n), engine))(jnp.ones(shape, np.int32))
    np.testing.assert_array_equal(got, seen(meaning, "reference"))
