"""Meshes with explicit axes: calls outside `jit`, generation and caches equal one device."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan import models
from tests.sharding.test_sharded_models import DECODER, ENCODER, EXPLICIT, IDS, MASK, mesh_of, placed, spec_of


def on(mesh, model):
    graph, state = nnx.split(model)
    return nnx.merge(graph, placed(mesh, state, spec_of))


@pytest.mark.check
def test_a_model_outside_jit_drops_the_same_values_as_on_one_device():
    mesh, model = mesh_of(EXPLICIT), models.MaskedLM(models.BertConfig(**ENCODER), rngs=nnx.Rngs(0))
    ids, rngs = jax.device_put(IDS, NamedSharding(mesh, P("x"))), nnx.Rngs(dropout=3)
    got = on(mesh, model)(ids, attention_mask=MASK, deterministic=False, rngs=rngs)
    want = model(IDS, attention_mask=MASK, deterministic=False, rngs=nnx.Rngs(dropout=3))
    np.testing.assert_allclose(*(np.where(MASK[..., None], x.logits, 0) for x in (got, want)), atol=1e-5)
    assert got.logits.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 3)
    assert rngs.dropout.count[...] == 2  # the caller's stream has given two keys: the encoder's and the head's


@pytest.mark.check
@pytest.mark.parametrize("set_mesh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_generated_tokens_are_those_of_one_device(set_mesh):
    mesh, model = mesh_of(EXPLICIT), models.CausalLM(models.LlamaConfig(**DECODER), rngs=nnx.Rngs(0))
    given = dict(max_new_tokens=5, temperature=0.7, top_k=5, key=jax.random.key(1))
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        got = ls.generate(on(mesh, model), [IDS[0, :7], IDS[1, :3]], **given)
    for a, b in zip(got, ls.generate(model, [IDS[0, :7], IDS[1, :3]], **given), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.check
@pytest.mark.parametrize("heads_first", [False, True])
def test_a_cache_takes_sharded_keys(heads_first):
    mesh, heads = mesh_of(EXPLICIT), P("x", None, "y", None)
    mask = ls.Causal() & ls.Window(3, 0)
    cache = ls.cache.init(ls.cache.plan(mask, 12), 4, 2, 3, jnp.float32, heads_first=heads_first)
    k = jnp.arange(4 * 5 * 2 * 3, dtype=jnp.float32).reshape(4, 5, 2, 3)
    there = jax.device_put(k, NamedSharding(mesh, heads))
    (got, seen), (want, wanted) = cache.append(there, there), cache.append(k, k)
    assert jax.typeof(got.k).sharding.spec == (P("x", "y", None, None) if heads_first else heads)
    assert jax.typeof(seen.v).sharding.spec == heads
    for a, b in zip(jax.tree.leaves((got, seen)), jax.tree.leaves((want, wanted)), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="was planned for 12 positions, but a row would have 15"):
        got.append(there, there)[0].append(there, there)
