"""The middle of `SelfAttention`, of both kinds: rotate, keep keys and values in a cache if there is one, attend."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.attend import attention
from longspan.cache import Cache
from longspan.layout import BlockLayout
from longspan.maskinfo import MaskInfo
from longspan.nn.rope import check_rope, turned
from longspan.parallel.sequence_sharding import SequenceSharding

NOWHERE = np.int32(np.iinfo(np.int32).max)  # the position of padding among keys


def attend(
    q, k, v, *, mask, positions, rope_positions, rope, interleaved: bool, cache, lengths, shared: SequenceSharding,
    **options,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """The output [B, T, N, H], and the cache with the new tokens; None without one."""
    check_rope(rope, rope_positions)
    if cache is None:
        _check_uncached(lengths)
        places = _places_of(mask, positions) if rope_positions is None else (rope_positions, rope_positions)
        q_at, kv_at = (shared.positions(q.shape[1]) if at is None else at for at in places)
        (q,), (k,) = turned(rope, interleaved, q_at, q), turned(rope, interleaved, kv_at, k)
        return shared.attention(q, k, v, mask=mask, q_positions=positions, kv_positions=positions, **options), None
    _check_cached(cache, positions, shared)
    # Keys are stored as they are seen: turned by the positions that the cache is about to give them, or by the call's.
    at = cache.length[:, None] + jnp.arange(q.shape[1], dtype=np.int32)[None]
    at = at if rope_positions is None else rope_positions
    q, k = turned(rope, interleaved, at, q, k)
    mask = cache.plan.mask if mask is None else mask
    cache, view = cache.append(k, v, lengths)
    return attention(q, **view.of(mask), **options), cache


def _places_of(mask: Any, positions: Any) -> tuple[Any, Any]:
    """Where queries and keys stand: as the call says, or else the mask that was bound to a batch."""
    if positions is not None or not isinstance(mask, MaskInfo | BlockLayout):
        return positions, positions
    keys = mask.kv_positions
    return mask.q_positions, None if keys is None else jnp.where(keys == NOWHERE, 0, keys)


def _check_uncached(lengths: Any) -> None:
    if lengths is not None:
        raise ValueError(
            "`lengths` say how many of the new tokens a cache keeps, and there is no `cache`. For padding, give "
            "`mask=KvLengths(lengths)`."
        )


def _check_cached(cache: Any, positions: Any, shared: SequenceSharding) -> None:
    if shared.mesh is not None:
        raise ValueError("A `cache` is decoded with on one device; a `mesh` shares whole sequences. Give one of them.")
    if not isinstance(cache, Cache):
        raise TypeError(f"`cache` must be what `ls.cache.init(plan, ...)` gives, got {type(cache).__name__}.")
    if positions is not None:
        raise ValueError(
            "`positions` and `cache` were both given, but a cache counts the tokens of each row itself. Leave "
            "`positions` out, give `lengths` for rows that have fewer tokens, and `rope_positions` for other rotations."
        )
