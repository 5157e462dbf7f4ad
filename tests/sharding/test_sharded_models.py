"""Encoders, decoders and modules with sharded batches and kernels: sums over devices, and no gathers."""

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan import models
from longspan.engines.cpu import Cpu
from longspan.nn import nnx as modules
from tests.sharding.test_rows_and_heads import collectives

SIZES = dict(vocab_size=11, hidden_size=16, num_attention_heads=4, num_hidden_layers=2, intermediate_size=32)
DECODER = dict(**SIZES, num_key_value_heads=2)
COLUMNS = ("query", "key", "value", "gate", "up")
B, T = 4, 21
rng = np.random.default_rng(0)
IDS = rng.integers(1, 11, (B, T)).astype(np.int32)
MASK = (np.arange(T)[None] < np.array([[21], [17], [20], [9]])).astype(np.int32)


@pytest.fixture
def xla(monkeypatch):
    """On CPUs too, "auto" takes the engine of accelerators."""
    monkeypatch.setattr(Cpu, "unsupported", lambda self, request: "not here")
    jax.clear_caches()  # which engine is taken is no part of what JAX remembers programs by
    yield
    jax.clear_caches()


def mesh_of():
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])


def spec_of(path, x):
    """Megatron's: what makes heads and hidden units is split by columns, what takes them by rows."""
    *_, owner, leaf, _ = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    more = [None] * (x.ndim - (2 if leaf == "kernel" else 1))
    if owner in COLUMNS:
        return P(*more, None, "y") if leaf == "kernel" else P(*more, "y")
    return P(*more, "y", None) if owner in ("out", "down") and leaf == "kernel" else P()


def placed(mesh, tree, spec):
    return jax.tree_util.tree_map_with_path(lambda p, x: jax.device_put(x, NamedSharding(mesh, spec(p, x))), tree)


MODELS = {
    "bert": lambda: models.Encoder(models.BertConfig(**SIZES, max_position_embeddings=64), rngs=nnx.Rngs(0)),
    "llama": lambda: models.CausalLM(models.LlamaConfig(**DECODER), rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_sums_over_devices_and_gathers_nothing(name, request):
    if name == "llama":
        request.getfixturevalue("xla")
    mesh, (graph, state) = mesh_of(), nnx.split(MODELS[name]())
    inputs = dict(input_ids=IDS, attention_mask=MASK)

    def value(state, inputs):
        output = nnx.merge(graph, state)(**inputs)
        x = output.last_hidden_state if name == "bert" else output.logits
        return jnp.sum(jnp.where(inputs["attention_mask"][..., None] > 0, x, 0) ** 3), x

    step = jax.jit(jax.value_and_grad(value, has_aux=True))
    there = placed(mesh, state, spec_of), placed(mesh, inputs, lambda *_: P("x"))
    program = step.lower(*there).compile()
    assert collectives(program) <= {"all-reduce"}
    ((total, x), grads), ((want, wanted), want_grads) = program(*there), step(state, inputs)
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 3)
    np.testing.assert_allclose(np.where(MASK[..., None], x, 0), np.where(MASK[..., None], wanted, 0), atol=1e-5)
    np.testing.assert_allclose(total, want, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * max(1.0, float(np.abs(b).max())))


def test_a_cached_decoder_gathers_nothing():
    mesh = mesh_of()
    model = models.CausalLM(models.MistralConfig(**DECODER, sliding_window=8), rngs=nnx.Rngs(0))
    (graph, state), cache = nnx.split(model), model.init_cache(B, 40)

    def spec(cache):
        by_name = dict(k=P("x", None, "y"), v=P("x", None, "y"), tables=P())
        names = [field.name for field in fields(cache) if field.name != "plan"]
        parts = [jax.tree.map(lambda _, n=n: by_name.get(n, P("x")), getattr(cache, n)) for n in names]
        parts = jax.tree.leaves(parts, is_leaf=lambda x: isinstance(x, P))
        specs = jax.tree.unflatten(jax.tree.structure(cache), parts)
        return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), cache, specs)

    def step(state, ids, cache):
        output = nnx.merge(graph, state)(ids, cache=cache)
        return output.logits, output.cache

    there = placed(mesh, state, spec_of), jax.device_put(IDS[:, :5], NamedSharding(mesh, P("x")))
    caches = jax.tree.map(spec, cache, is_leaf=lambda x: isinstance(x, ls.cache.Cache))
    program = jax.jit(step).lower(*there, caches).compile()
    assert collectives(program) <= {"all-reduce"}
    logits, after = program(*there, caches)
    np.testing.assert_allclose(logits, jax.jit(step)(state, IDS[:, :5], cache)[0], atol=1e-5)
    assert after[0].k.sharding.is_equivalent_to(NamedSharding(mesh, P("x", None, "y")), 4)


def test_a_module_gathers_nothing():
    mesh = mesh_of()
    layer = modules.SelfAttention(num_heads=4, num_kv_heads=2, in_features=16, sinks=True, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    x = jnp.asarray(rng.normal(size=(B, T, 16)), jnp.float32)

    def spec(path, x):
        *_, owner, leaf, _ = [getattr(key, "key", getattr(key, "name", None)) for key in ("", "", *path)]
        if leaf == "sink" or owner == "out":
            return P("y") if leaf in ("sink", "kernel") else P()
        return P(None, "y") if leaf == "kernel" else P("y")

    def value(state, x):
        return jnp.sum(nnx.merge(graph, state)(x, mask=ls.Causal()) ** 2)

    step = jax.jit(jax.value_and_grad(value))
    there = placed(mesh, state, spec), jax.device_put(x, NamedSharding(mesh, P("x")))
    program = step.lower(*there).compile()
    assert collectives(program) <= {"all-reduce"}
    for a, b in zip(jax.tree.leaves(program(*there)), jax.tree.leaves(step(state, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
