"""Checks of masks' arguments. Each message names the expected value, the given one and the fix."""

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
    """Checks a number: a Python int, or an int array of shape () or [B]. NumPy integers become Python ints."""
    value = getattr(mask, name)
    label = f"{type(mask).__name__}.{name}"
    if is_array(value):
        if not is_int(value):
            cure = "Cast it with `.astype('int32')`"
            if _is_bool(value.dtype):  # a cast would give the numbers 0 and 1
                cure = "To get a number from a padding mask, count its True entries, e.g. `mask.sum(-1)`"
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
    """Checks a number with a lower bound. Traced numbers are not checked: they are clipped when they are read.

    A `static` number sets array shapes, and also has an upper bound.
    """
    if static and is_array(getattr(mask, name)):
        raise TypeError(
            f"{type(mask).__name__}.{name} sets array shapes, so it must be a Python int, got an array. Convert it "
            "with `int(...)` outside jit."
        )
    check_number(mask, name)
    value = getattr(mask, name)
    found = _least(value)
    if found is not None and found < least:
        cure = ""
        if name in ("left", "right"):
            cure = " For a band without the query's own position, use `Band(low, high)`."
        raise ValueError(f"{type(mask).__name__}.{name} must be >= {least}, got {found}.{cure}")
    if static and value > FAR:
        raise ValueError(
            f"{type(mask).__name__}.{name} must be at most {FAR} (2**30 - 1), got {value}. Give at most the length of "
            "the sequence."
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
    """Checks an array of ints or bools with the axes named. Ints are ids, or numbers if they saturate."""
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
    if kind == "int":
        is_kind, noun, cure = is_int(array), "integers", "Cast it with `.astype('int32')`."
    else:
        is_kind, noun, cure = array.dtype == bool, "bools", "Compare it, e.g. `array != 0`, to get bools."
    if not is_kind:
        if _is_bool(array.dtype):  # a cast would give padding the id 0, which is a document
            cure = "Convert a padding mask to ids with `np.where(mask, 0, -1)`."
        raise TypeError(f"{label} must hold {noun}, got dtype {array.dtype}. {cure}")
    ranks = [len(option) for option in axes.split(" or ")]
    if array.ndim not in ranks:
        raise ValueError(
            f"{label} must have shape [{_axes(axes)}], got rank {array.ndim} (shape {tuple(array.shape)}). "
            "Add or drop axes, e.g. `array[None]`."
        )
    if kind == "int" and saturates:
        object.__setattr__(mask, name, clipped_to_int32(array))
    elif kind == "int":
        object.__setattr__(mask, name, ids_as_int32(label, array))


def check_entries(term: Any, name: str) -> None:
    """Checks the array of a term: ints or bools [B or 1, L] or [B or 1, N or 1, L].

    Bools become ints unless all entries are valid.
    """
    array = getattr(term, name)
    if isinstance(array, list | tuple):
        array = np.asarray(array)
    if not is_array(array):
        raise TypeError(f"masks.array: `entries` must be an array of ints or bools, got {type(array).__name__}.")
    if not is_int(array) and not _is_bool(array.dtype):
        raise TypeError(f"masks.array: `entries` must be an array of ints or bools, got dtype {array.dtype}.")
    if array.ndim not in (2, 3):
        raise ValueError(
            f"masks.array: `entries` must have shape [B or 1, L] or [B or 1, N or 1, L], got {tuple(array.shape)}. Add "
            "an axis, e.g. `entries[None]`."
        )
    if not _is_bool(array.dtype):
        array = ids_as_int32("masks.array: `entries`", array)
    elif term.valid != "all" and isinstance(array, jax.ShapeDtypeStruct):
        array = jax.ShapeDtypeStruct(array.shape, np.int32)
    elif term.valid != "all":
        array = array.astype(np.int32)
    object.__setattr__(term, name, array)


def check_listing(mask: Any, name: str) -> None:
    """Checks that a table lists ints. Bools are an error: as ints they would list blocks 0 and 1."""
    value = getattr(mask, name)
    dtype = getattr(value, "dtype", None)
    if isinstance(value, Sequence):
        dtype = np.asarray(value).dtype
    if dtype is not None and _is_bool(dtype):
        raise TypeError(
            f"{type(mask).__name__}.{name} must list the indices of key blocks, got bools. Give bools "
            "[N or 1, q blocks, kv blocks] to `Blocks.from_bool(table, block_size)`."
        )
    if dtype is not None and not np.issubdtype(dtype, np.integer):
        raise TypeError(
            f"{type(mask).__name__}.{name} must list the indices of key blocks, ints, got {dtype}. To use scores, list "
            "the best blocks, e.g. `jnp.argsort(-scores, axis=-1)[..., :r]`."
        )


def check_block_bools(table: Any, max_blocks: Any) -> tuple[Any, int]:
    """Checks a table with one bool per pair of blocks; returns it and the maximum number of blocks per row."""
    if isinstance(table, list | tuple):
        table = np.asarray(table)
    if not is_array(table):
        raise TypeError(f"Blocks.from_bool: `table` must be an array of bools, got {type(table).__name__}.")
    if table.dtype != bool:
        raise TypeError(
            f"Blocks.from_bool: `table` must hold bools, got dtype {table.dtype}. For a table that lists the indices "
            "of key blocks, use `Blocks(table, block_size)`. For scores, compare them first, e.g. `scores > 0`."
        )
    if table.ndim not in (3, 4):
        raise ValueError(
            f"Blocks.from_bool: `table` must have shape [{_axes('NQK or BNQK')}], got {tuple(table.shape)}. Add axes, "
            "e.g. `table[None]` for one table for all heads."
        )
    count = table.shape[-1]
    if max_blocks is None:
        return table, count
    limit = check_static_size("max_blocks", max_blocks, 1)
    if is_known(table):
        longest = int(np.asarray(table).sum(-1).max(initial=0))  # NumPy, because JAX may be tracing
        if longest > limit:
            raise ValueError(
                f"Blocks.from_bool: `table` allows {longest} key blocks for one query block, more than "
                f"max_blocks={limit}. Raise `max_blocks`, or leave it out."
            )
    return table, min(limit, count)


def check_intervals(mask: Any, starts: str, stops: str) -> None:
    """Checks the ends of one interval per query, int [T], [B or 1, T] or [B or 1, N or 1, T]; they become rank 3."""
    for name in (starts, stops):
        check_array(mask, name, "int", "T or BT or BNT", saturates=True)
    shapes = [tuple(getattr(mask, name).shape) for name in (starts, stops)]
    full = []
    for shape in shapes:
        rows_and_heads = {1: (1, 1), 2: (shape[0], 1), 3: shape[:2]}[len(shape)]
        full.append((*rows_and_heads, shape[-1]))
    differ = any(m != n and 1 not in (m, n) for m, n in zip(full[0][:2], full[1][:2], strict=True))
    if differ or full[0][2] != full[1][2]:
        label = type(mask).__name__
        raise ValueError(
            f"{label}.{starts} has shape {shapes[0]} and {label}.{stops} has shape {shapes[1]}. Both must have the "
            "same number of queries (the last axis). Their numbers of batch rows and of heads must be equal, or one "
            "of them must be 1."
        )
    for name, shape in zip((starts, stops), full, strict=True):
        object.__setattr__(mask, name, _reshaped(getattr(mask, name), shape))


def check_indices(mask: Any, name: str) -> None:
    """Checks a tuple of static ints; a single int becomes a tuple."""
    value, label = getattr(mask, name), f"{type(mask).__name__}.{name}"
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{label} must be a tuple of Python ints, got a JAX array. "
            "For global tokens that change from batch to batch, use `q_flags` and `kv_flags`."
        )
    if not np.iterable(value):
        value = (value,)
    try:
        indices = tuple(operator.index(i) for i in value)
    except TypeError:
        raise TypeError(f"{label} must be a tuple of ints, got {getattr(mask, name)!r}.") from None
    if any(abs(i) > FAR for i in indices):
        raise ValueError(f"{label} must be positions within ±{FAR} (2**30 - 1), got {max(indices, key=abs)}.")
    object.__setattr__(mask, name, indices)


