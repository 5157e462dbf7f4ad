"""Bad input: every message says what was expected, what came and what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.testing import Shape, make_qkv

pytestmark = pytest.mark.quick

Q, K, V = make_qkv(Shape(B=2, T=5, S=7, N=6, K=3, H=4), jnp.float32)
IDS = np.zeros((2, 5), np.int32)


def raises(error, words, call):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value), str(caught.value)


MASKS = [
    (TypeError, "Compose masks with `&`, `|` and `~`", lambda: ls.Causal() and ls.Window(3, 0)),
    (TypeError, "Causal() has no truth value", lambda: ls.Causal() or ls.Window(3, 0)),
    (TypeError, "test for a missing mask with `mask is None`", lambda: not (ls.Causal() & ls.Window(3, 0))),
    (ValueError, "Window.left must be >= 0, got -1", lambda: ls.Window(-1, 0)),
    (ValueError, "use `Band(low, high)`", lambda: ls.Window(0, -2)),
    (ValueError, "Window.dilation must be >= 1, got 0", lambda: ls.Window(1, 0, dilation=0)),
    (ValueError, "Chunk.size must be >= 1, got 0", lambda: ls.Chunk(0)),
    (ValueError, "BlockCausal.size must be >= 1, got 0", lambda: ls.BlockCausal(0)),
    (ValueError, "BlockCausal.size must be >= 1, got -2", lambda: ls.BlockCausal(np.array([4, -2]))),
    (TypeError, "BlockCausal.size must be an int, or an int array of shape () or [B]", lambda: ls.BlockCausal(2.0)),
    (TypeError, "QLengths.lengths must hold integers, got dtype float32", lambda: ls.QLengths(jnp.ones(2))),
    (ValueError, "QLengths.lengths must be an int, or", lambda: ls.QLengths(np.ones((2, 2), int))),
    (ValueError, "Prefix.length must be >= 0, got -3", lambda: ls.Prefix(-3)),
    (ValueError, "Window.left must be >= 0, got -1", lambda: ls.Window(jnp.array([3, -1]), 0)),
    (ValueError, "use `Band(low, high)`", lambda: ls.Window(0, np.array(-2))),
    (ValueError, "Window.dilation must be >= 1, got 0", lambda: ls.Window(1, 0, dilation=jnp.array(0))),
    (ValueError, "Chunk.size must be >= 1, got 0", lambda: ls.Chunk(jnp.array(0))),
    (ValueError, "Prefix.length must be >= 0, got -3", lambda: ls.Prefix(np.array([1, -3]))),
    (
        TypeError,
        "Causal.offset must be an int, or an int array of shape () or [B], got 1.5 (float)",
        lambda: ls.Causal(1.5),
    ),
    (TypeError, "Causal.offset must hold integers, got dtype float32", lambda: ls.Causal(jnp.ones(2))),
    (ValueError, "shape () or [B], got shape (2, 2)", lambda: ls.Causal(np.ones((2, 2), int))),
    (TypeError, "Segments.q_ids must hold integers, got dtype float32. Cast it", lambda: ls.Segments(jnp.ones((1, 3)))),
    (
        ValueError,
        "Segments.q_ids must have shape [B or 1, T], got rank 1 (shape (3,))",
        lambda: ls.Segments(np.zeros(3, int)),
    ),
    (
        TypeError,
        "Between.starts must hold integers, got dtype float64",
        lambda: ls.Between(np.ones(3), np.ones(3, int)),
    ),
    (TypeError, "Between.stops must be an array [T] or [B or 1, T] or", lambda: ls.Between(np.ones(3, int), 4)),
    (
        ValueError,
        "Between.starts has shape (3,) and Between.stops has shape (2, 4). Both must have the same number of queries",
        lambda: ls.Between(np.zeros(3, int), np.ones((2, 4), int)),
    ),
    (
        ValueError,
        "has shape (3, 1, 4) and Between.stops has shape (2, 1, 4). Both must have the same number of queries",
        lambda: ls.Between(np.zeros((3, 1, 4), int), np.ones((2, 1, 4), int)),
    ),
    (ValueError, "got rank 4 (shape (1, 1, 1, 3))", lambda: ls.Between(np.zeros((1, 1, 1, 3), int), np.ones(3, int))),
    (
        ValueError,
        "Between.starts covers 3 queries, but the call has 4",
        lambda: ls.Between(np.zeros(3, int), np.ones(3, int)).dense(4, 9),
    ),
    (TypeError, "FirstOfSegment.kv_ids must hold integers", lambda: ls.FirstOfSegment(IDS, 1, kv_ids=IDS > 0)),
    (ValueError, "FirstOfSegment.n must be >= 0, got -1", lambda: ls.FirstOfSegment(IDS, np.array([2, -1]))),
    (TypeError, "`segment_ids` must be an int array [L] or [B, L]", lambda: ls.positions_from_segments([0, 1])),
    (TypeError, "Segments.q_ids must be an array [B or 1, T], got int", lambda: ls.Segments(3)),
    (
        TypeError,
        "must hold integers, got dtype bool. Convert a padding mask to ids with `np.where(mask, 0, -1)`",
        lambda: ls.Segments(IDS == 0),
    ),
    (
        TypeError,
        "got dtype bool. To get a number from a padding mask, count its True entries, e.g. `mask.sum(-1)`",
        lambda: ls.KvLengths(np.ones(2, bool)),
    ),
    (
        TypeError,
        "Blocks.table must list the indices of key blocks, ints, got float64. To use scores, list the best blocks",
        lambda: ls.Blocks(np.ones((1, 2, 2)), 4),
    ),
    (TypeError, "Dense.array must hold bools, got dtype int64. Compare it", lambda: ls.Dense(np.ones((2, 2), int))),
    (
        ValueError,
        "Dense.array must have shape [B or 1, N or 1, T, S] or [T, S], got rank 3",
        lambda: ls.Dense(np.ones((1, 2, 2), bool)),
    ),
    (
        TypeError,
        "Dense.q_offset must be an int, or an int array of shape () or [B], got 1.0",
        lambda: ls.Dense(np.ones((2, 2), bool), 1.0),
    ),
    (TypeError, "Dense.kv_offset must hold integers", lambda: ls.Dense(np.ones((2, 2), bool), kv_offset=jnp.ones(()))),
    (
        ValueError,
        "Dense.array covers 2 queries, but the call has 5",
        lambda: ls.Dense(np.ones((2, 2), bool), kv_offset=0).dense(5, 5),
    ),
    (
        ValueError,
        "Dense.kv_offset has 3 batch rows, but Dense.q_offset has 2",
        lambda: ls.Dense(np.ones((2, 2), bool), np.zeros(2, int), np.zeros(3, int)).dense(5, 5),
    ),
    (
        ValueError,
        "Blocks.table must have shape [N or 1, q blocks, r] or [B or 1, N or 1, q blocks, r], got rank 2",
        lambda: ls.Blocks(np.zeros((2, 2), int), 4),
    ),
    (
        ValueError,
        "Blocks.table has 3 batch rows, but Segments.q_ids has 2",
        lambda: (ls.Segments(IDS) & ls.Blocks(np.zeros((3, 1, 2, 1), int), 3)).dense(5, 5),
    ),
    (TypeError, "Blocks.block_size sets array shapes", lambda: ls.Blocks(np.zeros((1, 2, 2), int), jnp.ones((), int))),
    (TypeError, "Global.indices must be a tuple of Python ints, got a JAX array", lambda: ls.Global(jnp.arange(2))),
    (TypeError, "Global.indices must be a tuple of ints, got ('a',)", lambda: ls.Global(("a",))),
    (
        ValueError,
        "Global.indices must be positions within ±1073741823 (2**30 - 1), got -21",
        lambda: ls.Global((-(2**31),)),
    ),
    (TypeError, "Global.q_flags must hold bools", lambda: ls.Global(q_flags=np.zeros((1, 3), int))),
    (ValueError, "zero='some' is not one of 'q', 'kv', 'both', 'none'", lambda: ls.TokenTypes(IDS, zero="some")),
    (TypeError, "PerHead.masks must be a non-empty sequence of masks", lambda: ls.PerHead(())),
    (TypeError, "PerHead.masks must be a non-empty sequence of masks", lambda: ls.PerHead((ls.Full(), 3))),
    (
        ValueError,
        "Blocks.block_size must be at most 1073741823 (2**30 - 1), got 2147483648. Give at most the length",
        lambda: ls.Blocks(np.zeros((1, 2, 2), int), 2**31),
    ),
    (
        ValueError,
        "q_tile must be at most 1073741823 (2**30 - 1), got 2147483648. Give at most the length",
        lambda: ls.Causal().layout(4, 4, q_tile=2**31),
    ),
    (ValueError, "kv_tile must be at most 1073741823", lambda: ls.Causal().layout(4, 4, kv_tile=99999999999)),
    (ValueError, "q_len must be at most 1073741823 (2**30 - 1)", lambda: ls.Causal().layout(2**31, 4)),
    (ValueError, "kv_len must be at most 1073741823 (2**30 - 1)", lambda: ls.Causal().show(4, 2**40)),
    (
        ValueError,
        "Custom.heads must be at most 1073741823 (2**30 - 1), got 2147483648.",
        lambda: ls.Custom(lambda b, h, q, k: q >= k, heads=2**31),
    ),
    (TypeError, "Custom.fn must be a function, got int", lambda: ls.Custom(3)),
    (TypeError, "Custom.bounds must be a function, got int", lambda: ls.Custom(lambda q, k: q >= k, bounds=3)),
    (
        ValueError,
        "returned shape (5,) for positions of shape (1, 1, 7, 7)",
        lambda: ls.Custom(lambda q, k: jnp.ones(5, bool)).dense(7, 7),
    ),
    (TypeError, "unsupported operand", lambda: ls.Causal() & np.ones((2, 2), bool)),
    (TypeError, "q_len must be a Python int (it sets array shapes)", lambda: ls.Causal().dense(2.0, 3)),
    (TypeError, "q_len must be a Python int (it sets array shapes), got '5'", lambda: ls.Causal().show("5")),
    (ValueError, "kv_len must be >= 0, got -1", lambda: ls.Causal().dense(2, -1)),
    (ValueError, "q_tile must be a Python int >= 1, got 0", lambda: ls.Causal().layout(4, 4, q_tile=0)),
    (
        ValueError,
        "Segments.q_ids covers 5 queries, but the call has 6 queries. Create the mask with an array for 6 queries.",
        lambda: ls.Segments(IDS).dense(6, 6),
    ),
    (
        ValueError,
        "Create the mask with an array for 4 queries, or cut the mask with `mask.cut(...)`.",
        lambda: ls.Segments(IDS).dense(4, 4),
    ),
    (
        ValueError,
        "Blocks.table covers 2 blocks of 4 queries, but the call has 9 queries. Create the mask with an array for 3 "
        "blocks of 4 queries.",
        lambda: ls.Blocks(np.zeros((1, 2, 1), int), 4).dense(9, 9),
    ),
    (
        ValueError,
        "KvLengths.lengths has 3 batch rows, but Segments.q_ids has 2",
        lambda: (ls.Segments(IDS) & ls.KvLengths(np.ones(3, int))).dense(5, 5),
    ),
    (
        ValueError,
        "q_positions must have shape [5] or [B, 5]",
        lambda: ls.Causal().dense(5, 5, q_positions=np.arange(4)),
    ),
    (
        TypeError,
        "kv_positions must be an int array, got dtype float64",
        lambda: ls.Causal().dense(5, 5, kv_positions=np.ones(5)),
    ),
]

CALLS = [
    (ValueError, "`q` must have shape [B, T, N, H], got rank 2", dict(q=Q[0, 0])),
    (ValueError, "Either all of `q`, `k` and `v` must have a batch axis, or none of them, got shapes", dict(q=Q[0])),
    (ValueError, "got shapes (5, 6, 4), (7, 3, 4), (2, 7, 3, 4). Add the axis", dict(q=Q[0], k=K[0])),
    (ValueError, "`q` has 5 heads and `k` has 3", dict(q=Q[0, :, :5], k=K[0], v=V[0])),
    (
        ValueError,
        "q_positions has 2 batch rows, but the call has 1. Give 1.",
        dict(q=Q[0], k=K[0], v=V[0], q_positions=IDS),
    ),
    (ValueError, "`PerHead` of shifted masks instead, for example", dict(q_positions=np.ones((2, 6, 5), int))),
    (TypeError, "`k` must be an array [B, S, K, H], got list", dict(k=[1])),
    (TypeError, "`q` must be one of float16, bfloat16, float32, float64, got int32", dict(q=Q.astype(int))),
    (TypeError, "must share a dtype, got float32, bfloat16 and float32", dict(k=K.astype(jnp.bfloat16))),
    (ValueError, "`k` and `v` must have the same batch, length and heads", dict(v=V[:, :3])),
    (ValueError, "`q` has batch size 1 and `k` has batch size 2", dict(q=Q[:1])),
    (ValueError, "`q` has head size 3 and `k` has head size 4", dict(q=Q[..., :3])),
    (ValueError, "`q` has 5 heads and `k` has 3. The number of query heads must be a multiple", dict(q=Q[:, :, :5])),
    (
        ValueError,
        "`mask` has rank 3, shape (2, 5, 7), which could be [B, T, S] or [N, T, S]",
        dict(mask=np.ones((2, 5, 7), bool)),
    ),
    (ValueError, "`mask` must be broadcastable to [B, N, T, S] = [2, 6, 5, 7]", dict(mask=np.ones((5, 6), bool))),
    (
        TypeError,
        "`mask` as an array must be bool, got float32. If it holds 1 (allowed) and 0, give `mask != 0`. If it is "
        "additive (0 and large negative numbers), give it as `bias`.",
        dict(mask=np.ones((5, 7), np.float32)),
    ),
    (TypeError, "`mask` must be a Mask, a MaskInfo, a BlockLayout or an array of bools, got str", dict(mask="causal")),
    (
        TypeError,
        "got function. Wrap a function of positions: `ls.Custom(fn)`.",
        dict(mask=lambda q, k: q >= k),
    ),
    (
        TypeError,
        "the function must return bools, got float32. Compare, e.g. `values != 0`. To add numbers to the "
        "scores, use a bias: `bias=ls.ScoreBias(fn)`.",
        dict(mask=ls.Custom(lambda q, k: -0.5 * abs(q - k).astype(np.float32)), engine="reference"),
    ),
    (
        TypeError,
        "`bias` as an array must be float, got bool. If it is a mask, give it as `mask`, with bools.",
        dict(bias=np.ones((5, 7), bool)),
    ),
    (ValueError, "`bias` must be broadcastable to [B, N, T, S]", dict(bias=jnp.ones((1, 2, 5, 7)))),
    (ValueError, "`bias` has rank 3", dict(bias=jnp.ones((6, 5, 7)))),
    (ValueError, "`sinks` must be one float logit per query head, shape [6], got shape (3,)", dict(sinks=jnp.ones(3))),
    (ValueError, "`dropout_rate` must be a number in [0, 1), got 1.0", dict(dropout_rate=1.0)),
    (ValueError, "`dropout_rate` must be a number in [0, 1), got True", dict(dropout_rate=True)),
    (ValueError, "`dropout_rate` must be a number in [0, 1), got np.float32(1.5)", dict(dropout_rate=np.float32(1.5))),
    (ValueError, "dropout_rate=0.1 needs a `dropout_key`", dict(dropout_rate=0.1)),
    (ValueError, "`soft_cap` must be a number > 0 or None, got 0", dict(soft_cap=0)),
    (ValueError, "`soft_cap` must be a number > 0 or None, got nan", dict(soft_cap=float("nan"))),
    (ValueError, "`soft_cap` must be a number > 0 or None, got array([2.])", dict(soft_cap=np.array([2.0]))),
    (ValueError, "`soft_cap` must be a number > 0 or None, got np.True_", dict(soft_cap=np.True_)),
    (
        ValueError,
        "`soft_cap` must lie between 1.18e-38 and 3.4e+38, got 1e+39. This is the range of float32",
        dict(soft_cap=1e39),
    ),
    (
        ValueError,
        "got inf. This is the range of float32, the dtype of the scores. Pass None for no cap",
        dict(soft_cap=float("inf")),
    ),
    (
        ValueError,
        "got 1e-40. This is the range of float32, the dtype of the scores. Pass None for no cap",
        dict(soft_cap=1e-40),
    ),
    (ValueError, "`scale` must be a number or a float array of shape (), got 'big'", dict(scale="big")),
    (ValueError, "`scale` must be a number or a float array of shape (), got True", dict(scale=True)),
    (ValueError, "`scale` must be a number or a float array of shape ()", dict(scale=jnp.ones(2))),
    (ValueError, "the dtype of the scores, got inf", dict(scale=np.float32(np.inf))),
    (ValueError, "`scale` must be finite in float32", dict(scale=float("inf"))),
    (ValueError, "the dtype of the scores, got nan. Pass None for 1/sqrt(H)", dict(scale=float("nan"))),
    (
        ValueError,
        "`scale` must be finite in float32, the dtype of the scores, got 1e+39",
        dict(scale=1e39),
    ),
    (ValueError, "engine='fast' is not one of 'auto'", dict(engine="fast")),
    (
        ValueError,
        "Segments.q_ids covers 5 queries",
        dict(mask=ls.Segments(IDS, np.zeros((2, 7), int)), q=jnp.ones((2, 4, 6, 4))),
    ),
    (ValueError, "Segments.kv_ids covers 5 keys, but the call has 7", dict(mask=ls.Segments(IDS))),
    (ValueError, "KvLengths.lengths has 3 batch rows, but the call has 2", dict(mask=ls.KvLengths(np.ones(3, int)))),
    (ValueError, "QLengths.lengths has 3 batch rows, but the call has 2", dict(mask=ls.QLengths(np.ones(3, int)))),
    (ValueError, "PerHead.masks has 2 query heads, but the call has 6", dict(mask=ls.PerHead((ls.Full(), ls.Full())))),
    (
        ValueError,
        "This BlockLayout is for 4 queries and 7 keys, but the call has 5 queries and 7 keys. Make a "
        "BlockLayout for the lengths of the call.",
        dict(mask=ls.Causal().layout(4, 7)),
    ),
    (
        ValueError,
        "A BlockLayout already has positions, so the call takes none",
        dict(mask=ls.Causal().layout(5, 7), q_positions=np.arange(5)),
    ),
    (
        ValueError,
        "`q_positions` is given both",
        dict(mask=ls.Causal().layout(5, 7, q_positions=np.arange(5)), q_positions=np.arange(5)),
    ),
    (
        ValueError,
        "kv_positions must have shape [7] or [B, 7] (one position per slot), got (5,)",
        dict(kv_positions=np.arange(5)),
    ),
    (ValueError, "q_positions has 3 batch rows, but the call has 2", dict(q_positions=np.zeros((3, 5), int))),
]


@pytest.mark.parametrize("error, words, call", MASKS, ids=[words for _, words, _ in MASKS])
def test_bad_masks(error, words, call):
    raises(error, words, call)


@pytest.mark.parametrize("error, words, change", CALLS, ids=[words for _, words, _ in CALLS])
@pytest.mark.parametrize("function", [ls.attention, ls.explain], ids=["attention", "explain"])
def test_bad_calls(function, error, words, change):
    arguments = dict(q=Q, k=K, v=V) | change
    raises(error, words, lambda: function(**arguments))


ELSEWHERE = {
    "is_causal": "Give `mask=ls.Causal()` instead.",
    "local_window_size": "Give `mask=ls.Window(left, right)` instead.",
    "key_value_seq_lengths": "Give `mask=ls.KvLengths(lengths)` instead.",
    "query_seq_lengths": "Give `mask=ls.QLengths(lengths)` instead.",
}


@pytest.mark.parametrize("name, words", ELSEWHERE.items(), ids=ELSEWHERE)
def test_arguments_of_jax_nn_are_translated(name, words):
    arguments: dict = {name: True}
    raises(TypeError, f"attention() has no argument '{name}'. {words}", lambda: ls.attention(Q, K, V, **arguments))
    raises(TypeError, words, lambda: jax.jit(lambda q: ls.attention(q, K, V, **arguments))(Q))


def test_several_arguments_of_jax_nn_are_one_mask():
    both: dict = dict(is_causal=True, key_value_seq_lengths=3)
    raises(
        TypeError,
        "'is_causal' and 'key_value_seq_lengths' together, give `mask=ls.Causal() & ls.KvLengths(lengths)`.",
        lambda: ls.attention(Q, K, V, **both),
    )


def test_other_unknown_arguments_are_pythons_own_error():
    wrong: dict = dict(is_cusal=True)
    raises(
        TypeError, "attention() got an unexpected keyword argument 'is_cusal'", lambda: ls.attention(Q, K, V, **wrong)
    )


def test_errors_come_before_tracing_goes_deep():
    with pytest.raises(ValueError, match="number of query heads must be a multiple"):
        jax.jit(ls.attention)(Q[:, :, :5], K, V)
