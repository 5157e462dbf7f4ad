"""Argument checks shared by several modules. Each message names the expected value, the given one and the fix."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.core import Tracer

from longspan.array_types import FAR, F, Namespace

INT32 = np.iinfo(np.int32)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises a ValueError that lists the choices, unless `value` is one of them."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(repr(c) for c in choices)}.")


def renamed_argument(old: str, new: str) -> Callable[[F], F]:
    """Decorator: the function also accepts the keyword `old` for `new`. Its signature and its docs list only `new`."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def renaming(*args: Any, **kwargs: Any) -> Any:
            if old in kwargs:
                if new in kwargs:
                    raise ValueError(f"`{old}` is the former name of `{new}`: give only `{new}`.")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return cast(F, renaming)

    return decorate


def check_lengths(q_len: Any, kv_len: Any) -> None:
    """Checks that both lengths are Python ints from 0 to FAR, so that adding slot indices never overflows int32."""
    for name, value in (("q_len", q_len), ("kv_len", kv_len)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise TypeError(
                f"{name} must be a Python int (it sets array shapes), got {value!r} ({type(value).__name__})."
            )
        if value < 0:
            raise ValueError(f"{name} must be >= 0, got {value}.")
        if value > FAR:
            raise ValueError(f"{name} must be at most {FAR} (2**30 - 1), got {value}. Split the sequence.")


def check_tiles(q_tile: Any, kv_tile: Any) -> None:
    """Raises a ValueError unless both tile sizes are ints of at least 1."""
    for name, value in (("q_tile", q_tile), ("kv_tile", kv_tile)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a Python int >= 1, got {value!r}.")
        if value > FAR:
            raise ValueError(
                f"{name} must be at most {FAR} (2**30 - 1), got {value}. Give at most the length of the sequence."
            )


def check_extents(
    mask: Any, *, q_len: int, kv_len: int, batch: int | None = None, heads: int | None = None, whole: Any = None
) -> None:
    """Checks that the sizes of a mask's arrays agree with each other and with the call.

    If the call has some rows and heads of `whole` = (all rows, all heads), arrays may have the sizes of either.
    """
    lengths = {"T": q_len, "S": kv_len}
    names = {"T": "queries", "S": "keys", "B": "batch rows", "N": "query heads"}
    seen: dict[str, Any] = {}
    for extent in mask.extents():
        name, axis, size, unit = extent
        if axis in lengths:
            if size != -(-lengths[axis] // unit):
                raise ValueError(_wrong_extent(extent, lengths[axis], names[axis]))
            continue
        wanted = heads
        if axis == "B":
            wanted = batch
        if size == 1:
            continue
        if whole is not None:
            in_all = whole["BN".index(axis)]
            if size not in (wanted, in_all):
                raise ValueError(
                    f"{name} has {size} {names[axis]}, but this shard has {wanted} of {in_all}. Give "
                    f"{_one_of(1, wanted, in_all)}."
                )
            continue
        if wanted is not None and size != wanted:
            raise ValueError(f"{name} has {size} {names[axis]}, but the call has {wanted}. Give {_one_of(1, wanted)}.")
        other = seen.setdefault(axis, extent)
        if other.size != size:
            raise ValueError(
                f"{name} has {size} {names[axis]}, but {other.name} has {other.size}. The two numbers must be equal."
            )


def _wrong_extent(extent: Any, length: int, noun: str) -> str:
    """The message for an array that covers another number of queries or keys than the call has."""
    name, _, size, unit = extent
    wanted = -(-length // unit)
    covers, needs = f"{size} {noun}", f"{wanted} {noun}"
    if unit != 1:
        covers = f"{size} blocks of {unit} {noun}"
        needs = f"{wanted} {'block' if wanted == 1 else 'blocks'} of {unit} {noun}"
    cure = f"Create the mask with an array for {needs}"
    if size > wanted:
        cure += ", or cut the mask with `mask.cut(...)`"
    return f"{name} covers {covers}, but the call has {length} {noun}. {cure}."


def _one_of(*sizes: Any) -> str:
    """The distinct sizes, in words: "1", "1 or 3", "1, 3 or 6"."""
    *first, last = dict.fromkeys(map(str, sizes))
    return " or ".join([", ".join(first), last] if first else [last])


def check_sides(mask: Any, q_len: Any, kv_len: Any, q_positions: Any, kv_positions: Any) -> int:
    """Checks that lengths, a mask's arrays and positions agree; returns the number of distinct batch rows."""
    check_lengths(q_len, kv_len)
    check_extents(mask, q_len=q_len, kv_len=kv_len)
    batch = mask.batch
    for name, positions, length in (("q_positions", q_positions, q_len), ("kv_positions", kv_positions, kv_len)):
        expected = None
        if batch != 1:
            expected = batch
        batch = max(batch, check_positions(name, positions, length, expected))
    return batch


def check_positions(name: str, positions: Any, length: int, batch: int | None) -> int:
    """Checks positions [L], [1, L] or [B, L], with any B if `batch` is None; returns the number of distinct rows.

    Positions lie within ±FAR, so that engines can add distances to them. The maximum of int32 is also legal for keys:
    it is after every query. Traced positions are not checked: those beyond ±FAR are clipped (see `to_int32`).
    """
    if positions is None:
        return 1
    if not is_array(positions) or not is_int(positions):
        got = type(positions).__name__
        if is_array(positions):
            got = f"dtype {positions.dtype}"
        raise TypeError(f"{name} must be an int array, got {got}. Cast it with `.astype('int32')`.")
    if positions.ndim == 3:
        raise ValueError(
            f"{name} has shape {tuple(positions.shape)}, but must have shape [{length}] or [B, {length}]. Positions "
            "cannot differ between heads. Use a `PerHead` of shifted masks instead, for example `PerHead((Causal(), "
            "Causal(3)))`."
        )
    if positions.ndim not in (1, 2) or positions.shape[-1] != length:
        raise ValueError(
            f"{name} must have shape [{length}] or [B, {length}] (one position per slot), got {tuple(positions.shape)}."
        )
    _check_range(name, positions)
    rows = 1
    if positions.ndim == 2:
        rows = positions.shape[0]
    if rows != 1 and batch is not None and rows != batch:
        raise ValueError(f"{name} has {rows} batch rows, but the call has {batch}. Give {_one_of(1, batch)}.")
    return rows


def _check_range(name: str, positions: Any) -> None:
    if not is_known(positions) or not positions.size or positions.dtype.itemsize < 4:
        return
    values = np.asarray(positions)
    if name == "kv_positions":
        values = values[values != INT32.max]
    least, greatest = int(np.min(values, initial=0)), int(np.max(values, initial=0))
    if least < -FAR or greatest > FAR:
        raise ValueError(
            f"{name} must lie within ±{FAR} (2**30 - 1), got positions from {least} to {greatest}. If the mask depends "
            "only on distances (Causal, Window), subtract the same number from the positions of queries and keys."
        )


def to_int32(positions: Any, xp: Namespace) -> Any:
    """Positions as int32. Wider positions saturate: traced ones were not checked, and must not wrap around."""
    positions = xp.asarray(positions)
    if positions.dtype.itemsize >= 4 and positions.dtype != np.int32:
        least = INT32.min
        if np.issubdtype(positions.dtype, np.unsignedinteger):
            least = 0
        positions = xp.clip(positions, least, INT32.max)
    return positions.astype(np.int32)


def ids_as_int32(label: str, ids: Any) -> Any:
    """Ids as int32, which engines compare. Raises if two different ids could become equal."""
    if ids.dtype == np.int32:
        return ids
    if isinstance(ids, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(ids.shape, np.int32, sharding=ids.sharding)
    if ids.dtype.itemsize >= 4 and not is_known(ids):
        raise TypeError(
            f"{label} has dtype {ids.dtype}. Its values cannot be checked, because the array is traced, or lies partly "
            "on other hosts. Such an array must be int32, because a cast to 32 bits could make two different ids "
            "equal. Renumber the ids before jit, or cast them with `.astype('int32')` if they fit into 32 bits."
        )
    if ids.dtype.itemsize >= 4 and ids.size:
        known = np.asarray(ids)  # NumPy, because JAX may be tracing
        least, greatest = int(known.min()), int(known.max())
        if least < INT32.min or greatest > INT32.max:
            raise ValueError(
                f"{label} must fit into 32 bits, got numbers from {least} to {greatest}. Renumber them, for example "
                "with `np.unique(array, return_inverse=True)[1].reshape(array.shape)`."
            )
    return ids.astype(np.int32)


def is_abstract(value: Any) -> bool:
    """Whether a value has a shape but no values: it is traced, or a `ShapeDtypeStruct`."""
    return isinstance(value, jax.ShapeDtypeStruct | Tracer)


def is_known(array: Any) -> bool:
    """Whether the values of an array can be read now: it is not traced, and not on other hosts."""
    return not is_abstract(array) and (isinstance(array, np.ndarray) or array.is_fully_addressable)


def number_of(value: Any) -> int | float | None:
    """A Python number, a NumPy number or an array of shape () as a Python number; else None.

    Bools and traced arrays give None.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    if not isinstance(value, np.generic | np.ndarray | jax.Array) or value.shape != () or is_abstract(value):
        return None
    if value.dtype.name not in FLOATS and not is_int(value):
        return None
    return value.item()


def is_array(value: Any) -> bool:
    """Whether a value is an array or a `ShapeDtypeStruct`."""
    return isinstance(value, np.ndarray | jax.Array | jax.ShapeDtypeStruct)


def is_int(value: Any) -> bool:
    """Whether an array holds integers."""
    return np.issubdtype(value.dtype, np.integer)


FLOATS = ("float16", "bfloat16", "float32", "float64")


# Arguments of `jax.nn.dot_product_attention`, and the masks that replace them.
TRANSLATED = {
    "is_causal": "mask=ls.Causal()",
    "local_window_size": "mask=ls.Window(left, right)",
    "key_value_seq_lengths": "mask=ls.KvLengths(lengths)",
    "query_seq_lengths": "mask=ls.QLengths(lengths)",
}


def hint_keywords(function: F) -> F:
    """Wraps a function so that a keyword of another library raises an error that names the mask to pass instead.

    A wrapper, because `**unknown` in the signature itself would show in `help` and in the docs.
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not known.keys() >= kwargs.keys():
            check_keywords(function.__name__, [name for name in kwargs if name not in known])
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def check_keywords(function: str, unknown: Sequence[str]) -> None:
    """Raises for unknown keyword arguments. For those of `jax.nn` the message names the mask to use instead."""
    for name in unknown:
        if name not in TRANSLATED:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        translated = [other for other in unknown if other in TRANSLATED]
        more = ""
        if len(translated) > 1:
            masks = " & ".join(TRANSLATED[other].removeprefix("mask=") for other in translated)
            more = f" For {' and '.join(map(repr, translated))} together, give `mask={masks}`."
        raise TypeError(f"{function}() has no argument {name!r}. Give `{TRANSLATED[name]}` instead.{more}")


def with_batch(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Adds a batch axis of size 1 to q, k and v if all three lack one."""
    ranks = [len(x.shape) for x in (q, k, v) if hasattr(x, "shape")]
    if len(ranks) == 3 and 3 in ranks and len(set(ranks)) > 1:
        raise ValueError(
            "Either all of `q`, `k` and `v` must have a batch axis, or none of them, got shapes "
            f"{', '.join(str(tuple(x.shape)) for x in (q, k, v))}. Add the axis with `x[None]`."
        )
    if ranks != [3, 3, 3]:
        return q, k, v
    return _one_row(q), _one_row(k), _one_row(v)


def _one_row(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
    return x[None]


def check_heads(name: str, x: Any, axes: str = "[B, T, N, H]") -> None:
    """Checks that `x` is a rank-4 array of a supported float dtype."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"`{name}` must be an array {axes}, got {type(x).__name__}.")
    if len(x.shape) != 4:
        raise ValueError(
            f"`{name}` must have shape {axes}, got rank {len(x.shape)} (shape {tuple(x.shape)}). "
            "Add the batch axis with `x[None]`, or split heads with `x.reshape(B, T, N, H)`."
        )
    if getattr(x.dtype, "name", None) not in FLOATS:  # dtypes of other libraries may have no name
        raise TypeError(f"`{name}` must be one of {', '.join(FLOATS)}, got {x.dtype}. Cast it with `.astype(...)`.")


def check_qkv(q: Any, k: Any, v: Any) -> None:
    """Checks queries [B,T,N,H], keys [B,S,K,H] and values [B,S,K,Hv] of one float dtype."""
    for name, x, axes in (("q", q, "[B, T, N, H]"), ("k", k, "[B, S, K, H]"), ("v", v, "[B, S, K, Hv]")):
        check_heads(name, x, axes)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"`q`, `k` and `v` must share a dtype, got {q.dtype}, {k.dtype} and {v.dtype}.")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "`k` and `v` must have the same batch, length and heads, [B, S, K, H] and [B, S, K, Hv], got "
            f"{tuple(k.shape)} and {tuple(v.shape)}."
        )
    (batch, _, heads, size), (kv_batch, _, kv_heads, kv_size) = q.shape, k.shape
    if batch != kv_batch:
        raise ValueError(f"`q` has batch size {batch} and `k` has batch size {kv_batch}. The two sizes must be equal.")
    if size != kv_size:
        raise ValueError(f"`q` has head size {size} and `k` has head size {kv_size}. The two sizes must be equal.")
    if heads != 0 and (kv_heads == 0 or heads % kv_heads != 0):
        raise ValueError(
            f"`q` has {heads} heads and `k` has {kv_heads}. The number of query heads must be a multiple of the "
            "number of key/value heads. Repeat `k` and `v`, or change the number of key/value heads."
        )


def check_broadcast(name: str, array: Any, shape: Sequence[int], *, kind: str) -> tuple[int, ...]:
    """Checks that an array of rank 2 or 4 broadcasts to [B,N,T,S]; returns its shape as rank 4."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(f"`{name}` must be an array, got {type(array).__name__}. Convert it with `jnp.asarray`.")
    if kind == "bool":
        is_kind = array.dtype == bool
        cure = (
            "If it holds 1 (allowed) and 0, give `mask != 0`. If it is additive (0 and large negative numbers), give "
            "it as `bias`."
        )
    else:
        is_kind = array.dtype.name in FLOATS
        cure = (
            "If it is a mask, give it as `mask`, with bools. If it is added to the scores, cast it with `.astype(...)`."
        )
    if not is_kind:
        raise TypeError(f"`{name}` as an array must be {kind}, got {array.dtype}. {cure}")
    if array.ndim == 3:
        raise ValueError(
            f"`{name}` has rank 3, shape {tuple(array.shape)}, which could be [B, T, S] or [N, T, S]. "
            f"Add the missing axis: `{name}[:, None]` for one per batch row, `{name}[None]` for one per head."
        )
    full = (1,) * (4 - array.ndim) + tuple(array.shape)
    if array.ndim not in (2, 4) or any(n not in (1, m) for n, m in zip(full, shape, strict=True)):
        raise ValueError(
            f"`{name}` must be broadcastable to [B, N, T, S] = {list(shape)} (or be [T, S]), got shape "
            f"{tuple(array.shape)}."
        )
    return full


def check_bound_lengths(what: str, mine: Sequence[int], call: Sequence[int]) -> None:
    """Checks that a mask bound to (or planned for) some lengths is called with these lengths."""
    if tuple(mine) != tuple(call):
        raise ValueError(
            f"This {what} is for {mine[0]} queries and {mine[1]} keys, but the call has {call[0]} queries and "
            f"{call[1]} keys. Make a {what} for the lengths of the call."
        )


def check_static_size(name: str, value: Any, least: int) -> int:
    """Checks a Python int that sets array shapes, and returns it."""
    if isinstance(value, jax.Array):
        raise TypeError(
            f"`{name}` sets array shapes, so it must be a Python int, got an array. Convert it with `int(...)` outside "
            "jit, or name it in `static_argnames`."
        )
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{name}` must be a Python int >= {least}, got {value!r}.")
    return int(value)
