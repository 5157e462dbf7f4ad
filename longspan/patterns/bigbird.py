"""BigBird (arXiv:2007.14062): the mask, the exact attention of the original, and its random blocks."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Int, Num

from longspan.array_types import Array, EngineName, Key, Output, Query, Real, no_type_check
from longspan.attend import attention
from longspan.axes import BATCH_AXES, HEAD_AXIS
from longspan.biases import Bias
from longspan.checks import FLOATS, check_qkv, check_static_size, is_array, is_int
from longspan.engines import Engine
from longspan.layout import BlockLayout
from longspan.masks import Blocks, Full, Global, Mask, Segments, rule
from longspan.parallel.call import attention as parallel_attention
from longspan.parallel.order import Order, check_mesh
from longspan.patterns.padding import padding_ids

LEGACY_REACH = 1024  # tokens: for legacy lengths, random blocks are among the first 1024 tokens


@no_type_check
def bigbird(seq_len: int, *, block_size: int, rand_attn: Int[Array, "N_or_1 rows r"]) -> Mask:
    """BigBird: sliding window + global blocks + random blocks (arXiv:2007.14062).

    Query block i attends to blocks i-1, i, i+1, the first and the last block, and `rand_attn[head, i-1]`. The first and
    the last block attend to all blocks.

    Args:
        seq_len: number of tokens T, a multiple of `block_size`, at least 5 blocks.
        block_size: tokens per block.
        rand_attn: int [N or 1, T / block_size - 2, r]; row 0 belongs to block 1. A NumPy table is static, a JAX array
            is data.

    Example:
        >>> print(bigbird(5, block_size=1, rand_attn=np.zeros((1, 3, 0), int)).show(5, 5))
        #####
        ###.#
        #####
        #.###
        #####

    Differs from `bigbird_attention`: a mask is true or false, so a block that is listed twice counts once.
    """
    blocks = _check_blocks(seq_len, seq_len, block_size)
    _check_rand_attn(rand_attn, blocks)
    xp = np if isinstance(rand_attn, np.ndarray) else jnp
    rand_attn = rand_attn.astype(np.int32)
    row = xp.arange(1, blocks - 1, dtype=np.int32).reshape(1, -1, 1)
    near = xp.broadcast_to(xp.concatenate([row - 1, row, row + 1], axis=2), (rand_attn.shape[0], blocks - 2, 3))
    middle = xp.concatenate([near, rand_attn], axis=2)
    # The first and the last block attend to everything through `Global`, not through a row that lists every block.
    table = xp.pad(middle, ((0, 0), (1, 1), (0, 0)), constant_values=-1)
    ends = (*range(block_size), *range(seq_len - block_size, seq_len))
    return Blocks(table, block_size) | Global(ends)


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
    dropout_rate: Real = 0.0,
    dropout_key: jax.Array | None = None,
    engine: EngineName | Engine = "auto",
    mesh: Mesh | AbstractMesh | None = None,
    axis: str = "sp",
    order: Order = "contiguous",
    batch_axes: str | Sequence[str] = BATCH_AXES,
    head_axis: str | None = HEAD_AXIS,
) -> Output:
    """BigBird's block-sparse attention (arXiv:2007.14062): one softmax over a multiset of key blocks.

    With nb blocks, query block i attends to blocks 0, i-1, i, i+1, nb-1 and `rand_attn[head, i-1]`. A block that this
    list contains twice counts twice in the softmax, as in the original. There is one exception: for i = 1, block 0 is
    also a neighbour, and for i = nb-2, block nb-1 is. These count once. Query blocks 0 and nb-1 attend to every block
    once. The scale is 1/sqrt(H).

    Args:
        q: queries [B, T, N, H], T a multiple of `block_size`, at least 5 blocks.
        k: keys [B, T, K, H], where N is a multiple of K.
        v: values [B, T, K, H].
        block_size: tokens per block.
        rand_attn: int [N or 1, T / block_size - 2, r], from `bigbird_random_blocks`; row 0 belongs to block 1. It is
            data: new blocks do not retrace. Numbers outside the blocks are errors, or ignored if the array is traced.
        q_mask: bools, ints or 0/1 floats [B or 1, T]. Queries with 0 are padding: their output is 0.
        kv_mask: bools, ints or 0/1 floats [B or 1, T]. Keys with 0 are padding: they get no weight.
        dropout_rate: as in `attention`. A pair that counts twice is kept or dropped as a whole.
        dropout_key: as in `attention`.
        engine: as in `attention`.
        mesh: a mesh that shards the sequence, as in `ls.parallel.attention`; by default the sequence is not sharded.
        axis: the mesh axis that shards the sequence.
        order: the order of tokens on the devices. Blocks consist of neighbouring tokens, so "zigzag" is an error.
        batch_axes: the mesh axes that shard the batch, as in `ls.attention`.
        head_axis: the mesh axis that shards the heads, as in `ls.attention`.

    Returns:
        The output [B, T, N, H]; 0 for padded queries and for queries without a valid key.

    Example:
        >>> q = k = v = jnp.ones((1, 16, 2, 4))
        >>> blocks = ls.bigbird_random_blocks(16, block_size=2, num_random_blocks=1, num_heads=2, seed=0)
        >>> bigbird_attention(q, k, v, block_size=2, rand_attn=blocks).shape
        (1, 16, 2, 4)
    """
    check_qkv(q, k, v)
    check_mesh(order, mesh)
    (B, T, N, _), S = q.shape, k.shape[1]
    blocks = _check_blocks(T, S, block_size)
    _check_rand_attn(rand_attn, blocks, N)
    for name, mask, length in (("q_mask", q_mask, T), ("kv_mask", kv_mask, S)):
        if mask is not None:
            _check_token_mask(name, mask, B, length)
            _check_zero_one(name, mask)
    padding = _padding(q_mask, kv_mask, T)
    options: dict[str, Any] = dict(
        dropout_rate=dropout_rate, dropout_key=dropout_key, engine=engine, batch_axes=batch_axes, head_axis=head_axis
    )
    if mesh is not None:
        mask = bigbird(T, block_size=block_size, rand_attn=rand_attn) & padding
        times = _multiplicity(int(block_size), blocks, rand_attn)
        return parallel_attention(q, k, v, mask=mask, bias=times, mesh=mesh, axis=axis, order=order, **options)
    return attention(q, k, v, mask=_bigbird_layout(padding, int(block_size), blocks, rand_attn), **options)


@no_type_check
def bigbird_random_blocks(
    seq_len: int,
    *,
    block_size: int,
    num_random_blocks: int,
    num_heads: int,
    seed: int,
    max_seq_len: int = 4096,
    legacy_lengths: Sequence[int] = (1024, 3072, 4096),
) -> Int[np.ndarray, "N rows r"]:
    """The random blocks that the original implementations draw, so that a checkpoint gets the blocks of its training.

    NumPy's legacy generator is called in the original's order. Blocks next to the query block and global blocks are
    never drawn, with one exception: at length 1024 the last block may be drawn, and then counts twice in
    `bigbird_attention`.

    Args:
        seq_len: number of tokens T (padded to whole blocks).
        block_size: tokens per block.
        num_random_blocks: random blocks per query block, r.
        num_heads: number of heads N; each has its own blocks.
        seed: seed of the generator; in a model, the index of the layer.
        max_seq_len: the model's maximum length. Only the lengths in `legacy_lengths` use it: their blocks are drawn for
            this length, and the first rows are returned.
        legacy_lengths: lengths whose blocks are drawn from the first 1024 tokens, as in the paper. The default, 1024,
            3072 and 4096, is Hugging Face's. The original code also has 2048. All other lengths need at least 2r + 6
            blocks.

    Returns:
        int32 [N, T / block_size - 2, r]; row 0 belongs to block 1.

    Example:
        >>> bigbird_random_blocks(9, block_size=1, num_random_blocks=1, num_heads=2, seed=0)[:, :, 0].tolist()
        [[3, 5, 5, 1, 3, 2, 5], [3, 5, 1, 2, 3, 4, 2]]
    """
    blocks = _check_blocks(seq_len, seq_len, block_size)
    r = check_static_size("num_random_blocks", num_random_blocks, 0)
    heads = check_static_size("num_heads", num_heads, 1)
    draw = np.random.RandomState(seed)
    if seq_len in legacy_lengths:
        _check_legacy_length(seq_len, max_seq_len)
        reach = all_blocks = max_seq_len // block_size
        if 2 * block_size < LEGACY_REACH:
            reach = LEGACY_REACH // block_size
        return np.stack([_legacy_rows(draw, all_blocks, reach, r)[: blocks - 2] for _ in range(heads)])
    _check_random_plan(blocks, r)
    return _generated_rows(draw, blocks, r, heads)


def _padding(q_mask, kv_mask, length: int) -> Mask:
    """A mask that excludes padding on both sides."""
    if q_mask is None and kv_mask is None:
        return Full()
    q_ids = kv_ids = jnp.zeros((1, length), np.int32)
    if q_mask is not None:
        q_ids = padding_ids(jnp.asarray(q_mask).astype(bool))
    if kv_mask is not None:
        kv_ids = padding_ids(jnp.asarray(kv_mask).astype(bool))
    return Segments(q_ids, kv_ids)


def _bigbird_layout(padding: Mask, block_size: int, blocks: int, rand_attn) -> BlockLayout:
    """The key blocks that each query block attends to, each as often as it counts."""
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
    """Intervals (starts, stops) of key blocks per query block: the first, the window, the last, the random ones."""
    known = (rand_attn >= 0) & (rand_attn < blocks)
    rand_attn = jnp.pad(jnp.where(known, rand_attn, -1), ((0, 0), (1, 1), (0, 0)), constant_values=-1)[None]
    row = jnp.arange(blocks, dtype=np.int32).reshape(1, 1, -1, 1)
    ends = (row == 0) | (row == blocks - 1)
    first = (jnp.zeros_like(row), jnp.where(ends, blocks, 1))  # query blocks at the ends attend to everything
    window = (jnp.where(ends, 0, jnp.maximum(row - 1, 1)), jnp.where(ends, 0, jnp.minimum(row + 2, blocks - 1)))
    last = (jnp.where(ends, 0, blocks - 1), jnp.where(ends, 0, blocks))
    drawn = (jnp.maximum(rand_attn, 0), rand_attn + 1)
    shape = (*rand_attn.shape[:3], 1)
    return tuple(
        jnp.concatenate([*(jnp.broadcast_to(a, shape) for a in near), random], axis=3).astype(np.int32)
        for *near, random in zip(first, window, last, drawn, strict=True)
    )


@rule
class Multiplicity(Bias):
    """The bias log(n), where n is the number of times the table lists the key's block, at least 1.

    A key that counts n times in the softmax has n times the weight. On one device a layout visits a tile n times
    instead; when the sequence is sharded there is no layout of the whole sequence.
    """

    array_axes: ClassVar = {"table": "N.."}

    table: Any  # int [N or 1, blocks, r]; -1: no block
    block_size: int

    def at(self, q, kv, dtype):
        listed = q.side.listed(self.table, q.position // self.block_size)
        block = kv.position // self.block_size
        times = sum((listed[..., i] == block).astype(np.int32) for i in range(listed.shape[-1]))
        return jnp.log(jnp.maximum(times, 1).astype(dtype))


def _multiplicity(block_size: int, blocks: int, rand_attn) -> Multiplicity | None:
    """The bias for blocks that count more than once; None if the table is static and lists no block twice."""
    xp = np if isinstance(rand_attn, np.ndarray) else jnp
    row = xp.arange(1, blocks - 1, dtype=np.int32).reshape(1, -1, 1)
    near = xp.concatenate([row - 1, row, row + 1], axis=2)
    near = xp.where((near > 0) & (near < blocks - 1), near, np.int32(-1))  # `ends` lists the first and the last block
    ends = xp.concatenate([row * 0, row * 0 + np.int32(blocks - 1)], axis=2)
    shape = (rand_attn.shape[0], blocks - 2)
    parts = [xp.broadcast_to(part, (*shape, part.shape[2])) for part in (near, ends)]
    table = xp.concatenate([*parts, rand_attn.astype(np.int32)], axis=2)
    if xp is np:
        ranked = np.sort(table, axis=2)
        if not ((ranked[..., 1:] == ranked[..., :-1]) & (ranked[..., 1:] >= 0)).any():
            return None
    # The first and the last query block attend to every block once.
    return Multiplicity(jnp.asarray(xp.pad(table, ((0, 0), (1, 1), (0, 0)), constant_values=-1)), block_size)


def _check_rand_attn(rand_attn: Any, blocks: int, heads: int | None = None) -> None:
    """Raises an error unless `rand_attn` is int [N or 1, blocks - 2, r], and its values are blocks if known."""
    wanted = f"ints [{heads or 'N'} or 1, {blocks - 2}, r]"
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
            f"`rand_attn` must be {wanted} for {blocks} blocks (the first and the last block have no row), got "
            f"shape {shape}. Make it with `bigbird_random_blocks(...)` for this length."
        )
    if isinstance(rand_attn, np.ndarray) and rand_attn.size and (rand_attn.min() < 0 or rand_attn.max() >= blocks):
        raise ValueError(
            f"`rand_attn` must hold block numbers from 0 to {blocks - 1}, got {rand_attn.min()} to {rand_attn.max()}. "
            "Make it with `bigbird_random_blocks(...)` for this length."
        )


def _check_token_mask(name: str, mask: Any, batch: int, length: int) -> None:
    """Raises an error unless a padding mask is [B or 1, L] of bools, ints or floats."""
    wanted = f"[{batch}, {length}] (or [1, {length}])"
    if not is_array(mask):
        raise TypeError(f"`{name}` must be an array {wanted}, got {type(mask).__name__}.")
    if not (mask.dtype == bool or is_int(mask) or mask.dtype.name in FLOATS):
        raise TypeError(f"`{name}` must hold bools, ints or 0/1 floats, got dtype {mask.dtype}.")
    if mask.ndim != 2 or mask.shape[0] not in (1, batch) or mask.shape[1] != length:
        raise ValueError(
            f"`{name}` must have shape {wanted}, one entry per token, got {tuple(mask.shape)}. "
            "Drop axes of size 1, e.g. `mask[:, 0, 0, :]`."
        )


def _check_zero_one(name: str, mask: Any) -> None:
    """Raises an error if a float mask with known values is not 0/1, for example an additive mask."""
    if mask.dtype.name not in FLOATS or isinstance(mask, Tracer | jax.ShapeDtypeStruct):
        return
    values = np.asarray(mask).astype(np.float32)
    if not ((values == 0) | (values == 1)).all():
        raise ValueError(
            f"`{name}` must hold 0 (padding) and 1 (a token), got values from {values.min():g} to {values.max():g}. "
            "If it is an additive mask (0 for tokens, large negative numbers for padding), convert it: `mask == 0`."
        )


def _legacy_rows(draw: np.random.RandomState, blocks: int, reach: int, r: int) -> np.ndarray:
    """One head's random blocks for query blocks 1 to blocks - 2, drawn from the blocks before `reach`."""
    middle = np.arange(1, blocks - 1, dtype=np.int32)
    rows = []
    for i in range(1, blocks - 1):
        choices = _legacy_choices(middle, i, blocks, reach - 1)
        _check_few_random_blocks(len(choices), i, r)
        rows.append(draw.permutation(choices)[:r])
    return np.stack(rows)


