"""`Dense` with offsets: a small array among many slots. Only its tiles are visited; pairs outside are not allowed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.engines.cpu.program import supports
from longspan.layout import count
from longspan.testing import Shape, assert_matches_reference, assert_obeys_laws, make_qkv

pytestmark = pytest.mark.quick

RNG = np.random.default_rng(0)
T, S = 23, 31
ARRAY = RNG.random((2, 3, 7, 11)) < 0.6


def by_hand(array, q_offset, kv_offset):
    """The array inside a table that is False elsewhere; entries beyond the table are dropped."""
    table = np.zeros((*array.shape[:2], T, S), bool)
    for b, n, i, j in np.ndindex(*array.shape):
        t, s = i + np.broadcast_to(q_offset, 2)[b], j + np.broadcast_to(kv_offset, 2)[b]
        if 0 <= t < T and 0 <= s < S:
            table[b, n, t, s] = array[b, n, i, j]
    return table


OFFSETS = [(0, 0), (5, 9), (T - 3, S - 2), (-3, -4), (T, 2), (2, S + 9), (np.array(4), np.array([1, 25]))]


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_entry_i_is_for_slot_offset_plus_i(offsets, array):
    mask = ls.Dense(array(ARRAY), *offsets)
    np.testing.assert_array_equal(mask.dense(T, S), by_hand(ARRAY, *offsets))
    assert_obeys_laws(mask, T, S)
    assert count(mask.layout(T, S)).pairs == by_hand(ARRAY, *offsets).sum()


def test_an_offset_of_0_lets_an_array_be_small_and_none_does_not():
    small = RNG.random((7, 11)) < 0.5
    assert ls.Dense(small, 0, 0).dense(T, S).sum() == small.sum()
    assert ls.Dense(small, kv_offset=0).dense(7, S).sum() == small.sum()
    with pytest.raises(ValueError, match=r"Dense\.array covers 11 keys, but the call has 31"):
        ls.Dense(small, q_offset=0).dense(T, S)
    one = ls.Dense(np.ones((1, 1), bool), kv_offset=4).dense(T, S)  # one query for all, and one key
    np.testing.assert_array_equal(one[0, 0], np.broadcast_to(np.arange(S) == 4, (T, S)))


def test_only_the_tiles_of_the_array_are_visited_also_where_offsets_are_traced():
    tree = np.tril(np.ones((64, 64), bool))
    layout = ls.Dense(tree, 5000, 9000).layout(8192, 16384)
    assert layout.visits() <= 4 and layout.transpose().visits() <= 4
    assert count(layout).pairs == tree.sum()

    @jax.jit
    def planned(at):
        layout = ls.Dense(tree, at, at).layout(8192, 8192)
        return layout, layout.transpose()

    for at in (0, 4096 - 64, 5000):
        assert [layout.visits() for layout in planned(at)] == [ls.Dense(tree, at, at).layout(8192, 8192).visits()] * 2
    assert [layout.visits() for layout in planned(8192)] == [0, 0]


@pytest.mark.parametrize("offsets", [(5, 9), (None, 12), (-2, None), (np.array([3, 18]), np.array(-4))], ids=str)
def test_engines_match_the_reference_in_both_passes(offsets):
    sizes = [n if at is None else 9 for n, at in zip((T, S), offsets, strict=True)]
    mask = ls.Prefix(3) | ls.Dense(RNG.random((2, 1, *sizes)) < 0.6, *offsets)
    assert supports(mask)
    q, k, v = make_qkv(Shape(B=2, T=T, S=S, N=4, K=2, H=5), jnp.float32)
    for rule in (mask, mask.layout(T, S, q_tile=4, kv_tile=3)):
        assert_matches_reference(["cpu", "xla"], q, k, v, rule)


def test_a_tree_of_drafts_after_a_growing_cache_does_not_retrace():
    tree = jnp.asarray(np.tril(np.ones((5, 5), bool)))
    q, k, v = make_qkv(Shape(B=1, T=5, S=S, N=2, K=1, H=4), jnp.float32)
    traces = []

    @jax.jit
    def step(filled):
        traces.append(1)
        mask = ls.KvLengths(filled) | ls.Dense(tree, kv_offset=filled)
        return [ls.attention(q, k, v, mask=mask, engine=e) for e in ("cpu", "xla")]

    for filled in (0, 7, S - 5):
        wanted = ls.attention(q, k, v, mask=ls.Causal(filled), engine="reference")
        for got in step(filled):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert len(traces) == 1


def test_a_cut_to_consecutive_slots_changes_the_offset_and_others_gather():
    mask = ls.Dense(ARRAY, 5, np.array([9, 2]))
    truth = np.asarray(mask.dense(T, S))
    moved = mask.cut(np.arange(7, 20), np.arange(4, 30))
    assert moved.array.shape == ARRAY.shape and moved.q_offset == -2 and moved.kv_offset.tolist() == [5, -2]
    np.testing.assert_array_equal(moved.dense(13, 26), truth[:, :, 7:20, 4:30])
    rows = np.array([[3, 4, 5], [8, 9, 10]])
    np.testing.assert_array_equal(mask.cut(rows).dense(3, S), np.take_along_axis(truth, rows[:, None, :, None], axis=2))
    some = np.array([6, 1, 12, 6])
    for kept in (some, jnp.asarray(some)):
        cut = mask.cut(kept, kept)
        assert cut.q_offset is None and cut.array.shape[2:] == (4, 4)
        np.testing.assert_array_equal(cut.dense(4, 4), truth[:, :, some][..., some])
    assert not np.asarray(ls.Dense(np.ones((0, 4), bool), 1, 1).cut(some, some).dense(4, 4)).any()


def test_it_compares_by_value_and_is_a_pytree():
    mask = ls.Dense(ARRAY, 3, np.array([1, 2]))
    assert repr(mask) == "Dense(bool[2,3,7,11], q_offset=3, kv_offset=i32[2])"
    assert mask == ls.Dense(ARRAY, 3, np.array([1, 2])) != ls.Dense(ARRAY, 4, np.array([1, 2]))
    assert mask.batch == 2 and mask.heads == 3 and repr(ls.Dense(ARRAY)) == "Dense(bool[2,3,7,11])"


def test_offsets_beyond_32_bits_saturate():
    for far in (2**40, -(2**40), np.array(2**40), np.array([-(2**62), 2**62])):
        assert not np.asarray(ls.Dense(ARRAY, far, 0).dense(T, S)).any()
        assert ls.Dense(ARRAY, 0, far).layout(T, S, q_tile=4, kv_tile=4).visits() == 0
        for kept in (np.arange(3), np.array([[3, 4], [0, 1]]), np.array([4, 2, 9]), jnp.arange(3)):
            size = kept.shape[-1]
            assert not np.asarray(ls.Dense(ARRAY, far, far).cut(kept, kept).dense(size, size)).any()
