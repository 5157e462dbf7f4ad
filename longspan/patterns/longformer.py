"""Longformer (arXiv:2004.05150): the mask, and the attention with separate projections for global tokens."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Num

from longspan.array_types import Array, EngineName, Key, Number, Output, Query, Real, no_type_check
from longspan.attend import attention
from longspan.axes import BATCH_AXES, HEAD_AXIS
from longspan.checks import FLOATS, check_qkv, is_array, is_int
from longspan.constants import unfolded
from longspan.engines import Engine, Request, choose
from longspan.layout import BlockLayout
from longspan.masks import Causal, Global, Mask, PerHead, Segments, Window
from longspan.parallel.call import attention as parallel_attention
from longspan.parallel.order import Order, check_mesh
from longspan.patterns.padding import padding_ids


@no_type_check
def longformer(
    window: Number,
    *,
    token_kinds: Num[Array, "B_or_1 T"] | None = None,
    dilation: int | Sequence[int] = 1,
    causal: bool = False,
) -> Mask:
    """Longformer: a sliding window, and global tokens that attend to all tokens and are attended to by all.

    From arXiv:2004.05150. Allows keys i + d·j, |j| <= window (j <= 0 if causal), and pairs in which either token is
    global. Padding is in no allowed pair.

    Args:
        window: number of keys on each side of a query, an int >= 0 or an int array of shape () or [B]. Hugging Face's
            `attention_window` counts both sides: give half of it.
        token_kinds: [B or 1, T]: -1 padding, 0 local, +1 global. By default all tokens are local.
        dilation: distance between the keys of a window, an int or one per head.
        causal: whether to also require k <= q of every pair, global or not.

    Example:
        >>> print(longformer(1, token_kinds=np.array([[1, 0, 0, 0, -1]])).show(5, 5))
        ####.
        ###..
        ####.
        #.##.
        .....

    Differs from `longformer_attention`: a mask has no second set of projections for global queries.
    """
    _check_window(window)
    near = _window_mask(window, _check_dilation(dilation), causal)
    if token_kinds is None:
        return near
    _check_token_kinds(token_kinds)
    is_global, is_token = _split_kinds(token_kinds)
    mask = near | Global(q_flags=is_global, kv_flags=is_global)
    if causal:
        mask = mask & Causal()
    return mask & Segments(padding_ids(is_token))


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
    dropout_rate: Real = 0.0,
    dropout_key: jax.Array | None = None,
    engine: EngineName | Engine = "auto",
    mesh: Mesh | AbstractMesh | None = None,
    axis: str = "sp",
    order: Order = "contiguous",
    batch_axes: str | Sequence[str] = BATCH_AXES,
    head_axis: str | None = HEAD_AXIS,
) -> Output:
    """Longformer's attention (arXiv:2004.05150): windows, and global tokens with separate projections.

    A local query has one softmax over the keys i + d·j, |j| <= window, and the global keys, each once, with q, k and v.
    A global query has full attention with q_global, k_global and v_global. No query attends to padding, and the output
    of padding is 0. The scale is 1/sqrt(H) in both.

    Args:
        q: queries [B, T, N, H].
        k: keys [B, T, K, H], where N is a multiple of K.
        v: values [B, T, K, H].
        q_global: queries of the global tokens, with the shape of `q`; entries of other tokens are not used.
        k_global: keys for global queries, with the shape of `k`.
        v_global: values for global queries, with the shape of `v`. All three may be None without `token_kinds`.
        window: number of keys on each side of a query, an int >= 0 or an int array of shape () or [B]. Hugging Face's
            `attention_window` counts both sides: give half of it.
        token_kinds: [B or 1, T]: -1 padding, 0 local, +1 global. It is data: new kinds do not retrace, and the
            number of global tokens may differ between rows. By default all tokens are local.
        dilation: distance between the keys of a window, an int or one per head.
        causal: whether to also require k <= q of every pair, global or not.
        dropout_rate: as in `attention`.
        dropout_key: as in `attention`.
        engine: as in `attention`.
        mesh: a mesh that shards the sequence, as in `ls.parallel.attention`; by default the sequence is not sharded.
        axis: the mesh axis that shards the sequence.
        order: the order of tokens, and of `token_kinds`, on the devices.
        batch_axes: the mesh axes that shard the batch, as in `ls.attention`.
        head_axis: the mesh axis that shards the heads, as in `ls.attention`.

    Returns:
        The output [B, T, N, H].

    Example:
        >>> q = k = v = jnp.ones((1, 8, 2, 4))
        >>> kinds = jnp.array([[1, 0, 0, 0, 0, 0, -1, -1]])
        >>> longformer_attention(q, k, v, q, k, v, window=2, token_kinds=kinds).shape
        (1, 8, 2, 4)
    """
    check_qkv(q, k, v)
    check_mesh(order, mesh)
    B, T, N, _ = q.shape
    _check_same_lengths(T, k.shape[1])
    _check_window(window)
    dilation = _check_dilation(dilation, N)
    near = _window_mask(window, dilation, causal)
    options: dict[str, Any] = dict(dropout_rate=dropout_rate, dropout_key=dropout_key, engine=engine)
    options |= dict(batch_axes=batch_axes, head_axis=head_axis)
    attend = attention
    if mesh is not None:
        attend = partial(parallel_attention, mesh=mesh, axis=axis, order=order)
    if token_kinds is None:
        return attend(q, k, v, mask=near, **options)
    _check_token_kinds(token_kinds, B, T)
    far_q, far_k, far_v = _check_global_projections((q, k, v), (q_global, k_global, v_global))
    if mesh is not None:
        # Tokens are not sorted by kind: they stay on their devices, and `parallel_attention` gathers the global ones.
        is_global, is_token = _split_kinds(unfolded(jnp.asarray(token_kinds)))
        local, rows = _local_and_global(near, is_global, is_token, causal)
        out = attend(q, k, v, mask=local, **options)
        out_global = attend(far_q, far_k, far_v, mask=rows, **options)
        return jnp.where(is_global[:, :, None, None], out_global, out)
    tokens = _sort_tokens(jnp.broadcast_to(unfolded(jnp.asarray(token_kinds)), (B, T)))
    # Global queries attend to nothing in the first call, local queries to nothing in the second. No pair is computed
    # twice, so both calls may use the same dropout key, which draws by pair.
    request = Request.of(q=q, k=k, v=v, mask=near)
    tiles = choose(engine, request)[0].tiles(request)
    layout = _local_layout(tokens, window, dilation, causal, near, tiles)
    out = attention(q, tokens.sorted(k), tokens.sorted(v), mask=layout, **options)
    rows = _global_rows(tokens, causal)
    out_global = attention(tokens.sorted(far_q), far_k, far_v, mask=rows, q_positions=tokens.order, **options)
    return jnp.where(tokens.is_global[:, :, None, None], tokens.unsorted(out_global), out)


def _local_and_global(near: Mask, is_global, is_token, causal: bool) -> tuple[Mask, Mask]:
    """The masks of local and of global queries. In each, queries of the other kind attend to nothing."""
    local = near | Global(kv_flags=is_global, rows=False)
    rows: Mask = Global(q_flags=is_global, columns=False)
    if causal:
        local, rows = local & Causal(), rows & Causal()
    keys = padding_ids(is_token)
    return local & Segments(padding_ids(is_token & ~is_global), keys), rows & Segments(keys)


def _window_mask(window: Number, dilation: int | tuple[int, ...], causal: bool) -> Mask:
    """Longformer's window, the same for all heads or one per head."""
    right = 0 if causal else window
    if isinstance(dilation, int):
        return Window(window, right, dilation)
    return PerHead(tuple(Window(window, right, d) for d in dilation))


