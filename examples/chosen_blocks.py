"""Attention to selected blocks: every query block attends to the key blocks with the highest scores.

The scores are products of mean-pooled queries and keys, for each batch row and head. Each query block selects the best
of the earlier key blocks, as in NSA, MoBA and VSA. The selection is an array, `Blocks(table, block_size)`: it may
change with every batch without a new compilation, and both passes skip the other blocks.

    python examples/chosen_blocks.py                         # 4096 tokens, 8 of 64 blocks
    python examples/chosen_blocks.py --length 512 --block-size 32 --chosen 4
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

import longspan as ls


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Prints on stderr that the block compiles a program, and the seconds of the block."""
    start = time.monotonic()
    print(f"compiling {what} ...", file=sys.stderr, flush=True)
    yield
    print(f"compiled {what} and ran it once in {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


def choose_blocks(q, k, block_size: int, chosen: int):
    """The key blocks of each query block, int [B, N, blocks, chosen]; -1 if fewer blocks precede it.

    Each query block always selects its own block. q is [B, T, N, H], k [B, T, K, H].
    """
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    pooled = [x.reshape(x.shape[0], -1, block_size, *x.shape[2:]).mean(axis=2) for x in (q, k)]
    scores = jnp.einsum("binh,bjnh->bnij", *pooled)
    block = jnp.arange(scores.shape[-1])
    q_block, kv_block = block.reshape(1, 1, -1, 1), block.reshape(1, 1, 1, -1)
    scores = jnp.where(kv_block > q_block, -jnp.inf, scores)
    scores = jnp.where(kv_block == q_block, jnp.inf, scores)
    best, table = jax.lax.top_k(scores, chosen)
    return jnp.where(best == -jnp.inf, -1, table)


def chosen_mask(q, k, block_size: int, chosen: int) -> ls.Mask:
    """Causal attention within the chosen blocks."""
    # The selection has no gradient; attention to the selected blocks has one.
    table = jax.lax.stop_gradient(choose_blocks(q, k, block_size, chosen))
    return ls.Causal() & ls.Blocks(table, block_size)


def dense_attention(q, k, v, table, block_size: int):
    """The same attention in plain JAX, with the whole T×T array of scores, for comparison."""
    T, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    blocks = jax.nn.one_hot(table, T // block_size, dtype=bool).any(axis=3)
    allowed = blocks.repeat(block_size, axis=2).repeat(block_size, axis=3) & jnp.tri(T, dtype=bool)[None, None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[3] ** 0.5
    weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def compare(length: int = 4096, block_size: int = 64, chosen: int = 8, engine: Any = "auto", report=print):
    """The largest differences from dense attention to the same blocks: of the output and of dq, dk and dv."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k = jax.random.normal(keys[0], (2, length, 4, 32)), jax.random.normal(keys[1], (2, length, 2, 32))
    v, weights = jax.random.normal(keys[2], (2, length, 2, 32)), jax.random.normal(keys[3], (2, length, 4, 32))

    def ours(q, k, v):
        return ls.attention(q, k, v, mask=chosen_mask(q, k, block_size, chosen), engine=engine)

    def dense(q, k, v):
        return dense_attention(q, k, v, choose_blocks(q, k, block_size, chosen), block_size)

    results = []
    for name, attend in dict(sparse=ours, dense=dense).items():
        with compiling(f"{name} attention"):
            out, backward = jax.vjp(jax.jit(attend), q, k, v)
            results.append(jax.block_until_ready((out, *backward(weights))))
    layout = chosen_mask(q, k, block_size, chosen).layout(length, length, q_tile=block_size, kv_tile=block_size)
    causal = ls.Causal().layout(length, length, q_tile=block_size, kv_tile=block_size).visits()
    report(f"{layout.visits() / 8:.0f} tiles per head and batch row; causal attention visits {causal}")
    return [float(jnp.abs(a - b).max()) for a, b in zip(*results, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--chosen", type=int, default=8, help="key blocks that each query block selects")
    differences = compare(**vars(parser.parse_args()))
    for name, difference in zip(("out", "dq", "dk", "dv"), differences, strict=True):
        print(f"{name:>3}: differs by at most {difference:.1e} from dense attention to the same blocks")


if __name__ == "__main__":
    main()
