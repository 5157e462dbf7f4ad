"""The `pallas_tpu` engine, interpreted, against float64: masks, features and NaN in both passes, and the copies.

Tiles are small, so that each side has several and the last is not full. `make slow` runs test_pallas_tpu_matrix.py.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import longspan as ls
from longspan.engines.pallas_tpu import PallasTpu
from longspan.testing import Shape, assert_matches_reference, make_qkv

FUSED, APART = PallasTpu(interpret=True), PallasTpu(interpret=True, fused=False)
# Simulates copies and semaphores, and fills memory that nothing has written with NaN.
SIMULATED = PallasTpu(interpret=pltpu.InterpretParams())
SHAPE = Shape(B=2, T=19, S=29, N=4, K=2, H=5, Hv=7)
NAN, INF = np.nan, np.inf


def draws(seed=0):
    return np.random.default_rng(seed)


def layout(mask, shape=SHAPE, tiles=(8, 8), **positions):
    return mask.layout(shape.T, shape.S, q_tile=tiles[0], kv_tile=tiles[1], **positions)


def documents(shape=SHAPE):
    rng = draws(1)
    return (jnp.asarray(np.sort(rng.integers(0, 4, (shape.B, length)))) for length in (shape.T, shape.S))


def floats(*size, seed=2, low=0.0):
    """Normal numbers, of which a share `low` is -inf."""
    rng = draws(seed)
    return jnp.asarray(np.where(rng.random(size) < low, -INF, rng.normal(size=size)).astype(np.float32))


def dropout():
    return dict(dropout_rate=0.3, dropout_key=jax.random.key(5))


def test_grouped_heads_where_rows_have_no_visit():
    assert_matches_reference([FUSED, APART], *make_qkv(SHAPE, jnp.float32), layout(ls.Causal(-9)))


def test_window_at_permuted_positions_with_dropout():
    rng = draws()
    positions = dict(q_positions=rng.permutation(19)[None] - 7, kv_positions=rng.permutation(29))
    window = layout(ls.Window(jnp.asarray([3, 9]), 2), tiles=(16, 8), **positions)
    assert_matches_reference([FUSED, APART], *make_qkv(SHAPE, jnp.float32), window, **dropout())


def test_traced_documents_in_bfloat16():
    shape = Shape(B=2, T=37, S=45, N=6, K=3, H=9)
    q_ids, kv_ids = documents(shape)
    packed = layout(ls.Causal(8) & ls.Segments(q_ids, kv_ids), shape)
    assert_matches_reference(FUSED, *make_qkv(shape, jnp.bfloat16), packed)


def test_tiles_that_every_row_visits_with_sinks_and_a_soft_cap():
    flags = draws().random((2, 19)) < 0.1, draws(3).random((1, 29)) < 0.1
    wide = ls.Window(2, 1) | ls.Global(q_flags=jnp.asarray(flags[0]), kv_flags=jnp.asarray(flags[1]))
    sinks = jnp.asarray([0.5, -INF, -40.0, 3.0])
    assert_matches_reference([FUSED, APART], *make_qkv(SHAPE, jnp.float32), layout(wide), sinks=sinks, soft_cap=2.5)


def test_lists_of_blocks_by_head():
    table = draws().integers(-1, 8, (2, 4, 5, 3))
    assert_matches_reference(FUSED, *make_qkv(SHAPE, jnp.float32), layout(ls.Blocks(jnp.asarray(table), 4)))


def test_masks_by_head_with_dropout():
    heads = ls.PerHead((ls.Causal(4), ls.Window(2, 3), ls.Empty(), ~ls.Chunk(5)))
    assert_matches_reference(FUSED, *make_qkv(SHAPE, jnp.float32), layout(heads), **dropout())


def test_pairs_by_row():
    pairs = ls.Dense(draws().random((2, 1, 19, 29)) < 0.3)
    assert_matches_reference(FUSED, *make_qkv(SHAPE, jnp.float32), layout(pairs, tiles=(3, 5)))


def test_one_query_of_a_group_with_the_engine_s_tiles():
    shape = Shape(B=3, T=1, S=211, N=6, K=2, H=5, Hv=17)
    q, k, v = make_qkv(shape, jnp.float32)
    lengths = ls.KvLengths(jnp.asarray([0, 211, 130]))
    # The slots that a sequence has not filled may hold anything.
    k, v = k.at[2, 150].set(NAN), v.at[2, 131:].set(3e38).at[0, 5].set(INF)
    assert_matches_reference(FUSED, q, k, v, lengths)


def test_tiles_that_are_listed_twice_count_twice():
    twice = layout(ls.Full())
    starts = jnp.asarray(np.array([[0, 0], [1, 2], [3, 0]], np.int32)[None, None])
    stops = jnp.asarray(np.array([[2, 1], [3, 4], [4, 0]], np.int32)[None, None])
    twice = replace(twice, starts=starts, stops=stops, repeats=True)
    assert_matches_reference([FUSED, APART], *make_qkv(SHAPE, jnp.float32), twice, soft_cap=3.0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_keys_values_and_queries_that_nobody_sees_may_hold_anything(dtype):
    rows, columns = [1, 6, 18], [2, 3, 9, 10, 20, 28]
    pairs = np.ones((1, 1, 19, 29), bool)
    pairs[:, :, rows], pairs[..., columns] = False, False
    q, k, v = make_qkv(SHAPE, dtype)
    fill = [jnp.asarray([NAN, INF, -3e38, 3e38, -INF, NAN][:n], dtype)[:, None, None] for n in (3, 6)]
    q, k, v = q.at[:, rows].set(fill[0]), k.at[:, columns].set(fill[1]), v.at[:, columns].set(-fill[1])
    assert_matches_reference([FUSED, APART], q, k, v, layout(ls.Dense(pairs)), soft_cap=2.5)


def test_keys_that_only_the_padding_of_a_tile_could_see_may_hold_anything():
    q, k, v = make_qkv(SHAPE, jnp.float32)
    k, v = k.at[:, 19:22].set(NAN), v.at[:, 20:].set(INF).at[:, 19].set(NAN)
    assert_matches_reference([FUSED, APART], q, k, v, layout(ls.Causal()))


def test_bias_arrays_by_query_key_and_pair_have_gradients():
    bias = floats(1, 4, 19, 1), floats(2, 1, 1, 29, low=0.2), floats(2, 4, 19, 29, low=0.1), floats(1, 1, 19, 29)
    q, k, v = make_qkv(SHAPE, jnp.float32)
    assert_matches_reference([FUSED, APART], q, k, v, layout(ls.Window(9, 12)), bias=bias, sinks=floats(4))


def cells(b, h, q, k, table, every):
    return table[h, (q + 2 * k) // every[b] % 5]


def test_biases_that_are_functions_have_gradients():
    every = jnp.asarray([2, 3], jnp.int32)
    bias = (ls.alibi(abs(floats(4))), ls.relative_bias(floats(8, 4), max_distance=19),
            ls.ScoreBias(cells, floats(4, 5), every))  # fmt: skip
    q, k, v = make_qkv(SHAPE, jnp.float32)
    assert_matches_reference(FUSED, q, k, v, layout(ls.Causal(10)), bias=bias, soft_cap=2.0, **dropout())


def assert_same_as_in_float32(q, k, v, mask, bias, sinks):
    """Compared with the reference in float32, because there all weights of a row of very low scores are equal."""
    weights = draws(4).normal(size=(*q.shape[:3], v.shape[3])).astype(np.float32)

    @jax.jit
    def gradients(operands, mask):
        def loss(operands, engine):
            return jnp.vdot(ls.attention(**operands, mask=mask, engine=engine), weights)

        return [jax.grad(loss)(operands, engine) for engine in ("reference", FUSED, APART)]

    want, *found = gradients(dict(q=q, k=k, v=v, bias=bias, sinks=sinks), mask)
    for got in found:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_rows_whose_bias_is_as_low_as_people_mask_with():
    bias = np.zeros((1, 1, 19, 29), np.float32)
    bias[:, :, 2], bias[:, :, 3], bias[:, :, 5, 1:], bias[:, :, 17] = -1e9, np.finfo(np.float32).min, -1e9, -INF
    sinks = jnp.asarray([0.0, -INF, -1e9, -3e38])
    q, k, v = make_qkv(SHAPE, jnp.float32)
    assert_same_as_in_float32(q, k, v, layout(ls.Causal(8)), jnp.asarray(bias), sinks)


def test_a_sink_of_nan_makes_every_gradient_nan():
    q, k, v = make_qkv(Shape(B=1, T=8, S=8, N=1, K=1, H=3), jnp.float32)

    def loss(q, k, v, sinks):
        return ls.attention(q, k, v, sinks=sinks, engine=FUSED).sum()

    for gradient in jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v, jnp.asarray([NAN])):
        assert np.isnan(np.asarray(gradient)).all()


# Rows of the grid with no visit, one visit, and several intervals. Read by keys: key tile 0 is visited last by the
# query tile that key tile 1 visits first, so that the sum of its dq must be written before it is read again.
ROWS_OF_BLOCKS = np.array([[-1, -1, -1], [0, -1, -1], [0, 1, -1], [-1, 1, 5], [0, 2, 4], [3, 5, -1]])


@pytest.mark.parametrize("engine", [SIMULATED, replace(SIMULATED, fused=False)], ids=["fused", "apart"])
def test_copies_start_for_the_next_row_and_end_before_they_are_read(engine):
    shape = Shape(B=1, T=45, S=43, N=4, K=2, H=5)
    table = ls.Blocks(ROWS_OF_BLOCKS[None], 8)
    bias = floats(1, 1, 45, 43)  # one sum for all heads
    assert_matches_reference(engine, *make_qkv(shape, jnp.float32), layout(table, shape), bias=bias)


def test_copies_of_tiles_that_every_row_visits():
    shape = Shape(B=2, T=30, S=35, N=2, K=1, H=5)
    q_ids, kv_ids = documents(shape)
    wide = ls.Window(1, 0) | (ls.Global((0, 33)) & ls.Segments(q_ids, kv_ids))
    assert_matches_reference(SIMULATED, *make_qkv(shape, jnp.float32), layout(wide, shape), **dropout())
