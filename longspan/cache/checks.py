"""Checks of the arguments of a cache's methods."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import FAR
from longspan.cache.lifetimes import lifetimes_of_both
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


def check_order(heads_first: Any) -> None:
    """The order of heads and slots sets array shapes, so it is a Python bool."""
    if not isinstance(heads_first, bool):
        raise TypeError(f"`heads_first` must be True or False, a Python bool, got {_described(heads_first)}.")


def check_new(cache: "Cache", k: Any, v: Any) -> None:
    """New keys and values have the cache's rows, heads and head sizes."""
    for name, x, like in (("k", k, cache.k), ("v", v, cache.v)):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"`{name}` must be an array [B, n, K, H], got {type(x).__name__}.")
        B, K, H = like.shape[0], like.shape[cache.heads_axis], like.shape[3]
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
    """The number of new tokens in each row, int32 [B]: 0 to `count`, but traced values may be outside that range."""
    if not hasattr(lengths, "shape") or tuple(lengths.shape) != (batch,) or not is_int(lengths):
        raise ValueError(f"`lengths` must be ints of shape [{batch}], one per row, got {_described(lengths)}.")
    if is_known(lengths) and ((np.asarray(lengths) < 0) | (np.asarray(lengths) > count)).any():
        raise ValueError(
            f"`lengths` must lie between 0 and the {count} tokens that are appended, got "
            f"{np.asarray(lengths).tolist()}."
        )
    return jnp.clip(to_int32(lengths, jnp), -1, count + 1)


def check_rollback(cache: "Cache", n: Any) -> tuple[Any, jax.Array]:
    """The number of tokens to remove from each row, and the rows that cannot do so: outside jit, these are an error."""
    batch = cache.length.shape[0]
    if type(n) is int:
        n = np.asarray(n)
    if not hasattr(n, "shape") or tuple(n.shape) not in ((), (batch,)) or not is_int(n):
        raise ValueError(f"`n` must be an int, or ints of shape [{batch}], one per row, got {_described(n)}.")
    if not isinstance(n, jax.Array):
        n = np.asarray(np.clip(np.asarray(n, np.int64), -FAR, FAR), np.int32)
    if is_known(n) and (np.asarray(n) < 0).any():
        raise ValueError(f"`n` must be at least 0, got {np.asarray(n).min()}.")
    plan, tied = cache.plan, cache.tables[2]
    n = jnp.broadcast_to(to_int32(n, jnp), (batch,))
    remaining = cache.length - n
    bad = (n < 0) | (remaining < 0)
    if plan.evicts:
        # Tokens up to `furthest` have overwritten older keys, even if a rollback has removed these tokens since.
        bad |= remaining < cache.furthest - plan.slack
    if tied is not None:
        inside = jnp.clip(remaining, 0, plan.length - 1)
        bad |= (n > 0) & (remaining < plan.length) & plan.outline.at(tied, inside, jnp)
    if is_known(bad) and bad.any():
        row = int(np.argmax(np.asarray(bad)))
        _refuse_rollback(cache, row, int(n[row]))
    return n, bad


def _refuse_rollback(cache: "Cache", row: int, count: int) -> None:
    plan, length, furthest = cache.plan, int(cache.length[row]), int(cache.furthest[row])
    remaining = length - count
    if count > length:
        raise ValueError(f"Row {row} has {length} tokens, so {count} cannot be rolled back. Roll back fewer.")
    if plan.evicts and remaining < furthest - plan.slack:
        raise ValueError(
            f"Row {row} cannot be rolled back to {remaining} tokens: it once held {furthest}, and a cache with "
            f"slack={plan.slack} keeps the keys only for a rollback to {furthest - plan.slack} or more. Plan with "
            f"`slack={furthest - remaining}` or more."
        )
    raise ValueError(
        f"{plan.mask!r} lets position {remaining - 1} attend to position {remaining}, so a rollback must keep both or "
        "remove both. Roll back whole chunks, and a prefix as a whole."
    )


def check_rows(rows: Any, batch: int) -> Any:
    """The rows that a fork copies, int [n]."""
    if not hasattr(rows, "shape") or len(rows.shape) != 1 or not is_int(rows):
        raise ValueError(f"`rows` must be ints of shape [n], got {_described(rows)}.")
    if is_known(rows) and ((np.asarray(rows) < 0) | (np.asarray(rows) >= batch)).any():
        raise ValueError(f"`rows` must lie between 0 and {batch - 1}, got {np.asarray(rows).tolist()}.")
    return rows


def check_mask(plan: CachePlan, mask: Any, batch: int) -> None:
    """The mask of a call allows no key after the plan has evicted it."""
    if not isinstance(mask, Mask):
        raise TypeError(f"`mask` must be a Mask, got {type(mask).__name__}.")
    check_extents(mask, q_len=plan.length, kv_len=plan.length, batch=batch)
    if jax.tree.structure(mask) == jax.tree.structure(plan.mask):
        return
    planned, given = lifetimes_of_both(plan.mask, mask, plan.length)
    longer = given.last > planned.last
    if longer.any():
        at = int(np.argmax(longer))
        key = planned.outline.keys[at]
        raise ValueError(
            f"This cache was planned for {plan.mask!r}, which needs key {key} until query {planned.last[at]}. With "
            f"{mask!r}, later queries up to {given.last[at]} may attend to key {key}. Plan the cache with the mask "
            "of the call."
        )
    if (given.tied & ~planned.tied).any():
        raise ValueError(
            f"{mask!r} lets queries attend to later keys. These keys must be appended together with the queries, but "
            f"this cache was planned for {plan.mask!r}. Plan the cache with the mask of the call."
        )


def check_drawable(cache: "Cache", batch: int) -> None:
    """The cache has values, of one layer, and the row exists."""
    if not is_known(cache.positions):
        raise TypeError("A picture needs values, which are not known while tracing. Call `show` outside jit.")
    if cache.positions.ndim != 2:
        raise ValueError(
            f"This cache stacks {cache.positions.shape[0]} layers. Draw one of them: "
            "`jax.tree.map(lambda x: x[0], cache).show()`."
        )
    rows = cache.positions.shape[0]
    if not 0 <= batch < rows:
        raise IndexError(f"batch={batch} is out of range: the cache has {rows} rows.")


def _described(x: Any) -> str:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{list(x.shape)}"
    return repr(x)
