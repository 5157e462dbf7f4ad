"""The masks, features and dtypes of tests/test_parity.py on the interpreted `pallas_tpu` engine (`make slow`)."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.engines.pallas_tpu import PallasTpu
from longspan.testing import assert_matches_reference, make_qkv
from tests.test_parity import MASKS, ONE_BY_ONE, SHAPES

ENGINES = [PallasTpu(interpret=True), PallasTpu(interpret=True, fused=False)]
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
TILINGS = {"own tiles": None, "tiles 8x8": (8, 8), "tiles 3x5": (3, 5)}


def combinations():
    """Every mask with every feature and dtype. Shapes and tilings take turns: their numbers have no common factor."""
    turns = zip(itertools.cycle(SHAPES), itertools.cycle(TILINGS), strict=False)
    return [(*choice, *turn) for choice, turn in zip(itertools.product(MASKS, ONE_BY_ONE, DTYPES), turns, strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize("choice", combinations(), ids=", ".join)
def test_interpreted_kernels_match_the_reference(choice):
    mask_name, feature, dtype_name, shape_name, tiling = choice
    rng = np.random.default_rng([*",".join(choice).encode()])
    shape, dtype = SHAPES[shape_name], DTYPES[dtype_name]
    arguments, mask = ONE_BY_ONE[feature](rng, shape, dtype), MASKS[mask_name](rng, shape)
    if TILINGS[tiling] is not None:
        q_tile, kv_tile = TILINGS[tiling]
        places = {name: arguments.pop(name) for name in ("q_positions", "kv_positions") if name in arguments}
        mask = (ls.Full() if mask is None else mask).layout(shape.T, shape.S, q_tile=q_tile, kv_tile=kv_tile, **places)
    assert_matches_reference(ENGINES, *make_qkv(shape, dtype), mask, **arguments)
