"""One mask of every family for sharded sequences: each family needs another kind of communication."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import longspan as ls
from longspan.testing import Shape, make_qkv
from tests.users_masks import Near, NearSlots

T, B, N, K, H, HV = 41, 2, 4, 2, 5, 3
RNG = np.random.default_rng(0)
IDS = np.sort(RNG.integers(0, 5, (B, 2 * T)), axis=1)
IDS[1] = RNG.integers(0, 3, 2 * T)
FLAGS = RNG.random((B, 2 * T)) < 0.08


def every_fourth(q, k):
    return (q + k) % 4 == 0


def by_row_and_head(b, h, q, k):
    return (q + b * 3 + h) % 4 != k % 3


# For tokens in any order: in zigzag order, arrays are in the order of the tokens.
BY_TOKEN: dict[str, Callable[[np.ndarray], ls.Mask]] = {
    "causal window": lambda at: ls.Causal() & ls.Window(4, 0),
    "window": lambda at: ls.Window(3, 2),
    "dilated window": lambda at: ls.Window(2, 1, 3),
    "wide window": lambda at: ls.Window(13, 0),
    "traced window": lambda at: ls.Causal() & ls.Window(jnp.array([3, 9]), 0),
    "aligned chunks": lambda at: ls.Chunk(3),
    "causal": lambda at: ls.Causal(),
    "full": lambda at: ls.Full(),
    "empty": lambda at: ls.Empty(),
    "outside a window": lambda at: ~ls.Window(5, 5),
    "block causal": lambda at: ls.BlockCausal(5),
    "window and prefix": lambda at: ls.Causal() & (ls.Window(4, 0) | ls.Prefix(3)),
    "window and global tokens": lambda at: ls.Window(3, 3) | ls.Global((0, 17)),
    "global rows": lambda at: ls.Window(2, 0) | ls.Global((7, 8), columns=False),
    "window and flags": lambda at: ls.Window(2, 2) | ls.Global(q_flags=FLAGS[:, at], kv_flags=FLAGS[:, at]),
    "documents": lambda at: ls.Segments(IDS[:, at]),
    "causal documents": lambda at: ls.Causal() & ls.Segments(np.sort(IDS, axis=1)[:, at]),
    "bounded documents": lambda at: ls.Segments(IDS[:, at]) & ls.Window(3, 0),
    "token types": lambda at: ls.TokenTypes(IDS[:, at]) & ls.Causal(),
    "lengths": lambda at: ls.Causal() & ls.KvLengths(np.array([30, 7])) & ls.QLengths(np.array([33, 20])),
    "custom": lambda at: ls.Custom(every_fourth),
    "custom by row and head": lambda at: ls.Custom(by_row_and_head, batch=B, heads=N) & ls.Window(7, 3),
    "per head": lambda at: ls.PerHead((ls.Causal(), ls.Window(2, 2), ls.Causal(), ls.Prefix(4))),
}
# Rules by slot, for tokens in contiguous order only.
BY_SLOT: dict[str, Callable[[np.ndarray], ls.Mask]] = {
    "dense": lambda at: ls.Dense(np.random.default_rng(1).random((B, N, len(at), len(at))) < 0.3),
    "between": lambda at: ls.Between(RNG.integers(0, 20, (B, N, len(at))), RNG.integers(10, len(at), (B, N, len(at)))),
    "random blocks": lambda at: ls.Blocks(
        np.random.default_rng(2).integers(0, -(-len(at) // 5), (N, -(-len(at) // 5), 2)), 5
    ),
    "listed blocks": lambda at: ls.Blocks(
        np.random.default_rng(2).integers(0, -(-len(at) // 2), (N, -(-len(at) // 2), 1)), 2
    ),
    "listed blocks, as data": lambda at: (
        ls.Blocks(jnp.asarray(np.random.default_rng(3).integers(0, len(at), (N, len(at), 1))), 1) | ls.Window(1, 0)
    ),
    "first of documents": lambda at: ls.FirstOfSegment(IDS[:, at], 2) | ls.Window(2, 0),
    "a user's": lambda at: Near(5),
    "a user's by slot": lambda at: NearSlots(5),
}
FAMILIES = BY_TOKEN | BY_SLOT

MESHES = {
    "sp8": partial(ls.parallel.mesh, sp=8),
    "sp4": partial(ls.parallel.mesh, sp=4),
    "sp3": partial(ls.parallel.mesh, sp=3),
    "dp2-sp4": partial(ls.parallel.mesh, dp=2, sp=4),
    "dp2-tp2-sp2": partial(ls.parallel.mesh, dp=2, tp=2, sp=2),
}
# Arguments that name the axes of `mesh_of_other_names`.
NAMED = dict(axis="tokens", batch_axes="rows", head_axis="model")
ENGINES = ("cpu", "xla")


def mesh_of_other_names():
    """Eight devices on axes that have none of the default names."""
    return jax.make_mesh((2, 2, 2), ("rows", "model", "tokens"), axis_types=(AxisType.Auto,) * 3)


def operands(length: int = T, dtype=jnp.float32):
    return make_qkv(Shape(B, length, length, N, K, H, HV), dtype)
