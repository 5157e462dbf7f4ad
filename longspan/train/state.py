"""The state of a run: made from a model, as named arrays for checkpoints, and back."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from longspan.train.paths import names_of
from longspan.train.placement import place_array, state_shardings
from longspan.train.step import TrainState, promotes


def initial_state(
    parameters: Any, others: Any, optimizer: Any, key: jax.Array, mesh: Any, heads: Mapping[str, int]
) -> TrainState:
    """The state before the first step, on a mesh if there is one. Its arrays are copies, because steps donate them."""

    def init(parameters):
        with promotes():
            return optimizer.init(parameters)

    if mesh is None:
        copied: list[Any] = [jax.tree.map(_copy, tree) for tree in (np.int32(0), key, parameters, others)]
        return TrainState(*copied, optimizer=jax.jit(init)(parameters))
    start: list[Any] = [np.int32(0), key, parameters, others]
    shapes = TrainState(*start, optimizer=jax.eval_shape(init, parameters))
    shardings = state_shardings(shapes, optimizer, mesh, heads)
    placed = [jax.tree.map(place_array, tree, there) for tree, there in zip(start, shardings[:4], strict=True)]
    return TrainState(*placed, optimizer=jax.jit(init, out_shardings=shardings.optimizer)(placed[2]))


def named_arrays(state: Any) -> dict[str, jax.Array]:
    """The arrays of a state by name, such as "parameters/embed/embedding"; random keys as their raw data."""
    return {"/".join(names_of(path)): _raw(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}


def from_named_arrays(arrays: Mapping[str, jax.Array], like: Any) -> Any:
    """The inverse of `named_arrays`, for a state of the structure of `like`."""

    def leaf(path: Any, x: jax.Array) -> jax.Array:
        found = arrays["/".join(names_of(path))]
        if _is_key(x):
            return jax.random.wrap_key_data(found, impl=jax.random.key_impl(x))
        return found

    return jax.tree_util.tree_map_with_path(leaf, like)


def split_model(model: nnx.Module) -> tuple[Any, Any, Any]:
    """The structure, the parameters and the other variables of a model."""
    graph, parameters, others = nnx.split(model, nnx.Param, ...)
    return graph, parameters, others


def _copy(x: Any) -> jax.Array:
    if isinstance(x, jax.Array):
        return jnp.copy(x)
    return jax.device_put(x)


def _raw(x: jax.Array) -> jax.Array:
    if _is_key(x):
        return jax.random.key_data(x)
    return x


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
