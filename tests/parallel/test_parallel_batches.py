"""`shard_batch`, `unshard`, `mesh` and `cost`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from tests.parallel.families import MESHES, B, operands

BATCH = dict(
    tokens=np.arange(2 * 41).reshape(2, 41),
    labels=np.ones((2, 41), int),
    segment_ids=np.zeros((2, 41), int),
    weights=np.ones((2, 41, 3), np.float32),
    lengths=np.array([41, 7]),
)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("mesh", MESHES)
def test_unshard_undoes_shard_batch(mesh, order):
    mesh = MESHES[mesh]()
    placed = ls.parallel.shard_batch(BATCH, mesh, order=order)
    unit = mesh.shape["sp"] * (2 if order == "zigzag" else 1)
    assert set(placed) == {*BATCH, "positions"}
    for name, x in BATCH.items():
        spec = P(("dp", "fsdp"), "sp") if x.ndim > 1 else P(("dp", "fsdp"))
        assert placed[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
        if x.ndim > 1:
            assert placed[name].shape[1] % unit == 0
            np.testing.assert_array_equal(ls.parallel.unshard(placed[name], mesh, length=41, order=order), x)
    positions = np.asarray(placed["positions"])
    padding = positions >= 41
    assert (np.asarray(placed["labels"])[padding] == -100).all()
    assert (np.asarray(placed["segment_ids"])[padding] == -1).all()
    assert (np.asarray(placed["tokens"])[padding] == 0).all()
    assert (np.asarray(placed["tokens"])[0][~padding[0]] == positions[0][~padding[0]]).all()


def test_in_zigzag_order_device_i_holds_chunk_i_and_its_mirror():
    mesh = ls.parallel.mesh(sp=3)
    placed = ls.parallel.shard_batch(dict(x=np.arange(12)[None]), mesh, order="zigzag")
    assert placed["x"].tolist() == [[0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]]


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_attention_with_a_sharded_batch_equals_one_device(order):
    mesh, (q, k, v) = MESHES["sp4"](), operands()
    ids = np.sort(np.random.default_rng(0).integers(0, 4, (B, 41)), axis=1)
    placed = ls.parallel.shard_batch(dict(q=q, k=k, v=v, segment_ids=ids), mesh, order=order)
    mask = ls.Causal() & ls.Segments(placed["segment_ids"])
    out = ls.parallel.attention(*(placed[x] for x in "qkv"), mask=mask, mesh=mesh, order=order)
    want = ls.attention(q, k, v, mask=ls.Causal() & ls.Segments(ids), engine="reference")
    got = ls.parallel.unshard(out, mesh, length=41, order=order)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_padding_has_the_value_of_fill():
    placed = ls.parallel.shard_batch(dict(x=np.ones((1, 5), int)), ls.parallel.mesh(sp=4), fill=dict(x=7))
    assert placed["x"].tolist() == [[1] * 5 + [7] * 3]


REFUSED = {
    "The batch already has 'positions'": dict(positions=np.zeros((2, 41))),
    "must have the same number of tokens, but 'a' has 41, 'b' has 40": dict(a=np.zeros((2, 41)), b=np.zeros((2, 40))),
    "must have the same number of batch rows": dict(a=np.zeros((2, 41)), b=np.zeros(3)),
    "needs at least one array of shape": dict(a=np.zeros(3)),
    "2 tokens cannot be shared by 4 devices": dict(a=np.zeros((2, 2))),
    "3 batch rows cannot be split over 2 devices": dict(a=np.zeros((3, 41))),
    "'labels' is uint8, which cannot hold -100": dict(labels=np.zeros((2, 41), np.uint8)),
    "but 'mask' is None. Leave 'mask' out": dict(a=np.zeros((2, 41)), mask=None),
    "must be a dict from names to arrays, got list": [np.zeros((2, 41))],
}


@pytest.mark.parametrize("message", REFUSED)
def test_batches_that_cannot_be_sharded_are_refused(message):
    with pytest.raises((ValueError, TypeError), match=message):
        ls.parallel.shard_batch(REFUSED[message], MESHES["dp2-sp4"]())


def test_fill_may_only_name_arrays_of_the_batch():
    with pytest.raises(ValueError, match=r"`fill` names 'label', which is not in the batch. The batch has 'labels'"):
        ls.parallel.shard_batch(dict(labels=np.zeros((2, 41))), MESHES["sp4"](), fill=dict(label=0))


@pytest.mark.check
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_explicit_axes_too(order):
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(AxisType.Explicit,) * 2)
    tokens = np.arange(2 * 41).reshape(2, 41)
    placed = ls.parallel.shard_batch(dict(tokens=tokens), mesh, order=order)["tokens"]
    np.testing.assert_array_equal(ls.parallel.unshard(placed, mesh, length=41, order=order), tokens)
    again = ls.parallel.shard_batch(dict(tokens=placed), mesh)["tokens"]
    np.testing.assert_array_equal(again, placed)
    assert jax.typeof(again).sharding.spec == P("dp", "sp")


def test_unshard_refuses_lengths_that_shard_batch_does_not_return():
    mesh = ls.parallel.mesh(sp=4)
    with pytest.raises(
        ValueError,
        match=r"7 tokens, but `shard_batch` pads to a multiple of 8 for 4 devices and order='zigzag'. "
        "Pass an array whose tokens are padded and ordered as by `shard_batch` with the same `mesh` and `order`.",
    ):
        ls.parallel.unshard(jnp.zeros((1, 7)), mesh, order="zigzag")
    with pytest.raises(ValueError, match="`length` must be at most the 8 tokens of the array, got 9"):
        ls.parallel.unshard(jnp.zeros((1, 8)), mesh, length=9)


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"dp=3 · fsdp=1 · tp=1 · sp=8 takes 24 devices, but there are 8"):
        ls.parallel.mesh(dp=3, sp=8)


SIZES = dict(batch=1, heads=16, kv_heads=2, head_dim=128, dtype=jnp.bfloat16)


def test_a_windows_cost_is_its_halo():
    """1,047,552 bytes are also counted in XLA's program for a real topology."""
    cost = ls.parallel.cost(ls.parallel.plan(ls.Causal() & ls.Window(1023, 0), 1 << 20, 256), **SIZES)
    assert cost.sent_bytes == cost.bound_bytes == 1_047_552
    pairs = (1 << 20) * 1024 - 1023 * 1024 // 2
    assert cost.useful_flops == pytest.approx(4 * 128 * 16 * pairs / 256, rel=0.01)


