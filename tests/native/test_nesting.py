"""Mask programs that no mask produces, passed directly to the handler, raise an error and do not crash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspan.engines.cpu import library
from longspan.engines.cpu.program import FULL, PER_HEAD

needs_library = pytest.mark.skipif("library.missing() is not None", reason="no native library here")


def nested(depth: int) -> list[int]:
    """A program of nested PerHead, `depth` levels deep; the innermost part allows everything."""
    return [word for rest in range(depth, 0, -1) for word in (PER_HEAD, 1, 3 * rest - 2)] + [FULL]


def attend(words: list[int]):
    q = jnp.ones((1, 4, 1, 8))
    table = jnp.zeros((1, 1, 1, 1), jnp.int32)
    row = jax.ShapeDtypeStruct((1, 4, 1), jnp.float32)
    numbers = dict(scale=1.0, soft_cap=0.0, dropout_rate=0.0, dropout_threshold=0, q_tile=4, kv_tile=4)
    attributes = {name: np.float64(x) if isinstance(x, float) else np.int64(x) for name, x in numbers.items()}
    attributes |= dict(roles=library.static_ints([-1] * 9), program=library.static_ints(words))
    results = (jax.ShapeDtypeStruct(q.shape, q.dtype), row, row)
    out, *_ = library.call("longspan_forward", results, (q, q, q, table, table + 1), **attributes)
    return jax.block_until_ready(out)


@needs_library
def test_parts_may_nest_deeply():
    np.testing.assert_allclose(attend(nested(64)), 1, rtol=1e-6)


@needs_library
@pytest.mark.parametrize("depth", [65, 200_000])
def test_endless_nesting_is_refused(depth):
    with pytest.raises(jax.errors.JaxRuntimeError, match="PerHead is nested deeper than 64"):
        attend(nested(depth))
