"""Masks: small pictures, pytrees, comparison and hashing by value, and no retracing."""

import ast
import copy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import longspan as ls

pytestmark = pytest.mark.quick

IDS = np.array([[0, 0, 1, 1, -1]], np.int32)


def picture(mask, q_len, kv_len, **which):
    return mask.show(q_len, kv_len, **which).split()


def test_window_counts_keys_besides_the_query():
    assert picture(ls.Window(2, 0), 4, 4) == ["#...", "##..", "###.", ".###"]
    assert picture(ls.Window(1, 1), 3, 3) == ["##.", "###", ".##"]
    assert int(ls.Window(4, 4).dense(99, 99)[0, 0, 50].sum()) == 9


def test_a_dilated_window_skips_keys():
    assert picture(ls.Window(1, 1, dilation=2), 5, 5) == ["#.#..", ".#.#.", "#.#.#", ".#.#.", "..#.#"]


def test_causal_and_chunk_and_prefix():
    assert picture(ls.Causal(1), 3, 4) == ["##..", "###.", "####"]
    assert picture(ls.Chunk(2) & ls.Causal(), 4, 4) == ["#...", "##..", "..#.", "..##"]
    assert picture(ls.Prefix(1) | ls.Causal(), 2, 3) == ["#..", "##."]


def test_segments_hide_padding_and_other_documents():
    assert picture(ls.Segments(IDS), 5, 5) == ["##...", "##...", "..##.", "..##.", "....."]
    assert picture(ls.Segments(IDS[:, :2], IDS), 2, 5) == ["##...", "##..."]


def test_token_type_zero_is_disabled_by_default():
    types = np.array([[0, 1, 0]])
    for zero in ("q", "kv", "both"):
        assert picture(ls.TokenTypes(types, zero=zero), 3, 3) == ["...", ".#.", "..."]
    assert picture(ls.TokenTypes(types, zero="none"), 3, 3) == ["#.#", ".#.", "#.#"]


def test_global_rows_and_columns():
    flags = np.array([[False, True, False]])
    assert picture(ls.Global((0,)), 3, 3) == ["###", "#..", "#.."]
    assert picture(ls.Global((0,), rows=False), 3, 3) == ["#..", "#..", "#.."]
    assert picture(ls.Global(q_flags=flags), 3, 3) == ["...", "###", "..."]
    assert picture(ls.Global(kv_flags=flags), 3, 3) == [".#.", ".#.", ".#."]


def test_blocks_list_pairs_and_repeats_count_once():
    table = np.array([[[1, 1], [-1, 0]], [[0, -1], [0, 1]]])
    assert picture(ls.Blocks(table, 2), 4, 4, head=0) == ["..##", "..##", "##..", "##.."]
    assert picture(ls.Blocks(table, 2), 4, 4, head=1) == ["##..", "##..", "####", "####"]


def test_block_causal_allows_the_own_block_and_all_before_it():
    assert picture(ls.BlockCausal(3), 5, 7) == ["###....", "###....", "###....", "######.", "######."]
    causal_or_chunk = ls.Causal() | ls.Chunk(3)
    np.testing.assert_array_equal(ls.BlockCausal(3).dense(11, 13), causal_or_chunk.dense(11, 13))
    sizes = ls.BlockCausal(np.array([1, 4])).dense(5, 5)
    np.testing.assert_array_equal(sizes, np.concatenate([ls.Causal().dense(5, 5), ls.BlockCausal(4).dense(5, 5)]))
    assert ls.BlockCausal(256).layout(4096, 4096).visits() == ls.Causal().layout(4096, 4096, q_tile=256).visits() * 2


def test_queries_after_their_length_see_no_key():
    assert picture(ls.QLengths(np.array([1])), 3, 2) == ["##", "..", ".."]
    mask = ls.QLengths(np.array([3, 0]))
    assert mask.dense(4, 2).sum((1, 2, 3)).tolist() == [6, 0] and ls.QLengths(9).dense(4, 2).all()
    layout = mask.layout(1024, 1024)
    assert layout.visits() == layout.transpose().visits() == 8
    rolling = np.array([4, 5, 2, 3])
    np.testing.assert_array_equal(mask.dense(4, 2, q_positions=rolling), mask.dense(4, 2))


