"""A training step and an evaluation as compiled programs: gradients of the parts of a batch, then one update."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from longspan.models.graph import HashedGraph


class TrainState(NamedTuple):
    """Everything that a step changes, as arrays: a checkpoint holds exactly this."""

    step: Any  # int32, the number of finished steps
    key: Any  # the random key of the run
    parameters: Any
    others: Any  # variables that are not trained: running averages, counters of random streams
    optimizer: Any


class StepOutput(NamedTuple):
    """Scalars of a step."""

    loss: Any
    learning_rate: Any  # NaN if the optimizer does not tell it
    stop: Any  # int32, whether a process asks to stop


@dataclass(frozen=True)
class TrainProgram:
    """The static part of a step."""

    graph: HashedGraph  # of the model
    loss: Callable
    optimizer: Any
    accumulate: int
    shardings: tuple[Any, ...] | None = None  # of the state's arrays; None: one device

    def __call__(self, state: TrainState, batch: Any, stop: Any) -> tuple[TrainState, StepOutput]:
        """The state after one step. The given state's arrays are donated."""
        return _step(self, state, batch, stop)


@dataclass(frozen=True)
class EvaluationProgram:
    """The static part of an evaluation."""

    graph: HashedGraph  # of the model, with dropout off
    evaluate: Callable

    def __call__(self, parameters: Any, others: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        """(value, weight) of each metric on a batch."""
        return _evaluate(self, parameters, others, batch)


def hashable(function: Callable) -> Callable:
    """The function, as a static argument of `jit`: callable objects may have no hash."""
    try:
        hash(function)
    except TypeError:
        return functools.partial(function)
    return function


@contextmanager
def promotes() -> Iterator[None]:
    """Allows what optax needs: it mixes ints with floats, also if the caller set strict promotion of dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _step(program: TrainProgram, state: TrainState, batch: Any, stop: Any) -> tuple[TrainState, StepOutput]:
    key = jax.random.fold_in(state.key, state.step)
    if program.accumulate == 1:
        loss, _, gradients, others = _gradients(program, state.parameters, state.others, batch, key)
    else:
        loss, gradients, others = _accumulated(program, state, batch, key)
    with promotes():
        updates, optimizer = program.optimizer.update(gradients, state.optimizer, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
    after = TrainState(state.step + np.int32(1), state.key, parameters, others, optimizer)
    if program.shardings is not None:
        leaves, tree = jax.tree.flatten(after)
        placed = map(jax.lax.with_sharding_constraint, leaves, program.shardings)
        after = jax.tree.unflatten(tree, list(placed))
    return after, StepOutput(loss, _learning_rate(optimizer), jnp.max(stop))


def _gradients(program: TrainProgram, parameters: Any, others: Any, batch: Any, key: Any) -> tuple[Any, Any, Any, Any]:
    """The loss, its weight, the gradients, and the variables that are not trained after the call."""

    def value(parameters):
        # Copies of the trees: `merge` puts a tree's own variables into the model, and the call may change them.
        model = nnx.merge(program.graph.graph, *jax.tree.map(lambda x: x, (parameters, others)))
        loss, weight = _scalar_and_weight("loss", program.loss(model, batch, key))
        _, _, after = nnx.split(model, nnx.Param, ...)
        return loss, (weight, after)

    (loss, (weight, after)), gradients = jax.value_and_grad(value, has_aux=True)(parameters)
    return loss, weight, gradients, after


def _accumulated(program: TrainProgram, state: TrainState, batch: Any, key: Any) -> tuple[Any, Any, Any]:
    """As `_gradients` of the whole batch, one part after another: means over the parts by their weights."""
    parts = program.accumulate

    def split(x):
        # Row r goes to part r % parts. On a mesh, each device then has rows of every part, and nothing is sent.
        return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)

    def add(carry, part):
        (total, count, sums), others = carry
        number, batch = part
        loss, weight, gradients, others = _gradients(
            program, state.parameters, others, batch, jax.random.fold_in(key, number)
        )
        sums = jax.tree.map(lambda s, x: s + weight * x.astype(s.dtype), sums, gradients)
        return ((total + weight * loss, count + weight, sums), others), None

    zero = jnp.zeros((), np.float32)
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, np.float32)), state.parameters)
    numbered = jnp.arange(parts, dtype=np.uint32), jax.tree.map(split, batch)
    ((total, count, sums), others), _ = jax.lax.scan(add, ((zero, zero, sums), state.others), numbered)
    # If no part has a target, the sums are 0.
    factor = 1 / jnp.where(count > 0, count, 1)
    gradients = jax.tree.map(lambda s, x: (s * factor).astype(x.dtype), sums, state.parameters)
    return total * factor, gradients, others


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(program: EvaluationProgram, parameters: Any, others: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
    model = nnx.merge(program.graph.graph, *jax.tree.map(lambda x: x, (parameters, others)))
    found = program.evaluate(model, batch)
    return {name: _scalar_and_weight(name, value) for name, value in found.items()}


def _scalar_and_weight(name: str, result: Any) -> tuple[Any, Any]:
    """A scalar and its weight, both float32, from `scalar` or `(scalar, weight)`."""
    pair = result
    if not isinstance(result, tuple):
        pair = result, 1.0
    shapes = [np.shape(x) for x in pair]
    if shapes != [(), ()]:
        raise ValueError(
            f"`{name}` must be a scalar or a pair (scalar, weight), got arrays of shapes {shapes}. Return the mean "
            "over the batch."
        )
    value, weight = pair
    return jnp.asarray(value).astype(np.float32), jax.lax.stop_gradient(jnp.asarray(weight).astype(np.float32))


def _learning_rate(optimizer_state: Any) -> Any:
    """The learning rate in the state of `optax.inject_hyperparams`; NaN without one."""

    def is_array(path: Any, value: Any) -> bool:
        return isinstance(value, jax.Array)

    found = optax.tree_utils.tree_get_all_with_path(optimizer_state, "learning_rate", filtering=is_array)
    if len(found) != 1:
        return jnp.full((), np.nan, np.float32)
    return found[0][1].astype(np.float32)