def _legacy_choices(middle: np.ndarray, i: int, blocks: int, last: int) -> np.ndarray:
    """The blocks that block i may draw; `middle` is 1, 2, ..., of which the first `last` can be drawn."""
    if i in (1, 2):
        return middle[i + 1 : last]
    if i in (blocks - 3, blocks - 2):
        return middle[:last]
    before = middle[: min(i - 2, last)]
    if i + 1 >= last:  # no block after the window can be drawn
        return before
    return np.concatenate([before, middle[i + 1 : last]])


def _generated_rows(draw: np.random.RandomState, blocks: int, r: int, heads: int) -> np.ndarray:
    """The random blocks of other lengths: as in the original, every row draws from the first 2r + 5 blocks."""
    first = 2 * r + 5
    rows = np.zeros((heads, blocks, r), np.int32)
    for i in range(1, blocks):
        taken = {0, first - 1, i - 1, i, i + 1}
        taken |= {1: {first - 2}, first - 2: {1}}.get(i, set())
        for head in range(heads):
            if r:
                order = draw.permutation(np.arange(first, dtype=np.int32))
                rows[head, i] = [j for j in order if j not in taken][:r]
    return rows[:, 1:-1]


def _check_blocks(q_len: Any, kv_len: Any, block_size: Any) -> int:
    """The number of blocks: at least 5, and the same for queries and keys."""
    size = check_static_size("block_size", block_size, 1)
    q_len, kv_len = check_static_size("seq_len", q_len, 0), check_static_size("seq_len", kv_len, 0)
    if q_len != kv_len:
        raise ValueError(
            f"BigBird needs as many query blocks as key blocks, got {q_len} queries and {kv_len} keys. Use "
            "BigBird for self-attention only."
        )
    if q_len % size:
        raise ValueError(
            f"BigBird needs a length that is a multiple of block_size={size}, got {q_len}. Pad the sequence to "
            f"{-(-q_len // size) * size} tokens and mark the padding in `q_mask` and `kv_mask`."
        )
    if q_len // size < 5:
        smaller = next((n for n in range(min(size, q_len // 5), 0, -1) if q_len % n == 0), None)
        other = "" if smaller is None else f", or block_size={smaller}"
        raise ValueError(
            f"BigBird needs at least 5 blocks, got {q_len // size} ({q_len} tokens in blocks of {size}). Use full "
            f"attention for this length{other}."
        )
    return q_len // size


def _check_random_plan(blocks: int, num_random_blocks: int) -> None:
    """Raises a ValueError if there are too few blocks to draw from, for lengths that are not legacy."""
    least = 2 * num_random_blocks + 6
    if blocks < least:
        raise ValueError(
            f"{num_random_blocks} random blocks need at least 2·{num_random_blocks} + 6 = {least} blocks, got "
            f"{blocks}. With fewer, the original code fails or repeats blocks. Use full attention for this length, or "
            "fewer random blocks."
        )


def _check_few_random_blocks(choices: int, block: int, num_random_blocks: int) -> None:
    """Raises a ValueError if a block of a legacy length has too few blocks to draw from."""
    if choices < num_random_blocks:
        raise ValueError(
            f"Block {block} can draw {choices} random blocks, but num_random_blocks={num_random_blocks}. Use fewer "
            "random blocks, a smaller block_size, or a greater max_seq_len."
        )


def _check_legacy_length(seq_len: int, max_seq_len: Any) -> None:
    """Raises a ValueError if a legacy length is longer than the length that blocks are drawn for."""
    max_seq_len = check_static_size("max_seq_len", max_seq_len, 1)
    if seq_len > max_seq_len:
        raise ValueError(
            f"seq_len={seq_len} is in `legacy_lengths`, so its blocks are drawn for max_seq_len={max_seq_len} tokens. "
            "`seq_len` must be at most `max_seq_len`. Raise `max_seq_len`, or remove the length from `legacy_lengths`."
        )
