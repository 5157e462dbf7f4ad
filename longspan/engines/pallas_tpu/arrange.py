"""The order in which the kernels hold arrays: heads before tokens, padded to whole tiles, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.dropout import Dropout, row_words
from longspan.engines.pallas_tpu.plan import TpuPlan
from longspan.layout import BlockLayout

# A finite number that is greater is treated as garbage of an uninitialised buffer: products with it may overflow.
MAX_HARMLESS = 1e15


def queries_by_head(plan: TpuPlan, x: jax.Array) -> jax.Array:
    """[B, T, N, X] as [B, heads, group, padded T, X]."""
    x = _pad_queries(plan, x)
    return x.reshape(plan.B, -1, plan.heads, plan.group, x.shape[3]).transpose(0, 2, 3, 1, 4)


def queries_back(plan: TpuPlan, x: jax.Array) -> jax.Array:
    """[B, heads, group, padded T, X] as [B, T, N, X]."""
    return x.transpose(0, 3, 1, 2, 4).reshape(plan.B, -1, plan.N, x.shape[4])[:, : plan.T]


def keys_by_head(plan: TpuPlan, x: jax.Array) -> jax.Array:
    """[B, S, K, X] as [B, K, padded S, X]. The transpose of a heads-first cache cancels with this one."""
    return _pad(x.transpose(0, 2, 1, 3), 2, plan.kv_tiles * plan.kv_tile)


def keys_back(plan: TpuPlan, x: jax.Array, dtype: Any) -> jax.Array:
    """[B, heads, padded S, X] as [B, S, K, X], summed over the heads of the grid that share a kv head."""
    if plan.heads != plan.K:
        x = x.reshape(plan.B, plan.K, -1, *x.shape[2:]).sum(2)
    return x[:, :, : plan.S].transpose(0, 2, 1, 3).astype(dtype)


def statistic_by_tile(plan: TpuPlan, x: jax.Array) -> jax.Array:
    """[B, T, N] as [B, heads, query tiles, group, q_tile]: the tokens of a tile lie along the last axis."""
    x = _pad_queries(plan, x).reshape(plan.B, plan.q_tiles, plan.q_tile, plan.heads, plan.group)
    return x.transpose(0, 3, 1, 4, 2)


def statistic_back(plan: TpuPlan, x: jax.Array) -> jax.Array:
    """[B, heads, query tiles, group, q_tile] as [B, T, N]."""
    return x.transpose(0, 2, 4, 1, 3).reshape(plan.B, -1, plan.N)[:, : plan.T]


def dropout_words(plan: TpuPlan, dropout: Dropout | None, layout: BlockLayout) -> list[jax.Array]:
    """The two words of each query, from which a kernel computes the bits of a tile; none without dropout."""
    if dropout is None:
        return []
    positions = layout.q_positions
    if positions is None:
        positions = jnp.arange(plan.T, dtype=np.int32)
    positions = jnp.asarray(positions).reshape(-1, plan.T, 1)
    counters = dropout.rows.reshape(-1, 1, 1), dropout.heads.reshape(1, 1, -1), positions
    found = []
    for words in row_words(dropout, *(counter.astype(np.uint32) for counter in counters)):
        words = jax.lax.bitcast_convert_type(words, np.int32)
        found.append(statistic_by_tile(plan, jnp.broadcast_to(words, (plan.B, plan.T, plan.N))))
    return found


def has_garbage(*arrays: jax.Array) -> jax.Array:
    """int32 [B]: 1 for batch rows with a NaN, an infinity or a very large number in any of the arrays.

    Keys that no query may attend to may hold anything. Only then do the kernels look for such keys in each tile.
    """
    found = []
    for x in arrays:
        harmless = jnp.abs(x.astype(np.float32)) < MAX_HARMLESS
        found.append(~jnp.all(harmless.reshape(x.shape[0], -1), axis=1))
    return jnp.any(jnp.stack(found), axis=0).astype(np.int32)


def _pad_queries(plan: TpuPlan, x: jax.Array) -> jax.Array:
    return _pad(x, 1, plan.q_tiles * plan.q_tile)


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    more = size - x.shape[axis]
    if not more:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, more)
    return jnp.pad(x, widths)
