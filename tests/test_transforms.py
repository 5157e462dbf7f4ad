"""Engines under JAX's transformations: the same numbers, still skipping, nothing T×T, one trace."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan.testing import Shape, make_qkv
from tests.engines import every_engine, every_sparse_engine

SHAPE = Shape(B=2, T=37, S=37, N=4, K=2, H=5)
Q, K, V = make_qkv(SHAPE, jnp.float32)
SINKS = jnp.linspace(-1, 1, 4)


def packed(seed, batch=2, length=37):
    return np.sort(np.random.default_rng(seed).integers(-1, 4, (batch, length))).astype(np.int32)


def mask_of(ids):
    return ls.Causal() & ls.Segments(ids) | ls.Global((0,), rows=False)


def loss(q, k, v, sinks, ids, engine):
    out, lse = ls.attention(q, k, v, mask=mask_of(ids), sinks=sinks, engine=engine, return_lse=True)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0))


grad = jax.grad(loss, argnums=(0, 1, 2, 3))


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


@every_engine
def test_jit_remat_scan_and_cond(engine):
    wanted = grad(Q, K, V, SINKS, packed(0), "reference")

    def step(carry, ids):
        return carry, grad(Q, K, V, SINKS, ids, engine)

    close(jax.jit(grad, static_argnums=5)(Q, K, V, SINKS, packed(0), engine), wanted)
    close(jax.grad(jax.remat(loss, static_argnums=5), argnums=(0, 1, 2, 3))(Q, K, V, SINKS, packed(0), engine), wanted)
    ids = np.stack([packed(0), packed(1)])
    scanned = jax.jit(lambda ids: jax.lax.scan(step, 0, ids)[1])(ids)
    close(jax.tree.map(lambda x: np.asarray(x)[0], scanned), wanted)
    either = jax.jit(
        lambda p, ids: jax.lax.cond(
            p, lambda i: grad(Q, K, V, SINKS, i, engine), lambda i: grad(Q, K, V, SINKS, i * 0, engine), ids
        )
    )
    close(either(True, packed(0)), wanted)


@every_engine
def test_vmap_over_everything_and_over_a_mask_alone(engine):
    qs, ids = jnp.stack([Q, Q + 1, Q * 2]), jnp.stack([packed(i) for i in range(3)])
    wanted = [grad(q, K, V, SINKS, i, "reference") for q, i in zip(qs, ids, strict=True)]
    wanted = jax.tree.map(lambda *xs: jnp.stack(xs), *wanted)
    close(jax.vmap(lambda q, i: grad(q, K, V, SINKS, i, engine))(qs, ids), wanted)
    alone = jax.jit(jax.vmap(lambda i: loss(Q, K, V, SINKS, i, engine)))(ids)
    close(alone, jnp.stack([loss(Q, K, V, SINKS, i, "reference") for i in ids]))


@pytest.mark.mesh
@every_engine
def test_shard_map_over_batch_and_heads_with_replicated_sinks(engine):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    ids, here = packed(0), P("data", None, "model")
    bias = jnp.linspace(-1, 1, 37 * 37).reshape(1, 1, 37, 37)

    def local(q, k, v, sinks, bias, ids):
        out = ls.attention(q, k, v, mask=mask_of(ids), sinks=sinks, bias=bias, engine=engine)
        return jnp.sin(out)

    specs = (here, here, here, P("model"), P(), P("data"))
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=here)

    def total(function, *floats):
        return function(*floats, ids).sum()

    floats = (Q, K, V, SINKS, bias)
    got = jax.jit(jax.grad(lambda *x: total(sharded, *x), argnums=range(5)))(*floats)
    close(got, jax.grad(lambda *x: total(local, *x), argnums=range(5))(*floats))


@every_engine
def test_new_arrays_do_not_retrace(engine):
    traces = []

    @jax.jit
    def step(q, mask):
        traces.append(1)
        return ls.attention(q, K, V, mask=mask, engine=engine)

    for seed in range(3):
        mask = ls.Window(seed * 0 + 9, 0) & ls.Segments(packed(seed)) & ls.KvLengths(np.array([seed, 30]))
        close(step(Q, mask), ls.attention(Q, K, V, mask=mask, engine="reference"))
    assert len(traces) == 1


@every_sparse_engine
def test_a_second_derivative_raises_a_clear_error(engine):
    def once(q):
        return jax.grad(lambda q: ls.attention(q, K, V, engine=engine).sum())(q).sum()

    with pytest.raises(NotImplementedError, match=r"second derivatives.*engine='reference'"):
        jax.grad(once)(Q)
    assert jax.grad(lambda q: jax.grad(lambda q: ls.attention(q, K, V, engine="reference").sum())(q).sum())(Q).shape


FORWARD = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "jit of jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
}


@every_sparse_engine
@pytest.mark.parametrize("how", FORWARD)
def test_forward_mode_is_refused_and_the_reference_named_where_jax_lets_us(engine, how):
    x = make_qkv(Shape(B=1, T=5, S=5, N=2, K=2, H=3), jnp.float32)[0]

    def attend(name):
        return lambda q: ls.attention(q, q, q, mask=ls.Causal(), engine=name)

    ours = rf"engine='{engine}' has no forward-mode derivatives.*engine='reference'"
    with pytest.raises(TypeError, match=ours if how in ("jvp", "jacfwd") else "forward-mode.*custom_vjp"):
        FORWARD[how](attend(engine), x)
    with pytest.raises(NotImplementedError, match="engine='reference'"):
        jax.hessian(lambda q: attend(engine)(q).sum())(x)
    assert all(np.isfinite(np.asarray(a)).all() for a in jax.tree.leaves(FORWARD[how](attend("reference"), x)))


def evaluations(run):
    """How many tiles have their rule evaluated while `run` runs, through a rule that counts."""
    count = []

    def counting(q, k):
        jax.debug.callback(lambda: count.append(1))
        return q >= k

    jax.block_until_ready(run(ls.Custom(counting)))
    jax.effects_barrier()
    return len(count)


def test_xla_visits_only_the_tiles_of_the_documents():
    q, k, v = make_qkv(Shape(1, 64, 64, 1, 1, 4), jnp.float32)

    def attend(mask, ids):
        layout = (mask & ls.Segments(ids)).layout(64, 64, q_tile=4, kv_tile=4)
        return ls.attention(q, k, v, mask=layout, engine="xla")

    one, eight = np.zeros((1, 64), np.int32), np.repeat(np.arange(8, dtype=np.int32), 8)[None]
    visits = [evaluations(lambda m: jax.jit(attend)(m, ids)) for ids in (one, eight)]  # noqa: B023
    # 16 rows; 16 tiles in groups of 5 for one document, the 2 tiles of a document in one group for eight
    assert visits == [16 * 4, 16]


def test_xla_keeps_skipping_under_vmap():
    q, k, v = make_qkv(Shape(1, 64, 64, 1, 1, 4), jnp.float32)

    def attend(mask, ids):
        layout = (mask & ls.Segments(ids)).layout(64, 64, q_tile=4, kv_tile=4)
        return ls.attention(q, k, v, mask=layout, engine="xla")

    ids = np.stack([np.zeros((1, 64), np.int32), np.repeat(np.arange(8, dtype=np.int32), 8)[None]])
    assert evaluations(lambda m: jax.jit(jax.vmap(lambda i: attend(m, i)))(ids)) == 16 * 4 + 16


def long_program(engine, T, mask, both=True):
    x = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)

    def forward(q, k, v):
        return ls.attention(q, k, v, mask=mask, engine=engine).sum()

    return jax.jit(jax.grad(forward, argnums=(0, 1, 2)) if both else forward).lower(x, x, x)


LONG_MASKS = [
    ls.Window(256, 256),
    ls.Causal() & ls.Window(511, 0) | ls.Global((0, 7)),
    ls.Causal() & ls.Chunk(1024),
]


@every_sparse_engine
@pytest.mark.parametrize("mask", LONG_MASKS, ids=repr)
def test_nothing_of_the_size_of_the_square_is_ever_alive(engine, mask):
    T = 8192
    compiled = long_program(engine, T, mask).compile()
    shapes = re.findall(r"(?:pred|[sufb]+\d+)\[([\d,]+)\]", compiled.as_text())
    largest = max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)
    assert largest < T * T / 8
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 6 * 3 * 4 * T * 2 * 16


@every_sparse_engine
def test_a_few_queries_of_long_keys_copy_no_keys(engine):
    q, k = (jax.ShapeDtypeStruct((3, n, heads, 16), jnp.float32) for n, heads in ((1, 4), (30_000, 2)))
    lengths = jax.ShapeDtypeStruct((3,), jnp.int32)

    def decode(q, k, v, lengths):
        mask = ls.Causal() & ls.Window(255, 0) & ls.KvLengths(lengths)
        return ls.attention(q, k, v, mask=mask, q_positions=lengths[:, None] - 1, engine=engine)

    memory = jax.jit(decode).lower(q, k, k, lengths).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3 * 30_000 * 2 * 16 * 4 / 4  # a quarter of the keys


@pytest.mark.check
@every_sparse_engine
@pytest.mark.parametrize("per_head", [False, True])
def test_a_few_queries_of_long_keys_have_the_same_values_and_gradients(engine, per_head):
    q, k, v = make_qkv(Shape(B=2, T=5, S=2999, N=4, K=2, H=5), jnp.float32)
    mask = ls.PerHead((ls.Window(900, 40), ls.Causal(), ls.Full(), ls.Global((0,)))) if per_head else ls.Window(900, 40)
    mask &= ls.KvLengths(jnp.array([2999, 2500]))
    bias = jnp.linspace(-1, 1, 2999).reshape(1, 1, 1, -1)

    def value(q, k, v, bias, engine):
        positions = jnp.array([1, 700, 1500, 2300, 2998])
        return jnp.sin(ls.attention(q, k, v, mask=mask, bias=bias, q_positions=positions, engine=engine)).sum()

    run = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2, 3)), static_argnums=4)
    close(run(q, k, v, bias, engine), run(q, k, v, bias, "reference"))


@every_sparse_engine
@pytest.mark.parametrize("mask", LONG_MASKS, ids=repr)
def test_the_program_does_not_grow_with_the_length(engine, mask):
    short, long = (len(long_program(engine, T, mask).as_text()) for T in (1024, 65536))
    assert abs(long - short) < 0.05 * short


@pytest.mark.mesh
def test_documents_of_a_sharded_batch_need_no_communication_on_the_cpu_engine():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    q = jax.device_put(jnp.ones((8, 300, 4, 16)), NamedSharding(mesh, P("data", None, "model")))
    ids = jax.device_put(jnp.zeros((8, 300), jnp.int32), NamedSharding(mesh, P("data")))
    lengths = jax.device_put(jnp.full((8,), 200), NamedSharding(mesh, P("data")))

    def total(q, ids, lengths):
        mask = ls.Causal() & ls.Segments(ids) & ls.KvLengths(lengths)
        return ls.attention(q, q, q, mask=mask, engine="cpu")

    try:
        compiled = jax.jit(jax.grad(lambda *x: total(*x).sum())).lower(q, ids, lengths).compile()
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    assert not re.search("all-gather|all-to-all|collective-permute", compiled.as_text())
