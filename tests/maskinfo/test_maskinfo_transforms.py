"""The same results inside and outside jit, under vmap of stacked masks, scan, cond, grad, remat and shard_map."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan import MaskInfo

B, T = 2, 6
IDS = jnp.array([[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, -1, -1]])
TYPES = jnp.array([[0, 1, 1, 0, 2, 2], [1, 1, 0, 0, 1, 1]])


def start():
    return MaskInfo.from_segments(IDS).apply_causal()


def everything(info):
    """All arrays that a MaskInfo can return, as a flat list."""
    read = [
        info.attention_mask,
        info.q_segment_ids,
        info.kv_segment_ids,
        info.get_or_compute_positions(),
        info.get_qkv_masks(jnp.float32),
        info.get_or_compute_segment_ids(per_head=True),
        info.q_position_ids,
        info.q_attention_mask,
        info.q_lens,
        info.kv_lens,
        info.is_multi_sequence,
        info.is_self_attention(),
        info.num_segments,
        info.create_bias(jnp.float16),
        info.bias,
    ]
    return jax.tree.leaves(read)


# Operations on one number, which may be traced.
NUMBERED = {
    "causal": lambda i, n: i.apply_causal(n),
    "causal by row": lambda i, n: i.apply_causal(
        jnp.stack([n, n + 1]) if hasattr(n, "dtype") else np.array([n, n + 1])
    ),
    "window": lambda i, n: i.apply_sliding_window(n),
    "window pair": lambda i, n: i.apply_sliding_window((n, 1), offset=n),
    "window decode": lambda i, n: i.apply_sliding_window((2, 0), mode="decode", index=n, offset=n),
    "window prefill": lambda i, n: i.apply_sliding_window((2, 0), mode="prefill", offset=n),
    "chunked": lambda i, n: i.apply_chunked(n + 1, offset=n),
    "types": lambda i, n: i.apply_token_type_ids(TYPES + n),
    "types only": lambda i, n: i.apply_token_type_ids(TYPES, combine="replace"),
    "types too": lambda i, n: i.apply_token_type_ids((TYPES, TYPES), combine="intersect", zero_policy="none"),
    "lengths": lambda i, n: i.apply_kv_lengths(n, q_len=2, sliding_window=3),
    "ids": lambda i, n: i.replace(q_segment_ids=IDS * n),
    "positions": lambda i, n: i.replace(q_positions=jnp.arange(T) + n),
    "dense": lambda i, n: i.replace(attention_mask=ls.segment_ids_to_mask(IDS)),
    "dtype": lambda i, n: i.to_dtype(jnp.float32),
}


@pytest.mark.parametrize("step", NUMBERED.values(), ids=NUMBERED)
def test_traced_numbers_give_the_same_as_python_ints(step):
    wanted = step(start(), 2)
    got, mask = jax.jit(lambda info, n: (step(info, n), step(info, n).attention_mask))(start(), jnp.int32(2))
    assert isinstance(got, MaskInfo)
    assert got.shape == wanted.shape
    for other in (mask, got.attention_mask):
        assert other.dtype == wanted.attention_mask.dtype
        np.testing.assert_array_equal(other, wanted.attention_mask)
    np.testing.assert_array_equal(got.q_segment_ids, wanted.q_segment_ids)
    np.testing.assert_array_equal(got.kv_segment_ids, wanted.kv_segment_ids)
    jax.tree.map(np.testing.assert_array_equal, got.get_or_compute_positions(), wanted.get_or_compute_positions())


def test_everything_can_be_read_under_jit():
    info = start().apply_chunked(2)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(everything)(info), everything(info))


def test_vmap_over_stacked_masks_and_numbers():
    infos = [MaskInfo.from_segments(ids).apply_causal() for ids in (IDS, IDS[::-1], IDS * 0)]
    stacked, numbers = jax.tree.map(lambda *x: np.stack(x), *infos), np.array([0, 1, 2], np.int32)
    for name in ("causal", "window decode", "chunked", "types too", "lengths"):
        step = NUMBERED[name]
        got = jax.jit(jax.vmap(lambda info, n, step=step: step(info, n).attention_mask))(stacked, numbers)
        for i, info in enumerate(infos):
            np.testing.assert_array_equal(np.asarray(got)[i], step(info, i).attention_mask)
    got = jax.tree.map(np.asarray, jax.vmap(everything)(jax.device_put(stacked)))  # outside of jit too
    for i, info in enumerate(infos):
        jax.tree.map(np.testing.assert_array_equal, [x[i] for x in got], everything(info))


def test_scan_carries_a_mask_and_decodes_step_by_step():
    info = start()

    def body(carry, index):
        step = carry.apply_sliding_window((2, 0), mode="decode", index=index)
        return carry, (step.attention_mask, step.kv_positions)

    end, (masks, slots) = jax.lax.scan(body, info, jnp.arange(T))
    assert end == info
    whole = info.apply_sliding_window((2, 0)).attention_mask
    for index in range(T):
        np.testing.assert_array_equal(
            masks[index][:, 0, 0], np.take_along_axis(np.asarray(whole)[:, 0, index], np.asarray(slots[index]), axis=1)
        )


def test_cond_chooses_between_masks_of_one_kind():
    other = MaskInfo.from_segments(IDS[::-1]).apply_causal()
    choose = jax.jit(lambda yes, a, b: jax.lax.cond(yes, lambda: a, lambda: b))
    assert choose(True, start(), other) == start()
    assert choose(False, start(), other) == other


def test_grad_of_a_function_that_closes_over_a_mask():
    q, k, v = ls.testing.make_qkv(ls.testing.Shape(B=B, T=T, S=T, N=2, K=2, H=4), jnp.float32)

    def loss(q, mask):
        return (ls.attention(q, k, v, mask=mask) ** 2).sum()

    info = start()
    wanted = jax.grad(loss)(q, info.attention_mask)
    for got in (
        jax.grad(lambda q: loss(q, info))(q),
        jax.grad(loss)(q, info),
        jax.jit(jax.grad(jax.checkpoint(loss)))(q, info),
        jax.grad(lambda q: loss(q, start()))(q),
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.mesh
def test_shard_map_sees_a_smaller_batch():
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Auto,))
    info = MaskInfo.from_segments(jnp.concatenate([IDS, IDS[::-1]])).apply_causal().apply_chunked(4)

    @partial(jax.shard_map, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    def local(info):
        assert info.shape == (2, T, T)
        return info.apply_sliding_window((2, 0)).attention_mask

    np.testing.assert_array_equal(jax.jit(local)(info), info.apply_sliding_window((2, 0)).attention_mask)


@pytest.mark.mesh
def test_shard_map_along_the_sequence_with_given_positions():
    mesh = jax.make_mesh((2,), ("sp",), axis_types=(AxisType.Auto,))
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    info = MaskInfo.from_segments(IDS, q_positions=positions, kv_positions=positions).apply_causal()
    queries = {"_q_documents", "q_positions"}
    specs = jax.tree_util.tree_map_with_path(lambda path, _: P(None, "sp") if path[0].name in queries else P(), info)
    local = jax.shard_map(lambda i: i.attention_mask, mesh=mesh, in_specs=(specs,), out_specs=P(None, None, "sp"))
    np.testing.assert_array_equal(local(info), info.attention_mask)


def test_equality_compares_values():
    assert start() == start()
    assert start() != MaskInfo.from_segments(IDS)
    assert start() != MaskInfo.from_segments(IDS * 2).apply_causal()
    assert start() != "a mask"
    assert MaskInfo.from_segments(np.asarray(IDS)) == MaskInfo.from_segments(IDS)
    assert start().apply_causal(jnp.int32(1)) != start().apply_causal(jnp.int32(2))


def test_new_arrays_and_new_traced_numbers_do_not_retrace():
    traces = []

    @jax.jit
    def f(info, n):
        traces.append(None)
        return info.apply_sliding_window((n, 0)).apply_chunked(n + 1).attention_mask

    for n in range(3):
        f(MaskInfo.from_segments(IDS + n), jnp.int32(n))
    assert len(traces) == 1


def test_layout_and_explain_follow_the_positions():
    info = MaskInfo.from_mask(ls.Window(3, 0), 1, 8, q_positions=np.arange(8)[None], kv_positions=np.arange(8)[None])
    assert info.layout(q_tile=2, kv_tile=2).visits() == MaskInfo.from_mask(ls.Window(3, 0), 1, 8).layout(2, 2).visits()
    report = info.explain(heads=2, head_dim=8, engine="reference")
    assert report.engine == "reference"
    assert any("positions" in note for note in report.notes)


def test_explain_reports_a_traced_size():
    notes = []

    @jax.jit
    def f(info, n):
        notes.extend(info.apply_sliding_window(n).explain(engine="reference").notes)
        return n

    f(start(), jnp.int32(2))
    assert any("not known here" in note for note in notes)
