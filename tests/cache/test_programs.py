"""Caches inside programs: one trace for a whole generation, in place, sharded without communication."""

import functools
import re
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls

WINDOW = ls.Causal() & ls.Window(5, 0)
WIDE = ls.Causal() & ls.Window(99, 0)
PINNED = ls.Causal() & (ls.Window(5, 0) | ls.Prefix(2))
TABLE = ls.Causal() & (ls.Window(5, 0) | ls.Global((3, 12)))
LENGTH, B, N, K, H = 31, 3, 4, 2, 5
COMMUNICATION = re.compile("all-gather|all-to-all|collective-permute|all-reduce")


def new(seed, batch=B, count=1):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(batch, count, heads, H)), jnp.float32) for heads in (N, K, K)]


def empty(mask, batch=B, length=LENGTH, kv_heads=K, heads_first=False):
    return ls.cache.init(ls.cache.plan(mask, length), batch, kv_heads, H, jnp.float32, heads_first=heads_first)


def step(cache, q, k, v, mask, engine="cpu"):
    cache, view = cache.append(k, v)
    return cache, ls.attention(q, **view.of(mask), engine=engine)


@pytest.mark.parametrize("mask", [PINNED, TABLE], ids=repr)
def test_a_whole_generation_is_one_trace_under_jit_and_under_scan(mask):
    traces = []

    @jax.jit
    def once(cache, q, k, v):
        traces.append("jit")
        return step(cache, q, k, v, mask)

    @jax.jit
    def all_of_it(cache, qs, ks, vs):
        def body(cache, tokens):
            traces.append("scan")
            return step(cache, *tokens, mask)

        return jax.lax.scan(body, cache, (qs, ks, vs))

    tokens = [new(i) for i in range(LENGTH)]
    cache, outs = empty(mask), []
    for token in tokens:
        cache, out = once(cache, *token)
        outs.append(out)
    assert traces == ["jit"]
    scanned, scanned_outs = all_of_it(empty(mask), *(jnp.stack(x) for x in zip(*tokens, strict=True)))
    assert traces.count("scan") == 1 and not scanned.overflowed.any()
    np.testing.assert_allclose(scanned_outs, jnp.stack(outs), rtol=0, atol=1e-6)
    for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(scanned), strict=True):
        np.testing.assert_array_equal(one, other)


def test_caches_are_mapped():
    caches = [step(empty(TABLE), *new(i), TABLE)[0] for i in range(3)]
    tokens = [new(10 + i) for i in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    mapped, outs = jax.vmap(lambda c, q, k, v: step(c, q, k, v, TABLE))(
        stacked, *(jnp.stack(x) for x in zip(*tokens, strict=True))
    )
    for i, (cache, token) in enumerate(zip(caches, tokens, strict=True)):
        alone, out = step(cache, *token, TABLE)
        np.testing.assert_allclose(outs[i], out, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(mapped.k[i], alone.k)
        np.testing.assert_array_equal(mapped.positions[i], alone.positions)


def specs(cache):
    """Rows over `data`, heads over `model`; the plan's tables on every device."""
    keys = P("data", "model") if cache.heads_first else P("data", None, "model")
    by_name = dict(k=keys, v=keys, tables=P())
    names = [field.name for field in fields(cache) if not field.metadata.get("static")]
    parts = [jax.tree.map(lambda _, n=n: by_name.get(n, P("data")), getattr(cache, n)) for n in names]
    return jax.tree.unflatten(jax.tree.structure(cache), jax.tree.leaves(parts, is_leaf=lambda x: isinstance(x, P)))


@pytest.mark.mesh
@pytest.mark.parametrize("mask", [PINNED, TABLE], ids=repr)
@pytest.mark.parametrize(("count", "heads_first"), [(1, False), (4, False), (1, True), (4, True)])
def test_rows_and_heads_are_sharded_without_communication(mask, count, heads_first):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    here = P("data", None, "model")
    cache, tokens = empty(mask, batch=8, heads_first=heads_first), new(0, batch=8, count=count)
    placed = jax.device_put(cache, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(cache)))
    placed_tokens = [jax.device_put(x, NamedSharding(mesh, here)) for x in tokens]

    def run(cache, *tokens):
        return step(cache, *tokens, mask)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(specs(cache), here, here, here), out_specs=(specs(cache), here))
    wanted = jax.jit(run)(cache, *tokens)
    for function in (run, mapped):
        compiled = jax.jit(function).lower(placed, *placed_tokens).compile()
        assert not COMMUNICATION.search(compiled.as_text())
        after, out = compiled(placed, *placed_tokens)
        np.testing.assert_allclose(out, wanted[1], rtol=0, atol=1e-6)
        np.testing.assert_array_equal(after.k, wanted[0].k)
        assert after.k.sharding.is_equivalent_to(NamedSharding(mesh, specs(cache).k), 4)


