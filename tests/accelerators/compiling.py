"""Compiles both passes of `attention` on `pallas_tpu` for a chip."""

import re

import jax
import jax.numpy as jnp
import numpy as np

import longspan as ls
from benchmarks.tpu.chips import compile_for
from longspan.biases import combine_floats, partition_floats
from longspan.engines.pallas_tpu import PallasTpu
from longspan.testing import Shape

SMALL_TILES = dict(q_tile=128, kv_tile=128)


def operands_of(shape: Shape, dtype=jnp.bfloat16, **more) -> dict:
    """The shapes of q, k and v, and further operands: bias, sinks."""
    B, T, S, N, K, H, Hv = shape
    if Hv is None:
        Hv = H
    sizes = dict(q=(B, T, N, H), k=(B, S, K, H), v=(B, S, K, Hv))
    return {name: jax.ShapeDtypeStruct(size, dtype) for name, size in sizes.items()} | more


def compile_both(chip: str, mask, operands: dict, *, fused=None, tiles: dict | None = None, **features):
    """The compiled program of the output and of the gradients of all float operands."""
    engine = PallasTpu(fused=fused, chip=chip)
    T, S = operands["q"].shape[1], operands["k"].shape[1]

    def both(operands, mask):
        floats, integers = partition_floats(operands)
        placed = mask
        if tiles is not None:
            placed = mask.layout(T, S, **tiles)

        def forward(floats):
            return ls.attention(**combine_floats(floats, integers), mask=placed, engine=engine, **features)

        out, pull = jax.vjp(forward, floats)
        return out, pull(out)

    return compile_for(chip, both, operands, mask)


def compile_forward(chip: str, mask, operands: dict, **features):
    engine = PallasTpu(chip=chip)

    def forward(operands, mask):
        return ls.attention(**operands, mask=mask, engine=engine, **features)

    return compile_for(chip, forward, operands, mask)


def kernels(compiled) -> list[str]:
    """The names of the kernels that a program calls, in alphabetical order."""
    calls = [line for line in compiled.as_text().splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    names = [re.match(r"\s*(?:ROOT )?%?(\w+)", line) for line in calls]
    return sorted(name[1] for name in names if name is not None)


def floats(*size: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=size).astype(np.float32)
