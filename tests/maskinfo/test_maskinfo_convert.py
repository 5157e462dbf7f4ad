"""The conversion functions: exact small cases, round trips, and every error by its text."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan import (
    MaskInfo,
    attention_mask_to_qkv_cu_seqlens,
    cu_seqlens_to_mask,
    mask_to_segment_ids,
    qkv_cu_seqlens_to_attention_mask,
    qkv_cu_seqlens_to_qkv_masks,
    qkv_masks_to_cu_seqlens,
    segment_ids_to_mask,
    segment_ids_to_qkv_masks,
)

PACKED = np.array([[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]])
PADDED = np.array([[0, 0, 0, -1, -1], [0, 1, 1, 1, -1]])
EMPTY = np.array([[-1, -1, -1, -1, -1], [0, 0, 0, 0, 0]])
ROWS = dict(packed=PACKED, padded=PADDED, empty=EMPTY)


def by_hand(mask):
    """Ids of equal rows in order of first appearance, in plain Python."""
    seen, ids = {}, []
    for row in map(tuple, mask):
        ids.append(seen.setdefault(row, len(seen)) if any(row) else -1)
    return ids


@given(st.integers(0, 2**32 - 1), st.sampled_from([(5, 7), (4, 40)]))
def test_equal_rows_and_columns_share_an_id(seed, shape):
    rng = np.random.default_rng(seed)
    few = rng.integers(0, 2, (3, shape[1]))
    mask = few[rng.integers(0, 3, shape[0])] * (rng.random(shape[0]) < 0.8)[:, None]
    q_ids, kv_ids = mask_to_segment_ids(mask)
    assert q_ids.tolist() == by_hand(mask)
    assert kv_ids.tolist() == by_hand(mask.T)


def test_heads_of_a_dense_mask():
    rng = np.random.default_rng(0)
    mask = rng.random((2, 3, 4, 5)) < 0.5
    q_ids, kv_ids = mask_to_segment_ids(mask, per_head=True)
    assert (q_ids.shape, kv_ids.shape) == ((2, 3, 4), (2, 3, 5))
    for b, n in itertools.product(range(2), range(3)):
        assert q_ids[b, n].tolist() == by_hand(mask[b, n])
        assert kv_ids[b, n].tolist() == by_hand(mask[b, n].T)
    np.testing.assert_array_equal(mask_to_segment_ids(mask)[0], q_ids[:, 0])
    np.testing.assert_array_equal(mask_to_segment_ids(mask[:, 1])[1], kv_ids[:, 1])
    assert q_ids.dtype == jnp.int32


def test_ids_of_a_mask_need_little_memory():
    T = 4096
    compiled = jax.jit(mask_to_segment_ids).lower(jax.ShapeDtypeStruct((T, T), bool)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * T * T, "a few bits per pair, not T**3 bits"


@pytest.mark.parametrize("ids", ROWS.values(), ids=ROWS)
def test_ids_survive_a_round_trip_through_a_mask(ids):
    q_ids, kv_ids = mask_to_segment_ids(segment_ids_to_mask(ids))
    np.testing.assert_array_equal(q_ids, ids)
    np.testing.assert_array_equal(kv_ids, ids)


def test_ids_of_cross_attention_survive_a_round_trip_through_a_mask():
    q_ids, kv_ids = np.array([[0, 1, 1], [0, 0, -1]]), np.array([[0, 0, 1, 1], [0, -1, -1, -1]])
    again = mask_to_segment_ids(segment_ids_to_mask((q_ids, kv_ids)))
    np.testing.assert_array_equal(again[0], q_ids)
    np.testing.assert_array_equal(again[1], kv_ids)


def test_separate_masks_come_with_the_dense_one():
    q_ids, kv_ids = np.array([[0, -1]]), np.array([[0, 0, 1]])
    flagged = segment_ids_to_mask((q_ids, kv_ids), jnp.float32, return_separate_masks=True)
    for got, same in zip(segment_ids_to_qkv_masks(q_ids, kv_ids, jnp.float32), flagged, strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, same)
    assert flagged[2].tolist() == [[[[1, 1, 0], [0, 0, 0]]]]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=2))
def test_padding_masks_survive_a_round_trip_through_pairs(ends):
    mask = np.array([[min(pair) <= i < max(pair) for i in range(6)] for pair in ends])
    pairs, same = qkv_masks_to_cu_seqlens(mask)
    np.testing.assert_array_equal(pairs, same)
    np.testing.assert_array_equal(cu_seqlens_to_mask(pairs, 6), mask)
    assert pairs.shape == (4,)


def test_pairs_of_both_sides():
    q_pairs, kv_pairs = np.array([0, 2, 1, 3]), np.array([0, 4, 0, 0])
    sizes = dict(max_q_len=3, cu_seqlens_kv=kv_pairs, max_kv_len=5)
    q_mask, kv_mask = qkv_cu_seqlens_to_qkv_masks(q_pairs, **sizes, dtype=jnp.int32)
    assert q_mask.tolist() == [[1, 1, 0], [0, 1, 1]]
    assert kv_mask.tolist() == [[1, 1, 1, 1, 0], [0, 0, 0, 0, 0]]
    dense = qkv_cu_seqlens_to_attention_mask(q_pairs, **sizes)
    np.testing.assert_array_equal(dense[:, 0], (q_mask[:, :, None] * kv_mask[:, None, :]) > 0)
    back = attention_mask_to_qkv_cu_seqlens(dense)
    assert back[0].tolist() == [0, 2, 0, 0], "no query of row 1 attends to a key"
    assert back[1].tolist() == [0, 4, 0, 0]


@pytest.mark.parametrize(("how", "wanted"), [("any", [0, 3]), ("all", [1, 2]), ("first", [0, 2])])
def test_heads_are_combined_by_any_all_or_first(how, wanted):
    mask = np.array([[[[1, 1, 0]], [[0, 1, 1]]]])
    assert attention_mask_to_qkv_cu_seqlens(mask, reduce_heads=how, out_dtype=jnp.int16)[1].tolist() == wanted


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)], ids=str)
def test_empty_inputs_convert_to_empty_outputs(shape):
    ids = np.zeros(shape, np.int32)
    assert segment_ids_to_mask(ids).shape == (shape[0], 1, shape[1], shape[1])
    assert qkv_masks_to_cu_seqlens(ids)[0].tolist() == [0] * (2 * shape[0])
    assert mask_to_segment_ids(np.zeros((*shape, 0), bool))[0].shape == shape


@pytest.mark.parametrize("ids", ROWS.values(), ids=ROWS)
def test_conversions_work_under_jit_and_vmap(ids):
    mask = segment_ids_to_mask(ids)
    for f, x in (
        (mask_to_segment_ids, mask),
        (segment_ids_to_qkv_masks, jnp.asarray(ids)),
        (attention_mask_to_qkv_cu_seqlens, mask),
        (qkv_masks_to_cu_seqlens, ids >= 0),
    ):
        wanted = f(x)
        jax.tree.map(np.testing.assert_array_equal, jax.jit(f)(x), wanted)
        stacked = jax.jit(jax.vmap(f))(np.stack([x, x]))
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a)[1], b), stacked, wanted)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_offsets_survive_a_round_trip_through_ids(lengths):
    offsets = np.cumsum([0, *lengths, *[0] * (5 - len(lengths))])
    info = MaskInfo.from_offsets(offsets, max_q_len=20)  # one size, because every new one compiles
    assert info.q_lens.tolist() == [sum(lengths)]
    for side in info.get_or_compute_qkv_cu_seqlens(max_segments=5):
        assert side.tolist() == offsets.tolist()


def test_offsets_of_cross_attention_keep_empty_sequences():
    q_offsets, kv_offsets = np.array([0, 2, 2, 5]), np.array([0, 0, 3, 7])
    info = MaskInfo.from_offsets(q_offsets, kv_offsets=kv_offsets)
    got = info.get_or_compute_qkv_cu_seqlens(max_segments=3)
    assert [side.tolist() for side in got] == [q_offsets.tolist(), kv_offsets.tolist()]


@pytest.mark.parametrize("ids", ROWS.values(), ids=ROWS)
def test_offsets_follow_the_rows(ids):
    offsets, _ = MaskInfo.from_segments(ids).get_or_compute_qkv_cu_seqlens(max_segments=6)
    wanted = [len(list(run)) for row in ids for i, run in itertools.groupby(row) if i >= 0]
    assert np.diff(offsets).tolist() == wanted + [0] * (6 - len(wanted))


ERRORS = [
    (
        lambda: mask_to_segment_ids(np.ones(3)),
        ValueError,
        "mask must have shape (Q, K), (B, Q, K) or (B, H, Q, K), got rank 1",
    ),
    (lambda: mask_to_segment_ids(np.ones((1, 1, 1, 1, 1))), ValueError, "got rank 5"),
    (lambda: segment_ids_to_mask(np.array([0, 1])), ValueError, "q_segment_ids must have shape (B, L), got rank 1"),
    (lambda: segment_ids_to_mask((PACKED,) * 3), ValueError, "one array or (q_ids, kv_ids), got 3 arrays"),
    (lambda: segment_ids_to_mask(np.ones((1, 2))), TypeError, "must be an int array (B, L), got dtype float64"),
    (
        lambda: segment_ids_to_mask((PACKED, np.zeros((3, 5), int))),
        ValueError,
        "2 batch rows, but kv_segment_ids has 3",
    ),
    (lambda: qkv_masks_to_cu_seqlens(np.ones(3)), ValueError, "q_mask must have shape (B, L), got rank 1"),
    (
        lambda: qkv_masks_to_cu_seqlens(np.ones((1, 2)), np.ones((1, 2, 3))),
        ValueError,
        "kv_mask must have shape (B, L)",
    ),
    (lambda: cu_seqlens_to_mask(np.array([0, 1, 2]), 3), ValueError, "got an odd length 3"),
    (lambda: cu_seqlens_to_mask(np.array([[0, 1]]), 3), ValueError, "cu_seqlens must have shape (2B,), got rank 2"),
    (lambda: cu_seqlens_to_mask(np.array([0, 1]), -1), ValueError, "max_len must be >= 0, got -1"),
    (lambda: cu_seqlens_to_mask(np.array([0, 1]), 2.5), TypeError, "max_len must be an int, got 2.5"),
    (
        lambda: attention_mask_to_qkv_cu_seqlens(np.ones((1, 2, 3, 3)), reduce_heads="mean"),
        ValueError,
        "reduce_heads='mean' is not one of 'any', 'all', 'first'",
    ),
    (lambda: attention_mask_to_qkv_cu_seqlens(np.ones(3)), ValueError, "attention_mask must have shape (B, L)"),
    (lambda: jax.jit(cu_seqlens_to_mask)(np.array([0, 1]), 3), ValueError, "max_len sets array shapes"),
]


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS, ids=[text for _, _, text in ERRORS])
def test_errors_of_bad_input(call, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        call()
