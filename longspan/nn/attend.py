"""The core of `SelfAttention` in linen and NNX: rotate, append keys and values to a cache if there is one, attend."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.attend import attention
from longspan.cache import Cache
from longspan.layout import BlockLayout
from longspan.maskinfo import MaskInfo
from longspan.nn.rope import apply_rope, check_rope_positions
from longspan.parallel.sequence_sharding import SequenceSharding

PADDING = np.int32(np.iinfo(np.int32).max)  # the position that MaskInfo gives to padding among keys


def attend(
    q, k, v, *, mask, positions, rope_positions, rope, interleaved: bool, cache, lengths, sharding: SequenceSharding,
    **options,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """The output [B, T, N, H], and the cache with the new tokens (None without a cache)."""
    check_rope_positions(rope, rope_positions)
    if cache is None:
        _check_uncached(lengths)
        q_positions, kv_positions = _positions_for_rope(mask, positions, rope_positions, sharding.positions(q.shape[1]))
        (q,) = apply_rope(rope, interleaved, q_positions, q)
        (k,) = apply_rope(rope, interleaved, kv_positions, k)
        return sharding.attention(q, k, v, mask=mask, q_positions=positions, kv_positions=positions, **options), None
    _check_cached(cache, positions, sharding)
    # The cache stores rotated keys. It will give the new tokens these positions.
    if rope_positions is None:
        rope_positions = cache.length[:, None] + jnp.arange(q.shape[1], dtype=np.int32)[None]
    q, k = apply_rope(rope, interleaved, rope_positions, q, k)
    if mask is None:
        mask = cache.plan.mask
    cache, view = cache.append(k, v, lengths)
    return attention(q, **view.of(mask), **sharding.options, **options), cache


def _positions_for_rope(mask: Any, positions: Any, rope_positions: Any, default: Any) -> tuple[Any, Any]:
    """The positions that queries and keys are rotated by.

    In this order: `rope_positions`, `positions`, those of a `MaskInfo` or `BlockLayout`, the default.
    """
    q_positions = kv_positions = positions
    if rope_positions is not None:
        q_positions = kv_positions = rope_positions
    elif positions is None and isinstance(mask, MaskInfo | BlockLayout):
        q_positions, kv_positions = mask.q_positions, mask.kv_positions
        if kv_positions is not None:
            kv_positions = jnp.where(kv_positions == PADDING, 0, kv_positions)
    if q_positions is None:
        q_positions = default
    if kv_positions is None:
        kv_positions = default
    return q_positions, kv_positions


def _check_uncached(lengths: Any) -> None:
    if lengths is not None:
        raise ValueError(
            "`lengths` are the numbers of new tokens that a `cache` stores, but no `cache` was given. For padding, "
            "give `mask=KvLengths(lengths)`."
        )


def _check_cached(cache: Any, positions: Any, sharding: SequenceSharding) -> None:
    if sharding.mesh is not None:
        raise ValueError(
            "`cache` and `mesh` were both given, but decoding with a cache runs on one device, and `mesh` shards whole "
            "sequences. Give one of them."
        )
    if not isinstance(cache, Cache):
        raise TypeError(f"`cache` must be a Cache, made by `ls.cache.init(plan, ...)`, got {type(cache).__name__}.")
    if positions is not None:
        raise ValueError(
            "`positions` and `cache` were both given, but a cache counts the tokens of each row itself. Leave "
            "`positions` out; give `lengths` for rows that have fewer tokens, and `rope_positions` to rotate by other "
            "positions."
        )