def check_masks(mask: Any, name: str, kind: type) -> None:
    """Checks a non-empty sequence of masks; it becomes a tuple."""
    value, label = getattr(mask, name), f"{type(mask).__name__}.{name}"
    if not isinstance(value, Sequence) or not value or not all(isinstance(m, kind) for m in value):
        raise TypeError(f"{label} must be a non-empty sequence of masks, one per head, got {value!r}.")
    object.__setattr__(mask, name, tuple(value))


def check_custom(fn: Any, bounds: Any, arrays: int, batch: Any, heads: Any) -> None:
    """Checks the functions of `Custom`, and the numbers of rows and heads; `bounds` may be None."""
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
            raise ValueError(f"Custom.{name} must be at most {FAR} (2**30 - 1), got {value}.")
        if value > 1 and not takes_rows_and_heads(fn, arrays):
            raise ValueError(
                f"Custom.{name} is {value}, but the function takes only positions. Give it the batch row and the head "
                "as first parameters, `fn(b, h, q, k, *arrays)`, or leave `batch` and `heads` out."
            )


def takes_rows_and_heads(fn: Any, arrays: int, name: str = "fn") -> bool:
    """Whether a user's function takes (b, h, q, k, *arrays) instead of (q, k, *arrays)."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a function written in C, such as NumPy's functions of two arrays
        return False
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required, accepted = sum(p.default is p.empty for p in named), float(len(named))
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        accepted = math.inf
    fits_two, fits_four = required <= 2 + arrays <= accepted, required <= 4 + arrays <= accepted
    if fits_two and (required <= 2 or not fits_four):
        return False
    if fits_four and not fits_two:
        return True
    label = getattr(fn, "__name__", repr(fn))
    if fits_two:
        two, four = parameter_lists(arrays)
        raise TypeError(
            f"Custom.{name}: {label} accepts both `{two}` and `{four}`, so it is unclear which of them to pass. Wrap "
            f"{label} in a function that takes only one of these lists."
        )
    problem = f"has {counted(required, 'required parameter')}"
    if accepted < 2 + arrays:
        problem = f"takes at most {counted(len(named), 'parameter')}"
    raise TypeError(
        f"Custom.{name}: {label} {problem}. With {counted(arrays, 'array')}, the function must take "
        f"{parameter_forms(arrays)}. Wrap {label} in such a function."
    )


def counted(count: int, noun: str) -> str:
    """A number and its noun: "1 array", "2 arrays"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def parameter_forms(arrays: int, noun: str = "parameters") -> str:
    """The two lists of parameters that a user's function may have, in words.

    Example:
        >>> parameter_forms(0), parameter_forms(1)
        ('2 parameters, `(q, k)`, or 4, `(b, h, q, k)`', '3 parameters, `(q, k, array)`, or 5, `(b, h, q, k, array)`')
    """
    two, four = parameter_lists(arrays)
    return f"{2 + arrays} {noun}, `{two}`, or {4 + arrays}, `{four}`"