def _split_kinds(token_kinds) -> tuple[Array, Array]:
    """(is_global, is_token), bool; padding is not a token."""
    kinds = token_kinds.astype(np.int32)
    return kinds > 0, kinds >= 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _SortedTokens:
    """Tokens sorted by kind, global ones first and padding last, so that the work grows with the number of globals.

    Without sorting, one global token per tile would make every query tile visit every key tile, and vice versa.
    """

    is_global: Any  # bool [B, T]
    is_token: Any  # bool [B, T]: not padding
    order: Any  # int [B, T]: the position of each sorted slot
    place: Any  # int [B, T]: the sorted slot of each position
    locals_before: Any  # int [B, T + 1]: number of local tokens before each position
    in_order: Any  # bool: already sorted, as in a classifier (one global token first, padding last)

    @property
    def slot(self):
        return jnp.arange(self.order.shape[1], dtype=np.int32).reshape(1, -1)

    @property
    def globals(self):
        """The number of global tokens per row, [B, 1]."""
        return self.is_global.sum(1, keepdims=True, dtype=np.int32)

    def sorted(self, x):
        return self._take(x, self.order)

    def unsorted(self, x):
        return self._take(x, self.place)

    def _take(self, x, index):
        return _take_unless(self.in_order, x, index)


@jax.jit
def _take_unless(in_order, x, index):
    """The rows of x by index; nothing is copied if they are already in order."""

    def take(x, index):
        return jnp.take_along_axis(x, index[:, :, None, None], axis=1)

    return jax.lax.cond(in_order, lambda x, index: x, take, x, index)