@pytest.mark.parametrize("mask", [WIDE, PINNED, TABLE, ls.Causal()], ids=repr)
def test_a_single_token_is_written_and_read_in_place(mask):
    cache = ls.cache.init(ls.cache.plan(mask, 640), B, K, 64, jnp.float32)
    q, k = jnp.ones((B, 1, N, 64)), jnp.ones((B, 1, K, 64))
    after, view = cache.append(k, k)
    assert view.k is after.k and view.v is after.v and view.kv_positions is after.positions

    def append(cache, q, k, v):
        return cache.append(k, v)[0]

    def attend(cache, q, k, v):
        return step(cache, q, k, v, mask)

    for function in (append, attend):
        compiled = jax.jit(function, donate_argnums=0, keep_unused=True).lower(cache, q, k, k).compile()
        shape = re.escape("f32[" + ",".join(map(str, cache.k.shape)))
        copies = [line for line in compiled.as_text().splitlines() if re.search(rf"= {shape}\]\S* copy\(", line)]
        assert not copies, "\n".join(copies)
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= cache.k.nbytes + cache.v.nbytes
        if cache.plan.capacity > 10:
            assert memory.temp_size_in_bytes < cache.k.nbytes / 2


def test_the_bytes_of_a_step_do_not_grow_with_the_length():
    def memory(length):
        cache, tokens = empty(WINDOW, length=length), new(0)
        compiled = jax.jit(lambda c, *t: step(c, *t, WINDOW)).lower(cache, *tokens).compile().memory_analysis()
        return compiled.argument_size_in_bytes, compiled.output_size_in_bytes, compiled.temp_size_in_bytes

    assert memory(100) == memory(100_000)


def test_tables_are_data_of_the_program_not_constants_in_it():
    cache, tokens = empty(TABLE, length=3001), new(0, count=4)
    assert cache.tables[0].shape == (3001,)
    text = jax.jit(lambda c, *t: step(c, *t, TABLE)).lower(cache, *tokens).as_text()
    constants = re.findall(r"stablehlo.constant dense<.*?> : tensor<([\dx]+)x\w+>", text)
    assert all(np.prod([int(n) for n in shape.split("x")]) < 1000 for shape in constants)
    assert "tensor<3001xi32>" in text


def test_equal_plans_share_one_trace():
    traces = []

    @jax.jit
    def append(cache, k, v):
        traces.append(1)
        return cache.append(k, v)[0]

    _, k, v = new(0)
    for mask in (PINNED, ls.Causal() & (ls.Prefix(2) | ls.Window(5, 0))):
        append(empty(mask), k, v)
    assert len(traces) == 1


def test_a_cache_is_a_plain_tree():
    cache = empty(TABLE)
    leaves, structure = jax.tree.flatten(cache)
    assert jax.tree.structure(jax.tree.unflatten(structure, leaves)) == structure
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert jax.eval_shape(lambda: empty(TABLE)).k.shape == cache.k.shape
    assert replace(cache, length=cache.length + 1).length.tolist() == [1] * B


@pytest.mark.parametrize("mask", [WINDOW, TABLE, ls.Causal() & ls.Chunk(7)], ids=repr)
def test_a_fork_and_its_origin_can_each_be_donated(mask):
    run = jax.jit(lambda cache, k, v: cache.append(k, v)[0], donate_argnums=0)
    for in_jit in (False, True):
        cache, (_, k, v) = empty(mask), new(0)
        forked = (jax.jit(type(cache).fork) if in_jit else type(cache).fork)(cache, np.arange(B))
        assert run(forked, k, v).length.tolist() == [1] * B
        assert run(cache, k, v).length.tolist() == [1] * B


def test_a_donated_cache_is_updated_and_new_documents_do_not_retrace():
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache, q, k, v, mask):
        traces.append(1)
        return step(cache, q, k, v, mask)

    for seed in range(2):
        mask = WINDOW & ls.Segments(np.sort(np.random.default_rng(seed).integers(0, 3, (B, LENGTH))))
        cache, kept, donated = empty(mask), empty(mask), None
        for i in range(9):
            donated = cache
            cache, out = run(cache, *new(i), mask)
            kept, wanted = step(kept, *new(i), mask)
            np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-6)
        assert donated is not None and donated.k.is_deleted()
    assert len(traces) == 1
