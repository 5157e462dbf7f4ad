"""What the methods of a cache check of their arguments, in words."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan._checks import FLOATS, is_int
from longspan.cache.lifetimes import lifetimes
from longspan.cache.plan import Plan
from longspan.masks import Mask

if TYPE_CHECKING:
    from longspan.cache.store import Cache


def is_concrete(x: Any) -> bool:
    """Whether an array's values are known here: outside of jit."""
    return not isinstance(x, jax.core.Tracer)


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
    """How many of `count` tokens each row has, int32 [B]; what is traced is brought into range."""
    if not hasattr(lengths, "shape") or tuple(lengths.shape) != (batch,) or not is_int(lengths):
        raise ValueError(f"`lengths` must be ints of shape [{batch}], one per row, got {_told(lengths)}.")
    if is_concrete(lengths) and ((np.asarray(lengths) < 0) | (np.asarray(lengths) > count)).any():
        raise ValueError(
            f"`lengths` must lie between 0 and the {count} tokens that are appended, got "
            f"{np.asarray(lengths).tolist()}."
        )
    return jnp.clip(lengths, 0, count).astype(np.int32)


def check_rollback(cache: "Cache", n: Any) -> tuple[Any, jax.Array]:
    """How many tokens to take back, and which rows cannot; outside jit those are an error."""
    batch = cache.length.shape[0]
    if isinstance(n, int) and not isinstance(n, bool):
        n = np.int32(n)
    if not hasattr(n, "shape") or tuple(n.shape) not in ((), (batch,)) or not is_int(n):
        raise ValueError(f"`n` must be an int, or ints of shape [{batch}], one per row, got {_told(n)}.")
    n = jnp.asarray(n, np.int32)
    most = cache.plan.slack if cache.plan.at_once < 2**30 else cache.plan.length
    bad = (n < 0) | (n > jnp.minimum(most, cache.length))
    bad = jnp.broadcast_to(bad, (batch,))
    if is_concrete(bad) and bad.any():
        _refuse_rollback(cache, np.broadcast_to(np.asarray(n), (batch,)), int(np.argmax(np.asarray(bad))))
    return n, bad


def _refuse_rollback(cache: "Cache", n: np.ndarray, row: int) -> None:
    back, length, kept = int(n[row]), int(cache.length[row]), np.asarray(cache.positions[row])
    if back < 0:
        raise ValueError(f"`n` must be at least 0, got {back}.")
    if back > length:
        raise ValueError(f"Row {row} has {length} tokens, and {back} are to be taken back.")
    oldest = int(kept.min(initial=length))
    raise ValueError(
        f"Going back {back} tokens would need keys that were evicted: this cache was planned with "
        f"slack={cache.plan.slack}, and the oldest position that row {row} keeps is {oldest}. Plan with "
        f"`slack={back}` or more."
    )


def check_rows(rows: Any, batch: int) -> Any:
    """Which rows a fork takes, int [n]."""
    if not hasattr(rows, "shape") or len(rows.shape) != 1 or not is_int(rows):
        raise ValueError(f"`rows` must be ints of shape [n], got {_told(rows)}.")
    if is_concrete(rows) and ((np.asarray(rows) < 0) | (np.asarray(rows) >= batch)).any():
        raise ValueError(f"`rows` must lie between 0 and {batch - 1}, got {np.asarray(rows).tolist()}.")
    return rows


def check_mask(plan: Plan, mask: Any) -> None:
    """A mask that is attended with sees no key after the plan has given its slot away."""
    if not isinstance(mask, Mask):
        raise TypeError(f"`mask` must be a Mask, got {type(mask).__name__}.")
    if jax.tree.structure(mask) == jax.tree.structure(plan.mask):
        return
    mine, theirs = lifetimes(plan.mask, plan.length), lifetimes(mask, plan.length)
    longer = theirs.last > mine.last
    if longer.any():
        key = int(np.argmax(longer))
        raise ValueError(
            f"This cache was planned for {plan.mask!r}, which needs key {key} until query {mine.last[key]}, but "
            f"{mask!r} may see it until query {theirs.last[key]}. Plan with the mask that you attend with."
        )
    if (theirs.tied & ~mine.tied).any():
        raise ValueError(
            f"This cache was planned for {plan.mask!r}; {mask!r} lets queries see later keys that it does not keep "
            "together. Plan with the mask that you attend with."
        )


def _told(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") and hasattr(x, "dtype") else repr(x)
