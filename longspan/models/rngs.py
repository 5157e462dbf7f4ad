"""The random keys of a call: checks of `rngs`, and the stream that dropout draws from."""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError


class SingleKey(NamedTuple):
    """A stream that returns one key. A model with a head passes one to its encoder."""

    key: jax.Array

    def __call__(self) -> jax.Array:
        return self.key


Rngs: TypeAlias = nnx.Rngs | nnx.RngStream | jax.Array | SingleKey  # of a call, as in Flax's own dropout


def check_rngs(rngs: Any) -> None:
    """Raises unless `rngs` of a constructor is an `nnx.Rngs`, which all parts of a model need."""
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"`rngs` must be an nnx.Rngs, got {rngs!r}. Pass `rngs=nnx.Rngs(seed)`.")


def check_call_rngs(rngs: Any) -> None:
    """Raises unless `rngs` of a call is None or something that dropout can draw from."""
    if rngs is not None and not isinstance(rngs, nnx.Rngs | nnx.RngStream | SingleKey) and not _is_key(rngs):
        raise TypeError(
            f"`rngs` must be an nnx.Rngs, one of its streams or a JAX key, got {rngs!r}. Pass "
            "`rngs=nnx.Rngs(dropout=seed)`."
        )


def dropout_stream(rngs: Rngs | None) -> nnx.RngStream | SingleKey:
    """The stream that dropout draws from: "dropout" of an `nnx.Rngs`, the given stream, or a new one from a key."""
    if rngs is None:
        raise ValueError(
            "Dropout (`deterministic=False`, or after `model.train()`) needs `rngs`. Pass "
            "`rngs=nnx.Rngs(dropout=seed)`."
        )
    if isinstance(rngs, nnx.RngStream | SingleKey):
        return rngs
    if not isinstance(rngs, nnx.Rngs):
        return nnx.RngStream(rngs, tag="dropout")
    try:
        return rngs.dropout
    except AttributeError as error:
        raise ValueError(
            f"`rngs` has no stream 'dropout', only {', '.join(rngs)}. Pass `rngs=nnx.Rngs(dropout=seed)`."
        ) from error


def next_key(stream: nnx.RngStream | SingleKey) -> jax.Array:
    """The next key of a stream."""
    try:
        return stream()
    except TraceContextError as error:
        raise ValueError(
            "`rngs` was made outside of the function that Flax transforms (with `nnx.jit` or `nnx.grad`, for "
            "example), so the function cannot draw keys from it. Pass `rngs` to the function as an argument: "
            "`nnx.jit(step)(model, rngs, ...)` or `nnx.value_and_grad(loss)(model, rngs)`. Or draw a key outside of "
            "the function, `key = rngs.dropout()`, and call `model(..., rngs=key)` inside."
        ) from error


def _is_key(value: Any) -> bool:
    if not isinstance(value, jax.Array):
        return False
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key) or value.dtype == jnp.uint32  # new keys, old keys
