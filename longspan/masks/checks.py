"""Checks of what masks are made from and cut to: what was expected, what came, what to do."""

import inspect
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import FAR
from longspan.checks import check_static_size, ids_as_int32, is_array, is_int, is_known


def check_number(mask: Any, name: str) -> None:
    """A rule's number: a Python int, or an int array of shape () or [B]. NumPy integers become Python ints."""
    value = getattr(mask, name)
    label = f"{type(mask).__name__}.{name}"
    if is_array(value):
        if not is_int(value):
            # Cast to ints, flags would be the numbers 0 and 1.
            cure = "Count flags, e.g. `mask.sum(-1)`" if _is_bool(value.dtype) else "Cast it with `.astype('int32')`"
            raise TypeError(f"{label} must hold integers, got dtype {value.dtype}. {cure}.")
        if value.ndim > 1:
            raise ValueError(
                f"{label} must be an int, or an int array of shape () or [B], got shape {tuple(value.shape)}. "
                "Give one number for all rows, or one per batch row."
            )
        object.__setattr__(mask, name, clipped_to_int32(value))
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
    """A number with a lower bound; a traced one is not known yet, and is no less wherever it is read.

    A static one fixes shapes, and has an upper bound too.
    """
    if static and is_array(getattr(mask, name)):
        raise TypeError(
            f"{type(mask).__name__}.{name} fixes shapes, so it must be a Python int, got an array. Convert it with "
            "`int(...)` outside jit."
        )
    check_number(mask, name)
    value = getattr(mask, name)
    found = _least(value)
    if found is not None and found < least:
        raise ValueError(
            f"{type(mask).__name__}.{name} must be >= {least}, got {found}. "
            "For a band that leaves the query's own position out, use `Band(low, high)`."
            if name in ("left", "right")
            else f"{type(mask).__name__}.{name} must be >= {least}, got {found}."
        )
    if static and value > FAR:
        raise ValueError(
            f"{type(mask).__name__}.{name} must be at most {FAR} (2**30 - 1), got {value}. A block of as many slots as "
            "there are covers them all."
        )


def check_array(
    mask: Any,
    name: str,
    kind: str,
    axes: str,
    *,
    optional: bool = False,
    label: str | None = None,
    saturates: bool = False,
) -> None:
    """An array of a mask: of ints or bools, with the axes named. Ints are ids, or numbers that saturate."""
    value: Any = getattr(mask, name)
    label = label or f"{type(mask).__name__}.{name}"
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
        if _is_bool(array.dtype):  # cast to ints, padding would be a document of its own
            cure = "A padding mask becomes ids by `np.where(mask, 0, -1)`."
        noun = "integers" if kind == "int" else "bools"
        raise TypeError(f"{label} must hold {noun}, got dtype {array.dtype}. {cure}")
    ranks = [len(option) for option in axes.split(" or ")]
    if array.ndim not in ranks:
        raise ValueError(
            f"{label} must have shape [{_axes(axes)}], got rank {array.ndim} (shape {tuple(array.shape)}). "
            "Add or drop axes, e.g. `array[None]`."
        )
    if kind == "int":
        object.__setattr__(mask, name, clipped_to_int32(array) if saturates else ids_as_int32(label, array))


def check_entries(term: Any, name: str) -> None:
    """The array of a term: ints or bools [B or 1, L] or [B or 1, N or 1, L]. Bools of which not all count are ints."""
    value = getattr(term, name)
    array = np.asarray(value) if isinstance(value, list | tuple) else value
    if not is_array(array) or not (is_int(array) or _is_bool(array.dtype)):
        got = f"dtype {array.dtype}" if is_array(array) else type(array).__name__
        raise TypeError(f"array: its entries must be an array of ints or bools, got {got}.")
    if array.ndim not in (2, 3):
        raise ValueError(
            f"array: its entries must have shape [B or 1, L] or [B or 1, N or 1, L], got {tuple(array.shape)}. Add an "
            "axis, e.g. `entries[None]`."
        )
    if not _is_bool(array.dtype):
        array = ids_as_int32("array: its entries", array)
    elif term.valid != "all":
        known = not isinstance(array, jax.ShapeDtypeStruct)
        array = array.astype(np.int32) if known else jax.ShapeDtypeStruct(array.shape, np.int32)
    object.__setattr__(term, name, array)


def check_listing(mask: Any, name: str) -> None:
    """A table that lists numbers, and not one of bools: cast to ints, those would list blocks 0 and 1."""
    value = getattr(mask, name)
    dtype = np.asarray(value).dtype if isinstance(value, Sequence) else getattr(value, "dtype", None)
    if dtype is not None and _is_bool(dtype):
        raise TypeError(
            f"{type(mask).__name__}.{name} must list the numbers of kv blocks, got bools. Give bools "
            "[N or 1, q blocks, kv blocks] to `Blocks.from_bool(table, block_size)`."
        )
    if dtype is not None and not np.issubdtype(dtype, np.integer):
        raise TypeError(
            f"{type(mask).__name__}.{name} must list the numbers of kv blocks, ints, got {dtype}. Of scores, list the "
            "best blocks, e.g. `jnp.argsort(-scores, axis=-1)[..., :r]`."
        )


