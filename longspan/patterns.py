"""The patterns of BigBird and Longformer as masks, and BigBird's random blocks.

As masks they can be drawn, composed and given to `attention`. What the models compute is slightly more than a mask says
(BigBird counts a repeated block twice, Longformer has other projections for global tokens): that is in `recipes`.
"""

from collections.abc import Sequence
from typing import no_type_check

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Num

from longspan._checks import (
    check_bigbird_blocks,
    check_dilation,
    check_few_random_blocks,
    check_legacy_length,
    check_rand_attn,
    check_random_plan,
    check_static_size,
    check_token_kinds,
    check_window,
)
from longspan._types import Array, Number
from longspan.masks import Blocks, Causal, Global, Mask, PerHead, Segments, Window

LEGACY_REACH = 1024  # for legacy lengths, random blocks lie in the first 1024 tokens


@no_type_check
def bigbird(seq_len: int, *, block_size: int, rand_attn: Int[Array, "N_or_1 rows r"]) -> Mask:
    """BigBird: sliding window + global blocks + random blocks (arXiv:2007.14062).

    Query block i sees blocks i-1, i, i+1, the first and the last block, and `rand_attn[head, i-1]`; the first and the
    last block see everything.

    Args:
        seq_len: number of tokens T, a multiple of `block_size`, at least 5 blocks.
        block_size: tokens in a block.
        rand_attn: int [N or 1, T / block_size - 2, r]; row 0 belongs to block 1. A NumPy table is static, a JAX array
            is data.

    Example:
        >>> print(bigbird(5, block_size=1, rand_attn=np.zeros((1, 3, 0), int)).show(5, 5))
        #####
        ###.#
        #####
        #.###
        #####

    Differs from `bigbird_attention`: as in every mask, a block that is listed twice counts once.
    """
    blocks = check_bigbird_blocks(seq_len, seq_len, block_size)
    check_rand_attn(rand_attn, blocks)
    xp = np if isinstance(rand_attn, np.ndarray) else jnp
    rand_attn = rand_attn.astype(np.int32)
    row = xp.arange(1, blocks - 1, dtype=np.int32).reshape(1, -1, 1)
    near = xp.broadcast_to(xp.concatenate([row - 1, row, row + 1], axis=2), (rand_attn.shape[0], blocks - 2, 3))
    middle = xp.concatenate([near, rand_attn], axis=2)
    # The first and the last block see everything: that is said by `Global`, not by a row with every block.
    table = xp.pad(middle, ((0, 0), (1, 1), (0, 0)), constant_values=-1)
    ends = (*range(block_size), *range(seq_len - block_size, seq_len))
    return Blocks(table, block_size) | Global(ends)


