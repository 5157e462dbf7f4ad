"""Layouts: small tables by hand, transposes, repeats, and plans that stay linear."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.layout import count, plan_layout
from longspan.testing import Shape, assert_obeys_laws, make_qkv

pytestmark = pytest.mark.quick


def rows(layout, batch=0, head=0):
    """The tiles that each row visits."""
    count = layout.kv_tiles if layout.is_transposed else layout.q_tiles
    found = [[] for _ in range(count)]
    for row, tile in layout.entries(batch, head):
        for i, j in zip(row, tile, strict=True):
            found[i].append(int(j))
    return [sorted(tiles) for tiles in found]


def test_a_causal_window_by_hand():
    layout = (ls.Causal() & ls.Window(2, 0)).layout(8, 8, q_tile=2, kv_tile=2)
    assert rows(layout) == [[0], [0, 1], [1, 2], [2, 3]]
    assert rows(layout.transpose()) == [[0, 1], [1, 2], [2, 3], [3]]
    assert layout.transpose().transpose() is layout
    assert layout.visits() == layout.transpose().visits() == 7
    assert layout.starts.shape == (1, 1, 4, 1), "causal and window are merged into one band"


def test_global_tokens_add_rows_and_one_common_list():
    layout = (ls.Window(1, 1) | ls.Global((0, 7))).layout(10, 10, q_tile=2, kv_tile=2)
    assert layout.common[0, 0, : int(layout.common_count[0, 0])].tolist() == [0, 3]
    assert rows(layout) == [[0, 1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 3, 4]]
    mirrored = rows(layout.transpose())
    assert mirrored == [[i for i, row in enumerate(rows(layout)) if j in row] for j in range(5)]


def test_documents_in_any_order_span_their_first_to_last_occurrence():
    ids = np.array([[5, 5, 2, 2, 9, 9, -1, -1]])
    layout = (ls.Causal() & ls.Segments(ids)).layout(8, 8, q_tile=2, kv_tile=2)
    assert rows(layout) == [[0], [1], [2], []]


def test_the_layout_distinguishes_the_rows_and_heads_that_the_mask_does():
    assert ls.Causal().layout(8, 8).starts.shape[:2] == (1, 1)
    assert ls.KvLengths(np.array([1, 2, 3])).layout(8, 8).starts.shape[:2] == (3, 1)
    assert ls.PerHead((ls.Causal(), ls.Full())).layout(8, 8).starts.shape[:2] == (1, 2)


ONE, THREE = ls.PerHead((ls.Causal(),)), ls.PerHead((ls.Window(2, 0), ls.Full(), ls.Window(1, 1)))
FLAGGED = ls.PerHead((ls.Window(1, 0) | ls.Global((4,)),))


@pytest.mark.parametrize(
    "mask", [ONE & THREE, ONE | THREE, ONE & ls.Dense(np.ones((1, 3, 7, 7), bool)), FLAGGED & THREE]
)
def test_per_head_with_one_mask_applies_it_to_every_head(mask):
    assert_obeys_laws(mask, 7, 7)
    q, k, v = make_qkv(Shape(B=1, T=7, S=7, N=3, K=1, H=4), np.float32)
    expected = ls.attention(q, k, v, mask=mask, engine="reference")
    for engine in ("cpu", "xla"):
        np.testing.assert_allclose(ls.attention(q, k, v, mask=mask, engine=engine), expected, rtol=1e-5, atol=1e-6)


def test_sorted_positions_are_bisected_and_others_visit_every_tile():
    growing = ls.Causal().layout(4, 8, q_tile=2, kv_tile=2, kv_positions=np.arange(8) - 4)
    assert rows(growing) == [[0, 1, 2], [0, 1, 2, 3]]
    rolling = ls.Causal().layout(4, 8, q_tile=2, kv_tile=2, kv_positions=np.roll(np.arange(8), 3))
    assert rows(rolling) == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("lengths", [(0, 8), (8, 0), (0, 0)])
def test_a_table_without_queries_or_keys_has_an_empty_layout(lengths):
    blocks = -(-lengths[0] // 4)
    for table in (np.zeros((1, blocks, 2), int), jnp.zeros((3, blocks, 0), int)):
        layout = ls.Blocks(table, 4).layout(*lengths, q_tile=2, kv_tile=2)
        assert layout.visits() == layout.transpose().visits() == 0
        assert ls.Blocks(table, 4).dense(*lengths).shape[2:] == lengths


def test_a_tile_listed_twice_is_visited_and_counted_twice():
    once = ls.Full().layout(4, 4, q_tile=2, kv_tile=2)
    starts = np.array([[[[0, 0], [0, 1]]]], np.int32)
    from dataclasses import replace

    twice = replace(once, starts=starts, stops=np.array([[[[2, 1], [1, 2]]]], np.int32), repeats=True)
    assert rows(twice) == [[0, 0, 1], [0, 1]]
    assert rows(twice.transpose()) == [[0, 0, 1], [0, 1]]
    assert count(twice).pairs == 20


def test_a_static_mask_is_planned_in_numpy_and_arrays_in_jax():
    assert isinstance(ls.Causal().layout(8, 8).starts, np.ndarray)
    assert isinstance(ls.Segments(np.zeros((1, 8), int)).layout(8, 8).starts, np.ndarray)
    assert isinstance(ls.Segments(jnp.zeros((1, 8), int)).layout(8, 8).starts, jax.Array)


def test_planning_is_traceable_and_new_ids_do_not_retrace():
    traces = []

    @jax.jit
    def starts(ids):
        traces.append(1)
        return plan_layout(ls.Causal() & ls.Segments(ids), 8, 8, 2, 2).stops

    for seed in range(3):
        ids = np.sort(np.random.default_rng(seed).integers(0, 3, (1, 8)))
        np.testing.assert_array_equal(
            starts(ids), (ls.Causal() & ls.Segments(ids)).layout(8, 8, q_tile=2, kv_tile=2).stops
        )
    assert len(traces) == 1


@pytest.mark.parametrize(
    "mask",
    [
        ls.Causal() & ls.Window(4095, 0),
        ls.Window(256, 256) | ls.Global(tuple(range(0, 2**20, 2**14))),
        ls.Chunk(2048) | ls.Prefix(100),
    ],
    ids=["window", "global", "chunks"],
)
def test_tables_of_a_million_tokens_grow_linearly(mask):
    small, large = (mask.layout(n, n) for n in (2**18, 2**20))
    for name in ("starts", "stops", "common"):
        if getattr(large, name) is not None:
            assert getattr(large, name).size <= 4 * getattr(small, name).size
    assert large.starts.size < 40 * 2**13


def test_a_layout_prints_itself():
    text = repr(ls.Causal().layout(300, 500))
    assert text == "<BlockLayout of Causal(): 300x500 in tiles of 128x128, intervals i32[1,1,3,1]>"