def parameter_lists(arrays: int) -> tuple[str, str]:
    """The two lists of parameters, without and with the batch row and the head.

    Example:
        >>> parameter_lists(1)
        ('(q, k, array)', '(b, h, q, k, array)')
    """
    names = ["array"]
    if arrays != 1:
        names = [f"array{i}" for i in range(1, arrays + 1)]
    return f"({', '.join(['q', 'k', *names])})", f"({', '.join(['b', 'h', 'q', 'k', *names])})"


def check_lowered(rule: Any, lowered: Any) -> None:
    """Checks the result of a user's `lower`: a mask other than the rule itself."""
    from longspan.masks.base import Mask

    label = f"{type(rule).__name__}.lower()"
    if lowered is rule:
        raise ValueError(f"{label} returned the rule itself. Return other masks, or define `allowed(q, kv)` instead.")
    if isinstance(lowered, Mask):
        return
    cure = "Return a mask, for example `Compare(...)` or `ls.Full()`."
    if is_array(lowered):
        cure = "Return `ls.Dense(array)` for an array of bools."
    elif callable(lowered):
        cure = "Return `ls.Custom(fn)` for a function of positions."
    raise TypeError(f"{label} must return a Mask, got {type(lowered).__name__}. {cure}")


def check_bools(mask: Any, function: str, *dtypes: Any) -> None:
    """Checks that a user's function returned bools, not numbers meant for the scores."""
    for dtype in dtypes:
        if not _is_bool(dtype):
            raise TypeError(
                f"{mask!r}: {function} must return bools, got {dtype}. Compare, e.g. `values != 0`. To add numbers to "
                "the scores, use a bias: `bias=ls.ScoreBias(fn)`."
            )