@jax.jit
def _sort_tokens(kinds) -> _SortedTokens:
    is_global, is_token = _split_kinds(kinds)
    is_local = is_token & ~is_global
    rank = jnp.where(is_global, 0, jnp.where(is_token, 1, 2))
    order = jnp.argsort(rank, axis=1, stable=True).astype(np.int32)
    locals_before = jnp.pad(jnp.cumsum(is_local, axis=1, dtype=np.int32), ((0, 0), (1, 0)))
    return _SortedTokens(
        is_global,
        is_token,
        order,
        place=jnp.argsort(order, axis=1).astype(np.int32),
        locals_before=locals_before,
        in_order=(rank[:, 1:] >= rank[:, :-1]).all(),
    )


@partial(jax.jit, static_argnames="causal", inline=True)
def _global_rows(tokens: _SortedTokens, causal: bool) -> Mask:
    """The mask of sorted queries in which global ones attend to every token, and others to nothing."""
    rows: Mask = Segments(padding_ids(tokens.slot < tokens.globals), padding_ids(tokens.is_token))
    if causal:
        rows = rows & Causal()
    return rows


def _local_layout(
    tokens: _SortedTokens, window, dilation, causal: bool, near: Mask, tiles: tuple[int, int]
) -> BlockLayout:
    """The layout of local queries over sorted keys: the global keys, and the window among the local keys."""
    # Outside `jit` this compiles one program, instead of one per operation. An int window is static.
    static = ["dilation", "causal", "tiles"]
    if isinstance(window, int):
        static.append("window")
    plan = jax.jit(_plan_local_layout, static_argnames=static, inline=True)
    return plan(tokens, window=window, dilation=dilation, causal=causal, near=near, tiles=tiles)


