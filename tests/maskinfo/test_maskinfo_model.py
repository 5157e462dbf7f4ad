"""Random sequences of operations on a `MaskInfo` agree after each step with a dense model."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import longspan as ls
from longspan import MaskInfo
from tests import oracle
from tests.maskinfo.model import Model, Rule, rank4

B = 2
SHAPES = ((5, 7), (6, 6))  # few shapes, because every new shape compiles
MAX_SEGMENTS = 24

small = st.integers(-2, 3)


@st.composite
def ids_of(draw, length, packed=None):
    """Ids of each row: packed documents followed by padding, or arbitrary ids."""
    if draw(st.booleans()) if packed is None else packed:
        rows = [
            sorted(draw(st.lists(st.integers(0, 2), min_size=length, max_size=length)), key=lambda i: (i < 0, i))
            for _ in range(B)
        ]
        rows = [
            row[: length - pad] + [-1] * pad
            for row, pad in zip(rows, draw(st.tuples(*[st.integers(0, min(3, length))] * B)), strict=True)
        ]
        return np.array(rows, np.int32)
    return np.array(draw(st.lists(st.integers(-1, 2), min_size=B * length, max_size=B * length)), np.int32).reshape(
        B, -1
    )


def positions_of(length):
    rows = st.lists(st.integers(0, length + 3), min_size=B * length, max_size=B * length)
    return st.none() | rows.map(lambda p: np.array(p, np.int32).reshape(B, length))


def numbers(lowest, highest):
    one = st.integers(lowest, highest)
    return st.one_of(
        one, one.map(jnp.int32), st.lists(one, min_size=B, max_size=B).map(lambda n: np.array(n, np.int32))
    )


@st.composite
def step(draw, info, model):
    """One operation on both objects."""
    _, T, S = model.shape
    name = draw(st.sampled_from(["causal", "window", "decode", "prefill", "chunked", "types", "lengths", "replace"]))
    offset = draw(numbers(-1, 2))
    if name == "causal":
        return info.apply_causal(offset), model.causal(offset)
    if name == "window":
        size = draw(st.one_of(numbers(0, 3), st.tuples(numbers(0, 3), numbers(0, 3))))
        left, right = size if isinstance(size, tuple) else (size, size)
        return info.apply_sliding_window(size, offset=offset), model.window(left, right, offset)
    if name == "decode":
        size, index = draw(st.sampled_from([1, (2, 0), (0, 2)])), draw(numbers(0, T - 1))
        left, right = size if isinstance(size, tuple) else (size, size)
        cut = info.apply_sliding_window(size, offset=offset, mode="decode", index=index)
        return cut, model.decode(left, right, offset, index)
    if name == "prefill":
        size = draw(st.sampled_from([3, (2, 0), (1, 1)]))
        left, right = size if isinstance(size, tuple) else (size, size)
        count = left + right + 1 if isinstance(size, tuple) else size
        cut = info.apply_sliding_window(size, offset=offset, mode="prefill")
        return cut, model.prefill(left, right, offset, count)
    if name == "chunked":
        size = draw(numbers(1, 4))
        return info.apply_chunked(size, offset), model.chunked(size, offset)
    if name == "types":
        q_types, kv_types = draw(ids_of(T, packed=False)) + 1, draw(ids_of(S, packed=False)) + 1
        how = draw(st.sampled_from(["union", "intersect", "replace"]))
        zero, update = draw(st.sampled_from(["q", "kv", "both", "none"])), draw(st.sampled_from([None, True, False]))
        keywords = dict(combine=how, zero_policy=zero, update_segment_ids=update)
        other = info.apply_token_type_ids((q_types, kv_types), **keywords)
        return other, model.types(q_types, kv_types, how, zero, update)
    if name == "lengths":
        lengths, window = draw(numbers(0, S)), draw(st.sampled_from([None, 3]))
        q_len = draw(st.sampled_from([1, T]))
        cut = info.apply_kv_lengths(lengths, q_len=q_len, sliding_window=window)
        return cut, model.kv_lengths(np.asarray(lengths), q_len, window)
    return draw(replacement(info, model))


@st.composite
def replacement(draw, info, model):
    _, T, S = model.shape
    what = draw(st.sampled_from(["ids", "q ids", "no ids", "positions", "mask", "no mask"]))
    if what == "ids":
        q_ids, kv_ids = draw(ids_of(T)), draw(ids_of(S))
        return info.replace(q_segment_ids=q_ids, kv_segment_ids=kv_ids), model.with_ids(q_ids, kv_ids)
    if what == "q ids":
        ids = draw(ids_of(T))
        return info.replace(q_segment_ids=ids), model.with_ids(ids, model.kv_docs)
    if what == "no ids":
        empty = Model.of(np.zeros((B, T), np.int32), np.zeros((B, S), np.int32))
        return info.replace(q_segment_ids=None, kv_segment_ids=None), model.with_ids(empty.q_docs, empty.kv_docs)
    if what == "positions":
        q_pos, kv_pos = draw(positions_of(T)), draw(positions_of(S))
        other = info.replace(q_positions=q_pos, kv_positions=kv_pos)
        return other, Model(**{**vars(model), "q_pos": q_pos, "kv_pos": kv_pos})
    if what == "mask":
        bits = draw(st.lists(st.booleans(), min_size=B * T * S, max_size=B * T * S))
        mask = np.array(bits).reshape(B, 1, T, S)
        q_ids, kv_ids = (np.where(mask.any(axis=a), 0, -1).astype(np.int32) for a in ((1, 3), (1, 2)))
        new = Model(q_ids, kv_ids, q_ids, kv_ids, model.q_pos, model.kv_pos, Rule("table", mask))
        return info.replace(attention_mask=mask), new
    whole = Model.of(model.q_docs, model.kv_docs, model.q_pos, model.kv_pos)
    named = Model(**{**vars(whole), "q_ids": model.q_ids, "kv_ids": model.kv_ids})
    return info.replace(attention_mask=None), named


@given(st.data())
def test_every_step_agrees_with_a_dense_model(data):
    T, S = data.draw(st.sampled_from(SHAPES))
    q_ids, kv_ids = data.draw(ids_of(T)), data.draw(ids_of(S))
    q_pos, kv_pos = data.draw(positions_of(T)), data.draw(positions_of(S))
    info = MaskInfo.from_segments(q_ids, kv_ids, q_positions=q_pos, kv_positions=kv_pos)
    model = Model.of(q_ids, kv_ids, q_pos, kv_pos)
    assert_agrees(info, model)
    for _ in range(data.draw(st.integers(1, 4))):
        info, model = data.draw(step(info, model))
        assert_agrees(info, model)


@st.composite
def leaf(draw, T, S):
    """A mask that no method of `MaskInfo` creates, and the same for the model: (mask, rule, q ids)."""
    rng, ids = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), np.zeros((B, T), np.int32)
    kind = draw(st.sampled_from(["between", "dense", "blocks", "lengths"]))
    if kind == "lengths":
        lengths = draw(numbers(0, T))
        ids = np.where(np.arange(T) < np.reshape(np.asarray(lengths), (-1, 1)), ids, -1).astype(np.int32)
        return ls.QLengths(lengths), Rule("table", np.ones((B, 1, T, S), bool)), ids
    if kind == "blocks":
        size = draw(numbers(1, 4))
        return ls.BlockCausal(size), Rule("positions", lambda q, k: k // rank4(size) <= q // rank4(size)), ids
    if kind == "between":
        starts = rng.integers(-2, S, (B, T))
        mask = ls.Between(starts, starts + rng.integers(0, 5, (B, T)))
    else:
        mask = ls.Dense(rng.random((1, 1, 3, 4)) < 0.7, draw(numbers(-1, T - 1)), draw(numbers(-1, S - 1)))
    return mask, Rule("table", oracle.dense(mask, T, S, batch=B)), ids


@given(st.data())
def test_every_step_from_a_mask_agrees_with_a_dense_model(data):
    T, S = data.draw(st.sampled_from(SHAPES))
    mask, rule, q_ids = data.draw(leaf(T, S))
    q_pos, kv_pos = data.draw(positions_of(T)), data.draw(positions_of(S))
    info = MaskInfo.from_mask(mask, B, T, S, q_positions=q_pos, kv_positions=kv_pos)
    model = Model.of(q_ids, np.zeros((B, S), np.int32), q_pos, kv_pos)
    model = Model(**{**vars(model), "rule": rule})
    assert_agrees(info, model)
    for _ in range(data.draw(st.integers(1, 3))):
        info, model = data.draw(step(info, model))
        assert_agrees(info, model)


def assert_agrees(info, model):
    truth = model.truth
    assert info.shape == model.shape
    np.testing.assert_array_equal(info.q_segment_ids, model.q_ids)
    np.testing.assert_array_equal(info.kv_segment_ids, model.kv_ids)
    for got, wanted in zip(info.get_qkv_masks(), (model.q_ids >= 0, model.kv_ids >= 0, truth), strict=True):
        np.testing.assert_array_equal(got, wanted)
    for got, wanted in zip(info.get_or_compute_positions(), model.derived_positions(), strict=True):
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(info.q_lens, (model.q_ids >= 0).sum(1))
    np.testing.assert_array_equal(info.kv_lens, (model.kv_ids >= 0).sum(1))
    several = [len({i for i in row if i >= 0}) > 1 for row in (*model.q_ids, *model.kv_ids)]
    assert bool(info.is_multi_sequence) == any(several)
    offsets = model.offsets()
    if offsets is None:
        with pytest.raises(ValueError, match="an id reappears after another id"):
            info.get_or_compute_qkv_cu_seqlens(max_segments=MAX_SEGMENTS)
        return
    assert int(info.num_segments) == len(offsets[0]) - 1
    for got, wanted in zip(info.get_or_compute_qkv_cu_seqlens(max_segments=MAX_SEGMENTS), offsets, strict=True):
        np.testing.assert_array_equal(got, np.pad(wanted, (0, MAX_SEGMENTS + 1 - len(wanted)), mode="edge"))