def test_more_shards_stop_paying_when_a_shard_is_smaller_than_the_window():
    mask = ls.Causal() & ls.Window(1023, 0)
    pay = [ls.parallel.cost(ls.parallel.plan(mask, 1 << 20, n), **SIZES).more_shards_pay for n in (256, 1024, 2048)]
    assert pay == [True, True, False]
    assert "receives 1,023 rows and holds 512" in str(ls.parallel.cost(ls.parallel.plan(mask, 1 << 20, 2048), **SIZES))


def test_a_ring_stops_paying_when_the_link_takes_longer():
    costs = [ls.parallel.cost(ls.parallel.plan(ls.Causal(), 1 << 20, n, "zigzag"), **SIZES) for n in (16, 4096)]
    assert [cost.more_shards_pay for cost in costs] == [True, False]
    assert "more shards do not help: communication takes at least as long as compute" in str(costs[1])


def test_global_queries_do_not_change_the_load():
    mask = ls.Window(64, 64) | ls.Global((0, 1))
    assert ls.parallel.cost(ls.parallel.plan(mask, 1 << 16, 16), **SIZES).load < 1.1


def test_cost_prints_memory_and_an_estimate_for_twice_the_devices():
    cost = ls.parallel.cost(ls.parallel.plan(ls.Causal() & (ls.Window(1023, 0) | ls.Prefix(4)), 1 << 20, 256), **SIZES)
    row = 2 * 2 * 128 * 2  # k and v of two heads, bfloat16
    assert cost.shard_bytes == 4096 * (2 * 16 * 128 * 2 + row)
    assert cost.received_bytes == (1023 + 4) * row
    assert cost.doubled.shards == 512 and cost.doubled.rows == 2048 and cost.doubled.doubled is None
    assert cost.doubled.compute_seconds == pytest.approx(cost.compute_seconds / 2, rel=0.01)
    text = str(cost)
    assert "assumed chip       TPU v5e: 197 TFLOP/s, of which attention reaches 40%; link 50 GB/s" in text
    assert "memory             36 MiB of q, k, v and out, 1.003 MiB of received rows" in text
    assert "twice the devices  0.766 ms of compute and" in text
    assert "twice the devices" in cost._repr_html_()


