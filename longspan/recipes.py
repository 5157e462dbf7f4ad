"""Attention as BigBird and Longformer compute it, exactly, out of `attention` and layouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, no_type_check

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
from longspan.attention import ENGINES, attention, choose
from longspan.engines._request import Request
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
    dilation = check_dilation(dilation, N)
    near = window_mask(window, dilation, causal)
    options = dict(dropout_rate=dropout_rate, dropout_key=dropout_key, engine=engine)
    if token_kinds is None:
        return attention(q, k, v, mask=near, **options)
    check_token_kinds(token_kinds, B, T)
    check_global_projections((q, k, v), (q_global, k_global, v_global))
    tokens = _sort_tokens(jnp.broadcast_to(jnp.asarray(token_kinds), (B, T)))
    # Global queries see nothing in the first call and local ones nothing in the second, so no pair is computed twice:
    # even dropout may use the same key, as it counts pairs.
    request = Request(q, k, near, None, None, None, dropout_rate, jax.default_backend())
    tiles = ENGINES[choose(engine, request)[0]].tiles(request)
    layout = _local_layout(tokens, window, dilation, causal, near, tiles)
    out = attention(q, *(tokens.sorted(x) for x in (k, v)), mask=layout, **options)
    rows = _global_rows(tokens, causal)
    out_global = attention(tokens.sorted(q_global), k_global, v_global, mask=rows, q_positions=tokens.order, **options)
    return jnp.where(tokens.is_global[:, :, None, None], tokens.unsorted(out_global), out)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Tokens:
    """Tokens sorted by kind, global ones first and padding last, so that work follows their number.

    Unsorted, one global token a tile would make every query tile visit every key tile, and the other way round.
    """

    is_global: Any  # bool [B, T]
    is_token: Any  # bool [B, T]: not padding
    order: Any  # int [B, T]: the position of each sorted slot
    place: Any  # int [B, T]: the sorted slot of each position
    locals_before: Any  # int [B, T + 1]: local tokens before each position
    in_order: Any  # bool: sorted already, as in a classifier (a global token first, padding last)

    @property
    def slot(self):
        return jnp.arange(self.order.shape[1], dtype=np.int32).reshape(1, -1)

    @property
    def globals(self):
        """How many tokens of each row are global, [B, 1]."""
        return self.is_global.sum(1, keepdims=True, dtype=np.int32)

    def sorted(self, x):
        return self._take(x, self.order)

    def unsorted(self, x):
        return self._take(x, self.place)

    def _take(self, x, index):
        return _take_unless(self.in_order, x, index)


@jax.jit
def _take_unless(in_order, x, index):
    """The rows of x by index; what is in order already is not copied about."""

    def take(x, index):
        return jnp.take_along_axis(x, index[:, :, None, None], axis=1)

    return jax.lax.cond(in_order, lambda x, index: x, take, x, index)


@jax.jit
def _sort_tokens(kinds) -> _Tokens:
    is_global, is_token = kinds_of(kinds)
    is_local = is_token & ~is_global
    rank = jnp.where(is_global, 0, jnp.where(is_token, 1, 2))
    order = jnp.argsort(rank, axis=1, stable=True).astype(np.int32)
    locals_before = jnp.pad(jnp.cumsum(is_local, axis=1, dtype=np.int32), ((0, 0), (1, 0)))
    return _Tokens(
        is_global,
        is_token,
        order,
        place=jnp.argsort(order, axis=1).astype(np.int32),
        locals_before=locals_before,
        in_order=(rank[:, 1:] >= rank[:, :-1]).all(),
    )


def _global_rows(tokens: _Tokens, causal: bool) -> Mask:
    """What sorted queries see: the global ones every token, the others nothing."""
    rows = Segments(padding_ids(tokens.slot < tokens.globals), padding_ids(tokens.is_token))
    return rows & Causal() if causal else rows


def _local_layout(tokens: _Tokens, window, dilation, causal: bool, near: Mask, tiles: tuple[int, int]) -> BlockLayout:
    """What local queries see of the sorted keys: the global ones, and their window among the local ones."""
    B, T = tokens.order.shape
    q_tile, kv_tile = tiles
    counts, globals = tokens.locals_before, tokens.globals.reshape(-1, 1, 1, 1)
    first = jnp.arange(0, T, q_tile, dtype=np.int32).reshape(1, 1, -1, 1)
    last = jnp.minimum(first + q_tile, T)
    step = np.minimum(dilation, max(T, 1)).astype(np.int32).reshape(1, -1, 1, 1)
    window = min(window, T) if isinstance(window, int) else window
    # As far as the window reaches, or a little past everything: never so far that it overflows.
    reach = jnp.minimum(jnp.asarray(window, np.int32).reshape(-1, 1, 1, 1), T // step + 1) * step

    def before(position):
        """Local tokens before a position, [B, N or 1, query tiles, 1]."""
        return counts[jnp.arange(B).reshape(-1, 1, 1, 1), jnp.clip(position, 0, T)]

    low, high = before(first - reach), before(last if causal else last + reach)
    has_local = before(last) > before(first)
    columns = jnp.where(has_local, -(-globals // kv_tile), 0)
    start = jnp.maximum((globals + low) // kv_tile, columns)
    stop = jnp.where(has_local & (low < high), -(-(globals + high) // kv_tile), 0)
    shape = np.broadcast_shapes(columns.shape, start.shape)
    starts, stops = (
        jnp.concatenate([jnp.broadcast_to(a, shape) for a in pair], axis=3).astype(np.int32)
        for pair in ((jnp.zeros_like(columns), start), (columns, jnp.maximum(start, stop)))
    )
    seen = near | Global(kv_flags=tokens.slot < tokens.globals, rows=False)
    tokens_first = tokens.slot < tokens.is_token.sum(1, keepdims=True, dtype=np.int32)
    rows = Segments(padding_ids(tokens.is_token & ~tokens.is_global), padding_ids(tokens_first))
    return BlockLayout(
        (seen & Causal() if causal else seen) & rows,
        starts,
        stops,
        common=None,
        common_count=None,
        q_positions=None,
        kv_positions=tokens.order,
        forward=None,
        q_len=T,
        kv_len=T,
        q_tile=q_tile,
        kv_tile=kv_tile,
    )


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
