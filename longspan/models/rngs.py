"""Where a call's randomness comes from."""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError


class Drawn(NamedTuple):
    """What a model hands to its encoder: a stream of one key, drawn from the call's."""

    key: jax.Array

    def __call__(self) -> jax.Array:
        return self.key


Rngs: TypeAlias = nnx.Rngs | nnx.RngStream | jax.Array | Drawn  # of a call, as in Flax's own dropout


def check_rngs(rngs: Any) -> None:
    """What a model is made with: only an `nnx.Rngs` hands out keys to all of its parts."""
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"`rngs` must be an nnx.Rngs, got {rngs!r}. Pass `rngs=nnx.Rngs(seed)`.")


def check_call_rngs(rngs: Any) -> None:
    """What a call drops by, or would."""
    if rngs is not None and not isinstance(rngs, nnx.Rngs | nnx.RngStream | Drawn) and not _is_key(rngs):
        raise TypeError(
            f"`rngs` must be an nnx.Rngs, one of its streams or a JAX key, got {rngs!r}. Pass "
            "`rngs=nnx.Rngs(dropout=seed)`."
        )


def dropout_stream(rngs: Rngs | None) -> nnx.RngStream | Drawn:
    """The stream that a call drops by: the one of that name, the one given, or one that starts from a key."""
    if rngs is None:
        raise ValueError(
            "Dropout (`deterministic=False`, or after `model.train()`) needs `rngs`. Pass "
            "`rngs=nnx.Rngs(dropout=seed)`."
        )
    if isinstance(rngs, nnx.RngStream | Drawn):
        return rngs
    if not isinstance(rngs, nnx.Rngs):
        return nnx.RngStream(rngs, tag="dropout")
    try:
        return rngs.dropout
    except AttributeError as error:
        raise ValueError(
            f"`rngs` has no stream for dropout, only {', '.join(rngs)}. Pass `rngs=nnx.Rngs(dropout=seed)`."
        ) from error


def next_key(stream: nnx.RngStream | Drawn) -> jax.Array:
    """The next key of a stream."""
    try:
        return stream()
    except TraceContextError as error:
        raise ValueError(
            "`rngs` was made outside of the function that is transformed here, where Flax does not count its keys. "
            "Pass it as an argument, `nnx.jit(step)(model, rngs, ...)` and `nnx.value_and_grad(loss)(model, rngs)`, or "
            "draw a key outside: `key = rngs.dropout()`, and `model(..., rngs=key)` inside."
        ) from error


def _is_key(value: Any) -> bool:
    is_new = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return is_new or (isinstance(value, jax.Array) and value.dtype == jnp.uint32)
