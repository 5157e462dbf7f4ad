"""The differences from ejkernel's MaskInfo that MASKINFO.md lists: at least one test per row of its table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan import MaskInfo
from longspan.engines import ENGINES

IDS = np.array([[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, -1, -1]])
READS = [
    lambda i: i.attention_mask,
    lambda i: i.q_segment_ids,
    lambda i: i.cu_seqlens_q,
    lambda i: i.get_or_compute_positions(),
    lambda i: i.get_qkv_masks("float32"),
    lambda i: i.bias,
    lambda i: i.q_lens,
    lambda i: i.is_multi_sequence,
    lambda i: repr(i),
]


def dense(info):
    return np.asarray(info.attention_mask[:, 0]).astype(int)


def full(batch, length):
    return MaskInfo.from_segments(np.zeros((batch, length), int))


# caches on `self`: tracers leak out of jit, treedef changes, retrace


def test_reading_changes_nothing():
    info = MaskInfo.from_segments(IDS).apply_causal()
    before, leaves = jax.tree.structure(info), [id(x) for x in jax.tree.leaves(info)]
    for read in READS:
        read(info)
    assert jax.tree.structure(info) == before
    assert [id(x) for x in jax.tree.leaves(info)] == leaves


def test_no_tracer_leaks_and_nothing_retraces():
    info, traces = MaskInfo.from_segments(IDS).apply_causal(), []

    @jax.jit
    def f(info):
        traces.append(None)
        return [read(info) for read in READS[:-1]]

    with jax.checking_leaks():
        f(info)
    for read in READS:
        read(info)
        f(info)
    f(MaskInfo.from_segments(IDS[::-1].copy()).apply_causal())
    assert len(traces) == 1


def test_a_mask_closed_over_by_jit_stays_usable():
    info = MaskInfo.from_segments(IDS)
    inside = jax.jit(lambda: info.attention_mask)()
    np.testing.assert_array_equal(info.attention_mask, inside)


# lazy dtype: first caller's dtype sticks


def test_the_dtype_is_what_was_asked_each_time():
    info = MaskInfo.from_segments(IDS)
    for dtype in ("float32", bool, jnp.int8, jnp.bfloat16, np.float16):
        assert info.get_or_compute_attention_mask(dtype).dtype == jnp.dtype(dtype)
        assert all(m.dtype == jnp.dtype(dtype) for m in info.get_qkv_masks(dtype))
        assert info.to_dtype(dtype).attention_mask.dtype == jnp.dtype(dtype)
        assert info.to_dtype(dtype).get_or_compute_attention_mask().dtype == bool
    assert info.attention_mask.dtype == bool


# `get_qkv_masks` forgets causal/window; ids "recovered" from a causal mask give the identity matrix


def test_every_representation_has_every_rule():
    info = MaskInfo.from_segments(IDS).apply_causal().apply_sliding_window((1, 0))
    expected = np.asarray(ls.segment_ids_to_mask(IDS))[:, 0] & np.tril(np.ones((6, 6), bool))
    expected &= ~np.tril(np.ones((6, 6), bool), -2)
    np.testing.assert_array_equal(dense(info), expected)
    np.testing.assert_array_equal(info.get_qkv_masks()[2][:, 0], expected)
    np.testing.assert_array_equal(info.bias[:, 0] == 0, expected)
    np.testing.assert_array_equal(info.mask.dense(6, 6)[:, 0], expected)


def test_ids_of_a_causal_mask_name_documents_not_tokens():
    causal = np.tril(np.ones((2, 4, 4), int))
    info = MaskInfo.from_attention_mask(causal)
    assert info.q_segment_ids.tolist() == [[0, 0, 0, 0]] * 2
    np.testing.assert_array_equal(dense(info.materialize_segment_ids()), causal)


# `replace(ids)` leaves the old mask; `None` cannot clear; positions go stale


def test_replaced_ids_change_the_mask_and_all_derived_values():
    info = MaskInfo.from_segments(IDS).apply_causal()
    info.attention_mask, info.get_or_compute_positions()
    new = np.array([[0, 1, 1, 1, 1, 1]] * 2)
    other = info.replace(q_segment_ids=new, kv_segment_ids=new)
    np.testing.assert_array_equal(dense(other), dense(MaskInfo.from_segments(new).apply_causal()))
    assert other.get_or_compute_positions()[0].tolist() == [[0, 0, 1, 2, 3, 4]] * 2
    assert other.cu_seqlens_q[:5].tolist() == [0, 1, 6, 7, 12]


def test_none_clears_and_other_fields_stay():
    info = MaskInfo.from_segments(IDS, q_positions=np.arange(6)).apply_causal()
    assert info.replace(batch_axis_name="x").replace() == info.replace(batch_axis_name="x")
    assert info.replace(q_positions=None).q_positions is None
    assert info.replace(q_positions=None).kv_positions is None
    np.testing.assert_array_equal(
        dense(info.replace(q_segment_ids=None, kv_segment_ids=None)), np.tril(np.ones((2, 6, 6)))
    )
    np.testing.assert_array_equal(dense(info.replace(attention_mask=None)), dense(MaskInfo.from_segments(IDS)))
    assert info.replace(cu_seqlens_q=None) == info, "offsets are never stored, so there is nothing to clear"
    mask = np.random.default_rng(0).random((2, 1, 6, 6)) < 0.5
    np.testing.assert_array_equal(info.replace(attention_mask=mask).attention_mask, mask)
    offsets = MaskInfo.from_offsets(np.array([0, 2, 6])).apply_causal().replace(cu_seqlens_q=np.array([0, 3, 6]))
    assert offsets.q_segment_ids.tolist() == [[0, 0, 0, 1, 1, 1]]


# `cu_seqlens_q` has three formats; rows merged across the batch; segments past 128 silently dropped


@pytest.mark.parametrize(
    ("info", "wanted"),
    [
        (MaskInfo.from_segments(IDS), [0, 3, 5, 9]),
        (MaskInfo.from_attention_mask(IDS >= 0), [0, 5, 9]),
        (MaskInfo.from_cu_seqlens(np.array([0, 3, 1, 2]), max_q_len=4), [0, 3, 4]),
        (MaskInfo.from_offsets(np.array([0, 2, 5])), [0, 2, 5]),
    ],
    ids=["segments", "mask", "pairs", "offsets"],
)
def test_offsets_have_one_format_and_know_rows(info, wanted):
    for offsets in (info.cu_seqlens_q, info.cu_seqlens_kv, info.get_or_compute_qkv_cu_seqlens()[0]):
        assert offsets.shape == (129,)
        assert offsets.tolist() == wanted + wanted[-1:] * (129 - len(wanted))
        assert offsets.dtype == jnp.int32
    assert int(info.num_segments) == len(wanted) - 1


def test_too_many_sequences_raise_and_are_reported_under_jit():
    info = MaskInfo.from_segments(np.arange(130).reshape(1, 130))
    with pytest.raises(ValueError, match="There are 130 sequences, but max_segments=128"):
        _ = info.cu_seqlens_q
    offsets, count = jax.jit(lambda i: (i.cu_seqlens_q, i.num_segments))(info)
    assert offsets.tolist() == list(range(129))
    assert int(count) == 130
    assert info.get_or_compute_qkv_cu_seqlens(max_segments=130)[0].tolist() == list(range(131))
    assert info.get_or_compute_qkv_cu_seqlens(out_dtype="int16", max_segments=140)[1].dtype == jnp.int16


# `q_lens` fails in jit; one sequence with id 1 counts as many


def test_lengths_have_a_static_shape():
    info = MaskInfo.from_segments(IDS, IDS[:, :4].copy())
    lengths = jax.jit(lambda i: (i.q_lens, i.kv_lens))(info)
    assert [x.tolist() for x in lengths] == [[5, 4], [4, 4]]


@pytest.mark.parametrize(
    ("ids", "several"),
    [
        ([[1, 1, 1]], False),
        ([[0, 0, -1]], False),
        ([[-1, -1, -1]], False),
        ([[0, 0, 1]], True),
        ([[7, 7], [3, 3]], False),
    ],
)
def test_several_sequences_means_more_than_one_id_in_a_row(ids, several):
    info = MaskInfo.from_segments(np.array(ids))
    assert bool(jax.jit(lambda i: i.is_multi_sequence)(info)) == bool(info.is_multi_sequence) == several


# causal ignores given positions: decode with 1 query of 8 keys sees only key 0


def test_positions_drive_decode_prefill_and_rolling_caches():
    kv_ids = np.zeros((1, 8), int)
    one = MaskInfo.from_segments(np.zeros((1, 1), int), kv_ids, q_positions=np.array([[5]]))
    assert dense(one.apply_causal()).tolist() == [[[1, 1, 1, 1, 1, 1, 0, 0]]]
    assert dense(one.apply_sliding_window((2, 0))).tolist() == [[[0, 0, 0, 1, 1, 1, 0, 0]]]
    assert dense(one.apply_chunked(3)).tolist() == [[[0, 0, 0, 1, 1, 1, 0, 0]]]
    rolling = one.replace(kv_positions=np.array([[8, 1, 2, 3, 4, 5, 6, 7]]), q_positions=np.array([[8]]))
    assert dense(rolling.apply_causal().apply_sliding_window((2, 0))).tolist() == [[[1, 0, 0, 0, 0, 0, 1, 1]]]
    step = rolling.apply_sliding_window((2, 0), mode="decode", index=0)
    assert dense(step).tolist() == [[[1, 1, 1]]]
    assert step.kv_positions.tolist() == [[8, 6, 7]]


def test_a_decode_step_equals_the_same_row_of_the_whole_mask():
    whole = MaskInfo.from_segments(IDS).apply_causal().apply_sliding_window((2, 0))
    for index in range(6):
        step = MaskInfo.from_segments(IDS).apply_causal().apply_sliding_window((2, 0), mode="decode", index=index)
        row = np.zeros((2, 6), int)
        for b in range(2):
            row[b, np.asarray(step.kv_positions)[b]] = dense(step)[b, 0]
        np.testing.assert_array_equal(row, dense(whole)[:, index])
    prefill = MaskInfo.from_segments(IDS).apply_causal().apply_sliding_window((2, 0), mode="prefill")
    np.testing.assert_array_equal(dense(prefill), dense(whole)[:, :, 3:])


def test_rules_after_slicing_use_the_original_positions():
    step = full(1, 8).apply_kv_lengths(np.array([6]), q_len=2, sliding_window=4)
    assert (step.q_positions.tolist(), step.kv_positions.tolist()) == ([[4, 5]], [[2, 3, 4, 5]])
    assert dense(step.apply_causal()).tolist() == [[[1, 1, 1, 0], [1, 1, 1, 1]]]


# bad `mode` silently ignored


def test_a_bad_mode_names_the_choices():
    with pytest.raises(ValueError, match="mode='prefil' is not one of 'default', 'decode', 'prefill'"):
        full(1, 4).apply_sliding_window(1, mode="prefil")


# chunking overwrites document ids; token-type union opens padding and crosses documents


def test_chunks_do_not_join_documents():
    info = MaskInfo.from_segments(np.array([[0, 0, 0, 1, 1, -1]])).apply_chunked(4)
    assert dense(info)[0].tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert info.q_segment_ids.tolist() == [[1, 1, 1, 2, 3, -1]]
    assert full(1, 5).apply_chunked(2).q_segment_ids.tolist() == [[1, 1, 2, 2, 3]]


@pytest.mark.parametrize("combine", ["union", "intersect", "replace"])
def test_types_open_no_padding_and_a_union_crosses_no_documents(combine):
    info = MaskInfo.from_segments(np.array([[0, 0, 1, 1, -1]])).apply_causal()
    types = np.array([[2, 2, 2, 2, 2]])
    got = dense(info.apply_token_type_ids(types, combine=combine))[0]
    assert not got[4].any() and not got[:, 4].any()
    documents = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]])
    wanted = dict(union=documents, intersect=documents * np.tril(np.ones((4, 4))), replace=np.ones((4, 4)))
    np.testing.assert_array_equal(got[:4, :4], wanted[combine])


# `create_bias("float16")` TypeError; fully masked rows uniform or NaN


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", jnp.float16, np.float32, np.dtype("float32")], ids=str)
def test_a_bias_has_any_float_dtype(dtype):
    bias = full(1, 3).apply_causal().create_bias(dtype)
    assert bias.dtype == jnp.dtype(dtype)
    assert bias.shape == (1, 1, 3, 3)
    np.testing.assert_array_equal(bias == 0, np.tril(np.ones((1, 1, 3, 3))) > 0)
    assert bias.min() == jnp.finfo(dtype).min


def test_masked_rows_are_zero_with_zero_gradient():
    info = MaskInfo.from_segments(IDS).apply_causal()
    q, k, v = ls.testing.make_qkv(ls.testing.Shape(B=2, T=6, S=6, N=2, K=1, H=4), jnp.float32)
    out = ls.attention(q, k, v, mask=info)
    assert (np.asarray(out)[IDS < 0] == 0).all()
    for grad in jax.grad(lambda *x: ls.attention(*x, mask=info).sum(), argnums=(0, 1, 2))(q, k, v):
        assert np.isfinite(grad).all()
        assert (np.asarray(grad)[IDS < 0] == 0).all()


# some ops silently drop the mask


@pytest.mark.parametrize(
    "info",
    [
        MaskInfo.from_segments(IDS).apply_causal().apply_sliding_window((2, 1)),
        MaskInfo.from_segments(IDS).apply_chunked(4).apply_token_type_ids(np.abs(IDS)),
        MaskInfo.from_segments(IDS, q_positions=np.arange(6)[::-1].copy()).apply_causal(np.array([0, 2])),
        MaskInfo.from_random(2, 6, 6).apply_causal().apply_kv_lengths(np.array([4, 5]), q_len=6),
    ],
    ids=lambda i: repr(i.mask),
)
def test_every_engine_honours_all_of_it_or_raises(info):
    q, k, v = ls.testing.make_qkv(ls.testing.Shape(B=2, T=6, S=6, N=2, K=1, H=4), jnp.float32)
    able = [name for name in ENGINES if not refusal(name, q, k, v, info)]
    assert {"reference", "xla"} <= set(able)

    def run(*, mask, **arguments):
        return ls.attention(mask=info, **arguments)

    # The reference gets the dense mask, each engine the MaskInfo.
    ls.testing.assert_matches_reference(able, q, k, v, info.attention_mask, run=run)


def refusal(engine, q, k, v, info):
    try:
        ls.explain(q, k, v, mask=info, engine=engine)
    except NotImplementedError as reason:
        return str(reason)
    return None


def test_lengths_of_both_sides_become_ids():
    mask = ls.Causal() & ls.QLengths(np.array([2, 6])) & ls.KvLengths(np.array([3, 1])) & ls.Segments(IDS)
    info = MaskInfo.from_mask(mask, 2, 6)
    assert [type(part) for part in info.mask.walk()] == [ls.masks.And, ls.Segments, ls.Causal]
    assert info.q_segment_ids.tolist() == [[0, 0, -1, -1, -1, -1], [2, 2, 2, 2, -1, -1]]
    assert info.kv_segment_ids.tolist() == [[0, 0, 0, -1, -1, -1], [2, -1, -1, -1, -1, -1]]
    np.testing.assert_array_equal(dense(info), mask.dense(6, 6)[:, 0])
    assert MaskInfo.from_mask(ls.QLengths(2**40), 1, 3).q_segment_ids.tolist() == [[0, 0, 0]]