@no_type_check
def longformer(
    window: Number,
    *,
    token_kinds: Num[Array, "B_or_1 T"] | None = None,
    dilation: int | Sequence[int] = 1,
    causal: bool = False,
) -> Mask:
    """Longformer: a sliding window, and global tokens that see everything and are seen by all (arXiv:2004.05150).

    Allows keys i + d·j, |j| <= window (j <= 0 if causal), and pairs in which either token is global. Padding neither
    sees nor is seen.

    Args:
        window: keys on each side of a query, an int >= 0 or an int array of shape () or [B]. Hugging Face's
            `attention_window` counts both sides: give half of it.
        token_kinds: [B or 1, T]: -1 padding, 0 local, +1 global. By default all tokens are local.
        dilation: distance between the keys of a window, an int or one a head.
        causal: also ask k <= q of every pair, global or not.

    Example:
        >>> print(longformer(1, token_kinds=np.array([[1, 0, 0, 0, -1]])).show(5, 5))
        ####.
        ###..
        ####.
        #.##.
        .....

    Differs from `longformer_attention`: a mask has no second set of projections for global queries.
    """
    check_window(window)
    near = window_mask(window, check_dilation(dilation), causal)
    if token_kinds is None:
        return near
    check_token_kinds(token_kinds)
    is_global, is_token = kinds_of(token_kinds)
    mask = near | Global(q_flags=is_global, kv_flags=is_global)
    if causal:
        mask = mask & Causal()
    return mask & Segments(padding_ids(is_token))


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
    """The random blocks that the original implementations draw, so that a checkpoint sees those it was trained with.

    NumPy's legacy generator is asked in the original's order. Blocks next to the query block and global blocks are
    never drawn, but for the last block at length 1024 (it then counts twice in `bigbird_attention`).

    Args:
        seq_len: number of tokens T (padded to whole blocks).
        block_size: tokens in a block.
        num_random_blocks: random blocks a query block, r.
        num_heads: heads N, each with its own blocks.
        seed: in a model, the number of the layer.
        max_seq_len: the model's greatest length; legacy lengths draw for it and keep the first rows.
        legacy_lengths: lengths whose blocks are drawn from the first 1024 tokens, as for the paper. Hugging Face has
            these three, the original code also 2048. All other lengths need at least 2r + 6 blocks.

    Returns:
        int32 [N, T / block_size - 2, r]; row 0 belongs to block 1.

    Example:
        >>> bigbird_random_blocks(9, block_size=1, num_random_blocks=1, num_heads=2, seed=0)[:, :, 0].tolist()
        [[3, 5, 5, 1, 3, 2, 5], [3, 5, 1, 2, 3, 4, 2]]
    """
    blocks = check_bigbird_blocks(seq_len, seq_len, block_size)
    r = check_static_size("num_random_blocks", num_random_blocks, 0)
    heads = check_static_size("num_heads", num_heads, 1)
    draw = np.random.RandomState(seed)
    if seq_len in legacy_lengths:
        check_legacy_length(seq_len, max_seq_len)
        all_blocks = max_seq_len // block_size
        reach = LEGACY_REACH // block_size if 2 * block_size < LEGACY_REACH else all_blocks
        return np.stack([_legacy_rows(draw, all_blocks, reach, r)[: blocks - 2] for _ in range(heads)])
    check_random_plan(blocks, r)
    return _planned_rows(draw, blocks, r, heads)


def window_mask(window: Number, dilation: int | tuple[int, ...], causal: bool) -> Mask:
    """Longformer's window, one for all heads or one a head."""
    right = 0 if causal else window
    if isinstance(dilation, int):
        return Window(window, right, dilation)
    return PerHead(tuple(Window(window, right, d) for d in dilation))


def kinds_of(token_kinds) -> tuple[Array, Array]:
    """(is global, is a token and not padding), bool."""
    kinds = token_kinds.astype(np.int32)
    return kinds > 0, kinds >= 0


def padding_ids(is_token):
    """Ids for `Segments` under which tokens see each other, and padding neither sees nor is seen."""
    return is_token.astype(np.int32) - 1


def _legacy_rows(draw: np.random.RandomState, blocks: int, reach: int, r: int) -> np.ndarray:
    """One head's random blocks for blocks 1 to blocks - 2, from those below `reach` (and block `reach` - 1 itself)."""
    middle = np.arange(1, blocks - 1, dtype=np.int32)
    rows = np.zeros((blocks - 2, r), np.int32)
    for i in range(1, blocks - 1):
        choices = _legacy_choices(middle, i, blocks, reach - 1)
        check_few_random_blocks(len(choices), i, r)
        rows[i - 1] = draw.permutation(choices)[:r]
    return rows


def _legacy_choices(middle: np.ndarray, i: int, blocks: int, last: int) -> np.ndarray:
    """What block i may draw; `middle` is 1, 2, ..., and `last` of them are within reach."""
    if i in (1, 2):
        return middle[i + 1 : last]
    if i in (blocks - 3, blocks - 2):
        return middle[:last]
    before = middle[: min(i - 2, last)]
    # Where the window touches the end of the reach nothing lies behind it; far behind the reach all of it is before.
    return before if i + 1 >= last else np.concatenate([before, middle[i + 1 : last]])


def _planned_rows(draw: np.random.RandomState, blocks: int, r: int, heads: int) -> np.ndarray:
    """Every row draws among the first 2r + 5 blocks, as if those were all there are."""
    first = 2 * r + 5
    rows = np.zeros((heads, blocks, r), np.int32)
    for i in range(1, blocks):
        taken = {0, first - 1, i - 1, i, i + 1}
        taken |= {1: {first - 2}, first - 2: {1}}.get(i, set())
        for head in range(heads):
            order = draw.permutation(np.arange(first, dtype=np.int32)) if r else np.zeros(0, np.int32)
            rows[head, i] = [j for j in order if j not in taken][:r]
    return rows[:, 1:-1]
