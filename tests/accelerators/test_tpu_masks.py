"""The compiler of TPUs accepts every mask, both passes, on every chip (`make accelerators`). Nothing runs."""

import pytest

from benchmarks.tpu.chips import TOPOLOGIES
from longspan.testing import Shape
from tests.accelerators.compiling import SMALL_TILES, compile_both, kernels, operands_of
from tests.every_mask import every_mask

pytestmark = pytest.mark.accelerators

SHAPE = Shape(B=2, T=200, S=300, N=4, K=2, H=128)
MASKS = every_mask(SHAPE.B, SHAPE.N, SHAPE.T, SHAPE.S)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_every_mask_compiles_in_one_backward_kernel(chip, name):
    compiled = compile_both(chip, MASKS[name], operands_of(SHAPE), tiles=SMALL_TILES, fused=True)
    assert kernels(compiled) == ["longspan_backward", "longspan_forward"]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("chip", ["v5e", "v5p"])
def test_every_mask_compiles_in_two_backward_kernels(chip, name):
    compiled = compile_both(chip, MASKS[name], operands_of(SHAPE), tiles=SMALL_TILES, fused=False)
    assert kernels(compiled) == ["longspan_dkv", "longspan_dq", "longspan_forward"]


@pytest.mark.parametrize("name", ["dense", "segments", "between", "blocks", "global, flags"])
@pytest.mark.parametrize("T", [1, 7, 100, 130, 600])
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_masks_compile_with_the_engine_s_own_tiles(chip, T, name):
    shape = SHAPE._replace(T=T)
    mask = every_mask(shape.B, shape.N, shape.T, shape.S)[name]
    compiled = compile_both(chip, mask, operands_of(shape))
    assert kernels(compiled) == ["longspan_backward", "longspan_forward"]


@pytest.mark.parametrize("name", ["dense", "segments", "between", "blocks", "global, flags", "composed"])
@pytest.mark.parametrize("tiles", [(16, 128), (64, 64)])
def test_masks_compile_with_small_tiles(tiles, name):
    """BigBird's tiles are its blocks, usually of 64 tokens."""
    compiled = compile_both("v5e", MASKS[name], operands_of(SHAPE), tiles=dict(q_tile=tiles[0], kv_tile=tiles[1]))
    assert kernels(compiled) == ["longspan_backward", "longspan_forward"]
