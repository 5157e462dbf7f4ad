"""Every check at the public edge, and its message: what was expected, what came, what to do."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from longspan._types import FAR


def check_number(mask: Any, name: str) -> None:
    """A rule's number: a Python int, or an int array of shape () or [B]. NumPy integers become Python ints."""
    value = getattr(mask, name)
    label = f"{type(mask).__name__}.{name}"
    if is_array(value):
        if not is_int(value):
            raise TypeError(f"{label} must hold integers, got dtype {value.dtype}. Cast it with `.astype('int32')`.")
        if value.ndim > 1:
            raise ValueError(
                f"{label} must be an int, or an int array of shape () or [B], got shape {tuple(value.shape)}. "
                "Give one number for all rows, or one a batch row."
            )
        object.__setattr__(mask, name, _clipped_to_int32(value))
        return
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        object.__setattr__(mask, name, operator.index(value))
    except TypeError:
        raise TypeError(
            f"{label} must be an int, or an int array of shape () or [B], got {value!r} ({type(value).__name__})."
        ) from None


def check_at_least(mask: Any, name: str, least: int, *, static: bool = False) -> None:
    """A number with a lower bound; a traced or array number is taken at its word."""
    if static and is_array(getattr(mask, name)):
        raise TypeError(
            f"{type(mask).__name__}.{name} fixes shapes, so it must be a Python int, got an array. Convert it with "
            "`int(...)` outside jit."
        )
    check_number(mask, name)
    value = getattr(mask, name)
    if isinstance(value, int) and value < least:
        raise ValueError(
            f"{type(mask).__name__}.{name} must be >= {least}, got {value}. "
            "For a band that leaves the query's own position out, use `Band(low, high)`."
            if name in ("left", "right")
            else f"{type(mask).__name__}.{name} must be >= {least}, got {value}."
        )


def check_array(mask: Any, name: str, kind: str, axes: str, *, optional: bool = False) -> None:
    """An array of a mask: of ints or bools, with the axes named."""
    value: Any = getattr(mask, name)
    label = f"{type(mask).__name__}.{name}"
    if optional and value is None:
        return
    array: Any = value
    if not is_array(value):
        if not isinstance(value, Sequence):
            raise TypeError(f"{label} must be an array [{_axes(axes)}], got {type(value).__name__}.")
        array = np.asarray(value)
        object.__setattr__(mask, name, array)
    wanted = is_int(array) if kind == "int" else array.dtype == bool
    if not wanted:
        cure = "Cast it with `.astype('int32')`." if kind == "int" else "Compare it, e.g. `array != 0`, to get bools."
        noun = "integers" if kind == "int" else "bools"
        raise TypeError(f"{label} must hold {noun}, got dtype {array.dtype}. {cure}")
    ranks = [len(option) for option in axes.split(" or ")]
    if array.ndim not in ranks:
        raise ValueError(
            f"{label} must have shape [{_axes(axes)}], got rank {array.ndim} (shape {tuple(array.shape)}). "
            "Add or drop axes, e.g. `array[None]`."
        )
    if kind == "int":
        object.__setattr__(mask, name, _as_int32(label, array))


def check_indices(mask: Any, name: str) -> None:
    """A tuple of static ints."""
    value, label = getattr(mask, name), f"{type(mask).__name__}.{name}"
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{label} must be a tuple of Python ints, got a JAX array. "
            "Global tokens that are data go into `q_flags` and `kv_flags`."
        )
    try:
        indices = tuple(operator.index(i) for i in (value if np.iterable(value) else (value,)))
    except TypeError:
        raise TypeError(f"{label} must be a tuple of ints, got {value!r}.") from None
    object.__setattr__(mask, name, indices)


def check_masks(mask: Any, name: str, kind: type) -> None:
    """A non-empty sequence of masks."""
    value, label = getattr(mask, name), f"{type(mask).__name__}.{name}"
    if not isinstance(value, Sequence) or not value or not all(isinstance(m, kind) for m in value):
        raise TypeError(f"{label} must be a non-empty sequence of masks, one a head, got {value!r}.")
    object.__setattr__(mask, name, tuple(value))


def check_custom(fn: Any, bounds: Any) -> None:
    for name, value in (("fn", fn), ("bounds", bounds)):
        if not callable(value) and not (name == "bounds" and value is None):
            raise TypeError(f"Custom.{name} must be a function, got {type(value).__name__}.")


