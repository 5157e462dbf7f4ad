"""Numbers, positions and ids at the limits of what engines count with: refused, or the same in every engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.testing import Shape, make_qkv
from tests.engines import every_engine

Q, K, V = make_qkv(Shape(B=2, T=7, S=7, N=2, K=1, H=4), jnp.float32)


def weights(mask, engine, **positions):
    """The output for values that are unit vectors: what each query takes of each key."""
    units = jnp.broadcast_to(jnp.eye(7)[None, :, None], (2, 7, 1, 7))
    q, k = (jnp.zeros((2, 7, n, 7)) for n in (2, 1))
    return ls.attention(q, k, units, mask=mask, engine=engine, **positions)


def seen(mask, engine, **positions):
    return weights(mask, engine, **positions) > 0


CLAMPED = {
    "chunk": (lambda n: ls.Chunk(n - 1), ls.Chunk(1)),
    "block causal": (lambda n: ls.BlockCausal(n - 1), ls.Causal()),
    "query lengths": (lambda n: ls.QLengths(n - 4), ls.Empty()),
    "window": (lambda n: ls.Window(n - 3, n - 2) & ls.Causal(), ls.Window(0, 0)),
    "window, last int": (lambda n: ls.Window(n * np.int32(-(2**31)), 2), ls.Window(0, 2)),
    "dilation": (lambda n: ls.Window(2, 1, dilation=n - 1), ls.Window(2, 1)),
    "reach": (lambda n: ls.Window(n - 2, n, dilation=n + 1), ls.Window(0, 1, dilation=2)),
    "prefix": (lambda n: ls.Prefix(n - 4), ls.Empty()),
    "far": (lambda n: ls.Window(2**40, 0) & ls.Window(n + 2, 0), ls.Window(3, 0)),
    "far and causal": (lambda n: ls.Causal(2**40) & ls.Band(-(2**50), n) & ls.Causal(-n), ls.Causal(-1)),
}


@pytest.mark.parametrize("shape", [(), (2,)])
@every_engine
@pytest.mark.parametrize("name", CLAMPED)
def test_a_traced_number_that_is_too_small_stands_for_the_least_legal_one(name, engine, shape):
    of, meaning = CLAMPED[name]
    got = jax.jit(lambda n: seen(of(n), engine))(jnp.ones(shape, np.int32))
    np.testing.assert_array_equal(got, seen(meaning, "reference"))


FAR, LAST = 2**30 - 1, 2**31 - 1
TOO_FAR = {
    "one further": np.arange(7) + FAR - 5,
    "one before": np.arange(7) - FAR - 1,
    "int32's end": np.full((2, 7), LAST - 7, np.int32),
    "wraps to the past": np.arange(7) + 2**32,
    "unsigned": np.arange(7, dtype=np.uint32) + np.uint32(2**31),
    "last of int64": np.full(7, 2**63 - 1),
}


@pytest.mark.parametrize("name", TOO_FAR)
@pytest.mark.parametrize("side", ["q_positions", "kv_positions"])
def test_positions_that_engines_cannot_count_with_are_refused(side, name):
    positions = {side: TOO_FAR[name]}
    rows = {side: np.broadcast_to(TOO_FAR[name], (2, 7))}
    for call in (
        lambda: ls.attention(Q, K, V, mask=ls.Causal(), **positions),
        lambda: ls.Causal().dense(7, 7, **positions),
        lambda: ls.Causal().layout(7, 7, **positions),
        lambda: ls.MaskInfo.from_segments(np.zeros((2, 7), int), **rows),
    ):
        with pytest.raises(
            ValueError, match=rf"{side} must lie within ±1073741823 \(2\*\*30 - 1\), got positions from"
        ):
            call()


@every_engine
def test_the_furthest_legal_positions_are_told_apart_and_padding_comes_after_them(engine):
    mask = ls.Window(2, 0) & ls.Causal()
    expected = seen(mask, "reference")
    for offset in (FAR - 6, -FAR):
        positions = np.arange(7) + offset
        np.testing.assert_array_equal(seen(mask, engine, q_positions=positions, kv_positions=positions), expected)
    padded = np.array([0, 1, 2, 3, 4, LAST, LAST])
    np.testing.assert_array_equal(seen(ls.Causal(), engine, kv_positions=padded)[..., 5:], False)


@every_engine
def test_blocks_before_position_0_and_at_the_ends_are_counted_downwards(engine):
    near = np.arange(7) - 3
    for positions, size in ((near, 2), (near, 5), (np.arange(7) - FAR, 3), (np.arange(7) + FAR - 6, 2**40)):
        block = positions // min(size, FAR)
        got = seen(ls.BlockCausal(size), engine, q_positions=positions, kv_positions=positions)
        np.testing.assert_array_equal(got[0, :, 0], block <= block[:, None])


@every_engine
@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.uint64])
def test_traced_positions_saturate_and_never_wrap(engine, dtype):
    with jax.enable_x64(True):
        far = np.array([0, 1, 2, 3, 2**31 + 4, 2**32 - 1, 2**32 - 1], dtype)
        call = jax.jit(lambda far: seen(ls.Causal(), engine, kv_positions=far))
        np.testing.assert_array_equal(call(far)[..., 4:], False)
        info = jax.jit(lambda far: ls.MaskInfo.from_segments(jnp.zeros((1, 7), np.int32), kv_positions=far[None]))(far)
        np.testing.assert_array_equal(info.kv_positions, np.minimum(far, LAST)[None])


WIDE = np.array([[1, 1, 1, 2**32 + 1, 2**32 + 1, -1, -1]])


def test_ids_beyond_32_bits_never_become_one_document():
    makers = (ls.Segments, ls.TokenTypes, ls.MaskInfo.from_segments)
    for make in makers:
        with pytest.raises(ValueError, match="must fit into 32 bits, got numbers from -1 to 4294967297"):
            make(WIDE)
    with jax.enable_x64(True):
        for make in makers:
            with pytest.raises(
                TypeError, match="got traced int64: ids that differ only beyond 32 bits would become one"
            ):
                jax.jit(make)(WIDE)
            jax.jit(lambda ids, make=make: make(ids.astype("int32")))(WIDE)


def test_offsets_and_numbers_of_a_maskinfo_saturate_instead_of_wrapping():
    info = ls.MaskInfo.from_segments(np.zeros((1, 7), int)).apply_causal()
    far = info.apply_sliding_window(np.array(2**32 + 1))
    np.testing.assert_array_equal(far.mask.dense(7, 7), info.mask.dense(7, 7))
    with pytest.raises(ValueError, match="last offset"):
        ls.MaskInfo.from_offsets(np.array([0, 2**32 + 7]), max_q_len=7)


def test_the_shape_of_ids_stands_for_the_int32_that_they_become():
    mask = ls.Segments(jax.ShapeDtypeStruct((2, 7), np.int64))
    assert mask.q_ids.dtype == np.int32
    assert ls.KvLengths(jax.ShapeDtypeStruct((2,), np.int64)).lengths.dtype == np.int32
    compiled = jax.jit(lambda m: m.dense(7, 7)).lower(mask).compile()
    np.testing.assert_array_equal(compiled(ls.Segments(np.ones((2, 7), np.int64))), True)
