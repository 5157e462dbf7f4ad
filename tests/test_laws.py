"""Laws of the mask algebra, on random compositions of every rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan as ls
from longspan.layout import count, plan_layout
from longspan.testing import assert_obeys_laws, masks
from tests import oracle

pytestmark = pytest.mark.quick

T, S, B, N = 7, 11, 2, 3
ANY_MASK = masks(T, S, batch=B, heads=N)
positions = st.none() | st.integers(0, 2**32 - 1)
tile = st.integers(1, 6)


def place(seed, length):
    """Positions in any order, possibly repeated, for one or all batch rows; None: the slots' indices."""
    if seed is None:
        return None
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 12, size=(int(rng.choice([1, B])), length))
    return np.sort(found, axis=1) if rng.random() < 0.5 else found


def truth(mask, q_positions=None, kv_positions=None):
    q, kv = mask._sides(T, S, q_positions, kv_positions, np)
    return np.broadcast_to(np.asarray(mask.allowed(q.slots(), kv.slots())), (B, N, T, S))


def same(a, b):
    np.testing.assert_array_equal(truth(a), truth(b))


@given(ANY_MASK, positions, positions)
def test_dense_equals_a_plain_double_loop(mask, q_seed, kv_seed):
    q_positions, kv_positions = place(q_seed, T), place(kv_seed, S)
    expected = oracle.dense(mask, T, S, q_positions, kv_positions, B, N)
    np.testing.assert_array_equal(truth(mask, q_positions, kv_positions), expected)


@given(ANY_MASK, tile, tile, positions, positions)
def test_bounds_hold_and_the_layout_visits_each_allowed_pair_once(mask, q_tile, kv_tile, q_seed, kv_seed):
    places = dict(q_positions=place(q_seed, T), kv_positions=place(kv_seed, S))
    assert_obeys_laws(mask, T, S, q_tile=q_tile, kv_tile=kv_tile, **places)


@given(ANY_MASK, tile, tile)
def test_counts_equal_those_of_the_dense_mask(mask, q_tile, kv_tile):
    counts = count(plan_layout(mask, T, S, q_tile, kv_tile, xp=np))
    q, kv = mask._sides(T, S, None, None, np)
    told_apart = np.broadcast_to(mask.allowed(q.slots(), kv.slots()), (mask.batch, mask.heads, T, S))
    assert counts.pairs == np.count_nonzero(told_apart)


@given(ANY_MASK, ANY_MASK)
def test_de_morgan(a, b):
    same(~(a & b), ~a | ~b)
    same(~(a | b), ~a & ~b)


@given(ANY_MASK)
def test_idempotence_and_double_negation(a):
    same(a & a, a)
    same(a | a, a)
    same(~~a, a)


@given(ANY_MASK, ANY_MASK, ANY_MASK)
def test_associativity_and_distributivity(a, b, c):
    assert (a & b) & c == a & (b & c)
    assert (a | b) | c == a | (b | c)
    same((a & b) & c, a & (b & c))
    same(a & (b | c), (a & b) | (a & c))


@given(ANY_MASK, ANY_MASK)
def test_commutativity_and_absorption(a, b):
    same(a & b, b & a)
    same(a | b, b | a)
    same(a & (a | b), a)


@given(ANY_MASK)
def test_a_mask_survives_flattening_and_equals_itself(mask):
    leaves, tree = jax.tree.flatten(mask)
    again = jax.tree.unflatten(tree, leaves)
    assert again == mask
    assert repr(again) == repr(mask)
    if not leaves:
        assert hash(again) == hash(mask)
    placeholders = jax.tree.map(lambda _: 0, mask)
    assert jax.tree.structure(placeholders) == tree