def check_truth(got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """What a user's rule returned: of the positions' shape, or one row a batch row or head."""
    sizes = zip((1,) * (4 - len(got)) + got, expected, strict=False)
    if len(got) > 4 or any(n not in (1, size) and not (axis < 2 and size == 1) for axis, (n, size) in enumerate(sizes)):
        raise ValueError(
            f"Custom's function returned shape {got} for positions of shape {expected}. It must return one truth value "
            "for every pair of the positions it is given: compare them, and use an array's values at q or k."
        )


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(repr(c) for c in choices)}.")


def check_lengths(q_len: Any, kv_len: Any) -> None:
    """Static, non-negative lengths."""
    for name, value in (("q_len", q_len), ("kv_len", kv_len)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise TypeError(f"{name} must be a Python int (it fixes shapes), got {value!r} ({type(value).__name__}).")
        if value < 0:
            raise ValueError(f"{name} must be >= 0, got {value}.")


def check_tiles(q_tile: Any, kv_tile: Any) -> None:
    for name, value in (("q_tile", q_tile), ("kv_tile", kv_tile)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a Python int >= 1, got {value!r}.")


def check_extents(mask: Any, *, q_len: int, kv_len: int, batch: int | None = None, heads: int | None = None) -> None:
    """The sizes that a mask's arrays fix agree with each other and with the call."""
    lengths = {"T": q_len, "S": kv_len}
    names = {"T": "queries", "S": "keys", "B": "batch rows", "N": "query heads"}
    seen: dict[str, Any] = {}
    for extent in mask.extents():
        name, axis, size, unit = extent
        if axis in lengths:
            blocks = -(-lengths[axis] // unit)
            broadcast = name == "Dense.array" and size == 1
            if size != blocks and not broadcast:
                covers = f"{size} {names[axis]}" if unit == 1 else f"{size} blocks of {unit} {names[axis]}"
                raise ValueError(
                    f"{name} covers {covers}, but the call has {lengths[axis]}. "
                    "Bind the mask to arrays of this length, or slice it."
                )
            continue
        wanted = batch if axis == "B" else heads
        if size == 1:
            continue
        if wanted is not None and size != wanted:
            raise ValueError(f"{name} has {size} {names[axis]}, but the call has {wanted}. Give one, or {wanted}.")
        other = seen.setdefault(axis, extent)
        if other.size != size:
            raise ValueError(f"{name} has {size} {names[axis]}, but {other.name} has {other.size}. They must agree.")


def check_positions(name: str, positions: Any, length: int, batch: int | None) -> int:
    """Positions [L], [1, L] or [B, L], where None is any B; returns how many batch rows they tell apart."""
    if positions is None:
        return 1
    if not is_array(positions) or not is_int(positions):
        got = f"dtype {positions.dtype}" if is_array(positions) else type(positions).__name__
        raise TypeError(f"{name} must be an int array, got {got}. Cast it with `.astype('int32')`.")
    if positions.ndim not in (1, 2) or positions.shape[-1] != length:
        raise ValueError(
            f"{name} must have shape [{length}] or [B, {length}] (one position per slot), got {tuple(positions.shape)}."
        )
    rows = positions.shape[0] if positions.ndim == 2 else 1
    if rows != 1 and batch is not None and rows != batch:
        raise ValueError(f"{name} has {rows} batch rows, but the call has {batch}. Give one, or {batch}.")
    return rows


def is_abstract(value: Any) -> bool:
    """Whether a value has a shape but no numbers yet."""
    return isinstance(value, jax.ShapeDtypeStruct | Tracer)


def is_array(value: Any) -> bool:
    """An array, or the shape of one."""
    return isinstance(value, np.ndarray | jax.Array | jax.ShapeDtypeStruct)


def _clipped_to_int32(value: Any) -> Any:
    """Numbers as engines count, where all that is further than any position is as good as FAR."""
    if isinstance(value, jax.ShapeDtypeStruct) or value.dtype == np.int32:
        return value
    if value.dtype.itemsize >= 4:  # smaller ones hold no number that is too large
        xp = jnp if isinstance(value, jax.Array) else np
        value = xp.asarray(xp.clip(value, 0 if np.issubdtype(value.dtype, np.unsignedinteger) else -FAR, FAR))
    return value.astype(np.int32)


def _as_int32(label: str, array: Any) -> Any:
    """Ids as engines compare them. Traced ones are taken at their word."""
    if isinstance(array, jax.ShapeDtypeStruct) or array.dtype == np.int32:
        return array
    if array.dtype.itemsize >= 4 and not isinstance(array, Tracer) and array.size:
        least, most = int(array.min()), int(array.max())
        if not (least >= -(2**31) and most < 2**31):
            raise ValueError(
                f"{label} must fit into 32 bits, got numbers from {least} to {most}. Number them anew, for example "
                "with `np.unique(array, return_inverse=True)[1].reshape(array.shape)`."
            )
    return array.astype(np.int32)


def is_int(value: Any) -> bool:
    """Whether an array holds integers."""
    return np.issubdtype(value.dtype, np.integer)


def _axes(axes: str) -> str:
    readable = {"B": "B or 1", "T": "T", "S": "S", "N": "N or 1", "Q": "q blocks", "r": "r"}
    return "] or [".join(", ".join(readable[a] for a in option) for option in axes.split(" or "))


FLOATS = ("float16", "bfloat16", "float32", "float64")


def check_qkv(q: Any, k: Any, v: Any) -> None:
    """Queries [B,T,N,H], keys and values [B,S,K,H] of one float dtype."""
    for name, x, axes in (("q", q, "[B, T, N, H]"), ("k", k, "[B, S, K, H]"), ("v", v, "[B, S, K, H]")):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"`{name}` must be an array {axes}, got {type(x).__name__}.")
        if len(x.shape) != 4:
            raise ValueError(
                f"`{name}` must have shape {axes}, got rank {len(x.shape)} (shape {tuple(x.shape)}). "
                "Add the batch axis with `x[None]`, or split heads with `x.reshape(B, T, N, H)`."
            )
        if x.dtype.name not in FLOATS:
            raise TypeError(f"`{name}` must be one of {', '.join(FLOATS)}, got {x.dtype}. Cast it with `.astype(...)`.")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"`q`, `k` and `v` must share a dtype, got {q.dtype}, {k.dtype} and {v.dtype}.")
    if k.shape != v.shape:
        raise ValueError(f"`k` and `v` must have the same shape, got {tuple(k.shape)} and {tuple(v.shape)}.")
    (batch, _, heads, size), (kv_batch, _, kv_heads, kv_size) = q.shape, k.shape
    if batch != kv_batch:
        raise ValueError(f"`q` has batch {batch} and `k` has batch {kv_batch}: they must agree.")
    if size != kv_size:
        raise ValueError(f"`q` has head size {size} and `k` has head size {kv_size}: they must agree.")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"`q` has {heads} heads and `k` has {kv_heads}: query heads must be a multiple of key/value heads. "
            "Repeat `k` and `v`, or change the number of key/value heads."
        )


