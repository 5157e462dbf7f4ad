"""The compiler of TPUs accepts every feature, dtype and head size, both passes (`make accelerators`). Nothing runs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from benchmarks.tpu.chips import compile_for
from benchmarks.tpu.parity import slower
from longspan.engines.pallas_tpu import PallasTpu
from longspan.testing import Shape
from tests.accelerators.compiling import SMALL_TILES, compile_both, compile_forward, floats, kernels, operands_of

pytestmark = pytest.mark.accelerators

SHAPE = Shape(B=2, T=200, S=300, N=4, K=2, H=128)
MASK = ls.Causal(100) & ls.Window(130, 0)
DROPPED = dict(dropout_rate=0.1, dropout_key=jax.random.key(0))


BIASES = {
    "by pair": lambda s: floats(s.B, s.N, s.T, s.S),
    "by pair, one head": lambda s: floats(1, 1, s.T, s.S),
    "by key": lambda s: floats(1, s.N, 1, s.S),
    "by query": lambda s: floats(s.B, 1, s.T, 1),
    "alibi": lambda s: ls.alibi(np.abs(floats(s.N))),
    "relative": lambda s: ls.relative_bias(floats(16, s.N), max_distance=19),
    "function": lambda s: ls.ScoreBias(slower, floats(s.N), np.arange(1, s.B + 1, dtype=np.int32)),
    "sum": lambda s: (ls.alibi(np.abs(floats(s.N))), floats(s.B, 1, s.T, s.S)),
}


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_head_sizes_compile(size, chip):
    shape = SHAPE._replace(H=size)
    assert len(kernels(compile_both(chip, MASK, operands_of(shape), tiles=SMALL_TILES))) >= 2


@pytest.mark.parametrize("Hv", [64, 192])
def test_values_of_another_head_size_compile(Hv):
    shape = SHAPE._replace(Hv=Hv)
    assert len(kernels(compile_both("v5e", MASK, operands_of(shape), tiles=SMALL_TILES, fused=True))) == 2


@pytest.mark.parametrize("size", [80, 128])
@pytest.mark.parametrize("fused", [True, False])
def test_float32_compiles(size, fused):
    operands = operands_of(SHAPE._replace(H=size), jnp.float32)
    assert len(kernels(compile_both("v5e", MASK, operands, tiles=SMALL_TILES, fused=fused))) == 3 - fused


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("length", [4096, 2000, 100])
def test_the_engine_s_own_tiles_compile(chip, length):
    shape = Shape(B=1, T=length, S=length, N=4, K=1, H=128)
    assert len(kernels(compile_both(chip, ls.Causal(), operands_of(shape)))) >= 2


def test_as_many_key_heads_as_query_heads_compile():
    assert kernels(compile_both("v5e", MASK, operands_of(SHAPE._replace(K=4)), tiles=SMALL_TILES))


def test_soft_cap_sinks_and_dropout_compile():
    operands = operands_of(SHAPE, sinks=floats(SHAPE.N))
    assert kernels(compile_both("v5e", MASK, operands, tiles=SMALL_TILES, soft_cap=30.0, **DROPPED))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", BIASES)
def test_biases_compile_with_their_gradients(name, fused):
    operands = operands_of(SHAPE, bias=BIASES[name](SHAPE))
    assert kernels(compile_both("v5e", MASK, operands, tiles=SMALL_TILES, fused=fused))


@pytest.mark.parametrize("T", [1, 100])
@pytest.mark.parametrize("name", ["by pair", "by key", "by query", "relative", "function"])
def test_biases_of_few_queries_compile(name, T):
    shape = SHAPE._replace(T=T)
    operands = operands_of(shape, bias=BIASES[name](shape))
    assert kernels(compile_both("v5e", ls.Causal(200), operands))


@pytest.mark.parametrize("q_tile", [16, 64])
@pytest.mark.parametrize("name", ["by pair", "by query", "alibi", "function"])
def test_biases_compile_with_few_queries_in_each_tile(name, q_tile):
    operands = operands_of(SHAPE, bias=BIASES[name](SHAPE))
    assert kernels(compile_both("v5e", MASK, operands, tiles=dict(q_tile=q_tile, kv_tile=128), **DROPPED))


def test_bias_with_every_other_feature_compiles():
    operands = operands_of(SHAPE, bias=BIASES["by pair"](SHAPE), sinks=floats(SHAPE.N))
    assert kernels(compile_both("v5e", MASK, operands, tiles=SMALL_TILES, soft_cap=30.0, **DROPPED))


def test_positions_compile():
    rng = np.random.default_rng(0)
    positions = dict(q_positions=rng.permutation(SHAPE.T)[None], kv_positions=rng.permutation(SHAPE.S)[None])
    assert kernels(compile_both("v5e", MASK, operands_of(SHAPE), **positions, **DROPPED))


@pytest.mark.parametrize("fused", [True, False])
def test_pairs_that_count_twice_compile(fused):
    """BigBird's random blocks may repeat a block of the window."""
    drawn = ls.bigbird_random_blocks(1024, block_size=64, num_random_blocks=3, num_heads=2, seed=0)
    engine = PallasTpu(fused=fused, chip="v5e")

    def both(q, k, v):
        run = partial(ls.bigbird_attention, block_size=64, rand_attn=drawn, engine=engine)
        return jax.vjp(run, q, k, v)[1](q)

    x = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16)
    assert len(kernels(compile_for("v5e", both, x, x, x))) == 3 - fused


@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_decoding_compiles(chip, dtype):
    shape = Shape(B=4, T=1, S=4096, N=32, K=8, H=128)
    compiled = compile_forward(chip, ls.KvLengths(np.zeros(4, np.int32)), operands_of(shape, dtype))
    assert kernels(compiled) == ["longspan_forward"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("precision", ["highest", "bfloat16"])
def test_the_default_precision_of_the_program_does_not_matter(dtype, precision):
    with jax.default_matmul_precision(precision):
        assert kernels(compile_both("v5e", MASK, operands_of(SHAPE, dtype), tiles=SMALL_TILES))
