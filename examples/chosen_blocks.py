"""Attention that chooses what it reads: every block of queries picks the few blocks of keys that score highest.

Mean-pooled queries and keys are compared, for each batch row and head, and the best blocks of the past are kept: the
selection step of NSA, MoBA and VSA. The choice is an array, `Blocks(table, block_size)`, so it may change with every
batch without compiling anew, and what was not chosen is skipped, in both passes.

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
    """The first call of a program compiles it, which takes seconds: this says so on stderr."""
    start = time.monotonic()
    print(f"compiling {what} ...", file=sys.stderr, flush=True)
    yield
    print(f"compiled {what} and ran it once in {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


def choose_blocks(q, k, block_size: int, chosen: int):
    """The blocks that each block of queries reads, int [B, N, blocks, chosen]; -1 where the past has fewer.

    A block's own is always one of them. q is [B, T, N, H], k [B, T, K, H].
    """
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    pooled = (x.reshape(x.shape[0], -1, block_size, *x.shape[2:]).mean(axis=2) for x in (q, k))
    scores = jnp.einsum("binh,bjnh->bnij", *pooled)
    place = jnp.arange(scores.shape[-1])
    mine, theirs = place.reshape(1, 1, -1, 1), place.reshape(1, 1, 1, -1)
    scores = jnp.where(theirs < mine, scores, jnp.where(theirs == mine, jnp.inf, -jnp.inf))
    best, table = jax.lax.top_k(scores, chosen)
    return jnp.where(best == -jnp.inf, -1, table)


def chosen_mask(q, k, block_size: int, chosen: int) -> ls.Mask:
    """Causal attention within the chosen blocks."""
    # Which blocks are read has no gradient; what is read in them has.
    table = jax.lax.stop_gradient(choose_blocks(q, k, block_size, chosen))
    return ls.Causal() & ls.Blocks(table, block_size)


def dense_attention(q, k, v, table, block_size: int):
    """The same in plain JAX, with the whole T×T array of scores: what to compare with."""
    T, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    blocks = jax.nn.one_hot(table, T // block_size, dtype=bool).any(axis=3)
    allowed = blocks.repeat(block_size, axis=2).repeat(block_size, axis=3) & jnp.tri(T, dtype=bool)[None, None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[3] ** 0.5
    weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def compare(length: int = 4096, block_size: int = 64, chosen: int = 8, engine: Any = "auto", report=print):
    """The largest difference from dense attention over the same choice: of the output, and of the gradients."""
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = [(2, length, heads, 32) for heads in (4, 2, 2, 4)]
    q, k, v, weights = (jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=True))

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
    report(f"{layout.visits() / 8:.0f} tiles per head and row, where causal attention has {causal}")
    return [float(jnp.abs(a - b).max()) for a, b in zip(*results, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--chosen", type=int, default=8, help="blocks that each block of queries reads")
    differences = compare(**vars(parser.parse_args()))
    for name, difference in zip(("out", "dq", "dk", "dv"), differences, strict=True):
        print(f"{name:>3}: at most {difference:.1e} from dense attention over the same blocks")


if __name__ == "__main__":
    main()
