"""Models with random parameters from NumPy. Flax would compile about thirty programs to initialise one model."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def made(kind: Any, config: Any, *, seed: int = 0, **options: Any) -> Any:
    """A new model kind(config, rngs=..., **options) with random parameters of the same standard deviation."""
    graph, shapes = _shapes(kind, config, tuple(options.items()))
    # A copy of the tree, because `merge` puts the state's own variables into the model.
    model, rng = nnx.merge(graph, jax.tree.map(lambda shape: shape, shapes)), np.random.default_rng(seed)
    state = nnx.state(model, nnx.Param)
    for path, variable in nnx.to_flat_state(state):
        values = _initial(path[-1], variable.shape, config.initializer_range, rng)
        variable.set_value(jnp.asarray(values.astype(variable.dtype), variable.dtype))
    nnx.update(model, state)
    return model


@functools.cache
def _shapes(kind: Any, config: Any, options: tuple) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0), **dict(options))))


def _initial(name: str, shape: tuple[int, ...], spread: float, rng: np.random.Generator) -> np.ndarray:
    if name in ("kernel", "embedding"):
        return rng.normal(0, spread, shape)
    assert name in ("bias", "scale", "sinks"), name
    return np.full(shape, 1.0 if name == "scale" else 0.0)
