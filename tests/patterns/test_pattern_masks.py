"""`bigbird` and `longformer` as masks: they agree with the functions, with each pair once, and compose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.testing import assert_obeys_laws
from tests.patterns import plain

KINDS = np.array([[1, 0, 0, 0, 0, 1, 0, 0, -1], [0, 0, 1, -1, -1, 0, 0, 0, 0]], np.int32)
RANDOM = np.array([[[4], [6], [6], [1], [2]], [[3], [3], [0], [6], [6]]], np.int32)


def test_bigbird_allows_the_blocks_of_the_specification():
    truth = np.asarray(ls.bigbird(21, block_size=3, rand_attn=RANDOM).dense(21, 21))
    wanted = np.zeros((2, 7, 7), bool)
    for n, i in np.ndindex(2, 7):
        wanted[n, i, plain.bigbird_blocks(i, 7, RANDOM[n].tolist())] = True
    np.testing.assert_array_equal(truth[0], np.repeat(np.repeat(wanted, 3, 1), 3, 2))


@pytest.mark.parametrize(("q_tile", "kv_tile"), [(3, 3), (4, 5), (1, 7)])
def test_bigbird_obeys_the_laws_of_masks(q_tile, kv_tile):
    assert_obeys_laws(ls.bigbird(21, block_size=3, rand_attn=RANDOM), 21, 21, q_tile=q_tile, kv_tile=kv_tile)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dilation", [1, (1, 2, 3)])
def test_longformer_obeys_the_laws_of_masks(causal, dilation):
    assert_obeys_laws(ls.longformer(2, token_kinds=KINDS, dilation=dilation, causal=causal), 9, 9)


def test_bigbird_from_numpy_hashes_and_from_jax_is_data():
    static = ls.bigbird(21, block_size=3, rand_attn=RANDOM)
    assert hash(static) == hash(ls.bigbird(21, block_size=3, rand_attn=RANDOM.copy()))
    assert not jax.tree.leaves(static)
    assert len(jax.tree.leaves(ls.bigbird(21, block_size=3, rand_attn=jnp.asarray(RANDOM)))) == 1


def test_bigbird_composes_to_a_causal_variant():
    picture = (ls.bigbird(7, block_size=1, rand_attn=np.full((1, 5, 1), 4)) & ls.Causal()).show(7, 7)
    assert picture.split() == ["#......", "##.....", "###....", "#.##...", "#..##..", "#...##.", "#######"]


def test_longformer_draws_globals_padding_and_windows():
    assert ls.longformer(1, token_kinds=np.array([[0, 0, 0, 1, 0, -1]])).show(6, 6).split() == [
        "##.#..",
        "####..",
        ".###..",
        "#####.",
        "...##.",
        "......",
    ]


def test_longformer_without_kinds_is_a_window():
    assert ls.longformer(3) == ls.Window(3, 3)
    assert ls.longformer(3, causal=True, dilation=2) == ls.Window(3, 0, 2)


def test_attention_with_the_mask_equals_the_function_if_projections_agree():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 9, 3, 5)), jnp.float32) for _ in range(3))
    mask = ls.longformer(2, token_kinds=KINDS, dilation=(1, 2, 1), causal=True)
    got = ls.longformer_attention(q, k, v, q, k, v, window=2, token_kinds=KINDS, dilation=(1, 2, 1), causal=True)
    np.testing.assert_allclose(got, ls.attention(q, k, v, mask=mask), rtol=2e-5, atol=2e-6)
