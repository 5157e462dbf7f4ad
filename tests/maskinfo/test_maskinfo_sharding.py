"""`get_shardings` on eight devices: specs, axes that do not fit, and attention that does not change."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan import MaskInfo, MaskSharding

pytestmark = pytest.mark.mesh
AXES = ("dp", "fsdp", "tp", "sp")


def mesh_of(shape, names=AXES, kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def ids(batch, length):
    return jnp.asarray(np.sort(np.random.default_rng(0).integers(-1, 3, (batch, length)))[:, ::-1].copy())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
def test_batch_and_heads_are_split_and_the_sequence_on_demand(kind):
    mesh = mesh_of((2, 1, 2, 2), kind=kind)
    info = MaskInfo.from_attention_mask(np.ones((4, 6, 8, 10)))
    plain, along = info.get_shardings(mesh=mesh), info.get_shardings(True, mesh=mesh)
    both = ("dp", "fsdp")
    assert plain == MaskSharding(
        P(both, "tp", None, None), P(both, None), P(both, None), P(), P(), P(both, None), P(both, None)
    )
    assert along == MaskSharding(
        P(both, "tp", "sp", None), P(both, "sp"), P(both, "sp"), P(), P(), P(both, "sp"), P(both, "sp")
    )


def test_an_axis_that_does_not_divide_its_dimension_is_dropped():
    mesh = mesh_of((2, 2, 1, 2))
    specs = MaskInfo.from_segments(ids(3, 8), ids(3, 7)).get_shardings(True, mesh=mesh)
    assert specs.q_segment_ids == P(None, "sp")
    assert specs.kv_segment_ids == P(None, None)
    assert MaskInfo.from_segments(ids(2, 8)).get_shardings(mesh=mesh).q_segment_ids == P("dp", None)
    assert MaskInfo.from_attention_mask(np.ones((4, 3, 8, 8))).get_shardings(
        mesh=mesh_of((2, 1, 2, 2))
    ).attention_mask == P(("dp", "fsdp"), None, None, None)


def test_a_default_axis_that_the_mesh_lacks_is_replicated():
    info = MaskInfo.from_segments(ids(8, 4))
    assert info.get_shardings(True, mesh=mesh_of((8,), ("dp",))).q_segment_ids == P("dp", None)
    assert info.get_shardings(True, mesh=mesh_of((8,), ("x",))).attention_mask == P(None, None, None, None)


@pytest.mark.parametrize("field", ["batch_axis_name", "qheads_axis_name", "kvheads_axis_name", "sequence_axis_name"])
def test_a_given_axis_that_the_mesh_lacks_is_an_error(field):
    mesh = mesh_of((4, 2), ("data", "model"))
    info = MaskInfo.from_segments(ids(8, 4), **{field: "date"})
    with pytest.raises(
        ValueError, match=f"{field}='date' names 'date', which the mesh lacks: its axes are 'data', 'model'"
    ):
        info.get_shardings(mesh=mesh)
    assert info.replace(**{field: "data"}).get_shardings(mesh=mesh) is not None
    assert info.replace(**{field: None}).get_shardings(mesh=mesh).q_segment_ids == P(None, None)


def test_axis_names_travel_with_the_mask():
    info = MaskInfo.from_segments(ids(4, 4), batch_axis_name="data", sequence_axis_name=("a", "b")).apply_causal()
    again = jax.jit(lambda i: i.apply_chunked(2))(info)
    assert (again.batch_axis_name, again.sequence_axis_name) == ("data", ("a", "b"))
    mesh = mesh_of((2, 2, 2), ("data", "a", "b"))
    assert again.get_shardings(True, mesh=mesh).q_positions == P("data", ("a", "b"))


def test_the_empty_sharding_has_no_specs():
    assert MaskInfo.get_empty_sharding() == MaskSharding(*[None] * 7)


def test_an_abstract_mesh_is_accepted():
    specs = MaskInfo.from_segments(ids(4, 4)).get_shardings(mesh=mesh_of((4, 2), ("dp", "sp")).abstract_mesh)
    assert specs.q_segment_ids == P("dp", None)
    assert isinstance(mesh_of((8,), ("dp",)), Mesh)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
@pytest.mark.parametrize("along", [False, True], ids=["whole rows", "sequence parallel"])
def test_placed_arrays_give_the_same_mask(kind, along):
    mesh = mesh_of((2, 2, 2), ("dp", "tp", "sp"), kind)
    plain = MaskInfo.from_segments(ids(4, 8))
    specs = plain.get_shardings(along, mesh=mesh)
    q_ids, kv_ids = (
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in ((plain.q_segment_ids, specs.q_segment_ids), (plain.kv_segment_ids, specs.kv_segment_ids))
    )
    placed = jax.tree.unflatten(jax.tree.structure(plain), [q_ids, kv_ids])
    assert placed.q_segment_ids.sharding.spec == specs.q_segment_ids
    assert placed == plain


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
@pytest.mark.parametrize("along", [False, True], ids=["whole rows", "sequence parallel"])
def test_placed_arrays_give_the_same_attention_and_gradients(along, kind):
    mesh = mesh_of((2, 2, 2), ("dp", "tp", "sp"), kind)
    plain = MaskInfo.from_segments(ids(4, 8)).apply_causal()
    specs = plain.get_shardings(along, mesh=mesh)
    q, k, v = ls.testing.make_qkv(ls.testing.Shape(B=4, T=8, S=8, N=2, K=2, H=4), jnp.float32)

    def step(q, k, v, q_ids, kv_ids):
        info = MaskInfo.from_segments(q_ids, kv_ids).apply_causal()
        loss = lambda *x: (ls.attention(*x, mask=info, engine="xla") ** 2).sum()  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

    wanted = jax.jit(step)(q, k, v, plain.q_segment_ids, plain.kv_segment_ids)
    heads = P("dp", "sp" if along else None, "tp", None)
    placed = [jax.device_put(x, NamedSharding(mesh, heads)) for x in (q, k, v)]
    placed += [
        jax.device_put(plain.q_segment_ids, NamedSharding(mesh, specs.q_segment_ids)),
        jax.device_put(plain.kv_segment_ids, NamedSharding(mesh, specs.kv_segment_ids)),
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), jax.jit(step)(*placed), wanted)


def whole_and_bound():
    """Arguments of `attention` that are bound to a length, with the error for another length."""
    info = MaskInfo.from_segments(ids(1, 8)).apply_causal()
    return {
        "MaskInfo": (dict(mask=info), "This MaskInfo is for 8 queries and 8 keys, but the call has 4 queries"),
        "BlockLayout": (dict(mask=info.layout()), "This BlockLayout is for 8 queries and 8 keys, but the call has 4"),
        "ids": (dict(mask=info.mask), "Segments.q_ids covers 8 queries, but the call has 4"),
        "flags": (dict(mask=ls.Global(kv_flags=np.ones((1, 8), bool))), "Global.kv_flags covers 8 keys, but the call"),
        "table": (dict(mask=ls.Blocks(np.zeros((1, 4, 1), int), 2)), "Blocks.table covers 4 blocks of 2 queries, but"),
        "dense mask": (dict(mask=np.ones((8, 8), bool)), "`mask` must be broadcastable to"),
        "bias": (dict(bias=jnp.ones((8, 8))), "`bias` must be broadcastable to"),
        "q_positions": (dict(q_positions=np.arange(8)), "q_positions must have shape [4] or [B, 4]"),
        "kv_positions": (dict(kv_positions=np.arange(8)), "kv_positions must have shape [4] or [B, 4]"),
    }


@pytest.mark.parametrize("what", whole_and_bound())
def test_arguments_bound_to_the_whole_length_raise_on_a_shard(what):
    arguments, words = whole_and_bound()[what]
    q, k, v = ls.testing.make_qkv(ls.testing.Shape(B=1, T=8, S=8, N=2, K=2, H=4), jnp.float32)
    along = dict(mesh=mesh_of((2,), ("sp",)), in_specs=P(None, "sp"), out_specs=P(None, "sp"))
    with pytest.raises(ValueError, match=re.escape(words)):
        jax.shard_map(lambda *qkv: ls.attention(*qkv, **arguments), **along)(q, k, v)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
def test_a_mask_is_placed_and_split_by_batch_rows_in_shard_map(kind):
    rows = NamedSharding(mesh_of((8,), ("dp",), kind), P("dp"))
    info = MaskInfo.from_segments(ids(8, 6)).apply_causal()
    qkv = ls.testing.make_qkv(ls.testing.Shape(B=8, T=6, S=6, N=2, K=2, H=4), jnp.float32)
    wanted = ls.attention(*qkv, mask=info)
    placed = jax.device_put((*qkv, info), rows)
    assert placed[3] == info and {x.sharding for x in jax.tree.leaves(placed[3])} == {rows}
    run = jax.shard_map(
        lambda q, k, v, info: ls.attention(q, k, v, mask=info),
        mesh=rows.mesh,
        in_specs=P("dp"),
        out_specs=P("dp"),
    )
    np.testing.assert_allclose(run(*placed), wanted, rtol=1e-5, atol=1e-6)
