"""Every error of `MaskInfo`, by its text."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspan import Causal, MaskInfo, Segments

B, T, S = 2, 5, 7
SELF = MaskInfo.from_segments(np.zeros((B, T), int))
CROSS = MaskInfo.from_segments(np.zeros((B, T), int), np.zeros((B, S), int))


def traced(f):
    """Calls f with a traced int."""
    return lambda: jax.jit(f)(jnp.int32(1))


ERRORS = [
    # constructors
    (lambda: MaskInfo.from_segments(np.zeros(3, int)), ValueError, "q_segment_ids must have shape (B, L), got rank 1"),
    (
        lambda: MaskInfo.from_segments(np.zeros((2, 3))),
        TypeError,
        "q_segment_ids must be an int array (B, L), got dtype float64",
    ),
    (lambda: MaskInfo.from_segments("ids"), TypeError, "got str"),
    (
        lambda: MaskInfo.from_segments(np.zeros((2, 3), int), np.zeros((3, 3), int)),
        ValueError,
        "The two numbers must be equal.",
    ),
    (
        lambda: MaskInfo.from_segments(np.zeros((2, 3), int), q_positions=np.zeros((2, 4), int)),
        ValueError,
        "q_positions must have shape [3] or [B, 3] (one position per slot), got (2, 4)",
    ),
    (
        lambda: MaskInfo.from_segments(np.zeros((2, 3), int), kv_positions=np.zeros((2, 3))),
        TypeError,
        "kv_positions must be an int array, got dtype float64",
    ),
    (
        lambda: MaskInfo.from_segments(np.zeros((2, 3), int), batch_axis_name=3),
        TypeError,
        "batch_axis_name must be the name of a mesh axis, a tuple of names or None, got 3",
    ),
    (
        lambda: MaskInfo.from_attention_mask(np.ones(3)),
        ValueError,
        "attention_mask must have shape (B, L), (B, Q, K) or (B, H, Q, K), got rank 1",
    ),
    (lambda: MaskInfo.from_cu_seqlens(np.array([0, 1, 2]), max_q_len=4), ValueError, "use `MaskInfo.from_offsets`"),
    (lambda: MaskInfo.from_cu_seqlens(np.array([0, 1]), max_q_len=-4), ValueError, "max_len must be >= 0, got -4"),
    (lambda: MaskInfo.from_offsets(np.array([1, 3])), ValueError, "offsets must start at 0 and never decrease"),
    (lambda: MaskInfo.from_offsets(np.array([0, 3, 2])), ValueError, "got [0, 3, 2]"),
    (lambda: MaskInfo.from_offsets(np.array([], int)), ValueError, "got an array without entries"),
    (
        lambda: MaskInfo.from_offsets(np.array([0, 3]), max_q_len=2),
        ValueError,
        "max_q_len must be >= 3, the last offset, got 2",
    ),
    (
        lambda: jax.jit(lambda o: MaskInfo.from_offsets(o).q_lens)(np.array([0, 3])),
        ValueError,
        "max_q_len must be given if the offsets are traced",
    ),
    (lambda: MaskInfo.from_mask(np.ones((2, 2)), 1, 2), TypeError, "mask must be a `Mask`, got ndarray"),
    (lambda: MaskInfo.from_mask(Segments(np.zeros((2, 3), int)), 4, 3), ValueError, "2 batch rows, but the call has 4"),
    (lambda: MaskInfo.from_mask(Causal(), -1, 3), ValueError, "batch must be >= 0, got -1"),
    (lambda: MaskInfo.from_mask(Causal(), 1, 2.0), TypeError, "q_len must be a Python int"),
    (lambda: MaskInfo.from_random(1, 2, sparsity=1.5), ValueError, "sparsity must lie in [0, 1]"),
    (lambda: MaskInfo.from_random(1, 2, sparsity=-0.1), ValueError, "got -0.1"),
    (
        lambda: MaskInfo.dynamic_init(),
        ValueError,
        "needs at least one of mask_info, input_ids, inputs_embeds and attention_mask",
    ),
    (
        lambda: MaskInfo.dynamic_init(input_ids=np.zeros(3, int)),
        ValueError,
        "input_ids must have shape (B, T), got rank 1",
    ),
    # rules
    (
        lambda: SELF.apply_causal(np.zeros(3, int)),
        ValueError,
        "offset must be an int, or an int array of shape () or (2,)",
    ),
    (lambda: SELF.apply_causal(1.5), TypeError, "offset must be an int, got 1.5 (float)"),
    (lambda: SELF.apply_causal(np.ones(2)), TypeError, "offset must hold integers, got dtype float64"),
    (lambda: SELF.apply_sliding_window(-1), ValueError, "sliding_window must be >= 0, got -1"),
    (lambda: SELF.apply_sliding_window((1, np.array([1, -2]))), ValueError, "sliding_window must be >= 0, got [1, -2]"),
    (
        lambda: SELF.apply_sliding_window((1, 2, 3)),
        ValueError,
        "sliding_window must be a size or (left, right), got 3 sizes",
    ),
    (lambda: SELF.apply_sliding_window(None), TypeError, "sliding_window must be an int, got None"),
    (
        lambda: SELF.apply_sliding_window(1, mode="decoding"),
        ValueError,
        "mode='decoding' is not one of 'default', 'decode', 'prefill'",
    ),
    (lambda: SELF.apply_sliding_window(1, mode="decode"), ValueError, "mode='decode' needs `index`"),
    (lambda: SELF.apply_sliding_window(1, mode="decode", index=5), ValueError, "index must lie in [0, 5)"),
    (lambda: SELF.apply_sliding_window(1, mode="decode", index=np.array([0, -1])), ValueError, "got [0, -1]"),
    (
        traced(lambda w: SELF.apply_sliding_window(w, mode="decode", index=0).shape),
        ValueError,
        "mode='decode' slices arrays, so sliding_window must be static",
    ),
    (
        traced(lambda w: SELF.apply_sliding_window((w, 0), mode="prefill").shape),
        ValueError,
        "mode='prefill' slices arrays, so sliding_window must be static",
    ),
    (lambda: SELF.apply_chunked(0), ValueError, "chunk_size must be >= 1, got 0"),
    (lambda: SELF.apply_chunked(np.array([2, 0])), ValueError, "chunk_size must be >= 1, got [2, 0]"),
    (lambda: MaskInfo.create_chunked_attention_mask(-3, 4), ValueError, "chunk_size must be >= 1, got -3"),
    (lambda: SELF.apply_token_type_ids(np.zeros(T, int)), ValueError, "q_types must have shape (B, L), got rank 1"),
    (
        lambda: SELF.apply_token_type_ids(np.zeros((3, T), int)),
        ValueError,
        "q_types must have shape (2, 5), got (3, 5)",
    ),
    (lambda: CROSS.apply_token_type_ids(np.zeros((B, T), int)), ValueError, "pass (q_types, kv_types)"),
    (lambda: SELF.apply_token_type_ids((np.zeros((B, T), int),) * 3), ValueError, "got 3 arrays"),
    (
        lambda: SELF.apply_token_type_ids(np.zeros((B, T), int), combine="or"),
        ValueError,
        "combine='or' is not one of 'union', 'intersect', 'replace'",
    ),
    (
        lambda: SELF.apply_token_type_ids(np.zeros((B, T), int), zero_policy="all"),
        ValueError,
        "zero_policy='all' is not one of 'q', 'kv', 'both', 'none'",
    ),
    (
        lambda: SELF.apply_kv_lengths(np.array([1, 2, 3]), q_len=1),
        ValueError,
        "kv_lengths must be an int, or an int array",
    ),
    (lambda: SELF.apply_kv_lengths(3, q_len=6), ValueError, "q_len must be at most 5, the number of queries, got 6"),
    (lambda: SELF.apply_kv_lengths(3, q_len=1, sliding_window=-1), ValueError, "sliding_window must be >= 0, got -1"),
    (traced(lambda n: SELF.apply_kv_lengths(3, q_len=n).shape), ValueError, "q_len sets array shapes"),
    # reading
    (
        lambda: MaskInfo.from_segments(np.arange(6).reshape(1, 6)).get_or_compute_qkv_cu_seqlens(max_segments=4),
        ValueError,
        "There are 6 sequences, but max_segments=4",
    ),
    (
        lambda: MaskInfo.from_segments(np.array([[0, 1, 0]])).cu_seqlens_q,
        ValueError,
        "an id reappears after another id",
    ),
    (lambda: SELF.get_or_compute_qkv_cu_seqlens(max_segments=0), ValueError, "max_segments must be >= 1, got 0"),
    (lambda: SELF.create_bias(jnp.int32), TypeError, "A bias needs a float dtype, got int32"),
    (
        lambda: SELF.replace(segment_ids=1),
        TypeError,
        "replace() got an unknown field 'segment_ids'. The fields are attention_mask, q_segment_ids",
    ),
    (lambda: SELF.replace(q_segment_ids=np.zeros((B, 4), int)), ValueError, "replace() cannot change sizes"),
    (lambda: SELF.replace(q_positions=np.zeros((B, 4), int)), ValueError, "q_positions must have shape [5] or [B, 5]"),
    (lambda: SELF.replace(batch_axis_name=("dp", 1)), TypeError, "batch_axis_name must be the name of a mesh axis"),
    (lambda: hash(SELF), TypeError, "A MaskInfo holds arrays, so it has no hash"),
    (lambda: jax.jit(lambda info: info == SELF)(SELF), TypeError, "== compares the values of two MaskInfos"),
    # pictures
    (lambda: SELF.visualize(batch=2), IndexError, "batch=2 is out of range: the batch size is 2"),
    (lambda: SELF.visualize(head=-1), IndexError, "head=-1 is out of range: the mask's number of heads is 1"),
    (lambda: SELF.visualize(charset="utf-8"), ValueError, "charset='utf-8' is not one of 'unicode', 'ascii'"),
    (lambda: SELF.visualize(block_size=0), ValueError, "block_size must be >= 1, got 0"),
    (lambda: jax.jit(lambda info: info.visualize())(SELF), TypeError, "Draw outside jit"),
]


@pytest.mark.parametrize(
    ("call", "kind", "text"), ERRORS, ids=[f"{i}: {text}" for i, (_, _, text) in enumerate(ERRORS)]
)
def test_errors_of_bad_input(call, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        call()


def test_no_field_can_be_set():
    with pytest.raises(AttributeError, match="cannot assign to field"):
        SELF.q_positions = None
    with pytest.raises(AttributeError, match="cannot assign to field"):
        SELF.anything = 1
