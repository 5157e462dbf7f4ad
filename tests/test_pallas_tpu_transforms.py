"""The `pallas_tpu` engine, interpreted, under vmap, scan, remat and cond, and on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan.engines.pallas_tpu import PallasTpu

ENGINE = PallasTpu(interpret=True)
EXAMPLES, B, T, S, N, K, H, HV = 3, 2, 19, 21, 4, 2, 5, 7


def floats(*size, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=size).astype(np.float32))


def ids(*size, seed=0):
    return jnp.asarray(np.sort(np.random.default_rng(seed).integers(0, 3, size)))


Q, KEYS, V = floats(EXAMPLES, B, T, N, H), floats(EXAMPLES, B, S, K, H, seed=1), floats(EXAMPLES, B, S, K, HV, seed=2)


def planned(mask, kv_len=S):
    return mask.layout(T, kv_len, q_tile=8, kv_tile=8)


def attend(engine, q, k, v, mask, **options):
    return ls.attention(q, k, v, mask=mask, engine=engine, return_lse=True, **options)


def with_gradients(run, arguments):
    """The results of run(*arguments), and the gradients of a combination of them by every float argument."""
    places = tuple(n for n, x in enumerate(arguments) if jnp.issubdtype(x.dtype, np.floating))

    def loss(*arguments):
        out, lse = run(*arguments)
        weights = jnp.cos(jnp.arange(out.size, dtype=np.float32)).reshape(out.shape)
        return (out * weights).sum() + (jnp.where(jnp.isfinite(lse), lse, 0) * weights[..., 0]).sum(), (out, lse)

    return jax.jit(jax.value_and_grad(loss, places, has_aux=True))(*arguments)


def assert_same(make, *arguments):
    """`make(engine)` is a function of the arguments. The interpreted kernels and the reference agree."""
    got, want = (with_gradients(make(engine), arguments) for engine in (ENGINE, "reference"))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-4, atol=2e-5)


def by_segments(engine):
    return lambda q, k, v, q_ids, kv_ids: attend(engine, q, k, v, planned(ls.Causal(2) & ls.Segments(q_ids, kv_ids)))


def by_row_and_head(b, h, q, k):
    return (k <= q + 5 * b) & (q - k <= 3 * h + 1)


def test_vmap_folds_queries_and_ids_into_the_batch_where_keys_are_shared():
    mapped = 0, None, 0, 0, None
    q_ids, kv_ids = ids(EXAMPLES, B, T), ids(1, S, seed=1)
    assert_same(lambda engine: jax.vmap(by_segments(engine), mapped), Q, KEYS[0], V, q_ids, kv_ids)


@pytest.mark.check
def test_vmap_keeps_the_row_numbers_that_a_custom_mask_reads():
    mask = planned(ls.Custom(by_row_and_head, batch=B, heads=N))
    assert_same(lambda engine: jax.vmap(lambda q, k, v: attend(engine, q, k, v, mask)), Q, KEYS, V)


@pytest.mark.check
def test_vmap_over_masks_alone():
    shared = None, None, None, 0, 0
    q_ids, kv_ids = ids(EXAMPLES, B, T), ids(EXAMPLES, B, S, seed=1)
    assert_same(lambda engine: jax.vmap(by_segments(engine), shared), Q[0], KEYS[0], V[0], q_ids, kv_ids)


@pytest.mark.check
def test_vmap_over_dropout_keys_and_window_sizes():
    def make(engine):
        def run(q, k, v, words, left):
            key = jax.random.wrap_key_data(words)
            return attend(engine, q, k, v, planned(ls.Window(left, 1)), dropout_rate=0.3, dropout_key=key)

        return jax.vmap(run, (0, 0, None, 0, 0))

    words = jax.random.key_data(jax.random.split(jax.random.key(1), EXAMPLES))
    assert_same(make, Q, KEYS, V[0], words, jnp.asarray([1, 9, 4]))


@pytest.mark.check
@pytest.mark.parametrize("mapped", [0, None], ids=["mapped", "shared"])
def test_vmap_with_the_gradient_of_a_bias(mapped):
    bias = floats(EXAMPLES, 1, N, T, S, seed=3)
    if mapped is None:
        bias = bias[0]
    causal = planned(ls.Causal(2))
    assert_same(
        lambda engine: jax.vmap(lambda q, k, v, b: attend(engine, q, k, v, causal, bias=b), (0, 0, 0, mapped)),
        Q, KEYS, V, bias,
    )  # fmt: skip


@pytest.mark.check
def test_vmap_where_one_example_has_nan_in_a_key_that_nobody_sees():
    hidden = planned(ls.Dense(np.arange(S)[None, None, None] != 20) & ls.Causal(3))
    k, v = KEYS.at[1, :, 20].set(np.nan), V.at[1, :, 20].set(np.inf)
    assert_same(lambda engine: jax.vmap(lambda q, k, v: attend(engine, q, k, v, hidden)), Q, k, v)


def test_scan_with_remat_and_a_traced_scale():
    causal = planned(ls.Causal() & ls.Segments(ids(B, T)), kv_len=T)

    def make(engine):
        def layer(x, scale):
            out, lse = attend(engine, x, x[..., :K, :], x[..., :K, :], causal, scale=scale)
            return x + out, lse

        def run(x, scales):
            out, lses = jax.lax.scan(jax.checkpoint(layer), x, scales)
            return out, lses.sum(0)

        return run

    assert_same(make, Q[0], jnp.asarray([0.4, -0.3, 0.0], np.float32))


@pytest.mark.check
def test_cond_between_two_masks():
    def make(engine):
        def run(q, k, v, number):
            branches = (
                lambda *x, mask=mask: attend(engine, *x, planned(mask)) for mask in (ls.Causal(), ls.Window(2, 3))
            )
            return jax.lax.cond(number > 1, *branches, q, k, v)

        return run

    assert_same(make, Q[0], KEYS[0], V[0], jnp.asarray(2))


def mesh_of(*sizes):
    names = ("data", "model")[: len(sizes)]
    return jax.make_mesh(
        sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[: np.prod(sizes)]
    )


@pytest.mark.mesh
def test_shard_map_over_rows_and_heads():
    """JAX's interpreter of kernels does not support `check_vma=True`."""
    causal, here = planned(ls.Causal(2)), P("data", None, "model")

    def make(engine):
        return jax.shard_map(
            lambda q, k, v: attend(engine, q, k, v, causal),
            mesh=mesh_of(2, 2), in_specs=(here,) * 3, out_specs=(here, here), check_vma=False,
        )  # fmt: skip

    assert_same(make, Q[0], KEYS[0], V[0])


