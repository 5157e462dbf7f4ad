"""Run by hand or by cibuildwheel with the installed wheel: the native engine is installed and correct."""

import jax
import jax.numpy as jnp
import numpy as np

import longspan as ls


def main():
    q, k, v = (jax.random.normal(key, (2, 67, 3, 16)) for key in jax.random.split(jax.random.key(0), 3))
    documents = jnp.repeat(jnp.arange(3), jnp.array([20, 30, 17]), total_repeat_length=67)[None]
    mask = ls.Causal() & (ls.Window(7, 0) | ls.Prefix(2)) & ls.Segments(documents)
    got, want = (ls.attention(q, k, v, mask=mask, engine=engine) for engine in ("cpu", "reference"))
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=1e-5)
    print(f"longspan {ls.__version__} of {ls.__file__}: the cpu engine agrees with the reference.")


if __name__ == "__main__":
    main()
