"""Every check at the public edge, and its message: what was expected, what came, what to do."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer


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
            if size != blocks:
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
        raise TypeError(f"{name} must be an int array, got {got}.")
    if positions.ndim not in (1, 2) or positions.shape[-1] != length:
        raise ValueError(
            f"{name} must have shape [{length}] or [B, {length}] (one position a slot), got {tuple(positions.shape)}."
        )
    rows = positions.shape[0] if positions.ndim == 2 else 1
    if rows != 1 and batch is not None and rows != batch:
        raise ValueError(f"{name} has {rows} batch rows, but the call has {batch}. Give one, or {batch}.")
    return rows


def is_array(value: Any) -> bool:
    """An array, or the shape of one."""
    return isinstance(value, np.ndarray | jax.Array | jax.ShapeDtypeStruct)


def is_int(value: Any) -> bool:
    """Whether an array holds integers."""
    return np.issubdtype(value.dtype, np.integer)


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


def check_sinks(sinks: Any, heads: int) -> None:
    if not hasattr(sinks, "shape") or tuple(sinks.shape) != (heads,) or sinks.dtype.name not in FLOATS:
        got = f"shape {tuple(sinks.shape)}, {sinks.dtype}" if hasattr(sinks, "shape") else type(sinks).__name__
        raise ValueError(f"`sinks` must be one float logit a query head, shape [{heads}], got {got}.")


def check_dropout(rate: Any, key: Any) -> None:
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate < 1:
        raise ValueError(f"`dropout_rate` must be a Python float in [0, 1), got {rate!r}.")
    if rate > 0 and key is None:
        raise ValueError(f"dropout_rate={rate} needs a `dropout_key`. Pass `dropout_key=jax.random.key(seed)`.")


def check_soft_cap(soft_cap: Any) -> None:
    if soft_cap is not None and (not isinstance(soft_cap, int | float) or not soft_cap > 0):
        raise ValueError(f"`soft_cap` must be a Python float > 0 or None, got {soft_cap!r}.")


def check_scale(scale: Any) -> None:
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    shape, dtype = getattr(scale, "shape", None), getattr(scale, "dtype", None)
    if scale is not None and not number and (shape != () or getattr(dtype, "name", None) not in FLOATS):
        raise ValueError(f"`scale` must be a float or a float array of shape (), got {scale!r}.")


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


def check_bigbird_blocks(q_len: Any, kv_len: Any, block_size: Any) -> int:
    """How many blocks BigBird's tokens fill: at least 5, as many for queries as for keys."""
    size = check_static_size("block_size", block_size, 1)
    q_len, kv_len = check_static_size("seq_len", q_len, 0), check_static_size("seq_len", kv_len, 0)
    if q_len != kv_len:
        raise ValueError(
            f"BigBird needs as many query blocks as key blocks, got {q_len} queries and {kv_len} keys. Use it for "
            "self-attention only."
        )
    if q_len % size:
        raise ValueError(
            f"BigBird needs a length that is a multiple of block_size={size}, got {q_len}. Pad it to "
            f"{-(-q_len // size) * size} tokens and mark the padding in `q_mask` and `kv_mask`."
        )
    if q_len // size < 5:
        raise ValueError(
            f"BigBird needs at least 5 blocks, got {q_len // size} ({q_len} tokens in blocks of {size}). Use full "
            f"attention for so short an input, or block_size <= {q_len // 5}."
        )
    return q_len // size


def check_rand_attn(rand_attn: Any, blocks: int, heads: int | None = None) -> None:
    """BigBird's random blocks, int [N or 1, blocks - 2, r], each one of the blocks (if known here)."""
    wanted = f"ints [{'N' if heads is None else heads} or 1, {blocks - 2}, r]"
    if not is_array(rand_attn):
        raise TypeError(
            f"`rand_attn` must be an array of {wanted}, got {type(rand_attn).__name__}. Make it with "
            "`bigbird_random_blocks(...)`."
        )
    if not is_int(rand_attn):
        raise TypeError(
            f"`rand_attn` must hold {wanted}, got dtype {rand_attn.dtype}. Cast it with `.astype('int32')`."
        )
    shape = tuple(rand_attn.shape)
    if len(shape) != 3 or shape[0] == 0 or shape[1] != blocks - 2 or (heads and shape[0] not in (1, heads)):
        raise ValueError(
            f"`rand_attn` must be {wanted} for {blocks} blocks (no row for the first and the last), got shape {shape}. "
            "Make it with `bigbird_random_blocks(...)` for this length."
        )
    if isinstance(rand_attn, np.ndarray) and rand_attn.size and (rand_attn.min() < 0 or rand_attn.max() >= blocks):
        raise ValueError(
            f"`rand_attn` must name blocks 0 to {blocks - 1}, got {rand_attn.min()} to {rand_attn.max()}. Make it with "
            "`bigbird_random_blocks(...)` for this length."
        )


def check_random_plan(blocks: int, num_random_blocks: int) -> None:
    """Enough blocks for a generated plan of random blocks."""
    least = 2 * num_random_blocks + 6
    if blocks < least:
        raise ValueError(
            f"{num_random_blocks} random blocks need at least 2·{num_random_blocks} + 6 = {least} blocks, got {blocks} "
            "(with fewer, the original fails or repeats blocks). Use full attention for so short an input, or fewer "
            "random blocks."
        )


