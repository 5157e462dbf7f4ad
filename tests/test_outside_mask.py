"""The xla engine skips tiles of a mask from outside the package, written as in CONTRIBUTING."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import longspan as ls

PAGE = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text("utf-8")


def diagonal():
    """The class of CONTRIBUTING's first block."""
    block = re.search(r"^```python\n(.*?class Diagonal.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    names: dict = {}
    exec(block[1], names)
    return names["Diagonal"]


def test_only_tiles_on_the_diagonal_are_evaluated():
    looked = []

    class Counted(diagonal()):
        """The same rule, with a callback whenever its pairs are evaluated in the running program."""

        classify = diagonal().classify
        kv_spans, q_spans, reads = diagonal().kv_spans, diagonal().q_spans, diagonal().reads

        def allowed(self, q, kv):
            jax.debug.callback(lambda: looked.append(1))
            return super().allowed(q, kv)

    counted = ls.masks.rule(Counted)(2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2048, 1, 4)), jnp.float32)
    out = jax.jit(lambda x: ls.attention(x, x, x, mask=counted, engine="xla"))(x)
    jax.effects_barrier()
    # 16 rows of tiles, each with one or two neighbours visited together: not 16 x 16 tiles, nor 16 x 4 runs.
    assert 16 <= len(looked) <= 32, len(looked)
    want = np.zeros_like(x)
    want[:, :-2] = np.asarray(x)[:, 2:]
    np.testing.assert_allclose(np.asarray(out), want, rtol=1e-6)
