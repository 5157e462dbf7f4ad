"""Negations of rules with arrays: the plan of a sharded sequence must send every key that they allow."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.parallel.exchange import tables_only
from longspan.parallel.needs import without_arrays

LENGTH, BATCH, HEADS = 19, 2, 2


@hypothesis.given(ls.testing.masks(LENGTH, LENGTH, batch=BATCH, heads=HEADS))
def test_a_mask_without_data_allows_at_least_the_pairs_of_the_mask(mask):
    allowed = np.asarray(mask.dense(LENGTH, LENGTH))
    for wider in (without_arrays(mask), tables_only(mask, True)):
        assert not (allowed & ~np.asarray(wider.dense(LENGTH, LENGTH))).any(), wider
    assert not jax.tree.leaves(without_arrays(mask))


@pytest.mark.parametrize("positions", [None, "given"])
def test_negated_rules_with_arrays_equal_one_device(positions):
    rng, length = np.random.default_rng(0), 64
    ids = jnp.asarray(rng.integers(0, 3, (1, length)))
    mask = ls.Causal() & (~ls.Segments(ids) | ~ls.Window(3, 3)) & ~ls.KvLengths(jnp.asarray([9]))
    q, k, v = (jnp.asarray(rng.normal(size=(1, length, 2, 4)), jnp.float32) for _ in range(3))
    call = dict(mask=mask)
    if positions:
        call |= dict(q_positions=np.arange(length) + 5, kv_positions=np.arange(length) + 5)
    got = ls.parallel.attention(q, k, v, mesh=ls.parallel.mesh(sp=8), **call)
    want = ls.attention(q, k, v, engine="reference", **call)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=2e-6)
