"""What the methods of a cache check of their arguments, in words."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import FAR
from longspan.cache.lifetimes import compared
from longspan.cache.plan import CachePlan
from longspan.checks import FLOATS, check_extents, is_int, is_known, to_int32
from longspan.masks import Mask

if TYPE_CHECKING:
    from longspan.cache.store import Cache


def check_dtype(dtype: Any) -> None:
    """Keys and values are floats."""
    name = getattr(jnp.dtype(dtype), "name", dtype)
    if name not in FLOATS:
        raise TypeError(f"`dtype` must be one of {', '.join(FLOATS)}, got {name}.")


def check_new(cache: "Cache", k: Any, v: Any) -> None:
    """New keys and values have the cache's rows, heads and head sizes."""
    for name, x, like in (("k", k, cache.k), ("v", v, cache.v)):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"`{name}` must be an array [B, n, K, H], got {type(x).__name__}.")
        B, _, K, H = like.shape
        if len(x.shape) != 4 or (x.shape[0], *x.shape[2:]) != (B, K, H):
            raise ValueError(
                f"`{name}` must have shape [B, n, K, H] with this cache's B, K and H = {B}, {K} and {H}, got "
                f"{tuple(x.shape)}."
            )
        if x.dtype.name not in FLOATS:
            raise TypeError(f"`{name}` must be one of {', '.join(FLOATS)}, got {x.dtype}.")
    if k.shape[1] != v.shape[1] or k.shape[1] < 1:
        raise ValueError(
            f"`k` and `v` must have the same number of new tokens, at least one, got {k.shape[1]} and {v.shape[1]}."
        )


def check_lengths(lengths: Any, batch: int, count: int) -> jax.Array:
    """How many of `count` tokens each row has, int32 [B]; what is traced may lie outside of that."""
    if not hasattr(lengths, "shape") or tuple(lengths.shape) != (batch,) or not is_int(lengths):
        raise ValueError(f"`lengths` must be ints of shape [{batch}], one per row, got {_told(lengths)}.")
    if is_known(lengths) and ((np.asarray(lengths) < 0) | (np.asarray(lengths) > count)).any():
        raise ValueError(
            f"`lengths` must lie between 0 and the {count} tokens that are appended, got "
            f"{np.asarray(lengths).tolist()}."
        )
    return jnp.clip(to_int32(lengths, jnp), -1, count + 1)


def check_rollback(cache: "Cache", n: Any) -> tuple[Any, jax.Array]:
    """How many tokens to take back, and which rows cannot; outside jit those are an error."""
    batch = cache.length.shape[0]
    n = np.asarray(n) if type(n) is int else n
    if not hasattr(n, "shape") or tuple(n.shape) not in ((), (batch,)) or not is_int(n):
        raise ValueError(f"`n` must be an int, or ints of shape [{batch}], one per row, got {_told(n)}.")
    n = n if isinstance(n, jax.Array) else np.asarray(np.clip(np.asarray(n, np.int64), -FAR, FAR), np.int32)
    if is_known(n) and (np.asarray(n) < 0).any():
        raise ValueError(f"`n` must be at least 0, got {np.asarray(n).min()}.")
    plan, tied = cache.plan, cache.tables[2]
    n = jnp.broadcast_to(to_int32(n, jnp), (batch,))
    left = cache.length - n
    # What was overwritten on the way to `furthest` is gone, also if rollbacks came in between.
    bad = (n < 0) | (left < (jnp.maximum(cache.furthest - plan.slack, 0) if plan.evicts else 0))
    if tied is not None:
        bad |= (n > 0) & (left < plan.length) & plan.outline.at(tied, jnp.clip(left, 0, plan.length - 1), jnp)
    if is_known(bad) and bad.any():
        row = int(np.argmax(np.asarray(bad)))
        _refuse_rollback(cache, row, int(n[row]))
    return n, bad


def _refuse_rollback(cache: "Cache", row: int, back: int) -> None:
    plan, length, furthest = cache.plan, int(cache.length[row]), int(cache.furthest[row])
    left, kept = length - back, np.asarray(cache.positions[row])
    if back > length:
        raise ValueError(f"Row {row} has {length} tokens, and {back} are to be taken back.")
    if plan.evicts and left < furthest - plan.slack:
        raise ValueError(
            f"Going back to {left} tokens would need keys that were evicted: this cache was planned with "
            f"slack={plan.slack}, row {row} has been at {furthest} tokens, and the oldest position that it keeps is "
            f"{int(kept.min(initial=length))}. Plan with `slack={furthest - left}` or more."
        )
    raise ValueError(
        f"{plan.mask!r} lets position {left - 1} see position {left}, so they cannot be told apart by a rollback: take "
        "back whole chunks, and a prefix at once."
    )


def check_rows(rows: Any, batch: int) -> Any:
    """Which rows a fork takes, int [n]."""
    if not hasattr(rows, "shape") or len(rows.shape) != 1 or not is_int(rows):
        raise ValueError(f"`rows` must be ints of shape [n], got {_told(rows)}.")
    if is_known(rows) and ((np.asarray(rows) < 0) | (np.asarray(rows) >= batch)).any():
        raise ValueError(f"`rows` must lie between 0 and {batch - 1}, got {np.asarray(rows).tolist()}.")
    return rows


def check_mask(plan: CachePlan, mask: Any, batch: int) -> None:
    """A mask that is attended with sees no key after the plan has given its slot away."""
    if not isinstance(mask, Mask):
        raise TypeError(f"`mask` must be a Mask, got {type(mask).__name__}.")
    check_extents(mask, q_len=plan.length, kv_len=plan.length, batch=batch)
    if jax.tree.structure(mask) == jax.tree.structure(plan.mask):
        return
    mine, theirs = compared(plan.mask, mask, plan.length)
    longer = theirs.last > mine.last
    if longer.any():
        at = int(np.argmax(longer))
        raise ValueError(
            f"This cache was planned for {plan.mask!r}, which needs key {mine.outline.keys[at]} until query "
            f"{mine.last[at]}, but {mask!r} may see it until query {theirs.last[at]}. Plan with the mask that you "
            "attend with."
        )
    if (theirs.tied & ~mine.tied).any():
        raise ValueError(
            f"This cache was planned for {plan.mask!r}; {mask!r} lets queries see later keys that it does not keep "
            "together. Plan with the mask that you attend with."
        )


def _told(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") and hasattr(x, "dtype") else repr(x)


def check_drawable(cache: "Cache", batch: int) -> None:
    """Values are known, and there is such a row."""
    if not is_known(cache.positions):
        raise TypeError("A picture needs values, which are not known while tracing. Draw outside jit.")
    if cache.positions.ndim != 2:
        raise ValueError(
            f"This cache holds those of several layers, {cache.positions.shape[0]} of them: draw one, "
            "`jax.tree.map(lambda x: x[0], cache).show()`."
        )
    rows = cache.positions.shape[0]
    if not 0 <= batch < rows:
        raise IndexError(f"batch={batch} is out of range: the cache has {rows} rows.")