def check_token_mask(name: str, mask: Any, batch: int, length: int) -> None:
    """A mask of tokens [B or 1, L]: bools, ints or 0/1 floats; True (not 0) = a real token."""
    wanted = f"[{batch}, {length}] (or [1, {length}])"
    if not is_array(mask):
        raise TypeError(f"`{name}` must be an array {wanted}, got {type(mask).__name__}.")
    if not (mask.dtype == bool or is_int(mask) or mask.dtype.name in FLOATS):
        raise TypeError(f"`{name}` must hold bools, ints or 0/1 floats, got dtype {mask.dtype}.")
    if mask.ndim != 2 or mask.shape[0] not in (1, batch) or mask.shape[1] != length:
        raise ValueError(
            f"`{name}` must have shape {wanted}, one entry a token, got {tuple(mask.shape)}. "
            "Drop axes of size 1, e.g. `mask[:, 0, 0, :]`."
        )


def check_zero_one(name: str, mask: Any) -> None:
    """A mask of floats is 0 or 1, not added to scores, as far as that can be known here."""
    if mask.dtype.name not in FLOATS or isinstance(mask, Tracer | jax.ShapeDtypeStruct):
        return
    values = np.asarray(mask).astype(np.float32)
    if not ((values == 0) | (values == 1)).all():
        raise ValueError(
            f"`{name}` must hold 0 (padding) and 1 (a token), got values from {values.min():g} to {values.max():g}. "
            "A mask that is added to scores becomes one of bools by `mask == 0`."
        )


def check_window(window: Any) -> None:
    """Longformer's window: a Python int >= 0, or an int array of shape () or [B]."""
    if is_array(window):
        if not is_int(window) or window.ndim > 1:
            raise TypeError(
                f"`window` must be an int, or an int array of shape () or [B], got {window.dtype} {list(window.shape)}."
            )
    elif not isinstance(window, int | np.integer) or isinstance(window, bool) or window < 0:
        raise ValueError(
            f"`window` must be an int >= 0, the keys on each side of a query, got {window!r}. Hugging Face's "
            "`attention_window` counts both sides: give half of it."
        )


def check_dilation(dilation: Any, heads: int | None = None) -> int | tuple[int, ...]:
    """Longformer's dilation: an int >= 1, or one a head; a tuple or an int."""
    wanted = "an int >= 1, or a sequence of them, one a head"
    if isinstance(dilation, Tracer):
        raise TypeError(f"`dilation` must be {wanted}, got a traced array. It is static: pass Python ints.")
    try:
        values = tuple(operator.index(d) for d in (dilation if np.ndim(dilation) else (dilation,)))
    except TypeError:
        raise TypeError(f"`dilation` must be {wanted}, got {dilation!r}.") from None
    if not values or min(values) < 1 or isinstance(dilation, bool):
        raise ValueError(f"`dilation` must be {wanted}, got {dilation!r}.")
    if not np.ndim(dilation):
        return values[0]
    if heads is not None and len(values) != heads:
        raise ValueError(f"`dilation` has {len(values)} entries, but `q` has {heads} heads. Give one int, or {heads}.")
    return values


def check_global_projections(qkv: Sequence[Any], global_qkv: Sequence[Any]) -> None:
    """The second set of queries, keys and values is shaped like the first."""
    for name, local, other in zip("qkv", qkv, global_qkv, strict=True):
        if other is None:
            raise ValueError(
                f"`{name}_global` is None, but `token_kinds` may hold global tokens. Give all of `q_global`, "
                "`k_global` and `v_global`, or leave `token_kinds` out."
            )
        if getattr(other, "shape", None) != local.shape or other.dtype != local.dtype:
            got = f"{other.dtype} {list(other.shape)}" if hasattr(other, "shape") else type(other).__name__
            raise ValueError(f"`{name}_global` must be like `{name}`, {local.dtype} {list(local.shape)}, got {got}.")


def check_few_random_blocks(choices: int, block: int, num_random_blocks: int) -> None:
    """A legacy draw has enough blocks to choose from."""
    if choices < num_random_blocks:
        raise ValueError(
            f"Block {block} can draw {choices} random blocks, but num_random_blocks={num_random_blocks}. Use fewer "
            "random blocks, a smaller block_size, or a greater max_seq_len."
        )


def check_legacy_length(seq_len: int, max_seq_len: Any) -> None:
    """A legacy length fits into the length that blocks are drawn for."""
    most = check_static_size("max_seq_len", max_seq_len, 1)
    if seq_len > most:
        raise ValueError(
            f"seq_len={seq_len} is a legacy length, whose blocks are drawn for max_seq_len={most}: it must not be "
            "longer. Raise `max_seq_len`, or take the length out of `legacy_lengths`."
        )


def check_token_kinds(token_kinds: Any, batch: int | None = None, length: int | None = None) -> None:
    """Kinds of tokens [B or 1, T]: -1, 0 or +1."""
    wanted = "[B, T]" if batch is None else f"[{batch}, {length}] (or [1, {length}])"
    if not is_array(token_kinds):
        raise TypeError(
            f"`token_kinds` must be an array {wanted} of -1 (padding), 0 (local) and +1 (global), got "
            f"{type(token_kinds).__name__}."
        )
    if not (token_kinds.dtype == bool or is_int(token_kinds) or token_kinds.dtype.name in FLOATS):
        raise TypeError(f"`token_kinds` must hold -1, 0 and +1, got dtype {token_kinds.dtype}.")
    shape = tuple(token_kinds.shape)
    if len(shape) != 2 or (batch is not None and (shape[0] not in (1, batch) or shape[1] != length)):
        raise ValueError(f"`token_kinds` must have shape {wanted}, one kind a token, got {shape}. Add or drop axes.")


def check_same_lengths(q_len: int, kv_len: int) -> None:
    if q_len != kv_len:
        raise ValueError(
            f"Longformer's attention is self-attention: `q` has {q_len} tokens and `k` has {kv_len}, they must agree. "
            "For other lengths use `attention` with `longformer(...)` as its mask."
        )
