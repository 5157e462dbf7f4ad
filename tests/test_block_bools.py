"""`Blocks.from_bool`: one bool per pair of blocks, static or data. The pairs are always those of the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.masks import Or
from longspan.testing import Shape, assert_obeys_laws, make_qkv

SHAPE = Shape(B=2, T=11, S=13, N=4, K=2, H=3)
B, T, S, N, *_ = SHAPE
SIZE, NQ, NK = 3, 4, 5  # the last block of each side is shorter


def bools(*lead, seed=0, share=0.5):
    return np.random.default_rng(seed).random((*lead, NQ, NK)) < share


def plain(table):
    truth = np.repeat(np.repeat(table, SIZE, axis=-2), SIZE, axis=-1)[..., :T, :S]
    return truth.reshape((1,) * (4 - truth.ndim) + truth.shape)


@pytest.mark.parametrize("lead", [(1,), (N,), (1, 1), (B, 1), (B, N)], ids=str)
@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["static", "data"])
def test_it_allows_the_pairs_that_are_true(lead, as_array):
    table = bools(*lead)
    mask = ls.Blocks.from_bool(as_array(table), SIZE)
    np.testing.assert_array_equal(mask.dense(T, S), plain(table))
    assert isinstance(mask, ls.Blocks)
    assert_obeys_laws(mask, T, S, q_tile=4, kv_tile=2)


def test_a_static_table_lists_as_many_blocks_as_its_longest_row():
    table = np.array([[[True, False, True], [False, False, False]]])
    assert ls.Blocks.from_bool(table, 2) == ls.Blocks(np.array([[[0, 2], [-1, -1]]], np.int32), 2)
    assert ls.Blocks.from_bool(table.tolist(), 2) == ls.Blocks.from_bool(table, 2, max_blocks=3)
    assert not ls.Blocks.from_bool(table & False, 2).dense(4, 6).any()
    assert not ls.Blocks.from_bool(table[..., :0], 2).dense(4, 6).any()
    hash(ls.Blocks.from_bool(table, 2))


def test_a_jax_table_lists_max_blocks_entries():
    table = bools(1)
    assert ls.Blocks.from_bool(jnp.asarray(table), SIZE).table.shape == (1, NQ, NK)
    assert ls.Blocks.from_bool(jnp.asarray(table), SIZE, max_blocks=99).table.shape == (1, NQ, NK)
    assert ls.Blocks.from_bool(jnp.asarray(table), SIZE, max_blocks=4).table.shape == (1, NQ, 4)
    shape = jax.ShapeDtypeStruct((1, NQ, NK), bool)
    assert ls.Blocks.from_bool(shape, SIZE, max_blocks=2).table.shape == (1, NQ, 2)


def weights(table, engine, max_blocks):
    """The output for values that are unit vectors: the weight of each key for each query."""
    mask = ls.Blocks.from_bool(table, SIZE, max_blocks)
    q, k = jnp.zeros((B, T, N, S)), jnp.zeros((B, S, N, S))
    units = jnp.broadcast_to(jnp.eye(S)[None, :, None], (B, S, N, S))
    return ls.attention(q, k, units, mask=mask, engine=engine)


@pytest.mark.parametrize("engine", ["cpu", "xla", "reference"])
def test_a_traced_row_with_more_than_max_blocks_loses_none(engine):
    run = jax.jit(lambda table: weights(table, engine, 2))
    for share in (0.2, 0.9, 1.0):  # rows that fit, rows that do not
        table = bools(B, N, share=share)
        seen = plain(table).swapaxes(1, 2)  # [B, T, N, S], as the outputs are
        expected = seen / np.maximum(seen.sum(-1, keepdims=True), 1)
        np.testing.assert_allclose(run(jnp.asarray(table)), expected, rtol=0, atol=1e-6)


def test_a_traced_table_has_right_gradients_and_is_traced_once():
    q, k, v = make_qkv(SHAPE, jnp.float32)
    traces = []

    def loss(q, k, v, table, engine="auto"):
        traces.append(engine)
        return jnp.sin(ls.attention(q, k, v, mask=ls.Blocks.from_bool(table, SIZE, 2), engine=engine)).sum()

    run = jax.jit(jax.grad(loss, (0, 1, 2)))
    for table in (bools(B, 1, share=0.2), bools(B, 1, share=0.9)):
        dense = jnp.asarray(np.broadcast_to(plain(table), (B, 1, T, S)))
        want = jax.grad(
            lambda *x, dense=dense: jnp.sin(ls.attention(*x, mask=dense, engine="reference")).sum(), (0, 1, 2)
        )(q, k, v)
        for got, expected in zip(run(q, k, v, jnp.asarray(table)), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert len(traces) == 1


def test_rows_within_max_blocks_visit_only_their_blocks():
    """`max_blocks` matters because a list of more than 64 entries is covered by one interval."""
    table = np.zeros((1, 80, 80), bool)
    table[:, :, [0, 79]] = True

    def visits(max_blocks):
        layouts = []

        @jax.jit
        def plan(table):
            layout = ls.Blocks.from_bool(table, 4, max_blocks).layout(320, 320, q_tile=4, kv_tile=4)
            layouts.append(isinstance(layout.mask, Or))
            return layout.starts, layout.stops

        starts, stops = plan(jnp.asarray(table))
        return int(np.maximum(np.asarray(stops) - np.asarray(starts), 0).sum()), layouts

    assert visits(2) == (160, [True])
    assert visits(None) == (6400, [False])


WRONG = [
    (TypeError, "Blocks.table must list the indices of key blocks, got bools", lambda: ls.Blocks(bools(1), SIZE)),
    (TypeError, "to `Blocks.from_bool(table, block_size)`", lambda: ls.Blocks(jnp.asarray(bools(1)), SIZE)),
    (TypeError, "to `Blocks.from_bool(table, block_size)`", lambda: ls.Blocks(bools(1).tolist(), SIZE)),
    (
        TypeError,
        "`table` must hold bools, got dtype int64. For a table that lists the indices of key blocks, use `Blocks(table",
        lambda: ls.Blocks.from_bool(np.zeros((1, 2, 2), int), 4),
    ),
    (TypeError, "`table` must be an array of bools, got str", lambda: ls.Blocks.from_bool("all", 4)),
    (
        ValueError,
        "must have shape [N or 1, q blocks, kv blocks] or [B or 1, N or 1, q blocks, kv blocks], got (4, 5). Add axes",
        lambda: ls.Blocks.from_bool(bools(), SIZE),
    ),
    (
        ValueError,
        "`table` allows 5 key blocks for one query block, more than max_blocks=2. Raise `max_blocks`, or leave it out",
        lambda: ls.Blocks.from_bool(bools(1, share=1), SIZE, max_blocks=2),
    ),
    (ValueError, "more than max_blocks=4", lambda: ls.Blocks.from_bool(jnp.asarray(bools(1, share=1)), SIZE, 4)),
    (ValueError, "`max_blocks` must be a Python int >= 1, got 0", lambda: ls.Blocks.from_bool(bools(1), SIZE, 0)),
    (ValueError, "Blocks.block_size must be >= 1, got 0", lambda: ls.Blocks.from_bool(bools(1), 0)),
]


@pytest.mark.parametrize("error, words, call", WRONG, ids=[words for _, words, _ in WRONG])
def test_tables_that_are_not_bools_are_errors(error, words, call, unchecked):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value), str(caught.value)


def test_a_table_that_a_jitted_function_closes_over_is_known():
    table = jnp.asarray(bools(1, share=1))
    with pytest.raises(ValueError, match="more than max_blocks=2"):
        jax.jit(lambda: ls.Blocks.from_bool(table, SIZE, 2).dense(T, S))()
