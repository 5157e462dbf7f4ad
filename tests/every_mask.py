"""Every rule of the algebra, with numbers as arrays where it takes them, and masks as users define them."""

import jax.numpy as jnp
import numpy as np

import longspan as ls
from longspan.masks.by_slot import kv_flags
from tests.users_masks import Louder, Near, NearSlots


def every_mask(B: int, N: int, T: int, S: int) -> dict[str, ls.Mask]:
    """One mask of each kind, and compositions, for B rows, N heads, T queries and S keys."""
    rng = np.random.default_rng(0)
    numbers = np.resize([2, 5, 3], B)
    q_ids, kv_ids, shared_ids = (rng.integers(-1, 3, size) for size in ((B, T), (B, S), (1, S)))
    block = -(-T // 4)
    lists = rng.integers(-1, -(-S // block), (N, -(-T // block), 2))
    part = T // 2, S // 2 - 1
    by_head = (ls.Causal(), ls.Full(), ls.Window(numbers, 0), ls.Segments(q_ids, kv_ids))
    return {
        "full": ls.Full(),
        "empty": ls.Empty(),
        "causal, arrays": ls.Causal(jnp.asarray(numbers)),
        "band": ls.Band(np.array(-4), numbers),
        "window": ls.Window(numbers, jnp.array(1)),
        "window, dilated": ls.Window(numbers, 2, dilation=numbers - 1),
        "chunk": ls.Chunk(numbers),
        "block causal": ls.BlockCausal(numbers),
        "prefix": ls.Prefix(numbers + 5),
        "key lengths": ls.KvLengths(numbers + S // 3),
        "query lengths": ls.QLengths(numbers + 1),
        "between": ls.Between(rng.integers(0, S // 2, (B, N, T)), rng.integers(S // 4, S - 5, (B, 1, T))),
        "key flags": kv_flags(rng.random((B, S)) < 0.5),
        "segments": ls.Segments(q_ids, shared_ids),
        "first of segment": ls.FirstOfSegment(q_ids, numbers, kv_ids=shared_ids),
        "token types": ls.TokenTypes(q_ids + 1, kv_ids + 1),
        "token types, none": ls.TokenTypes(q_ids + 1, kv_ids + 1, zero="none"),
        "global": ls.Global((4, 7, 11)),
        "global, flags": ls.Global(
            (7,), q_flags=rng.random((1, T)) < 0.3, kv_flags=rng.random((B, S)) < 0.3, rows=False
        ),
        "blocks": ls.Blocks(lists, block),
        "blocks, JAX": ls.Blocks(jnp.asarray(lists), block),
        "dense": ls.Dense(rng.random((T, S)) < 0.5),
        "dense, one column": ls.Dense(rng.random((B, 1, T, 1)) < 0.5),
        "dense, moved": ls.Dense(rng.random(part) < 0.7, 4, numbers + 3),
        "dense, moved keys": ls.Dense(rng.random((B, N, T, 5)) < 0.7, kv_offset=jnp.array(9)),
        "custom": ls.Custom(lambda q, k, far: q - k < far[0], numbers),
        "per head": ls.PerHead((by_head * -(-N // 4))[:N]),
        "composed": ls.Window(numbers, 3) & ls.Causal(np.array(1)) & ~(ls.Chunk(2) | ls.KvLengths(numbers)),
        "user's, positions": Near(4),
        "user's, slots": NearSlots(4),
        "user's, arrays": Louder(q_ids, kv_ids),
    }