def check_block_bools(table: Any, max_blocks: Any) -> tuple[Any, int]:
    """A table of one bool per pair of blocks, and the most blocks that its rows list."""
    table = np.asarray(table) if isinstance(table, list | tuple) else table
    if not is_array(table):
        raise TypeError(f"Blocks.from_bool: `table` must be an array of bools, got {type(table).__name__}.")
    if table.dtype != bool:
        raise TypeError(
            f"Blocks.from_bool: `table` must hold bools, got dtype {table.dtype}. A table that lists the numbers of kv "
            "blocks goes to `Blocks(table, block_size)`; scores are compared first, e.g. `scores > 0`."
        )
    if table.ndim not in (3, 4):
        raise ValueError(
            f"Blocks.from_bool: `table` must have shape [{_axes('NQK or BNQK')}], got {tuple(table.shape)}. Add axes, "
            "e.g. `table[None]` for one table for all heads."
        )
    count = table.shape[-1]
    most = count if max_blocks is None else check_static_size("max_blocks", max_blocks, 1)
    if is_known(table):
        longest = int(np.asarray(table).sum(-1).max(initial=0))  # not in JAX: a trace may be under way
        if longest > most:
            raise ValueError(
                f"Blocks.from_bool: a row of `table` has {longest} blocks, more than max_blocks={most}. Raise "
                "`max_blocks`, or leave it out."
            )
    return table, min(most, count)


def check_intervals(mask: Any, starts: str, stops: str) -> None:
    """Both ends of an interval per query, int [T], [B or 1, T] or [B or 1, N or 1, T], which become rank 3."""
    for name in (starts, stops):
        check_array(mask, name, "int", "T or BT or BNT", saturates=True)
    shapes = [tuple(getattr(mask, name).shape) for name in (starts, stops)]
    full = [shape if len(shape) == 3 else (*(shape[:-1] or (1,)), 1, shape[-1]) for shape in shapes]
    apart = [(m, n) for m, n in zip(full[0][:2], full[1][:2], strict=True) if m != n and 1 not in (m, n)]
    if apart or full[0][2] != full[1][2]:
        label = type(mask).__name__
        raise ValueError(
            f"{label}.{starts} and {label}.{stops} must have one shape, got {shapes[0]} and {shapes[1]}. Both have an "
            "entry per query; only along batch rows and heads may one of them have size 1."
        )
    for name, shape in zip((starts, stops), full, strict=True):
        object.__setattr__(mask, name, _reshaped(getattr(mask, name), shape))


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
    if any(abs(i) > FAR for i in indices):
        raise ValueError(f"{label} must be positions within ±{FAR} (2**30 - 1), got {max(indices, key=abs)}.")
    object.__setattr__(mask, name, indices)


def check_masks(mask: Any, name: str, kind: type) -> None:
    """A non-empty sequence of masks."""
    value, label = getattr(mask, name), f"{type(mask).__name__}.{name}"
    if not isinstance(value, Sequence) or not value or not all(isinstance(m, kind) for m in value):
        raise TypeError(f"{label} must be a non-empty sequence of masks, one per head, got {value!r}.")
    object.__setattr__(mask, name, tuple(value))


