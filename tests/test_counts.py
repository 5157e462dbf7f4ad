"""Counts of a layout equal those of the dense mask, as lists and as rectangles of tiles."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import longspan as ls
from longspan import layout as layouts
from longspan import tile_kinds
from longspan.layout import count, plan_layout
from longspan.testing import masks

pytestmark = pytest.mark.quick

T, S, B, N = 13, 11, 2, 3
ANY_MASK = masks(T, S, batch=B, heads=N)
tile = st.integers(1, 6)
places = st.none() | st.integers(0, 2**32 - 1)


def place(seed, length):
    """Positions in any order; None: the slots' indices."""
    return None if seed is None else np.random.default_rng(seed).integers(-3, 12, size=(B, length))


def expected(mask, layout):
    """[empty, partial, full] of all tiles classified at once, and the number of allowed pairs."""
    q, kv = layout.sides(xp=np)
    shape = (q.batch.size, q.head.size, layout.q_tiles, layout.kv_tiles)
    kinds = mask.classify(q.tiles(layout.q_tile), kv.tiles(layout.kv_tile))
    some, every = (np.broadcast_to(np.asarray(kind), shape) for kind in kinds)
    visits = np.zeros(shape, int)
    for b, n in np.ndindex(*shape[:2]):
        for rows, tiles in layout.entries(b, n):
            np.add.at(visits[b, n], (rows, tiles), 1)
    pairs = np.broadcast_to(np.asarray(mask.allowed(q.slots(), kv.slots())), (*shape[:2], T, S)).sum()
    return *(int(visits[kind].sum()) for kind in (~some, some & ~every, every)), int(pairs)


def planned(mask, q_tile, kv_tile, q_seed, kv_seed):
    return plan_layout(mask, T, S, q_tile, kv_tile, q_positions=place(q_seed, T), kv_positions=place(kv_seed, S), xp=np)


@pytest.mark.check
@given(ANY_MASK, tile, tile, places, places, st.sampled_from([1, 7, 100]), st.sampled_from([0, 2, 100]))
def test_lists_and_rectangles_of_tiles_have_equal_counts(mask, q_tile, kv_tile, q_seed, kv_seed, size, sparse):
    layout = planned(mask, q_tile, kv_tile, q_seed, kv_seed)
    wanted = expected(mask, layout)
    assert count(layout)[:4] == wanted
    with patch.multiple(layouts, CHUNK=0, RECTANGLE=size, SPARSE=sparse):
        assert count(layout)[:4] == wanted


@pytest.mark.check
@given(ANY_MASK, st.sampled_from([2, 3, 4, 8, 16]), st.sampled_from([2, 4, 5, 8]), places, places)
def test_pairs_read_in_split_tiles_equal_those_of_the_dense_mask(mask, q_tile, kv_tile, q_seed, kv_seed):
    layout = planned(mask, q_tile, kv_tile, q_seed, kv_seed)
    with (
        patch.object(layouts, "count_by_query", lambda *_: None),
        patch.multiple(tile_kinds, SPLIT=2, LEAF=1, READ_AT_ONCE=50),
    ):
        assert count(layout) == (*expected(mask, layout), None)


@given(ANY_MASK, tile, tile)
def test_a_sample_of_all_tiles_is_exact(mask, q_tile, kv_tile):
    layout = planned(mask, q_tile, kv_tile, None, None)
    with patch.object(layouts, "count_by_query", lambda *_: None), patch.object(layouts, "MAX_PAIRS_READ", 0):
        counts = count(layout)
    assert counts[:4] == expected(mask, layout)
    assert counts.sampled == (counts.partial or None)


def test_a_sample_of_some_tiles_is_close_and_counts_tiles_exactly():
    mask = ls.Causal() & ls.Segments(np.random.default_rng(0).integers(0, 5, (1, 3001)))
    layout = plan_layout(mask, 3001, 3001, 16, 16, xp=np)
    exact = count(layout)
    with (
        patch.multiple(layouts, count_by_query=lambda *_: None, MAX_PAIRS_READ=0, CHUNK=0, RECTANGLE=1000),
        patch.object(tile_kinds, "SAMPLE", 500),
    ):
        about = count(layout)
    assert about[:3] == exact[:3]
    assert about.sampled is not None and 400 < about.sampled < 1000 < about.partial
    assert about.pairs != exact.pairs and about.pairs == pytest.approx(exact.pairs, rel=0.02)


def test_rows_and_heads_share_the_limit_of_pairs_read():
    mask = ls.PerHead((ls.Custom(lambda q, k: q > k), ls.Custom(lambda q, k: q < k)))
    layout = plan_layout(mask, 64, 64, 16, 16, xp=np)
    with patch.object(layouts, "MAX_PAIRS_READ", 2 * 64 * 64):
        assert count(layout).sampled is None
    with patch.object(layouts, "MAX_PAIRS_READ", 64 * 64):
        assert count(layout).sampled == 32