def check_truth(got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Checks the shape a user's function returned: that of the positions, or one row per batch row or head."""
    sizes = zip((1,) * (4 - len(got)) + got, expected, strict=False)
    if len(got) > 4 or any(n not in (1, size) and not (axis < 2 and size == 1) for axis, (n, size) in enumerate(sizes)):
        raise ValueError(
            f"Custom's function returned shape {got} for positions of shape {expected}. It must return one truth value "
            "for every pair of positions: compare the positions, and index arrays with q or k."
        )


def check_slots(mask: Any, q: Any, kv: Any, q_len: int | None, kv_len: int | None) -> tuple[Any, Any]:
    """Checks the slots that a mask is cut to; returns them as int32 [B or 1, n], or None for all slots."""
    found = _slots("q", q, q_len), _slots("kv", kv, kv_len)
    batches = {slots.shape[0] for slots in found if slots is not None} | {mask.batch}
    if len(batches - {1}) > 1:
        raise ValueError(
            "The slots and the mask's arrays must have the same number of batch rows, or 1, got "
            f"{' and '.join(map(str, sorted(batches - {1})))}. Give one row of slots for all batch rows, or as many "
            "as the mask has."
        )
    return found


def _slots(name: str, slots: Any, length: int | None) -> Any:
    if slots is None:
        return None
    if not isinstance(slots, np.ndarray | jax.Array):
        if not isinstance(slots, Sequence) or isinstance(slots, str):
            raise TypeError(
                f"`{name}` must be the slots (array indices) to keep, ints [n] or [B, n], got {type(slots).__name__}."
            )
        if len(slots) == 0:
            slots = np.zeros(0, np.int32)
        slots = np.asarray(slots)
    if not is_int(slots):
        raise TypeError(
            f"`{name}` must hold the indices of the slots to keep, got dtype {slots.dtype}. Convert flags with "
            "`np.flatnonzero`."
        )
    if slots.ndim not in (1, 2):
        raise ValueError(f"`{name}` must be slots [n] or [B, n], got shape {tuple(slots.shape)}.")
    if isinstance(slots, np.ndarray) and slots.size:
        if length is None:
            length = FAR
        least, greatest = int(slots.min()), int(slots.max())
        if least < 0 or greatest >= length:
            raise ValueError(
                f"`{name}` keeps slots from {least} to {greatest}, but the slots are numbered from 0 to {length - 1}."
            )
    slots = slots.astype(np.int32)
    if slots.ndim == 1:
        return slots.reshape(1, -1)
    return slots


def _is_bool(dtype: Any) -> bool:
    # PyTorch's, because FlexAttention evaluates rules with its tensors.
    return str(dtype) == "torch.bool" or np.issubdtype(dtype, np.bool_)


def _least(value: Any) -> int | None:
    """The least of some numbers; None if there are none, or if they are not known."""
    if isinstance(value, int):
        return value
    if not is_known(value) or not value.size:
        return None
    return int(np.asarray(value).min())


def clipped_to_int32(value: Any) -> Any:
    """Numbers as int32, clipped to ±FAR: larger ones have the same effect, because no position lies further."""
    if value.dtype == np.int32:
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, np.int32, sharding=value.sharding)
    if value.dtype.itemsize >= 4:  # narrower dtypes cannot exceed FAR
        xp, least = np, -FAR
        if isinstance(value, jax.Array):
            xp = jnp
        if np.issubdtype(value.dtype, np.unsignedinteger):
            least = 0
        value = xp.asarray(xp.clip(value, least, FAR))
    return value.astype(np.int32)


def _reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    if tuple(array.shape) == shape:
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, array.dtype)
    return array.reshape(shape)


def _axes(axes: str) -> str:
    readable = {"B": "B or 1", "T": "T", "S": "S", "N": "N or 1", "Q": "q blocks", "K": "kv blocks", "r": "r"}
    return "] or [".join(", ".join(readable[a] for a in option) for option in axes.split(" or "))
