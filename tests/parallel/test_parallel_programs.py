"""Compiled programs for sharded sequences: shardings, memory, retraces, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
import longspan.parallel.call as parallel_call
from longspan.parallel.parts import ShardConfig
from tests.engines import every_sparse_engine
from tests.parallel.families import FAMILIES, MESHES, operands


def placed(mesh, *arrays):
    return [jax.device_put(x, NamedSharding(mesh, P("dp", "sp", "tp"))) for x in arrays]


@pytest.mark.parametrize("family", ["window", "causal", "window and global tokens"])
def test_results_and_gradients_stay_sharded(family):
    mesh = MESHES["dp2-tp2-sp2"]()
    q, k, v = placed(mesh, *operands(48))

    @jax.jit
    def run(q, k, v):
        def call(*x):
            return ls.parallel.attention(*x, mask=FAMILIES[family](np.arange(48)), mesh=mesh, return_lse=True)

        (out, lse), pull = jax.vjp(call, q, k, v)
        return out, lse, *pull((out, lse))

    for x in run(q, k, v):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "sp", "tp")), x.ndim)


@pytest.mark.check
@pytest.mark.parametrize("family", ["window", "window and prefix", "causal documents", "lengths"])
def test_garbage_in_unseen_keys_changes_nothing(family):
    mesh, (q, k, v) = MESHES["sp4"](), operands()
    mask = FAMILIES[family](np.arange(41)) & ls.KvLengths(np.array([29, 4]))
    unseen = (np.arange(41)[None] >= np.array([[29], [4]]))[..., None, None]
    bad = [jnp.where(unseen, jnp.nan, x) for x in (k, v)]

    @jax.jit
    def run(q, k, v, mask):
        def call(*x):
            return ls.parallel.attention(*x, mask=mask, mesh=mesh)

        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(jnp.ones_like(out))

    for got, want in zip(run(q, *bad, mask), run(q, k, v, mask), strict=True):
        np.testing.assert_array_equal(got, want)


def test_new_documents_are_no_new_program():
    mesh, (q, k, v) = MESHES["sp4"](), operands()
    traces = []

    @jax.jit
    def run(q, k, v, ids):
        traces.append(None)
        return ls.parallel.attention(q, k, v, mask=ls.Causal() & ls.Segments(ids), mesh=mesh)

    for seed in range(3):
        ids = np.sort(np.random.default_rng(seed).integers(0, 2 + 3 * seed, (2, 41)))
        want = ls.attention(q, k, v, mask=ls.Causal() & ls.Segments(ids), engine="reference")
        np.testing.assert_allclose(run(q, k, v, ids), want, rtol=1e-5, atol=1e-5)
    assert len(traces) == 1


# The fallback: a ring, or a halo.
@pytest.mark.check
@pytest.mark.parametrize("within", [ls.Full(), ls.Window(9, 4)], ids=str)
def test_flags_beyond_the_capacity_are_no_new_program_and_exact(within):
    mesh, (q, k, v) = MESHES["sp4"](), operands()

    @jax.jit
    def run(q, k, v, mask):
        def call(*x):
            return ls.parallel.attention(*x, mask=mask, mesh=mesh, global_capacity=3)

        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(out)

    for count in (0, 3, 4, 41):
        flags = np.arange(41)[None].repeat(2, 0) % 11 < 0
        flags[1, np.random.default_rng(count).permutation(41)[:count]] = True
        mask = within & (ls.Window(2, 1) | ls.Global(q_flags=flags, kv_flags=flags))
        out, pull = jax.vjp(lambda *x, mask=mask: ls.attention(*x, mask=mask, engine="reference"), q, k, v)
        for got, want in zip(run(q, k, v, mask), (out, *pull(out)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)
    assert run._cache_size() == 1


@pytest.mark.check
@every_sparse_engine
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_a_ring_backwards_takes_at_most_ten_shards_of_memory(engine, order):
    mesh, length = MESHES["sp8"](), 32768
    here = NamedSharding(mesh, P(None, "sp"))
    q, k = (jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32, sharding=here) for _ in range(2))

    def run(q, k, v, dout):
        def call(*x):
            return ls.parallel.attention(*x, mask=ls.Causal(), mesh=mesh, order=order, engine=engine)

        return jax.vjp(call, q, k, v)[1](dout)

    compiled = jax.jit(run).lower(q, k, k, q).compile()
    shard = length // 8 * 2 * 2 * 64 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 10 * shard


@pytest.mark.check
def test_vmap_scan_and_remat():
    mesh, mask = MESHES["sp4"](), ls.Window(3, 0) | ls.Global((0,))
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, 16, 2, 4)), jnp.float32)

    def layer(x):
        return ls.parallel.attention(x, x, x, mask=mask, mesh=mesh)

    want = jnp.stack([layer(x) for x in xs])
    np.testing.assert_allclose(jax.vmap(layer)(xs), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(jax.lax.map(layer, xs), want, rtol=1e-6, atol=1e-6)
    plain, kept = (jax.grad(lambda x, f=f: f(x).sum())(xs[0]) for f in (layer, jax.checkpoint(layer)))
    np.testing.assert_allclose(kept, plain, rtol=1e-6, atol=1e-6)


MIXED = (AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)


@pytest.mark.check
@pytest.mark.parametrize("kinds", [(AxisType.Explicit,) * 2, *MIXED], ids=["all", "sp", "dp"])
@pytest.mark.parametrize("is_placed", [False, True], ids=["anywhere", "placed"])
def test_a_mesh_with_explicit_axes(is_placed, kinds):
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=kinds)
    q, k, v = operands(48)
    want = ls.attention(q, k, v, mask=ls.Window(3, 0), engine="reference")
    with jax.set_mesh(mesh):
        given = [jax.device_put(x, NamedSharding(mesh, P("dp", "sp"))) if is_placed else x for x in (q, k, v)]
        got = jax.jit(lambda *x: ls.parallel.attention(*x, mask=ls.Window(3, 0), mesh=mesh))(*given)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_calls_without_rows():
    x = jnp.zeros((0, 16, 2, 4))
    out, lse = ls.parallel.attention(x, x, x, mesh=MESHES["sp4"](), return_lse=True)
    assert (out.shape, lse.shape) == ((0, 16, 2, 4), (0, 16, 2))


def call(mask=None, *, length=48, mesh="sp4", **more):
    q, k, v = operands(length)
    return ls.parallel.attention(q, k, v, mask=mask, mesh=MESHES[mesh](), **more)


TABLE = np.zeros((1, 24, 1), int)
BLOCKS = np.random.default_rng(0).integers(0, 12, (4, 12, 1))
BY_QUERY = jnp.asarray(np.random.default_rng(1).normal(size=(1, 1, 48, 1)), jnp.float32)
IDS = np.zeros((2, 48), int)
REFUSED = {
    "an axis that is not there": (lambda: call(axis="seq"), "axis='seq' is not in the mesh, whose axes are 'dp', "),
    "an axis named twice": (lambda: call(batch_axes="sp"), "The mesh axis 'sp' is named twice"),
    "no mesh": (
        lambda: ls.parallel.attention(*operands(), mesh=8),
        "`mesh` must be a jax.sharding.Mesh, as from `ls.parallel.mesh`, got int.",
    ),
    "too few tokens": (lambda: call(length=3), "3 tokens cannot be shared by the 4 devices of axis 'sp'"),
    "other lengths": (
        lambda: ls.parallel.attention(*operands(48)[:1], *operands(47)[1:], mesh=MESHES["sp4"]()),
        "got 48 queries and 47 keys",
    ),
    "a mask for another length": (
        lambda: call(ls.MaskInfo.from_segments(IDS[:, :40])), "This MaskInfo is for 40 queries and 40 keys",
    ),
    "a mask of another length": (lambda: call(ls.Segments(IDS[:, :40])), "Segments.q_ids covers 40 queries"),
    "a layout": (lambda: call(ls.Causal().layout(48, 48)), "A BlockLayout is planned for one device"),
    "a plan of another order": (
        lambda: call(ls.Causal(), plan=ls.parallel.plan(ls.Causal(), 48, 4, "zigzag")),
        "This plan is for order='zigzag', but the call has order='contiguous'",
    ),
    "a plan of other sizes": (
        lambda: call(ls.Causal(), plan=ls.parallel.plan(ls.Causal(), 40, 4)),
        "This plan is for 40 tokens on 4 devices, but the call has 48 on 4",
    ),
    "a plan of another mask": (
        lambda: call(ls.Causal(), plan=ls.parallel.plan(ls.Window(3, 0), 48, 4)),
        r"This plan is for Window\(3, 0\), and the call has Causal\(\). The mask, the heads",
    ),
    "a plan of a mask that looks alike without its arrays": (
        lambda: call(
            ls.Global(q_flags=IDS > 0) | ls.Segments(IDS),
            plan=ls.parallel.plan(ls.Global(q_flags=IDS > 0) | ls.Global(q_flags=IDS > 1), 48, 4),
        ),
        "The mask, the heads, the positions or the bias of the call differ",
    ),
    "a plan of other heads": (
        lambda: call(ls.Blocks(BLOCKS, 4), plan=ls.parallel.plan(ls.Blocks(BLOCKS, 4), 48, 4)),
        "The mask, the heads, the positions or the bias of the call differ",
    ),
    "a plan of another table": (
        lambda: call(
            ls.Blocks(BLOCKS[::-1], 4), plan=ls.parallel.plan(ls.Blocks(BLOCKS, 4), 48, 4, kv_heads=2)
        ),
        "The mask, the heads, the positions or the bias of the call differ",
    ),
    "a plan of a table of another shape": (
        lambda: call(
            ls.Blocks(jnp.asarray(BLOCKS), 4),
            plan=ls.parallel.plan(ls.Blocks(jnp.asarray(BLOCKS.repeat(2, 2)), 4), 48, 4, kv_heads=2),
        ),
        "The mask, the heads, the positions or the bias of the call differ",
    ),
    "a plan of indices where positions are given": (
        lambda: call(ls.Causal(), plan=ls.parallel.plan(ls.Causal(), 48, 4), q_positions=np.arange(48)),
        "The mask, the heads, the positions or the bias of the call differ",
    ),
    "a plan of queries that travel with a bias that does not": (
        lambda: call(ls.Window(2, 2) | ls.Global((3,)), bias=BY_QUERY,
                     plan=ls.parallel.plan(ls.Window(2, 2) | ls.Global((3,)), 48, 4)),
        "The mask, the heads, the positions or the bias of the call differ",
    ),
    "a plan of another capacity": (
        lambda: call(
            ls.Global(q_flags=IDS > 0) | ls.Window(2, 2), global_capacity=4,
            plan=ls.parallel.plan(ls.Global(q_flags=IDS > 0) | ls.Window(2, 2), 48, 4, global_capacity=3),
        ),
        "for global_capacity=3, but the call has global_capacity=4. Leave out `global_capacity` or `plan`.",
    ),
    "rows that dp does not divide": (
        lambda: ls.parallel.attention(*(x[:1] for x in operands(48)), mesh=MESHES["dp2-sp4"]()),
        "1 batch rows cannot be split over the 2 devices of 'dp', 'fsdp'",
    ),
    "heads that tp does not divide": (
        lambda: ls.parallel.attention(*(x[:, :, :1] for x in operands(48)), mesh=MESHES["dp2-tp2-sp2"]()),
        "1 query heads cannot be split over the 2 devices of 'tp'",
    ),
    "zigzag of a length that is not padded": (
        lambda: call(length=41, order="zigzag"), "order='zigzag' needs a multiple of 8 tokens, got 41",
    ),
    "zigzag of blocks": (lambda: call(ls.Blocks(TABLE, 2), order="zigzag"), r"Blocks\(.*\) depends on the slots"),
    "zigzag of bools": (lambda: call(np.ones((48, 48), bool), order="zigzag"), r"Dense\(.*\) depends on the slots"),
    "zigzag of intervals": (
        lambda: call(ls.Between(np.arange(48), np.arange(48)), order="zigzag"), r"Between\(.*\) depends on the slots",
    ),
    "zigzag of firsts": (lambda: call(ls.FirstOfSegment(IDS, 1), order="zigzag"), "FirstOfSegment.* depends on the"),
    "zigzag of a bias": (
        lambda: call(bias=jnp.zeros((48, 48)), order="zigzag"), r"a bias of shape \(1, 1, 48, 48\) depends on",
    ),
    "a plan that is none": (lambda: call(plan="halo"), "must be a ParallelPlan from `ls.parallel.plan`, got str"),
    "batch axes that are no names": (lambda: call(batch_axes=3), "`batch_axes` must be the name of a mesh axis"),
    "a mesh without devices": (
        lambda: ls.parallel.attention(*operands(48), mesh=MESHES["sp4"]().abstract_mesh), "which has no devices",
    ),
    "another shard_map around it": (
        lambda: jax.shard_map(call_with, mesh=MESHES["sp4"](), in_specs=P(), out_specs=P())(operands(48)[0]),
        "calls shard_map itself, but is called inside a shard_map over 'dp', 'fsdp', 'sp', 'tp'",
    ),
    "a plan in zigzag order of blocks": (
        lambda: ls.parallel.plan(ls.Blocks(TABLE, 2), 48, 4, "zigzag"), r"Blocks\(.*\) depends on the slots",
    ),
    "an order without a mesh": (
        lambda: ls.explain(*operands(48), order="zigzag"), "order='zigzag' orders the tokens over the devices of",
    ),
    "a pattern's order without a mesh": (
        lambda: ls.longformer_attention(*operands(48), *[None] * 3, window=4, order="zigzag"), "Pass `mesh`.",
    ),
    "an order of no masks": (lambda: ls.parallel.order([], 48, 4), "`masks` must be a Mask or a list of Masks, got"),
    "an order of too few tokens": (lambda: ls.parallel.order(ls.Causal(), 3, 4), "3 tokens cannot be shared by 4 dev"),
    "an order that is none": (lambda: call(order="spiral"), "order='spiral' is not one of 'contiguous', 'zigzag'"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_calls_that_cannot_be_sharded_are_refused(why, unchecked):
    run, message = REFUSED[why]
    with pytest.raises((ValueError, TypeError), match=message):
        run()


def test_second_derivatives_are_refused():
    with pytest.raises(NotImplementedError, match="has no second derivatives"):
        jax.grad(lambda q: jax.grad(lambda q: (call_with(q) ** 2).sum())(q).sum())(operands(48)[0])


def call_with(q):
    return ls.parallel.attention(q, *operands(48)[1:], mask=ls.Window(2, 0), mesh=MESHES["sp4"]())


PLANNED = {
    "a static mask": (lambda: ls.Causal() & ls.Window(3, 0), {}, {}),
    "documents, of another number of rows": (lambda: ls.Causal() & ls.Segments(IDS[:1]), {}, {}),
    "flags, with a capacity": (lambda: ls.Window(2, 2) | ls.Global(q_flags=IDS > 0), dict(global_capacity=3), {}),
    "blocks by head": (lambda: ls.Blocks(BLOCKS, 4), dict(kv_heads=2), {}),
    "heads that list no blocks": (lambda: ls.PerHead((ls.Causal(), ls.Window(2, 2)) * 2), {}, {}),
    "a bias by query, and no query that travels": (lambda: ls.Window(2, 2), {}, dict(bias=BY_QUERY)),
    "positions, and no rule that reads them": (lambda: ls.Segments(IDS), {}, dict(q_positions=np.arange(48))),
}


@pytest.mark.parametrize("case", PLANNED)
def test_a_plan_made_earlier_is_used_and_nothing_is_planned_again(case, monkeypatch):
    make, arguments, more = PLANNED[case]
    plan, used = ls.parallel.plan(make(), 48, 4, **arguments), []
    want = call(make(), **more)

    def never(*_, **__):
        raise AssertionError("planned again")

    monkeypatch.setattr(parallel_call, "plan_communication", never)
    monkeypatch.setattr(parallel_call, "ShardConfig", lambda *x: used.append(x[0]) or ShardConfig(*x))
    np.testing.assert_allclose(call(make(), plan=plan, **more), want, rtol=1e-5, atol=1e-5)
    assert used[0] is plan


def test_argument_names_of_other_libraries_are_explained():
    with pytest.raises(TypeError, match="has no argument 'is_causal'"):
        call(is_causal=True)
