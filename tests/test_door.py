"""Rules reach their data only through the sides: a kernel can hand them blocks of its own, and no arrays at all."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.masks.by_slot import kv_flags
from longspan.masks.sides import QUERIES, Tiles
from tests.users_masks import Louder, Near, NearSlots

T, S, B, N = 12, 20, 3, 4
ROW, HEAD = 1, 2  # what the kernel is computing
Q, KV = slice(3, 8), slice(6, 14)  # and which of its tiles
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Placeholder:
    """What is left of an array inside a kernel: its shape, its dtype, and which operand it is."""

    operand: int
    shape: tuple[int, ...]
    dtype: Any
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: int(np.prod(self.shape)))


class Namespace:
    """jax.numpy as far as a kernel has it: no select between bools, and no arrays from outside."""

    def __getattr__(self, name):
        return getattr(jnp, name)

    def where(self, condition, yes, no):
        assert jnp.asarray(yes).dtype != bool, "logic, not `where`, for bools"
        return jnp.where(condition, yes, no)

    def asarray(self, array, dtype=None):
        raise AssertionError("an array was read past the door")


class Door:
    """What a kernel's slots and tiles share: how they answer for an operand."""

    def __init__(self, side, at, operands):
        for name, value in dict(side=side, at=at, operands=operands).items():
            object.__setattr__(self, name, value)

    def number(self, value):
        if isinstance(value, int):
            return value
        flat = self.operands[value.operand].reshape(-1)
        return jnp.int32(flat[ROW if flat.size > 1 else 0])

    def table(self, array):
        return jnp.asarray(self.operands[array.operand])

    def row(self, array):
        array = self.operands[array.operand]
        head = () if array.ndim == 2 else (HEAD if array.shape[1] > 1 else 0,)
        return array[ROW if array.shape[0] > 1 else 0, *head, self.at]


