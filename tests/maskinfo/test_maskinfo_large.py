"""Masks of a million tokens within tens of MB: built, sliced for decoding, planned and sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan import MaskInfo

T = 1_000_000
MB = 1 << 20


def build(mask):
    return MaskInfo.from_attention_mask(mask).apply_causal().apply_sliding_window((511, 0))


def megabytes(f, *args):
    """The memory of a compiled program besides its arguments: results and temporaries, in MB."""
    memory = jax.jit(f).lower(*args).compile().memory_analysis()
    return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / MB


@pytest.mark.mesh
def test_a_million_tokens_are_built_cut_and_sharded_within_tens_of_megabytes():
    info = build(np.arange(T).reshape(1, T) < 999_000)
    assert info.shape == (1, T, T)
    assert sum(x.nbytes for x in jax.tree.leaves(info)) <= 8 * T
    step = info.apply_sliding_window((511, 0), mode="decode", index=jnp.int32(998_000))
    assert step.shape == (1, 1, 512)
    assert step.attention_mask.all()
    assert not info.apply_sliding_window((511, 0), mode="decode", index=999_500).attention_mask.any()
    last = info.apply_kv_lengths(np.array([999_000]), q_len=2, sliding_window=1024)
    assert (last.shape, last.q_positions.tolist()) == ((1, 2, 1024), [[998_998, 998_999]])
    assert info.q_lens.tolist() == [999_000]
    assert info.cu_seqlens_q[:3].tolist() == [0, 999_000, 999_000]
    specs = info.get_shardings(True, mesh=jax.make_mesh((8,), ("sp",)))
    assert specs.q_segment_ids == jax.P(None, "sp")
    assert ls.MaskInfo.from_mask(info.mask, 1, T) == info


def test_compiled_programs_stay_small_too():
    mask = jax.ShapeDtypeStruct((1, T), bool)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    assert megabytes(build, mask) < 20
    assert (
        megabytes(lambda m, i: build(m).apply_sliding_window(4, mode="decode", index=i).attention_mask, mask, index)
        < 20
    )
    assert megabytes(lambda m: build(m).layout().starts, mask) < 60
    assert megabytes(lambda m: build(m).get_or_compute_positions(), mask) < 60
    assert megabytes(lambda m: build(m).apply_chunked(4096), mask) < 150


def test_attention_over_a_million_tokens_follows_the_mask():
    info = build(np.arange(T).reshape(1, T) < 999_000)
    q, k, v = ls.testing.make_qkv(ls.testing.Shape(B=1, T=T, S=T, N=1, K=1, H=4), jnp.float32)
    compiled = jax.jit(lambda q, k, v, info: ls.attention(q, k, v, mask=info)).lower(q, k, v, info).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 10 * q.nbytes
    out = np.asarray(compiled(q, k, v, info))
    for stop in (600, 500_001, 999_000):
        start = max(stop - 700, 0)
        cut = [x[:, start:stop] for x in (q, k, v)]
        wanted = ls.attention(*cut, mask=ls.Causal() & ls.Window(511, 0), engine="reference")
        np.testing.assert_allclose(out[:, stop - 50 : stop], wanted[:, -50:], rtol=1e-4, atol=1e-5)
    assert not out[:, 999_000:].any()