def _plan_local_layout(tokens: _SortedTokens, window, dilation, causal: bool, near: Mask, tiles) -> BlockLayout:
    # Sorted keys are the G globals, then the locals in order of position. The keys of a window are therefore the
    # interval [G + locals before its first position, G + locals before its end). A tile with local queries visits two
    # intervals of key tiles: those of the globals, and the one of its window.
    B, T = tokens.order.shape
    q_tile, kv_tile = tiles
    counts, globals = tokens.locals_before, tokens.globals.reshape(-1, 1, 1, 1)
    first = jnp.arange(0, T, q_tile, dtype=np.int32).reshape(1, 1, -1, 1)
    last = jnp.minimum(first + q_tile, T)
    step = np.minimum(dilation, max(T, 1)).astype(np.int32).reshape(1, -1, 1, 1)
    if isinstance(window, int):
        window = min(window, T)
    # The distance to the window's edge, limited to slightly more than T, so that it cannot overflow.
    reach = jnp.minimum(jnp.asarray(window, np.int32).reshape(-1, 1, 1, 1), T // step + 1) * step

    def before(position):
        """The number of local tokens before a position, [B, N or 1, query tiles, 1]."""
        place = jnp.broadcast_to(jnp.clip(position, 0, T), (B, *position.shape[1:]))
        # Each row is indexed separately, so that a sharded batch needs no communication.
        return jnp.take_along_axis(counts, place.reshape(B, -1), axis=1).reshape(place.shape)

    end = last if causal else last + reach
    low, high = before(first - reach), before(end)
    has_local = before(last) > before(first)
    columns = jnp.where(has_local, -(-globals // kv_tile), 0)
    start = jnp.maximum((globals + low) // kv_tile, columns)
    stop = jnp.where(has_local & (low < high), -(-(globals + high) // kv_tile), 0)
    shape = np.broadcast_shapes(columns.shape, start.shape)

    def join(globals_part, window_part):
        parts = [jnp.broadcast_to(globals_part, shape), jnp.broadcast_to(window_part, shape)]
        return jnp.concatenate(parts, axis=3).astype(np.int32)

    mask = near | Global(kv_flags=tokens.slot < tokens.globals, rows=False)
    if causal:
        mask = mask & Causal()
    is_sorted_token = tokens.slot < tokens.is_token.sum(1, keepdims=True, dtype=np.int32)
    padding = Segments(padding_ids(tokens.is_token & ~tokens.is_global), padding_ids(is_sorted_token))
    return BlockLayout(
        mask & padding,
        starts=join(jnp.zeros_like(columns), start),
        stops=join(columns, jnp.maximum(start, stop)),
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


def _check_window(window: Any) -> None:
    """Raises an error unless the window is an int >= 0, or an int array of shape () or [B]."""
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


def _check_dilation(dilation: Any, heads: int | None = None) -> int | tuple[int, ...]:
    """The dilation as an int >= 1, or as a tuple of one int per head."""
    wanted = "an int >= 1, or a sequence of them, one per head"
    if isinstance(dilation, Tracer):
        raise TypeError(f"`dilation` must be {wanted}, got a traced array. It is static: pass Python ints.")
    try:
        entries = dilation if np.ndim(dilation) else (dilation,)
        values = tuple(operator.index(d) for d in entries)
    except TypeError:
        raise TypeError(f"`dilation` must be {wanted}, got {dilation!r}.") from None
    if not values or min(values) < 1 or isinstance(dilation, bool):
        raise ValueError(f"`dilation` must be {wanted}, got {dilation!r}.")
    if not np.ndim(dilation):
        return values[0]
    if heads is not None and len(values) != heads:
        raise ValueError(
            f"`dilation` has {len(values)} entries, but `q` has {heads} heads. Give one int for all heads, or {heads} "
            "ints, one per head."
        )
    return values


def _check_token_kinds(token_kinds: Any, batch: int | None = None, length: int | None = None) -> None:
    """Raises an error unless the kinds of tokens are numbers [B or 1, T]."""
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
        raise ValueError(f"`token_kinds` must have shape {wanted}, one kind per token, got {shape}. Add or drop axes.")


def _check_global_projections(qkv: Sequence[Any], global_qkv: Sequence[Any]) -> Sequence[Any]:
    """The global queries, keys and values; a ValueError if shapes or dtypes differ from the local ones."""
    for name, local, other in zip("qkv", qkv, global_qkv, strict=True):
        if other is None:
            raise ValueError(
                f"`{name}_global` is None, but `token_kinds` may hold global tokens. Give all of `q_global`, "
                "`k_global` and `v_global`, or leave `token_kinds` out."
            )
        if getattr(other, "shape", None) != local.shape or other.dtype != local.dtype:
            got = f"{other.dtype} {list(other.shape)}" if hasattr(other, "shape") else type(other).__name__
            raise ValueError(f"`{name}_global` must be like `{name}`, {local.dtype} {list(local.shape)}, got {got}.")
    return global_qkv


def _check_same_lengths(q_len: int, kv_len: int) -> None:
    if q_len != kv_len:
        raise ValueError(
            f"Longformer's attention is self-attention, but `q` has {q_len} tokens and `k` has {kv_len}. For different "
            "lengths use `attention` with `longformer(...)` as its mask."
        )