@pytest.mark.mesh
def test_jit_over_a_sharded_batch():
    spec = NamedSharding(mesh_of(2), P("data"))
    q, k, v, q_ids, kv_ids = (jax.device_put(x, spec) for x in (Q[0], KEYS[0], V[0], ids(B, T), ids(B, S, seed=1)))
    assert_same(by_segments, q, k, v, q_ids, kv_ids)


@pytest.mark.mesh
@pytest.mark.parametrize("mask", [ls.Causal(), ls.Window(5, 0)], ids=["ring", "halo"])
def test_sequences_sharded_over_four_devices(mask):
    mesh, tokens = mesh_of(4), 32
    q, k, v = floats(1, tokens, 2, H), floats(1, tokens, 1, H, seed=1), floats(1, tokens, 1, H, seed=2)

    def loss(operands, attend):
        out, lse = attend(*operands)
        return jnp.sin(out).sum() + lse.sum()

    def sharded(q, k, v):
        return ls.parallel.attention(q, k, v, mask=mask, mesh=mesh, axis="data", engine=ENGINE, return_lse=True)

    def dense(q, k, v):
        return ls.attention(q, k, v, mask=mask, engine="reference", return_lse=True)

    got, want = (jax.jit(jax.value_and_grad(loss), static_argnums=1)((q, k, v), run) for run in (sharded, dense))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want)
