"""Packed rows: each document has its own first tokens and its own positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.engines.cpu.program import supports
from longspan.testing import Shape, make_qkv
from tests.engines import every_sparse_engine

pytestmark = pytest.mark.quick

RNG = np.random.default_rng(0)
PACKED = np.array([[3, 3, 3, 3, 0, 0, 0, 7, -1, -1, -1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
MIXED = RNG.integers(-1, 4, (2, 11))


def by_hand(q_ids, kv_ids, n):
    """Key j has the query's id, and fewer than n tokens of its document before it."""
    B, T, S = len(q_ids), q_ids.shape[1], kv_ids.shape[1]
    truth = np.zeros((B, 1, T, S), bool)
    for b, i, j in np.ndindex(B, T, S):
        before = np.count_nonzero(kv_ids[b, :j] == kv_ids[b, j])
        truth[b, 0, i, j] = q_ids[b, i] == kv_ids[b, j] >= 0 and before < np.broadcast_to(n, B)[b]
    return truth


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("n", [0, 1, 3, 2**40, np.array(2), np.array([1, 4])], ids=str)
@pytest.mark.parametrize("ids", [PACKED, MIXED], ids=["packed", "mixed"])
def test_each_document_has_its_own_first_tokens(ids, n, array):
    for kv_ids in (None, RNG.integers(-1, 4, (2, 7))):
        mask = ls.FirstOfSegment(array(ids), n, kv_ids=kv_ids)
        kv_ids = ids if kv_ids is None else kv_ids
        np.testing.assert_array_equal(mask.dense(11, kv_ids.shape[1]), by_hand(ids, kv_ids, n))


def test_one_row_of_ids_serves_all_rows_of_numbers():
    mask = ls.FirstOfSegment(PACKED[:1], np.array([1, 4]))
    np.testing.assert_array_equal(mask.dense(11, 11), by_hand(PACKED[[0, 0]], PACKED[[0, 0]], [1, 4]))


def test_pinned_tokens_of_the_row_leave_later_documents_without_any():
    """`Prefix` under `Segments` pins tokens of the first document only; `FirstOfSegment` pins tokens of each."""
    near = ls.Window(1, 0)
    of_row = ((near | ls.Prefix(2)) & ls.Causal() & ls.Segments(PACKED)).dense(11, 11)[0, 0]
    of_each = ((near | ls.FirstOfSegment(PACKED, 2)) & ls.Causal() & ls.Segments(PACKED)).dense(11, 11)[0, 0]
    assert of_row[3].tolist() == of_each[3].tolist() == [True, True, True, True] + [False] * 7
    assert np.flatnonzero(of_row[6]).tolist() == [5, 6]
    assert np.flatnonzero(of_each[6]).tolist() == [4, 5, 6]


@pytest.mark.parametrize("ids", [PACKED, MIXED], ids=["packed", "mixed"])
def test_a_prefix_by_positions_of_documents_is_the_same_rule(ids):
    positions = ls.positions_from_segments(ids)
    prefix = (ls.Prefix(2) & ls.Segments(ids)).dense(11, 11, q_positions=positions, kv_positions=positions)
    np.testing.assert_array_equal(prefix, ls.FirstOfSegment(ids, 2).dense(11, 11))


def test_positions_start_at_0_in_every_document():
    expected = [[0, 1, 2, 3, 0, 1, 2, 0, 0, 0, 0], [*range(11)]]
    for ids in (PACKED, jnp.asarray(PACKED), PACKED.astype(np.int8)):
        positions = ls.positions_from_segments(ids)
        assert positions.tolist() == jax.jit(ls.positions_from_segments)(ids).tolist() == expected
        assert positions.dtype == np.int32
    assert ls.positions_from_segments(PACKED[0]).tolist() == expected[0]
    assert ls.positions_from_segments(np.zeros((2, 0), int)).shape == (2, 0)


def test_its_tiles_are_those_of_the_first_tokens():
    """A million keys in 8 documents: a row of tiles visits its window and the start of its own document."""
    ids = np.repeat(np.arange(8), 2**17)[None]
    mask = (ls.Window(255, 0) | ls.FirstOfSegment(ids, 4)) & ls.Causal() & ls.Segments(ids)
    layout = mask.layout(2**20, 2**20, q_tile=256, kv_tile=256)
    assert layout.visits() <= 3 * layout.q_tiles


def test_it_runs_natively_and_a_cut_keeps_the_first_tokens():
    mask = ls.FirstOfSegment(PACKED, 2)
    assert supports(mask) and supports(mask.cut([3, 5], [1, 2, 3, 5]))
    for slots in ([1, 2, 3, 5, 6], [5, 5, 4, 4, 4, 0]):
        np.testing.assert_array_equal(
            mask.cut([3, 5], slots).dense(2, len(slots)), np.asarray(mask.dense(11, 11))[:, :, [3, 5]][..., slots]
        )


@every_sparse_engine
def test_engines_agree_where_ids_and_numbers_are_traced(engine):
    q, k, v = make_qkv(Shape(B=2, T=11, S=11, N=2, K=1, H=4), jnp.float32)

    @jax.jit
    def run(ids, n):
        mask = (ls.Window(1, 0) | ls.FirstOfSegment(ids, n)) & ls.Causal()
        return [ls.attention(q, k, v, mask=mask, engine=e) for e in (engine, "reference")]

    out, expected = run(PACKED, np.array([2, -1]))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_it_can_be_described_by_shapes():
    shapes = ls.FirstOfSegment(jax.ShapeDtypeStruct((1, 11), np.int32), np.array([2, 1]))
    assert shapes.first_ids.shape == (2, 11)
    compiled = jax.jit(lambda m: m.dense(11, 11)).lower(shapes).compile()
    mask = ls.FirstOfSegment(PACKED[:1], np.array([2, 1]))
    np.testing.assert_array_equal(compiled(mask), mask.dense(11, 11))
