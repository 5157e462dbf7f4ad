"""Brute-force lifetimes from dense masks, and strategies for masks to test caches with."""

import jax
import numpy as np
from hypothesis import strategies as st

import longspan as ls
from longspan.masks.sides import two_sides

LENGTH, BATCH, HEADS = 17, 2, 2


def truth(mask, q_len=LENGTH, kv_len=LENGTH, q_positions=None, kv_positions=None, batch=BATCH) -> np.ndarray:
    """Bool [B, heads, T, S], in NumPy."""
    mask = jax.tree.map(np.asarray, mask)
    sides = two_sides(
        q_len, kv_len, batch=batch, heads=HEADS, q_positions=q_positions, kv_positions=kv_positions, xp=np
    )
    allowed = np.asarray(mask.allowed(*(side.slots() for side in sides)))
    return np.broadcast_to(allowed, (batch, HEADS, q_len, kv_len))


def last_queries(seen: np.ndarray) -> np.ndarray:
    """The last query that attends to each key, in any row and head; -1: none does."""
    anyone = seen.any((0, 1))
    return np.array([max(np.nonzero(anyone[:, key])[0], default=-1) for key in range(anyone.shape[1])])


def max_alive(last: np.ndarray, slack: int) -> int:
    """The largest number of keys alive at the same time: k <= t <= last(k) + slack."""
    steps = range(len(last))
    return max(sum(last[k] >= 0 and k <= t <= last[k] + slack for k in steps) for t in steps)


def tied(seen: np.ndarray) -> np.ndarray:
    """Whether each position is tied to the one before: some earlier query attends to it or to a later key."""
    anyone = seen.any((0, 1))
    return np.array([anyone[:p, p:].any() for p in range(anyone.shape[1])])


def exact_masks(leaves: int = 5):
    """Masks whose plans are exact: static rules under & and |, and one per head."""
    small = st.integers(0, LENGTH)
    indices = st.lists(st.integers(0, LENGTH - 1), max_size=3, unique=True).map(tuple)
    leaf = st.one_of(
        st.integers(-3, 3).map(ls.Causal),
        st.tuples(st.integers(0, 6), st.integers(0, 3)).map(lambda p: ls.Window(*p)),
        st.tuples(st.integers(-6, 2), st.integers(0, 3)).map(lambda p: ls.Band(p[0], p[0] + p[1])),
        st.integers(1, 7).map(ls.Chunk),
        small.map(ls.Prefix),
        st.tuples(indices, st.booleans(), st.booleans()).map(lambda p: ls.Global(p[0], rows=p[1], columns=p[2])),
        st.integers(0, 2**32 - 1).map(_blocks),
        st.sampled_from([ls.Full(), ls.Empty()]),
    )
    return st.recursive(leaf, _composed, max_leaves=leaves)


def decodable(masks):
    """Most of the masks with `& Causal()`, without which few can be decoded."""
    return st.tuples(masks, st.integers(0, 3)).map(lambda p: p[0] if p[1] == 0 else p[0] & ls.Causal())


def _composed(inner):
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda p: p[0] & p[1]),
        pairs.map(lambda p: p[0] | p[1]),
        pairs.map(ls.PerHead),
    )


def _blocks(seed: int):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 6))
    shape = (int(rng.choice([1, HEADS])), -(-LENGTH // size), int(rng.integers(0, 4)))
    return ls.Blocks(rng.integers(-1, -(-LENGTH // size), shape), size)
