"""Attention as BigBird and Longformer compute it, exactly, out of `attention` and layouts."""

from collections.abc import Sequence
from functools import partial
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Num

from longspan._checks import (
    check_bigbird_blocks,
    check_dilation,
    check_global_projections,
    check_qkv,
    check_rand_attn,
    check_same_lengths,
    check_token_kinds,
    check_token_mask,
    check_window,
    check_zero_one,
)
from longspan._types import Array, Key, Number, Output, Query
from longspan.attention import attention
from longspan.layout import BlockLayout
from longspan.masks import Causal, Full, Global, Mask, Segments
from longspan.patterns import kinds_of, padding_ids, window_mask


@no_type_check
def bigbird_attention(
    q: Query,
    k: Key,
    v: Key,
    *,
    block_size: int,
    rand_attn: Int[Array, "N_or_1 rows r"],
    q_mask: Num[Array, "B_or_1 T"] | None = None,
    kv_mask: Num[Array, "B_or_1 S"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key=None,
    engine: str = "auto",
) -> Output:
    """BigBird's block-sparse attention (arXiv:2007.14062): one softmax over a multiset of key blocks.

    With nb blocks, query block i in 2 ... nb-3 sees blocks 0, i-1, i, i+1, nb-1 and `rand_attn[head, i-1]`; blocks 1
    and nb-2 likewise, with 0 and nb-1 once; blocks 0 and nb-1 see every block once. A block that is listed twice
    counts twice in the softmax, as in the original. Scale 1/sqrt(H).

    Args:
        q: queries [B, T, N, H], T a multiple of `block_size`, at least 5 blocks.
        k: keys [B, T, K, H], where N is a multiple of K.
        v: values [B, T, K, H].
        block_size: tokens in a block.
        rand_attn: int [N or 1, T / block_size - 2, r], from `bigbird_random_blocks`; row 0 belongs to block 1. It is
            data: new blocks do not retrace. (In a traced array, a number that is no block is left out.)
        q_mask: [B or 1, T], 0 where a query is padding: its output is 0. Bools, ints or 0/1 floats.
        kv_mask: [B or 1, T], 0 where a key is padding: it gets no weight.
        dropout_rate: as in `attention`; a pair that counts twice is kept or dropped as one.
        dropout_key: as in `attention`.
        engine: as in `attention`.

    Returns:
        The output [B, T, N, H]; 0 for padded queries and for those that see no key.

    Example:
        >>> q = k = v = jnp.ones((1, 16, 2, 4))
        >>> blocks = ls.bigbird_random_blocks(16, block_size=2, num_random_blocks=1, num_heads=2, seed=0)
        >>> bigbird_attention(q, k, v, block_size=2, rand_attn=blocks).shape
        (1, 16, 2, 4)
    """
    check_qkv(q, k, v)
    (B, T, N, _), S = q.shape, k.shape[1]
    blocks = check_bigbird_blocks(T, S, block_size)
    check_rand_attn(rand_attn, blocks, N)
    for name, mask, length in (("q_mask", q_mask, T), ("kv_mask", kv_mask, S)):
        if mask is not None:
            check_token_mask(name, mask, B, length)
            check_zero_one(name, mask)
    layout = _bigbird_layout(_padding(q_mask, kv_mask, T), int(block_size), blocks, rand_attn)
    return attention(q, k, v, mask=layout, dropout_rate=dropout_rate, dropout_key=dropout_key, engine=engine)


@no_type_check
def longformer_attention(
    q: Query,
    k: Key,
    v: Key,
    q_global: Query | None,
    k_global: Key | None,
    v_global: Key | None,
    *,
    window: Number,
    token_kinds: Num[Array, "B_or_1 T"] | None = None,
    dilation: int | Sequence[int] = 1,
    causal: bool = False,
    dropout_rate: float = 0.0,
    dropout_key=None,
    engine: str = "auto",
) -> Output:
    """Longformer's attention (arXiv:2004.05150): windows, and global tokens with projections of their own.

    A local query: one softmax over the keys i + d·j, |j| <= window, and the global keys, each once, with q, k and v. A
    global query: full attention with q_global, k_global and v_global. Padding is seen by nobody, and its output is 0.
    Scale 1/sqrt(H) in both.

    Args:
        q: queries [B, T, N, H].
        k: keys [B, T, K, H], where N is a multiple of K.
        v: values [B, T, K, H].
        q_global: queries of global tokens, like `q`; read where a token is global.
        k_global: keys that global queries see, like `k`.
        v_global: values that global queries see, like `v`. These three may be None without `token_kinds`.
        window: keys on each side of a query, an int >= 0 or an int array of shape () or [B]. Hugging Face's
            `attention_window` counts both sides: give half of it.
        token_kinds: [B or 1, T]: -1 padding, 0 local, +1 global. It is data: new kinds do not retrace, and the
            number of global tokens may differ from row to row. By default all tokens are local.
        dilation: distance between the keys of a window, an int or one a head.
        causal: also ask k <= q of every pair, global or not.
        dropout_rate: as in `attention`.
        dropout_key: as in `attention`.
        engine: as in `attention`.

    Returns:
        The output [B, T, N, H].

    Example:
        >>> q = k = v = jnp.ones((1, 8, 2, 4))
        >>> kinds = jnp.array([[1, 0, 0, 0, 0, 0, -1, -1]])
        >>> longformer_attention(q, k, v, q, k, v, window=2, token_kinds=kinds).shape
        (1, 8, 2, 4)
    """
    check_qkv(q, k, v)
    B, T, N, _ = q.shape
    check_same_lengths(T, k.shape[1])
    check_window(window)
    near = window_mask(window, check_dilation(dilation, N), causal)
    options = dict(dropout_rate=dropout_rate, dropout_key=dropout_key, engine=engine)
    if token_kinds is None:
        return attention(q, k, v, mask=near, **options)
    check_token_kinds(token_kinds, B, T)
    check_global_projections((q, k, v), (q_global, k_global, v_global))
    is_global, is_token = kinds_of(jnp.asarray(token_kinds))
    keys, before = padding_ids(is_token), Causal() if causal else Full()
    # Global queries see nothing in the first call and local ones nothing in the second, so no pair is computed twice:
    # even dropout may use the same key, as it counts pairs.
    local_rows = Segments(padding_ids(is_token & ~is_global), keys)
    local = (near | Global(kv_flags=is_global, rows=False)) & before & local_rows
    out = attention(q, k, v, mask=local, **options)
    global_rows = Global(q_flags=is_global, columns=False) & before & Segments(padding_ids(is_global & is_token), keys)
    out_global = attention(q_global, k_global, v_global, mask=global_rows, **options)
    return jnp.where(is_global[:, :, None, None], out_global, out)


def _padding(q_mask, kv_mask, length: int) -> Mask:
    """A rule that pads out tokens, all others seeing each other."""
    if q_mask is None and kv_mask is None:
        return Full()
    q_ids, kv_ids = (
        jnp.zeros((1, length), np.int32) if mask is None else padding_ids(jnp.asarray(mask).astype(bool))
        for mask in (q_mask, kv_mask)
    )
    return Segments(q_ids, kv_ids)


def _bigbird_layout(padding: Mask, block_size: int, blocks: int, rand_attn) -> BlockLayout:
    """The key blocks that each query block sees, as often as they count."""
    starts, stops = _bigbird_intervals(jnp.asarray(rand_attn).astype(np.int32), blocks)
    length = blocks * block_size
    return BlockLayout(
        padding,
        starts,
        stops,
        common=None,
        common_count=None,
        q_positions=None,
        kv_positions=None,
        forward=None,
        q_len=length,
        kv_len=length,
        q_tile=block_size,
        kv_tile=block_size,
        repeats=True,
    )


@partial(jax.jit, static_argnames="blocks")
def _bigbird_intervals(rand_attn, blocks: int):
    """For each query block, intervals of key blocks: the first, the window, the last and the random ones."""
    known = (rand_attn >= 0) & (rand_attn < blocks)
    rand_attn = jnp.pad(jnp.where(known, rand_attn, -1), ((0, 0), (1, 1), (0, 0)), constant_values=-1)[None]
    row = jnp.arange(blocks, dtype=np.int32).reshape(1, 1, -1, 1)
    ends = (row == 0) | (row == blocks - 1)
    first = (jnp.zeros_like(row), jnp.where(ends, blocks, 1))  # the first and the last block see everything
    window = (jnp.where(ends, 0, jnp.maximum(row - 1, 1)), jnp.where(ends, 0, jnp.minimum(row + 2, blocks - 1)))
    last = (jnp.where(ends, 0, blocks - 1), jnp.where(ends, 0, blocks))
    drawn = (jnp.maximum(rand_attn, 0), rand_attn + 1)
    shape = (*rand_attn.shape[:3], 1)
    return tuple(
        jnp.concatenate([*(jnp.broadcast_to(a, shape) for a in near), random], axis=3).astype(np.int32)
        for *near, random in zip(first, window, last, drawn, strict=True)
    )
