"""Checks that several files of `MaskInfo` share. Checks with one user are in its file."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from longspan.checks import ids_as_int32, to_int32
from longspan.constants import unfolded


def is_traced(value: Any) -> bool:
    """Whether a value is a tracer."""
    return isinstance(value, Tracer)


def check_rank(name: str, array: Any, ranks: tuple[int, ...], axes: str) -> None:
    """Raises a ValueError unless an array has one of these ranks."""
    if np.ndim(array) not in ranks:
        raise ValueError(
            f"{name} must have shape {axes}, got rank {np.ndim(array)} (shape {tuple(np.shape(array))}). "
            "Add or drop axes, e.g. `array[None]`."
        )


def check_ints(name: str, array: Any, rank: int, axes: str) -> jax.Array:
    """An int array of a rank, as int32; larger values saturate."""
    array = _ints(name, array, rank, axes)
    xp = jnp if isinstance(array, jax.Array) else np
    return unfolded(jnp.asarray(to_int32(array, xp)))


def check_id_array(name: str, array: Any) -> jax.Array:
    """Ids or types [B, L] as int32; an error if two different ids would become equal."""
    return unfolded(jnp.asarray(ids_as_int32(name, _ints(name, array, 2, "(B, L)"))))


def _ints(name: str, array: Any, rank: int, axes: str) -> Any:
    if isinstance(array, list | tuple):
        array = np.asarray(array)
    if not hasattr(array, "dtype") or not np.issubdtype(array.dtype, np.integer):
        got = type(array).__name__
        if hasattr(array, "dtype"):
            got = f"dtype {array.dtype}"
        raise TypeError(f"{name} must be an int array {axes}, got {got}. Cast it with `.astype('int32')`.")
    check_rank(name, array, (rank,), axes)
    return array


def check_ids(
    q_ids: Any, kv_ids: Any, *, names: tuple[str, str] = ("q_segment_ids", "kv_segment_ids")
) -> tuple[jax.Array, jax.Array]:
    """Ids [B, T] and [B, S]; a side with one row is broadcast to the rows of the other."""
    q_ids, kv_ids = check_id_array(names[0], q_ids), check_id_array(names[1], kv_ids)
    rows = {q_ids.shape[0], kv_ids.shape[0]}
    if len(rows - {1}) > 1:
        raise ValueError(
            f"{names[0]} has {q_ids.shape[0]} batch rows, but {names[1]} has {kv_ids.shape[0]}. "
            "The two numbers must be equal."
        )
    batch = (rows - {1} or {1}).pop()
    return jnp.broadcast_to(q_ids, (batch, q_ids.shape[1])), jnp.broadcast_to(kv_ids, (batch, kv_ids.shape[1]))


def check_size(name: str, value: Any, least: int = 0) -> int:
    """A static size as a Python int of at least `least`."""
    if is_traced(value):
        raise ValueError(f"{name} sets array shapes, so it must be a Python int, got a traced value. Make it static.")
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__}).") from None
    if size < least:
        raise ValueError(f"{name} must be >= {least}, got {size}.")
    return size
