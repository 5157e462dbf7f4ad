"""Programs for a TPU, compiled without one, write new tokens into donated caches in place (`make accelerators`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan.engines import put

pytestmark = pytest.mark.accelerators

LAYERS, B, K, S, H = 4, 3, 5, 4096, 128


def compile_for_tpu(function, *arguments):
    """The program for one v5e, which donates the first argument. Arrays are only asked for their shapes and dtypes."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = Mesh(np.array(chips[:1]), ("x",))
    placed = NamedSharding(mesh, P())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, donate_argnums=0, out_shardings=placed).lower(*shapes).compile()


def array(*shape: int, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("count", [1, 3])
def test_a_loop_over_layers_puts_tokens_in_place(count, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")

    def fill(stack, slots, new):
        def body(stack, layer):
            stack = put(stack, layer, slots, new, heads_first=True)
            return stack, stack[layer].sum((0, 1, 2))

        return jax.lax.scan(body, stack, jnp.arange(LAYERS, dtype=np.int32))

    stack = array(LAYERS, B, K, S, H)
    memory = compile_for_tpu(fill, stack, array(B, count, dtype=jnp.int32), array(B, count, K, H)).memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * stack.size
    assert memory.temp_size_in_bytes < 2**20 < stack.size // LAYERS


@pytest.mark.parametrize("mask", [ls.Causal(), ls.Causal() & ls.Window(1999, 0)], ids=repr)
def test_a_loop_over_tokens_appends_in_place(mask):
    def append_all(cache, k, v):
        def body(cache, token):
            cache, view = cache.append(*token)
            return cache, view.k.sum((0, 1)) + view.v.sum((0, 1))

        return jax.lax.scan(body, cache, (k, v))

    plan = ls.cache.plan(mask, S)
    cache = jax.eval_shape(lambda: ls.cache.init(plan, B, K, H, jnp.bfloat16, heads_first=True))
    memory = compile_for_tpu(append_all, cache, *[array(7, B, 1, K, H)] * 2).memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * cache.k.size
    assert memory.temp_size_in_bytes < 2**20 < cache.k.size
