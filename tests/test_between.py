"""`Between`: an interval of key slots per query, static or data, visits the tiles of the equal window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.engines.cpu.program import supports
from longspan.layout import count
from longspan.testing import Shape, assert_matches_reference, assert_obeys_laws, make_qkv

pytestmark = pytest.mark.quick

RNG = np.random.default_rng(0)
T, S, B, N = 37, 53, 2, 4


def window(left, right, length=4096, array=np.asarray):
    """The intervals of `Window(left, right)`."""
    slots = np.arange(length)
    return ls.Between(array(slots - left), array(slots + right + 1))


@pytest.mark.parametrize("shape", [(T,), (B, T), (1, T), (B, N, T), (1, N, T)], ids=str)
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_a_query_sees_the_slots_from_its_start_up_to_its_stop(shape, array):
    starts = RNG.integers(-5, S + 5, shape)
    stops = starts + RNG.integers(-3, S, shape[-1])
    slots = np.arange(S)
    wanted = (starts[..., None] <= slots) & (slots < stops[..., None])
    wanted = wanted if len(shape) == 3 else wanted.reshape(-1, 1, T, S)
    np.testing.assert_array_equal(ls.Between(array(starts), array(stops)).dense(T, S), wanted)


def test_positions_do_not_matter():
    mask = ls.Between(np.arange(5), np.arange(5) + 2)
    moved = mask.dense(5, 9, q_positions=RNG.integers(0, 9, 5), kv_positions=RNG.integers(0, 9, 9))
    np.testing.assert_array_equal(moved, mask.dense(5, 9))


def test_its_layout_is_that_of_the_equal_window_in_both_directions():
    for left, right in ((256, 0), (100, 37), (0, 0)):
        mine, other = (m.layout(4096, 4096) for m in (window(left, right), ls.Window(left, right)))
        for a, b in ((mine, other), (mine.transpose(), other.transpose())):
            np.testing.assert_array_equal(a.starts, b.starts)
            np.testing.assert_array_equal(a.stops, b.stops)
        assert count(mine) == count(other)


def test_between_skips_tiles_if_its_arrays_are_traced():
    @jax.jit
    def layout(mask):
        planned = mask.layout(4096, 4096)
        return planned, planned.transpose()

    for mine, other in zip(layout(window(256, 0)), layout(ls.Window(256, 0)), strict=True):
        assert mine.visits() == other.visits() == 93
    assert jax.tree.leaves(layout(window(256, 0))[0])[0].shape == (1, 1, 4096)


def test_empty_intervals_widen_no_span():
    starts, stops = np.full(64, 900), np.full(64, 901)
    starts[::2], stops[::2] = 40, 40  # empty, far from the keys of the others
    layout = ls.Between(starts, stops).layout(64, 1024, q_tile=16, kv_tile=16)
    assert layout.visits() == layout.transpose().visits() == 4
    assert ls.Between(stops, starts).layout(64, 1024).visits() == 0


def test_intervals_in_any_order_span_their_hull():
    order = RNG.permutation(512)
    mask = ls.Between(order, order + 1)
    assert_obeys_laws(mask, 512, 512, q_tile=64, kv_tile=64)
    assert count(mask.layout(512, 512)).pairs == 512


@pytest.mark.parametrize("lengths", [(0, 9), (9, 0), (0, 0)])
def test_no_queries_and_no_keys(lengths):
    mask = ls.Between(np.zeros(lengths[0], int), np.full(lengths[0], 4))
    for m in (mask, jax.tree.map(jnp.asarray, mask)):
        layout = m.layout(*lengths, q_tile=2, kv_tile=2)
        assert layout.visits() == layout.transpose().visits() == 0 and m.dense(*lengths).shape[2:] == lengths


def test_interval_ends_beyond_32_bits_saturate():
    starts, stops = np.array([-(2**60), 3]), np.array([2**60, 2**63 - 1])
    assert ls.Between(starts, stops).show(2, 5).split() == ["#####", "...##"]
    assert ls.Between(np.array([0], np.uint32), np.array([2**32 - 1], np.uint32)).dense(1, 5).all()
    assert ls.Between(np.array([-(2**31)], np.int32), np.array([2**31 - 1], np.int32)).dense(1, 5).all()


@pytest.mark.parametrize("shape", [(T,), (B, 1, T), (1, N, T), (B, N, T)], ids=str)
def test_engines_match_the_reference_where_intervals_are_data(shape):
    starts = RNG.integers(-5, S, shape)
    q, k, v = make_qkv(Shape(B=B, T=T, S=S, N=N, K=2, H=5), jnp.float32)
    mask = ls.Between(jnp.asarray(starts), jnp.asarray(starts + RNG.integers(0, 30, shape)))
    assert supports(mask)
    assert_matches_reference(["cpu", "xla"], q, k, v, mask)


def test_it_combines_with_other_rules_and_with_vmap_scan_and_grad():
    q, k, v = make_qkv(Shape(B=B, T=T, S=S, N=N, K=2, H=5), jnp.float32)
    starts = jnp.asarray(RNG.integers(0, S, (3, B, 1, T)))

    def loss(engine, q, starts):
        mask = (ls.Between(starts, starts + 7) | ls.Prefix(2)) & ~ls.Causal(-20)
        return ls.attention(q, k, v, mask=mask, engine=engine).astype(jnp.float32).var()

    for engine in ("cpu", "xla"):
        wanted = jnp.stack([jax.grad(loss, argnums=1)("reference", q, s) for s in starts])
        mapped = jax.vmap(jax.grad(loss, argnums=1), in_axes=(None, None, 0))(engine, q, starts)
        _, scanned = jax.lax.scan(lambda c, s, e=engine: (c, jax.grad(loss, argnums=1)(e, q, s)), 0, starts)
        np.testing.assert_allclose(mapped, wanted, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(scanned, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.mesh
def test_its_heads_may_be_sharded():
    mesh = jax.make_mesh((2, 4), ("b", "n"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    q, k, v = make_qkv(Shape(B=B, T=T, S=S, N=N, K=N, H=5), jnp.float32)
    starts = jnp.asarray(RNG.integers(0, S, (B, N, T)))
    mask = ls.Between(starts, starts + 9)
    wanted = ls.attention(q, k, v, mask=mask, engine="reference")

    def placed(x, *spec):
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P(*spec)))

    operands = [placed(x, "b", None, "n") for x in (q, k, v)]
    mask = jax.tree.map(lambda x: placed(x, "b", "n"), mask)
    for engine in ("cpu", "xla"):
        got = jax.jit(lambda q, k, v, m, e=engine: ls.attention(q, k, v, mask=m, engine=e))(*operands, mask)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_static_cut_to_growing_slots_is_an_interval_again_and_stays_native():
    mask = window(256, 0)
    for kept in (np.arange(0, 4096, 2), np.arange(1000, 3000)):
        cut = mask.cut(kept, kept)
        assert isinstance(cut, ls.Between) and supports(cut)
        assert cut.layout(len(kept), len(kept)).visits() < 70
    traced = jax.jit(lambda kept: mask.cut(kept, kept).layout(2048, 2048))(np.arange(0, 4096, 2))
    assert traced.visits() < 70


def test_it_compares_by_value_and_is_a_pytree():
    mask = ls.Between(np.arange(3), np.arange(3) + 1)
    assert mask == ls.Between([0, 1, 2], [1, 2, 3]) != ls.Between([0, 1, 2], [1, 2, 4])
    assert repr(mask) == "Between(i32[1,1,3], i32[1,1,3])"
    assert mask.batch == mask.heads == 1 and ls.Between(np.zeros((2, 3, 4), int), np.ones(4, int)).heads == 3
    with pytest.raises(TypeError, match="arrays do not hash"):
        hash(mask)
    shapes = ls.Between(jax.ShapeDtypeStruct((3,), np.int32), jax.ShapeDtypeStruct((2, 3), np.int32))
    assert shapes.batch == 2 and jax.jit(lambda m: m.dense(3, 4)).lower(shapes).compile() is not None


def test_explain_counts_a_million_intervals():
    x = jax.ShapeDtypeStruct((1, 2**20, 2, 64), jnp.float32)
    mine = ls.explain(x, x, x, mask=window(511, 0, 2**20), engine="cpu")
    other = ls.explain(x, x, x, mask=ls.Window(511, 0), engine="cpu")
    assert mine.useful_flops == other.useful_flops and mine.tiles_full == other.tiles_full
