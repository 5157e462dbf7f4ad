"""The error messages of BigBird and Longformer: what was expected, what came, what to do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls

X = jnp.zeros((2, 12, 4, 3))
ROWS = np.zeros((4, 4, 1), np.int32)


def bigbird(q=X, k=X, v=X, block_size=2, rand_attn=ROWS, **options):
    return ls.bigbird_attention(q, k, v, block_size=block_size, rand_attn=rand_attn, **options)


def longformer(*x, window=2, **options):
    return ls.longformer_attention(*(x or (X,) * 6), window=window, **options)


def blocks(seq_len=96, block_size=8, num_random_blocks=3, num_heads=2, seed=0, **options):
    sizes = dict(block_size=block_size, num_random_blocks=num_random_blocks, num_heads=num_heads, seed=seed)
    return ls.bigbird_random_blocks(seq_len, **sizes, **options)


def traced(function):
    return lambda: jax.jit(function)(jnp.asarray(2))


CASES = {
    "length no multiple": (
        lambda: bigbird(X[:, :11], X[:, :11], X[:, :11]),
        ValueError,
        "a multiple of block_size=2, got 11. Pad the sequence to 12 tokens and mark the padding in `q_mask`",
    ),
    "too few blocks": (
        lambda: bigbird(block_size=3),
        ValueError,
        "got 4 (12 tokens in blocks of 3). Use full attention for this length, or block_size=2.",
    ),
    "too few tokens": (
        lambda: blocks(3, 1),
        ValueError,
        "at least 5 blocks, got 3 (3 tokens in blocks of 1). Use full attention for this length.",
    ),
    "no tokens": (
        lambda: blocks(0, 1),
        ValueError,
        "at least 5 blocks, got 0 (0 tokens in blocks of 1). Use full attention for this length.",
    ),
    "many random blocks": (
        lambda: blocks(1024, 64, num_random_blocks=10**12),
        ValueError,
        "random blocks, but num_random_blocks=1000000000000. Use fewer",
    ),
    "other key length": (
        lambda: bigbird(X, X[:, :10], X[:, :10]),
        ValueError,
        "got 12 queries and 10 keys. Use BigBird for self-attention only.",
    ),
    "traced block size": (traced(lambda n: bigbird(block_size=n)), TypeError, "`block_size` sets array shapes"),
    "block size": (lambda: bigbird(block_size=0), ValueError, "`block_size` must be a Python int >= 1, got 0."),
    "block size float": (
        lambda: bigbird(block_size=2.0),
        ValueError,
        "`block_size` must be a Python int >= 1, got 2.0.",
    ),
    "random list": (
        lambda: bigbird(rand_attn=[[0]]),
        TypeError,
        "`rand_attn` must be an array of ints [4 or 1, 4, r], got list. Make it with `bigbird_random_blocks(...)`.",
    ),
    "random floats": (
        lambda: bigbird(rand_attn=ROWS.astype(float)),
        TypeError,
        "got dtype float64. Cast it with `.astype('int32')`.",
    ),
    "random rows": (
        lambda: bigbird(rand_attn=np.zeros((4, 6, 1), int)),
        ValueError,
        "must be ints [4 or 1, 4, r] for 6 blocks (the first and the last block have no row), got shape (4, 6, 1).",
    ),
    "random heads": (lambda: bigbird(rand_attn=ROWS[:3]), ValueError, "got shape (3, 4, 1)"),
    "random rank": (lambda: bigbird(rand_attn=ROWS[0]), ValueError, "got shape (4, 1)"),
    "random range": (
        lambda: bigbird(rand_attn=ROWS + 6),
        ValueError,
        "`rand_attn` must hold block numbers from 0 to 5, got 6 to 6. Make it with `bigbird_random_blocks(...)` for "
        "this length.",
    ),
    "mask shape": (
        lambda: bigbird(kv_mask=np.ones((2, 1, 1, 12))),
        ValueError,
        "`kv_mask` must have shape [2, 12] (or [1, 12]), one entry per token, got (2, 1, 1, 12). Drop axes of size 1",
    ),
    "mask length": (lambda: bigbird(q_mask=np.ones((2, 11))), ValueError, "`q_mask` must have shape [2, 12]"),
    "mask list": (
        lambda: bigbird(q_mask=[1] * 12),
        TypeError,
        "`q_mask` must be an array [2, 12] (or [1, 12]), got list.",
    ),
    "mask dtype": (
        lambda: bigbird(q_mask=np.ones((2, 12), complex)),
        TypeError,
        "`q_mask` must hold bools, ints or 0/1 floats, got dtype complex128.",
    ),
    "additive mask": (
        lambda: bigbird(kv_mask=np.full((2, 12), -10000.0)),
        ValueError,
        "`kv_mask` must hold 0 (padding) and 1 (a token), got values from -10000 to -10000. If it is an additive "
        "mask (0 for tokens, large negative numbers for padding), convert it: `mask == 0`.",
    ),
    "q rank": (lambda: bigbird(X[0]), ValueError, "`q` must have shape [B, T, N, H], got rank 3"),
    "plan too short": (
        lambda: blocks(88),
        ValueError,
        "3 random blocks need at least 2·3 + 6 = 12 blocks, got 11",
    ),
    "legacy too long": (
        lambda: blocks(4096, 64, max_seq_len=2048),
        ValueError,
        "seq_len=4096 is in `legacy_lengths`, so its blocks are drawn for max_seq_len=2048 tokens. `seq_len` must "
        "be at most `max_seq_len`. Raise `max_seq_len`",
    ),
    "legacy too coarse": (
        lambda: blocks(1024, 128, 5, max_seq_len=1024),
        ValueError,
        "Block 1 can draw 4 random blocks, but num_random_blocks=5. Use fewer random blocks",
    ),
    "no heads": (lambda: blocks(num_heads=0), ValueError, "`num_heads` must be a Python int >= 1, got 0."),
    "negative random": (
        lambda: blocks(num_random_blocks=-1),
        ValueError,
        "`num_random_blocks` must be a Python int >= 0, got -1.",
    ),
    "window": (
        lambda: longformer(window=-1),
        ValueError,
        "`window` must be an int >= 0, the keys on each side of a query, got -1. Hugging Face's `attention_window` "
        "counts both sides: give half of it.",
    ),
    "window float": (lambda: longformer(window=2.5), ValueError, "`window` must be an int >= 0"),
    "window array": (
        lambda: longformer(window=np.ones((2, 2))),
        TypeError,
        "`window` must be an int, or an int array of shape () or [B], got float64 [2, 2].",
    ),
    "dilation": (
        lambda: longformer(dilation=0),
        ValueError,
        "`dilation` must be an int >= 1, or a sequence of them, one per head, got 0.",
    ),
    "dilation float": (lambda: longformer(dilation=1.5), TypeError, "one per head, got 1.5."),
    "dilation heads": (
        lambda: longformer(dilation=(1, 2)),
        ValueError,
        "`dilation` has 2 entries, but `q` has 4 heads. Give one int for all heads, or 4 ints, one per head.",
    ),
    "traced dilation": (
        traced(lambda n: longformer(dilation=n)),
        TypeError,
        "got a traced array. It is static: pass Python ints.",
    ),
    "kinds list": (
        lambda: longformer(token_kinds=[0] * 12),
        TypeError,
        "`token_kinds` must be an array [2, 12] (or [1, 12]) of -1 (padding), 0 (local) and +1 (global), got list.",
    ),
    "kinds dtype": (
        lambda: longformer(token_kinds=np.zeros((2, 12), complex)),
        TypeError,
        "`token_kinds` must hold -1, 0 and +1, got dtype complex128.",
    ),
    "kinds shape": (
        lambda: longformer(token_kinds=np.zeros((3, 12), int)),
        ValueError,
        "`token_kinds` must have shape [2, 12] (or [1, 12]), one kind per token, got (3, 12).",
    ),
    "lengths": (
        lambda: longformer(X, X[:, :9], X[:, :9], X, X[:, :9], X[:, :9]),
        ValueError,
        "`q` has 12 tokens and `k` has 9. For different lengths use `attention`",
    ),
    "no global queries": (
        lambda: longformer(X, X, X, None, X, X, token_kinds=np.zeros((2, 12), int)),
        ValueError,
        "`q_global` is None, but `token_kinds` may hold global tokens.",
    ),
    "global shape": (
        lambda: longformer(X, X, X, X, X[:, :, :2], X, token_kinds=np.zeros((2, 12), int)),
        ValueError,
        "`k_global` must be like `k`, float32 [2, 12, 4, 3], got float32 [2, 12, 2, 3].",
    ),
    "dropout": (
        lambda: longformer(dropout_rate=0.1),
        ValueError,
        "dropout_rate=0.1 needs a `dropout_key`. Pass `dropout_key=jax.random.key(seed)`.",
    ),
    "engine": (lambda: longformer(engine="fast"), ValueError, "engine='fast' is not one of 'auto'"),
    "bigbird mask": (
        lambda: ls.bigbird(12, block_size=5, rand_attn=ROWS),
        ValueError,
        "a multiple of block_size=5, got 12",
    ),
    "longformer mask": (lambda: ls.longformer(-2), ValueError, "`window` must be an int >= 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    call, kind, text = CASES[case]
    with pytest.raises(kind, match=re.escape(text)):
        call()