def test_negation_allows_padding_so_padding_is_added_last():
    padded = ls.Causal() & ls.KvLengths(np.array([2]))
    assert picture(~padded, 3, 3) == [".##", "..#", "..#"]
    assert picture(~ls.Causal() & ls.KvLengths(np.array([2])), 3, 3) == [".#.", "...", "..."]


def test_per_head_masks_have_a_head_axis():
    mask = ls.PerHead((ls.Causal(), ls.Full(), ls.Empty()))
    assert mask.dense(2, 5).shape == (1, 3, 2, 5)
    assert picture(mask, 2, 2, head=1) == ["##", "##"]


def test_dense_has_the_batch_rows_and_heads_that_the_mask_distinguishes():
    assert ls.Causal().dense(3, 5).shape == (1, 1, 3, 5)
    assert ls.Causal(jnp.arange(4)).dense(3, 5).shape == (4, 1, 3, 5)
    assert ls.Causal().dense(3, 5, q_positions=np.zeros((2, 3), int)).shape == (2, 1, 3, 5)
    assert ls.Causal().dense(0, 5).shape == (1, 1, 0, 5)


def test_every_export_of_ls_masks_has_an_example():
    tree = ast.parse(Path(ls.masks.__file__).read_text("utf-8"))
    names = [name.asname for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert {"Rule", "Compare", "rule", "Spans", "Term", "position", "Causal"} <= set(names)
    assert not [name for name in names if ">>>" not in (getattr(ls.masks, name).__doc__ or "")]


def test_without_kv_len_there_are_as_many_keys_as_queries():
    mask = ls.Window(2, 1) & ls.Segments(np.array([[0, 0, 1, 1, 1]]))
    np.testing.assert_array_equal(mask.dense(5), mask.dense(5, 5))
    assert mask.show(5) == mask.show(5, 5)
    layout, wanted = mask.layout(5, q_tile=2, kv_tile=3), mask.layout(5, 5, q_tile=2, kv_tile=3)
    assert (layout.q_len, layout.kv_len) == (5, 5)
    np.testing.assert_array_equal(layout.starts, wanted.starts)
    np.testing.assert_array_equal(layout.stops, wanted.stops)


def test_rules_read_positions_of_any_order():
    rolling = np.array([4, 5, 2, 3])  # a rolling cache of 4 slots at step 5
    truth = (ls.Causal() & ls.Window(2, 0)).dense(1, 4, q_positions=np.array([5]), kv_positions=rolling)
    assert truth[0, 0, 0].tolist() == [True, True, False, True]
    # arrays stay aligned with slots
    assert ls.KvLengths(np.array([1])).dense(1, 4, kv_positions=rolling)[0, 0, 0].tolist() == [True] + [False] * 3


@pytest.mark.parametrize(
    "mask",
    [
        ls.Causal(),
        ls.Causal(3) & ls.Window(5, 0),
        (ls.Window(2, 2, dilation=3) | ls.Global((0, 4), rows=False)) & ~ls.Chunk(3),
        ls.PerHead((ls.Band(-2, None), ls.Full(), ls.Empty() | ls.Prefix(3))),
    ],
    ids=repr,
)
def test_a_repr_can_be_pasted_back(mask):
    assert eval(repr(mask), vars(ls)) == mask
    assert hash(eval(repr(mask), vars(ls))) == hash(mask)


def test_arrays_print_by_dtype_and_shape():
    assert repr(ls.Segments(jnp.zeros((2, 7), jnp.int32))) == "Segments(i32[2,7])"
    assert repr(ls.Dense(np.ones((3, 5), bool))) == "Dense(bool[3,5])"


def test_masks_compare_by_value():
    assert ls.Window(1, 0) == ls.Window(np.int64(1), 0)
    assert ls.Window(1, 0) != ls.Window(0, 1)
    assert ls.Segments(IDS) == ls.Segments(jnp.asarray(IDS))
    assert ls.Segments(IDS) != ls.Segments(IDS + 1)
    assert ls.Causal() != "Causal()"
    assert len({ls.Causal(), ls.Causal(), ls.Window(1, 1)}) == 2


def test_a_static_block_table_hashes_and_a_jax_table_is_data():
    table = np.zeros((1, 2, 1), np.int32)
    assert hash(ls.Blocks(table, 2)) == hash(ls.Blocks(table.copy(), 2))
    assert not jax.tree.leaves(ls.Blocks(table, 2))
    assert len(jax.tree.leaves(ls.Blocks(jnp.asarray(table), 2))) == 1


def test_hashing_a_mask_with_arrays_raises_an_error_with_a_fix():
    with pytest.raises(TypeError, match=r"Segments\(i32\[1,5\]\) holds arrays.*ordinary argument"):
        hash(ls.Segments(IDS))
    with pytest.raises(TypeError, match="ordinary argument"):
        hash(ls.Causal() & ls.KvLengths(np.array([3])))


def test_masks_are_frozen():
    with pytest.raises(AttributeError):
        ls.Causal().offset = 3  # type: ignore[misc]
    assert copy.deepcopy(ls.Window(1, 2)) == ls.Window(1, 2)


def traced(mask_of):
    """A function under jit that counts how often it is traced."""
    count = []

    @jax.jit
    def dense(mask):
        count.append(1)
        return mask.dense(5, 5)

    return dense, count


def test_new_arrays_do_not_retrace_and_new_ints_do():
    dense, traces = traced(None)
    for seed in range(3):
        ids = np.random.default_rng(seed).integers(0, 3, (2, 5))
        mask = ls.Window(3, 0) & ls.Segments(ids) & ls.Causal(np.array(seed))
        np.testing.assert_array_equal(dense(mask), mask.dense(5, 5))
    assert len(traces) == 1
    dense(ls.Window(2, 0) & ls.Segments(ids) & ls.Causal(np.array(seed)))
    assert len(traces) == 2


@pytest.mark.parametrize("closed_over", [False, True])
def test_masks_work_under_every_transformation(closed_over):
    mask = ls.Causal() & ls.Segments(jnp.asarray(IDS)) | ls.Global((1,))
    truth = mask.dense(5, 5)

    def loss(x, m):
        m = mask if closed_over else m
        return jnp.sum(jnp.where(m.dense(5, 5), x, 0) ** 2)

    x = jnp.arange(25.0).reshape(1, 1, 5, 5)
    wanted = jnp.where(truth, 2 * x, 0)
    grad = jax.grad(loss)
    np.testing.assert_array_equal(grad(x, mask), wanted)
    np.testing.assert_array_equal(jax.jit(grad)(x, mask), wanted)
    np.testing.assert_array_equal(jax.grad(jax.remat(loss))(x, mask), wanted)
    np.testing.assert_array_equal(jax.lax.scan(lambda c, y: (c, grad(y, mask)), 0, x[None])[1][0], wanted)
    branch = jax.jit(lambda p, m: jax.lax.cond(p, lambda m: m.dense(5, 5), lambda m: (~m).dense(5, 5), m))
    np.testing.assert_array_equal(branch(True, mask), truth)
    np.testing.assert_array_equal(branch(False, mask), ~truth)


def test_masks_stack_and_vmap():
    masks = [ls.Causal(np.array(i)) & ls.Segments(IDS + i) for i in range(3)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *masks)
    many = jax.vmap(lambda m: m.dense(5, 5))(stacked)
    np.testing.assert_array_equal(many, np.stack([m.dense(5, 5) for m in masks]))


@pytest.mark.mesh
def test_a_mask_is_sharded_with_its_arrays():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    ids = np.random.default_rng(0).integers(-1, 3, (16, 5))
    mask = ls.Causal() & ls.Segments(ids)
    specs = jax.tree.map(lambda _: P("x"), mask)
    dense = jax.shard_map(lambda m: m.dense(5, 5), mesh=mesh, in_specs=(specs,), out_specs=P("x"))
    np.testing.assert_array_equal(dense(mask), mask.dense(5, 5))


def test_long_masks_are_drawn_by_blocks():
    drawn = ls.Causal().show(256, 256, max_cells=4, axes=False).split()
    assert drawn == ["+...", "#+..", "##+.", "###+"]


def test_a_picture_of_a_missing_head_is_an_error():
    with pytest.raises(IndexError, match="head=3 is out of range: the mask has 2 heads, 0 to 1"):
        ls.PerHead((ls.Causal(), ls.Full())).show(3, 3, head=3)