def test_a_ring_holds_two_shards_and_global_queries_their_outputs():
    ring = ls.parallel.cost(ls.parallel.plan(ls.Causal(), 1 << 12, 8), **SIZES)
    assert ring.received_bytes == 2 * 512 * 2 * 2 * 128 * 2
    plan = ls.parallel.plan(ls.Chunk(512) | ls.Global((0,)), 1 << 12, 8)
    assert [step.kind for step in plan.steps] == ["columns", "queries"]
    assert ls.parallel.cost(plan, **SIZES).received_bytes == 2 * 2 * 128 * 2 + 16 * (128 * 2 + 130 * 4)


def test_cost_has_no_estimate_for_twice_the_devices_without_the_masks_flags():
    flags = np.zeros((1, 1 << 12), bool)
    plan = ls.parallel.plan(ls.Window(64, 64) | ls.Global(q_flags=flags, kv_flags=flags), 1 << 12, 8)
    text = str(ls.parallel.cost(plan, **SIZES))
    assert "no estimate: the plan for twice the devices needs the mask's flags or tables" in text
    assert "in the worst case, the mask requires" in text
    cost = ls.parallel.cost(ls.parallel.plan(ls.Causal(), 8, 8), **SIZES)
    assert cost.doubled is None and "no estimate: twice the devices would be more devices than tokens" in str(cost)
    doubled = ls.parallel.cost(ls.parallel.plan(ls.Causal(), 64, 8), **SIZES).doubled
    assert "no estimate: these are the costs for twice the devices" in str(doubled)
    # Worst cases are compared with worst cases.
    documents = ls.parallel.plan(ls.Causal() & ls.Segments(np.zeros((1, 64), int)), 64, 4)
    text = str(ls.parallel.cost(documents, **SIZES))
    assert "load max/mean 1.74 if the mask's arrays allow all pairs" in text and "useful FLOPs       at most " in text
    assert "received           at most " in text and "lower bound        in the worst case, the mask " in text
    assert ls.parallel.cost(documents, **SIZES).doubled.gather_bytes == 7 * 8 * 2 * 2 * 128 * 2


def test_cost_counts_the_global_tokens_that_flags_may_name():
    window, flags = ls.Window(31, 31), np.zeros((1, 1024), bool)
    plain = ls.parallel.cost(ls.parallel.plan(window, 1024, 4), **SIZES)
    plan = ls.parallel.plan(window | ls.Global(kv_flags=flags), 1024, 4, global_capacity=2)
    flagged = ls.parallel.cost(plan, **SIZES)
    per_pair = 4 * SIZES["head_dim"] * SIZES["heads"] * SIZES["batch"] / 4
    exact = plain.useful_flops + 2 * 1024 * per_pair
    assert exact <= flagged.useful_flops <= 1.1 * exact  # the window's pairs are counted by tiles
    text = str(flagged)
    assert "useful FLOPs       at most " in text and "if the mask's arrays" not in text


def test_cost_refuses_wrong_arguments():
    with pytest.raises(TypeError, match=r"`plan` must be a ParallelPlan from `ls.parallel.plan`, got Causal"):
        ls.parallel.cost(ls.Causal(), **SIZES)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`chip` must be a Chip, such as `ls.parallel.V5E`, got 'H100'"):
        ls.parallel.cost(ls.parallel.plan(ls.Causal(), 64, 4), **SIZES | dict(chip="H100"))
    with pytest.raises(ValueError, match="`heads` must be a Python int >= 1"):
        ls.parallel.cost(ls.parallel.plan(ls.Causal(), 64, 4), **SIZES | dict(heads=0))