@given(masks(T, S, batch=B, heads=N, leaves=3), tile, tile)
@settings(max_examples=30)
def test_planning_in_jax_equals_planning_in_numpy(mask, q_tile, kv_tile):
    @jax.jit
    def in_jax(mask):
        layout = plan_layout(mask, T, S, q_tile, kv_tile, xp=jnp)
        return layout, layout.transpose(), mask.dense(T, S)

    host = plan_layout(mask, T, S, q_tile, kv_tile, xp=np)
    device, transposed, dense = in_jax(mask)
    for here, there in ((host, device), (host.transpose(), transposed)):
        for name in ("starts", "stops", "common", "common_count"):
            a, b = getattr(here, name), getattr(there, name)
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_array_equal(a, b)
    for table in (dense, mask.dense(T, S)):
        np.testing.assert_array_equal(np.broadcast_to(table, (B, N, T, S)), truth(mask))


EVERY_RULE = [
    ls.Full(),
    ls.Empty(),
    ls.Causal(1),
    ls.Band(-2, 3),
    ls.Window(2, 1),
    ls.Window(1, 2, dilation=3),
    ls.Chunk(3),
    ls.BlockCausal(5),
    ls.Prefix(4),
    ls.KvLengths(np.array([5])),
    ls.QLengths(np.array([5])),
    ls.Between(np.array([0, 0, 0, 2, 2, 4, 4, 4, 4, 9, 9, 12]), np.array([1, 3, 3, 3, 6, 7, 7, 9, 9, 9, 11, 12])),
    ls.Global((0, 5)),
    ls.Global((3,), rows=False),
    ls.Blocks(np.array([[[0, 2], [1, 1], [3, 0], [-1, 2]]]), 3),
    ls.Dense(np.random.default_rng(0).random((12, 12)) < 0.2),
    ls.Dense(np.random.default_rng(1).random((5, 6)) < 0.6, 2, 4),
    ls.Dense(np.random.default_rng(2).random((12, 4)) < 0.5, kv_offset=np.array([10])),
    ls.Dense(np.ones((7, 1), bool), q_offset=-2),
    ls.Segments(np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2, -1, -1, -1]])),
    ls.FirstOfSegment(np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2, -1, -1, -1]]), 2),
    ls.TokenTypes(np.array([[1, 1, 1, 1, 0, 0, 0, 2, 2, 2, 2, 2]])),
]


@pytest.mark.parametrize("mask", EVERY_RULE, ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_each_leaf_is_classified_exactly(mask, size):
    """EMPTY exactly where nothing is allowed, FULL exactly where everything is."""
    q, kv = mask._sides(12, 12, None, None, np)
    allowed = np.broadcast_to(np.asarray(mask.allowed(q.slots(), kv.slots())), (1, 1, 12, 12))[0, 0]
    count = -(-12 // size)
    some, every = (np.broadcast_to(k, (1, 1, count, count))[0, 0] for k in mask.classify(q.tiles(size), kv.tiles(size)))
    for i, j in np.ndindex(count, count):
        tile = allowed[i * size : (i + 1) * size, j * size : (j + 1) * size]
        assert some[i, j] == tile.any(), (i, j)
        assert every[i, j] == tile.all(), (i, j)


@pytest.mark.parametrize("mask", [m for m in EVERY_RULE if getattr(m, "dilation", 1) == 1], ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_spans_of_each_leaf_are_tight(mask, size):
    """Rows visit nothing beyond their first and last tile with an allowed pair, in both directions."""
    layout = plan_layout(mask, 12, 12, size, size, xp=np)
    q, kv = layout.sides(xp=np)
    some, _ = (
        np.broadcast_to(k, (1, 1, layout.q_tiles, layout.kv_tiles))[0, 0]
        for k in mask.classify(q.tiles(size), kv.tiles(size))
    )
    for table, seen in ((layout, some), (layout.transpose(), some.T)):
        visited = np.zeros_like(seen)
        for rows, tiles in table.entries(0, 0):
            visited[rows, tiles] = True
        for row, truth in zip(visited, seen, strict=True):
            assert row.any() == truth.any()
            assert not row.any() or (np.flatnonzero(row)[[0, -1]] == np.flatnonzero(truth)[[0, -1]]).all()
