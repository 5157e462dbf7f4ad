"""Numbers, positions and ids at the limits of int32: an error, or the same result in every engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.testing import Shape, make_qkv
from tests.engines import every_engine

Q, K, V = make_qkv(Shape(B=2, T=7, S=7, N=2, K=1, H=4), jnp.float32)


def weights(mask, engine, **positions):
    """The output for values that are unit vectors: the weight of each key for each query."""
    units = np.broadcast_to(np.eye(7, dtype=np.float32)[None, :, None], (2, 7, 1, 7))
    q, k = (np.zeros((2, 7, n, 7), np.float32) for n in (2, 1))
    return ls.attention(*jax.device_put((q, k, units)), mask=mask, engine=engine, **positions)


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
def test_a_traced_number_below_the_minimum_is_the_minimum(name, engine, shape):
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
def test_positions_out_of_range_are_errors(side, name):
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
def test_the_furthest_legal_positions_differ_and_padding_is_after_them(engine):
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
                TypeError,
                match=r"Its values cannot be checked.* because a cast to 32 bits could make two different ids equal",
            ):
                jax.jit(make)(WIDE)
            jax.jit(lambda ids, make=make: make(ids.astype("int32")))(WIDE)


def test_offsets_and_numbers_of_a_maskinfo_saturate_instead_of_wrapping():
    info = ls.MaskInfo.from_segments(np.zeros((1, 7), int)).apply_causal()
    far = info.apply_sliding_window(np.array(2**32 + 1))
    np.testing.assert_array_equal(far.mask.dense(7, 7), info.mask.dense(7, 7))
    with pytest.raises(ValueError, match="last offset"):
        ls.MaskInfo.from_offsets(np.array([0, 2**32 + 7]), max_q_len=7)


def test_shapes_of_wide_ids_become_int32():
    mask = ls.Segments(jax.ShapeDtypeStruct((2, 7), np.int64))
    assert mask.q_ids.dtype == np.int32
    assert ls.KvLengths(jax.ShapeDtypeStruct((2,), np.int64)).lengths.dtype == np.int32
    compiled = jax.jit(lambda m: m.dense(7, 7)).lower(mask).compile()
    np.testing.assert_array_equal(compiled(ls.Segments(np.ones((2, 7), np.int64))), True)


FAR_AWAY = {
    "causal": (ls.Causal, ls.Full()),
    "causal, back": (lambda n: ls.Causal(-n), ls.Empty()),
    "band": (lambda n: ls.Band(-n, n), ls.Full()),
    "window": (lambda n: ls.Window(n, 0), ls.Causal()),
    "dilated": (lambda n: ls.Window(1, 0, dilation=n), ls.Window(0, 0)),
    "chunk": (ls.Chunk, ls.Full()),
    "block causal": (ls.BlockCausal, ls.Full()),
    "prefix": (ls.Prefix, ls.Full()),
    "kv lengths": (ls.KvLengths, ls.Full()),
    "query lengths": (ls.QLengths, ls.Full()),
    "dense": (lambda n: ls.Dense(np.ones((2, 2), bool), kv_offset=n, q_offset=-n), ls.Empty()),
    "first of segment": (lambda n: ls.FirstOfSegment(np.zeros((1, 7), int), n), ls.Full()),
}


@pytest.mark.parametrize("number", [2**31, 2**40, 2**70], ids=["2**31", "2**40", "2**70"])
@pytest.mark.parametrize("name", FAR_AWAY)
def test_a_static_number_that_is_further_than_any_position_is_legal_everywhere(name, number):
    of, meaning = FAR_AWAY[name]
    mask, same = of(number), meaning.dense(7, 7)
    np.testing.assert_array_equal(mask.dense(7, 7), same)
    if not mask.inexact():  # a rule that holds arrays keeps every key
        kept = [ls.cache.plan(each & ls.Causal(), 7).capacity for each in (mask, meaning)]
        assert kept[0] == kept[1]
    assert ls.explain(Q, K, V, mask=mask).useful_flops == ls.explain(Q, K, V, mask=meaning).useful_flops
    assert mask.show(7, 7) == meaning.show(7, 7)


HUGE_TILES = {
    "causal": ls.Causal(),
    "segments": ls.Segments(np.zeros((1, 7), int)),
    "flags": ls.Global(q_flags=np.ones((1, 7), bool)),
    "dense": ls.Dense(np.ones((7, 7), bool)),
    "blocks": ls.Blocks(np.array([[[0], [1], [2], [3]]]), 2),
    "one block": ls.Blocks(np.zeros((1, 1, 1), int), FAR),
    "between": ls.Between(np.zeros(7, int), np.full(7, 7)),
}


@pytest.mark.parametrize("name", HUGE_TILES)
def test_a_tile_may_be_longer_than_the_sequence_without_memory_for_it(name):
    layout = HUGE_TILES[name].layout(7, 7, q_tile=FAR, kv_tile=FAR)
    assert layout.visits() == layout.transpose().visits() == 1


NUMBERS = [2, 2.0, np.float16(2), np.float32(2), np.float64(2), np.int64(2), np.array(2.0), np.array(2), jnp.float32(2)]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: f"{type(n).__name__} {getattr(n, 'dtype', '')}")
def test_python_numpy_and_rank_0_numbers_are_equivalent(number):
    key = jax.random.key(0)
    for name, given, plain, more in (
        ("soft_cap", number, 2.0, {}),
        ("scale", number, 2.0, {}),
        ("dropout_rate", number / 4, 0.5, dict(dropout_key=key)),
    ):
        got, want = (ls.attention(Q, K, V, **{name: value}, **more) for value in (given, plain))
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    x = jnp.ones((1, 3, 1, 4))
    got, want = (ls.rope.rotate(x, jnp.arange(3), jnp.ones(2), attention_factor=n) for n in (number, 2.0))
    np.testing.assert_array_equal(got, want)


def test_a_scale_of_numpy_is_static_and_one_of_jax_is_data():
    traces = []

    @jax.jit
    def run(scale):
        traces.append(scale)
        return ls.attention(Q, K, V, scale=scale)

    for scale in (0.5, 0.25):
        np.testing.assert_allclose(run(scale), ls.attention(Q, K, V, scale=np.float32(scale)), rtol=1e-6, atol=1e-6)
    assert len(traces) == 1


@pytest.mark.parametrize("name", ["soft_cap", "dropout_rate"])
def test_a_traced_static_argument_is_an_error_with_a_fix(name):
    def run(number):
        return ls.attention(Q, K, V, **{name: number}, dropout_key=jax.random.key(0))

    with pytest.raises(ValueError, match=rf"`{name}` must be a number.*got a traced f32\[\].*`static_argnames`"):
        jax.jit(run)(0.5)
    jax.jit(run, static_argnames="number")(number=0.5)


NOTHING = [Shape(B, T, S, N, K, 3) for B, T, S, N, K in ((0, 4, 5, 2, 1), (2, 0, 5, 2, 1), (2, 4, 0, 2, 1))]
NOTHING += [Shape(2, 4, 5, 0, 1, 3), Shape(2, 4, 5, 0, 0, 3), Shape(0, 0, 0, 0, 0, 3)]


@every_engine
@pytest.mark.parametrize("shape", NOTHING, ids=str)
def test_calls_of_no_rows_no_tokens_or_no_heads_give_zeros_and_zero_gradients(engine, shape):
    q, k, v = make_qkv(shape, jnp.float32)
    sinks = jnp.ones(shape.N)

    def run(q, k, v, sinks):
        return ls.attention(q, k, v, mask=ls.Causal(), sinks=sinks, engine=engine, return_lse=True)

    out, lse = run(q, k, v, sinks)
    assert out.shape == (shape.B, shape.T, shape.N, 3) and not out.any()
    np.testing.assert_array_equal(lse, jnp.ones((shape.B, shape.T, shape.N)))
    gradients = jax.jit(jax.grad(lambda *x: run(*x)[0].sum(), (0, 1, 2, 3)))(q, k, v, sinks)
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v, sinks)]
    assert not any(np.asarray(x).any() for x in gradients)
    assert ls.explain(q, k, v, mask=ls.Causal(), engine=engine).tiles_total == 0


def test_queries_without_key_heads_are_errors():
    q, k, v = make_qkv(Shape(2, 4, 5, 2, 1, 3), jnp.float32)
    with pytest.raises(
        ValueError, match=r"`q` has 2 heads and `k` has 0. The number of query heads must be a multiple"
    ):
        ls.attention(q, k[:, :, :0], v[:, :, :0])


@every_engine
def test_heads_without_features_score_zero_and_values_without_features_keep_lse(engine):
    q, k, v = make_qkv(Shape(2, 4, 5, 2, 1, 3), jnp.float32)
    zeros = ls.attention(q * 0, k, v, mask=ls.Causal(), engine="reference", return_lse=True)
    run = lambda *x: ls.attention(*x, mask=ls.Causal(), engine=engine, return_lse=True)  # noqa: E731
    for got, want in zip(run(q[..., :0], k[..., :0], v), zeros, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    out, lse = run(q, k, v[..., :0])
    assert out.shape == (2, 4, 2, 0)
    np.testing.assert_allclose(lse, run(q, k, v)[1], rtol=1e-6, atol=1e-6)
    dq, dk, dv = jax.grad(lambda *x: run(*x)[0].sum(), (0, 1, 2))(q[..., :0], k[..., :0], v)
    assert dq.shape == (2, 4, 2, 0) and dk.shape == (2, 5, 1, 0) and np.abs(dv).sum() > 0
