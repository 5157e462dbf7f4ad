"""Checks that several files of `MaskInfo` share; all others stand beside what they check."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from longspan.checks import ids_as_int32, to_int32
from longspan.constants import unfolded


def is_traced(value: Any) -> bool:
    """Whether a value is only known when the program runs."""
    return isinstance(value, Tracer)


def check_rank(name: str, array: Any, ranks: tuple[int, ...], axes: str) -> None:
    """An array with one of these ranks."""
    if np.ndim(array) not in ranks:
        raise ValueError(
            f"{name} must have shape {axes}, got rank {np.ndim(array)} (shape {tuple(np.shape(array))}). "
            "Add or drop axes, e.g. `array[None]`."
        )


def check_ints(name: str, array: Any, rank: int, axes: str) -> jax.Array:
    """An int array of a rank, as int32."""
    array = _ints(name, array, rank, axes)
    return unfolded(jnp.asarray(to_int32(array, jnp if isinstance(array, jax.Array) else np)))


def check_names(name: str, array: Any) -> jax.Array:
    """Ids or types [B, L], as int32 that tells them apart as they were."""
    return unfolded(jnp.asarray(ids_as_int32(name, _ints(name, array, 2, "(B, L)"))))


def _ints(name: str, array: Any, rank: int, axes: str) -> Any:
    if isinstance(array, list | tuple):
        array = np.asarray(array)
    if not hasattr(array, "dtype") or not np.issubdtype(array.dtype, np.integer):
        got = f"dtype {array.dtype}" if hasattr(array, "dtype") else type(array).__name__
        raise TypeError(f"{name} must be an int array {axes}, got {got}. Cast it with `.astype('int32')`.")
    check_rank(name, array, (rank,), axes)
    return array


def check_ids(
    q_ids: Any, kv_ids: Any, *, names: tuple[str, str] = ("q_segment_ids", "kv_segment_ids")
) -> tuple[jax.Array, jax.Array]:
    """Ids [B, T] and [B, S]; one row serves all rows of the other side."""
    q_ids, kv_ids = (check_names(n, a) for n, a in zip(names, (q_ids, kv_ids), strict=True))
    rows = {q_ids.shape[0], kv_ids.shape[0]}
    if len(rows - {1}) > 1:
        raise ValueError(
            f"{names[0]} has {q_ids.shape[0]} batch rows, but {names[1]} has {kv_ids.shape[0]}. They must agree."
        )
    batch = (rows - {1} or {1}).pop()
    q_ids, kv_ids = (jnp.broadcast_to(ids, (batch, ids.shape[1])) for ids in (q_ids, kv_ids))
    return q_ids, kv_ids


def check_size(name: str, value: Any, least: int = 0) -> int:
    """A static size."""
    if is_traced(value):
        raise ValueError(f"{name} fixes shapes, so it must be a Python int, got a traced value. Make it static.")
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__}).") from None
    if size < least:
        raise ValueError(f"{name} must be >= {least}, got {size}.")
    return size
