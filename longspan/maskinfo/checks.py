"""The checks of `MaskInfo` and its conversions; each message says what was expected, what came, what to do."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from longspan._checks import check_choice

MODES = (None, "default", "decode", "prefill")
COMBINE = ("union", "intersect", "replace")
ZERO_POLICIES = ("q", "kv", "both", "none")


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
    if isinstance(array, list | tuple):
        array = np.asarray(array)
    if not hasattr(array, "dtype") or not np.issubdtype(array.dtype, np.integer):
        got = f"dtype {array.dtype}" if hasattr(array, "dtype") else type(array).__name__
        raise TypeError(f"{name} must be an int array {axes}, got {got}. Cast it with `.astype('int32')`.")
    check_rank(name, array, (rank,), axes)
    return jnp.asarray(array).astype(np.int32)


def check_ids(q_ids: Any, kv_ids: Any, *, names: tuple[str, str] = ("q_segment_ids", "kv_segment_ids")):
    """Ids [B, T] and [B, S]; one row serves all rows of the other side."""
    q_ids, kv_ids = (check_ints(n, a, 2, "(B, L)") for n, a in zip(names, (q_ids, kv_ids), strict=True))
    rows = {q_ids.shape[0], kv_ids.shape[0]}
    if len(rows - {1}) > 1:
        raise ValueError(
            f"{names[0]} has {q_ids.shape[0]} batch rows, but {names[1]} has {kv_ids.shape[0]}. They must agree."
        )
    batch = (rows - {1} or {1}).pop()
    return tuple(jnp.broadcast_to(ids, (batch, ids.shape[1])) for ids in (q_ids, kv_ids))


def check_pairs(name: str, pairs: Any) -> jax.Array:
    """Pairs [start0, end0, ...]."""
    pairs = check_ints(name, pairs, 1, "(2B,)")
    if pairs.size % 2:
        raise ValueError(
            f"{name} must hold pairs [start0, end0, start1, end1, ...], got an odd length {pairs.size}. "
            "Cumulative lengths [0, n0, n0+n1, ...] go to `MaskInfo.from_offsets`."
        )
    return pairs


def check_offsets(name: str, offsets: Any) -> jax.Array:
    """Cumulative lengths [0, n0, n0+n1, ...]."""
    offsets = check_ints(name, offsets, 1, "(n+1,)")
    known = None if is_traced(offsets) else np.asarray(offsets)
    if not offsets.size or (known is not None and (known[0] != 0 or np.any(np.diff(known) < 0))):
        got = "an array without entries" if known is None or not known.size else known.tolist()
        raise ValueError(
            f"{name} must start at 0 and never fall: [0, n0, n0+n1, ...], got {got}. "
            "Pairs [start0, end0, ...] go to `MaskInfo.from_cu_seqlens`."
        )
    return offsets


def check_total(name: str, size: Any, offsets: jax.Array) -> int:
    """How many tokens there are: as given, or as the offsets say."""
    if size is not None:
        size = check_size(name, size)
        if not is_traced(offsets) and size < int(offsets[-1]):
            raise ValueError(f"{name} must be >= {int(offsets[-1])}, the last offset, got {size}.")
        return size
    if is_traced(offsets):
        raise ValueError(f"{name} must be given if the offsets are traced, because it fixes shapes.")
    return int(offsets[-1])


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


def check_number(name: str, value: Any, batch: int, least: int | None = None) -> Any:
    """An int, or an int array of shape () or (B,), which may be traced: a Python int, or int32."""
    if not hasattr(value, "dtype"):
        return check_size(name, value, -(2**31) if least is None else least)
    if not np.issubdtype(value.dtype, np.integer):
        raise TypeError(f"{name} must hold integers, got dtype {value.dtype}. Cast it with `.astype('int32')`.")
    if value.shape not in ((), (1,), (batch,)):
        raise ValueError(
            f"{name} must be an int, or an int array of shape () or ({batch},), one a batch row, got shape "
            f"{tuple(value.shape)}."
        )
    if least is not None and not is_traced(value) and np.any(np.asarray(value) < least):
        raise ValueError(f"{name} must be >= {least}, got {np.asarray(value).tolist()}.")
    return jnp.asarray(value).astype(np.int32)


def check_window(window: Any, batch: int) -> tuple[Any, Any]:
    """A window as (left, right); a single size is symmetric."""
    pair = window if isinstance(window, tuple | list) else (window, window)
    if len(pair) != 2:
        raise ValueError(f"sliding_window must be a size or (left, right), got {len(pair)} sizes.")
    left, right = (check_number("sliding_window", side, batch, least=0) for side in pair)
    return left, right


def check_static_window(mode: str, left: Any, right: Any) -> tuple[int, int]:
    """The sizes of a mode that slices."""
    if any(is_traced(n) or np.ndim(n) for n in (left, right)):
        raise ValueError(
            f"mode={mode!r} slices, so sliding_window must be static, got a traced size or one a batch row. "
            "Pass Python ints, or leave `mode` out."
        )
    return int(left), int(right)


def check_mode(mode: Any, index: Any) -> None:
    """A mode of a sliding window, with what it needs."""
    if mode not in MODES:
        check_choice("mode", mode, [m for m in MODES if m])
    if mode == "decode" and index is None:
        raise ValueError("mode='decode' needs `index`, the slot of the query: an int, or an int array of shape (B,).")


def check_index(index: Any, q_len: int, batch: int) -> jax.Array:
    """The slot of one query a row, [B]; a traced one is clipped."""
    index = check_number("index", index, batch)
    if not is_traced(index) and np.any((np.asarray(index) < 0) | (np.asarray(index) >= q_len)):
        raise ValueError(f"index must lie in [0, {q_len}), the slots of the queries, got {np.asarray(index).tolist()}.")
    return jnp.broadcast_to(jnp.clip(jnp.asarray(index, np.int32), 0, max(q_len - 1, 0)), (batch,))


def check_types(token_type_ids: Any, batch: int, q_len: int, kv_len: int) -> tuple[jax.Array, jax.Array]:
    """Token types [B, T] and [B, S]."""
    pair = token_type_ids if isinstance(token_type_ids, tuple) else (token_type_ids, token_type_ids)
    if len(pair) != 2:
        raise ValueError(f"token_type_ids must be one array or (q_types, kv_types), got {len(pair)} of them.")
    types = []
    for name, array, length in zip(("q_types", "kv_types"), pair, (q_len, kv_len), strict=True):
        array = check_ints(name, array, 2, "(B, L)")
        if array.shape[0] not in (1, batch) or array.shape[1] != length:
            raise ValueError(
                f"{name} must have shape ({batch}, {length}), got {tuple(array.shape)}. If queries and keys differ in "
                "length, pass (q_types, kv_types)."
            )
        types.append(jnp.broadcast_to(array, (batch, length)))
    return types[0], types[1]


def check_positions(name: str, positions: Any, batch: int, length: int) -> jax.Array | None:
    """Given positions, as int32 [B, L]."""
    if positions is None:
        return None
    positions = positions if hasattr(positions, "dtype") else np.asarray(positions)
    if not np.issubdtype(positions.dtype, np.integer):
        raise TypeError(f"{name} must be an int array, got dtype {positions.dtype}. Cast it with `.astype('int32')`.")
    if positions.shape not in ((length,), (1, length), (batch, length)):
        raise ValueError(
            f"{name} must have shape ({length},) or ({batch}, {length}), one position a token, got "
            f"{tuple(positions.shape)}."
        )
    positions = jnp.asarray(positions).astype(np.int32)
    return jnp.broadcast_to(positions.reshape(-1, length) if positions.ndim == 1 else positions, (batch, length))


def check_axis_names(**names: Any) -> None:
    """Names of mesh axes: a name, a tuple of names, or None."""
    for name, value in names.items():
        axes = value if isinstance(value, tuple) else (value,)
        if not all(a is None or isinstance(a, str) for a in axes):
            raise TypeError(f"{name} must be the name of a mesh axis, a tuple of names or None, got {value!r}.")


def check_segments(count: Any, in_order: Any, most: int) -> None:
    """That offsets can hold and tell the sequences, wherever that is known."""
    if is_traced(count) or is_traced(in_order):
        return
    if int(count) > most:
        raise ValueError(
            f"There are {int(count)} sequences, but max_segments={most}. Call "
            f"`get_or_compute_qkv_cu_seqlens(max_segments={int(count)})` (or more)."
        )
    if not bool(in_order):
        raise ValueError(
            "Cumulative lengths cannot tell these segment ids: an id comes back after another one, or queries and "
            "keys have them in a different order. Sort the tokens by id, or use the ids."
        )


def check_float(dtype: Any) -> Any:
    """A dtype that a bias can have."""
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"A bias needs a float dtype, got {dtype.name}. For 0 and 1 use `attention_mask`.")
    return dtype