def check_broadcast(name: str, array: Any, shape: Sequence[int], *, kind: str) -> tuple[int, ...]:
    """An array that broadcasts to [B,N,T,S], of rank 2 or 4; returns its shape as rank 4."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(f"`{name}` must be an array, got {type(array).__name__}. Convert it with `jnp.asarray`.")
    wanted = array.dtype == bool if kind == "bool" else array.dtype.name in FLOATS
    if not wanted:
        cure = (
            "Give an additive mask as `bias`, or compare it, e.g. `mask != 0`."
            if kind == "bool"
            else "Give a mask of bools as `mask`, or cast it."
        )
        raise TypeError(f"`{name}` as an array must be {kind}, got {array.dtype}. {cure}")
    if array.ndim == 3:
        raise ValueError(
            f"`{name}` has rank 3, shape {tuple(array.shape)}, which could be [B, T, S] or [N, T, S]. "
            f"Say which: `{name}[:, None]` for one a batch row, `{name}[None]` for one a head."
        )
    full = (1,) * (4 - array.ndim) + tuple(array.shape)
    if array.ndim not in (2, 4) or any(n not in (1, m) for n, m in zip(full, shape, strict=True)):
        raise ValueError(
            f"`{name}` must be broadcastable to [B, N, T, S] = {list(shape)} (or be [T, S]), got shape "
            f"{tuple(array.shape)}."
        )
    return full


def check_bound_lengths(what: str, mine: Sequence[int], call: Sequence[int]) -> None:
    """A mask that was bound or planned for some lengths is used with those."""
    if tuple(mine) != tuple(call):
        raise ValueError(
            f"This {what} is for {mine[0]} queries and {mine[1]} keys, but the call has {call[0]} and {call[1]}. "
            "Make one for these lengths, or slice it."
        )


def check_static_size(name: str, value: Any, least: int) -> int:
    """A Python int that fixes shapes."""
    if isinstance(value, jax.Array):
        raise TypeError(
            f"`{name}` fixes shapes, so it must be a Python int, got an array. Convert it with `int(...)` outside jit, "
            "or name it in `static_argnames`."
        )
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{name}` must be a Python int >= {least}, got {value!r}.")
    return int(value)