class Slots(Door):
    """Single slots, rank 2: [n, 1] or [1, n]."""

    def along(self, vector):
        return jnp.asarray(vector).reshape((-1, 1) if self.side.axis == QUERIES else (1, -1))

    @property
    def index(self):
        return self.along(np.arange(self.at.start, self.at.stop, dtype=np.int32))

    position = index

    def take(self, array):
        return self.along(self.row(array))

    def is_one_of(self, positions):
        found = self.position == positions[0]
        for position in positions[1:]:
            found = found | (self.position == position)
        return found

    def listed(self, table, unit):
        table = self.operands[table.operand]
        rows = table[HEAD if table.shape[0] > 1 else 0, np.arange(self.at.start, self.at.stop) // unit]
        return [self.along(column) for column in rows.T]

    def pairs(self, array, others, offsets=(None, None)):
        array = self.operands[array.operand]
        array = array.reshape((1,) * (4 - array.ndim) + array.shape)
        known = [n is not None for n in offsets]
        full = (array.shape[2] if known[0] else T, array.shape[3] if known[1] else S)
        tile = np.broadcast_to(array, (B, N, *full))[ROW, HEAD]
        places = [
            np.clip(np.arange(slots.at.start, slots.at.stop) - int(0 if n is None else self.number(n)), 0, size - 1)
            for slots, n, size in zip((self, others), offsets, full, strict=True)
        ]
        return jnp.asarray(tile[np.ix_(*places)])


class Tile(Door, Tiles):
    """One tile, all scalars; bounds of arrays were worked out before."""

    solid = False
    start = property(lambda self: jnp.int32(self.at.start))
    stop = property(lambda self: jnp.int32(self.at.stop))
    first = start
    last = property(lambda self: self.stop - 1)

    def least(self, array, valid=lambda entries: entries == entries):
        entries = self.row(array)
        return jnp.int32(entries[np.asarray(valid(entries))].min(initial=2**31 - 1))

    def greatest(self, array, valid=lambda entries: entries == entries):
        entries = self.row(array)
        return jnp.int32(entries[np.asarray(valid(entries))].astype(np.int32).max(initial=-(2**31)))

    def count_of(self, positions):
        return jnp.int32(sum(self.at.start <= p < self.at.stop for p in set(positions)))

    def blocks(self, unit):
        return None


def stripped(mask):
    """The mask with placeholders for its arrays, static ones too, and the arrays."""
    mask = mask.atoms()
    static = [part for part in mask.walk() if isinstance(part, ls.Blocks) and isinstance(part.table, np.ndarray)]
    if static:
        assert static == [mask]
        bare = copy.copy(mask)
        object.__setattr__(bare, "table", Placeholder(0, mask.table.shape, mask.table.dtype))
        return bare, [mask.table]
    leaves, tree = jax.tree.flatten(mask)
    operands = [np.asarray(leaf) for leaf in leaves]
    return jax.tree.unflatten(tree, [Placeholder(i, a.shape, a.dtype) for i, a in enumerate(operands)]), operands


def sides(make, operands):
    common = dict(head=jnp.int32(HEAD), xp=Namespace(), positions=None, whole=False)
    return (
        make(SimpleNamespace(axis=axis, length=length, **common), at, operands)
        for axis, length, at in ((2, T, Q), (3, S, KV))
    )


def ids(length, low=-1, rows=B):
    return RNG.integers(low, 3, (rows, length))


NUMBERS = np.array([2, 5, 3])
TABLE = RNG.integers(-1, 7, (N, 4, 2))
MASKS = [
    ls.Full(),
    ls.Empty(),
    ls.Causal(jnp.asarray(NUMBERS)),
    ls.Band(np.array(-4), NUMBERS),
    ls.Window(NUMBERS, jnp.array(1)),
    ls.Window(NUMBERS, 2, dilation=NUMBERS - 1),
    ls.Chunk(NUMBERS),
    ls.BlockCausal(NUMBERS),
    ls.Prefix(NUMBERS + 5),
    ls.KvLengths(NUMBERS + 6),
    ls.QLengths(NUMBERS + 1),
    ls.Between(RNG.integers(0, 9, (B, N, T)), RNG.integers(5, 15, (B, 1, T))),
    kv_flags(RNG.random((B, S)) < 0.5),
    ls.Segments(ids(T), ids(S, rows=1)),
    ls.FirstOfSegment(ids(T), NUMBERS, kv_ids=ids(S, rows=1)),
    ls.TokenTypes(ids(T, 0), ids(S, 0)),
    ls.TokenTypes(ids(T, 0), ids(S, 0), zero="none"),
    ls.Global((4, 7, 11)),
    ls.Global((7,), q_flags=RNG.random((1, T)) < 0.3, kv_flags=RNG.random((B, S)) < 0.3, rows=False),
    ls.Blocks(TABLE, 3),
    ls.Blocks(jnp.asarray(TABLE), 3),
    ls.Dense(RNG.random((T, S)) < 0.5),
    ls.Dense(RNG.random((B, 1, T, 1)) < 0.5),
    ls.Dense(RNG.random((6, 9)) < 0.7, 4, NUMBERS + 3),
    ls.Dense(RNG.random((B, N, T, 5)) < 0.7, kv_offset=jnp.array(9)),
    ls.Custom(lambda q, k, far: q - k < far[0], NUMBERS),
    ls.PerHead((ls.Causal(), ls.Full(), ls.Window(NUMBERS, 0), ls.Segments(ids(T), ids(S)))),
    ls.Window(NUMBERS, 3) & ls.Causal(np.array(1)) & ~(ls.Chunk(2) | ls.KvLengths(NUMBERS)),
    Near(4),
    NearSlots(4),
    Louder(ids(T), ids(S)),
]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_a_rule_holds_on_blocks_that_a_kernel_hands_it(mask):
    bare, operands = stripped(mask)
    truth = np.broadcast_to(mask.dense(T, S), (B, N, T, S))[ROW, HEAD, Q, KV]
    got = bare.allowed(*sides(Slots, operands))
    np.testing.assert_array_equal(np.broadcast_to(got, truth.shape), truth)


@pytest.mark.parametrize("mask", [m for m in MASKS if not isinstance(m, ls.Custom)], ids=repr)
def test_a_rule_bounds_a_tile_by_what_a_kernel_hands_it(mask):
    bare, operands = stripped(mask)
    truth = np.broadcast_to(mask.dense(T, S), (B, N, T, S))[ROW, HEAD, Q, KV]
    some, every = bare.classify(*sides(Tile, operands))
    assert bool(np.all(some)) >= truth.any() and bool(np.all(every)) <= truth.all()