def check_custom(fn: Any, bounds: Any, arrays: int, batch: Any, heads: Any) -> None:
    """A user's functions, which may be given rows and heads; bounds may be left out."""
    for name, value in (("fn", fn), ("bounds", bounds)):
        if name == "bounds" and value is None:
            continue
        if not callable(value):
            raise TypeError(f"Custom.{name} must be a function, got {type(value).__name__}.")
        takes_rows_and_heads(value, arrays, name)
    for name, value in (("batch", batch), ("heads", heads)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ValueError(f"Custom.{name} must be a Python int >= 1, got {value!r}.")
        if value > FAR:
            raise ValueError(f"Custom.{name} must be at most {FAR} (2**30 - 1), got {value}: no call has as many.")
        if value > 1 and not takes_rows_and_heads(fn, arrays):
            raise ValueError(
                f"Custom.{name} is {value}, but the function is one of positions alone. Let it take the batch row and "
                "the head first, `fn(b, h, q, k, *arrays)`, or leave `batch` and `heads` out."
            )


def takes_rows_and_heads(fn: Any, arrays: int, name: str = "fn") -> bool:
    """Whether a user's function is one of (b, h, q, k, *arrays), and not one of (q, k, *arrays)."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # written in C, such as NumPy's: of two arrays
        return False
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least = sum(p.default is p.empty for p in named)
    most = math.inf if any(p.kind == p.VAR_POSITIONAL for p in parameters) else len(named)
    without, with_them = (least <= count + arrays <= most for count in (2, 4))
    if without and (least <= 2 or not with_them):
        return False
    if with_them and not without:
        return True
    fits = "could be either" if without else f"requires {least} parameters and takes at most {most}"
    raise TypeError(
        f"Custom.{name} must be a function of (q, k) or (b, h, q, k) and of the {arrays} arrays given, {2 + arrays} or "
        f"{4 + arrays} parameters in all, but {getattr(fn, '__name__', repr(fn))} {fits}. Wrap it, for example "
        f"`lambda b, h, q, k: ...`, so that it names just these."
    )


def check_bools(mask: Any, what: str, *dtypes: Any) -> None:
    """What a user's rule returned: bools, and no numbers that were meant for the scores."""
    for dtype in dtypes:
        if not _is_bool(dtype):
            raise TypeError(
                f"{mask!r}: {what} must return bools, got {dtype}. Compare, e.g. `values != 0`. A number that is added "
                "to the scores is a bias: `bias=ls.ScoreBias(fn)`."
            )


def check_truth(got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """What a user's rule returned: of the positions' shape, or one row per batch row or head."""
    sizes = zip((1,) * (4 - len(got)) + got, expected, strict=False)
    if len(got) > 4 or any(n not in (1, size) and not (axis < 2 and size == 1) for axis, (n, size) in enumerate(sizes)):
        raise ValueError(
            f"Custom's function returned shape {got} for positions of shape {expected}. It must return one truth value "
            "for every pair of the positions it is given: compare them, and use an array's values at q or k."
        )


def check_slots(mask: Any, q: Any, kv: Any, q_len: int | None, kv_len: int | None) -> tuple[Any, Any]:
    """The slots that a mask is cut to, as int32 [B or 1, n]; None, all of them, stays None."""
    found = _slots("q", q, q_len), _slots("kv", kv, kv_len)
    apart = {slots.shape[0] for slots in found if slots is not None} | {mask.batch}
    if len(apart - {1}) > 1:
        raise ValueError(
            f"The slots to cut to, or the mask's arrays, tell {' and '.join(map(str, sorted(apart - {1})))} batch rows "
            "apart. Give one row of slots for all, or as many as the mask has."
        )
    return found


def _slots(name: str, slots: Any, length: int | None) -> Any:
    if slots is None:
        return None
    if not isinstance(slots, np.ndarray | jax.Array):
        if not isinstance(slots, Sequence) or isinstance(slots, str):
            raise TypeError(f"`{name}` must be the slots that stay, ints [n] or [B, n], got {type(slots).__name__}.")
        slots = np.asarray(slots) if len(slots) else np.zeros(0, np.int32)
    if not is_int(slots):
        raise TypeError(
            f"`{name}` must hold the numbers of the slots that stay, got dtype {slots.dtype}. Flags become numbers by "
            "`np.flatnonzero`."
        )
    if slots.ndim not in (1, 2):
        raise ValueError(f"`{name}` must be slots [n] or [B, n], got shape {tuple(slots.shape)}.")
    if isinstance(slots, np.ndarray) and slots.size:
        least, most = int(slots.min()), int(slots.max())
        last = (FAR if length is None else length) - 1
        if least < 0 or most > last:
            raise ValueError(f"`{name}` keeps slots from {least} to {most}, but they are numbered from 0 to {last}.")
    slots = slots.astype(np.int32)
    return slots.reshape(1, -1) if slots.ndim == 1 else slots


def _is_bool(dtype: Any) -> bool:
    return np.issubdtype(dtype, np.bool_)


def _least(value: Any) -> int | None:
    """The least of some numbers, if it can be known now."""
    if isinstance(value, int):
        return value
    return int(np.asarray(value).min()) if is_known(value) and value.size else None


def clipped_to_int32(value: Any) -> Any:
    """Numbers as engines count, where all that is further than any position is as good as FAR."""
    if value.dtype == np.int32:
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, np.int32, sharding=value.sharding)
    if value.dtype.itemsize >= 4:  # smaller ones hold no number that is too large
        xp = jnp if isinstance(value, jax.Array) else np
        value = xp.asarray(xp.clip(value, 0 if np.issubdtype(value.dtype, np.unsignedinteger) else -FAR, FAR))
    return value.astype(np.int32)


def _reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    if tuple(array.shape) == shape:
        return array
    return jax.ShapeDtypeStruct(shape, array.dtype) if isinstance(array, jax.ShapeDtypeStruct) else array.reshape(shape)


def _axes(axes: str) -> str:
    readable = {"B": "B or 1", "T": "T", "S": "S", "N": "N or 1", "Q": "q blocks", "K": "kv blocks", "r": "r"}
    return "] or [".join(", ".join(readable[a] for a in option) for option in axes.split(" or "))
