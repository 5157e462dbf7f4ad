"""MXFP4 tensors of a checkpoint, which are read as floats: 4-bit floats, and an exponent for every 32 of them.

A parameter `x` of shape [experts, inputs, outputs] is two tensors of bytes: `x_blocks` [experts, outputs, inputs / 32,
16] with two numbers per byte, and `x_scales` [experts, outputs, inputs / 32] with exponents of 2 plus 127.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from longspan.hf.tensors import CheckpointTensors

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32  # numbers with one exponent
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# By the 4 bits of a number, of which the highest is the sign.
VALUES = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float32)


def with_floats(tensors: CheckpointTensors) -> CheckpointTensors:
    """The tensors of a checkpoint, with one tensor of floats for each pair of blocks and scales.

    The numbers are computed when a tensor is read.
    """
    names = sorted(name.removesuffix(BLOCKS) for name in tensors.where if name.endswith(BLOCKS))
    packed = {name + end for name in names for end in (BLOCKS, SCALES)}
    problems = [f"{name}{SCALES} is missing" for name in names if name + SCALES not in tensors.where]
    problems += [f"{name} is there as floats too" for name in names if name in tensors.where]
    problems += [problem for name in names if not problems and (problem := _problem(tensors, name))]
    if problems:
        raise ValueError(
            "\n  ".join([f"{tensors.files} has MXFP4 tensors that cannot be read:", *problems])
            + "\nDownload or save the checkpoint again."
        )

    def added(of: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in of.items() if name not in packed} | new

    return CheckpointTensors(
        added(tensors.where, {name: Mxfp4Tensor(tensors, name) for name in names}),
        added(tensors.old_names, {name: name for name in names}),
        added(tensors.file_of, {name: tensors.file_of[name + BLOCKS] for name in names}),
        tensors.unlisted,
    )


def _problem(tensors: CheckpointTensors, name: str) -> str | None:
    """What is wrong with a pair of blocks and scales; None: nothing."""
    blocks, scales = tensors.shape(name + BLOCKS), tensors.shape(name + SCALES)
    if len(blocks) != 4 or blocks != (*scales, GROUP // 2):
        return (
            f"{name}{BLOCKS} is {list(blocks)} and {name}{SCALES} is {list(scales)}, but blocks need a last axis of "
            f"{GROUP // 2} after the three axes of the scales"
        )
    types = tensors.dtype_name(name + BLOCKS), tensors.dtype_name(name + SCALES)
    if types != ("U8", "U8"):
        return f"{name}{BLOCKS} is {types[0]} and {name}{SCALES} is {types[1]}, but both must be U8"
    return None


@dataclass
class Mxfp4Tensor:
    """One tensor of floats, with the methods of an open safetensors file that `CheckpointTensors` calls."""

    tensors: CheckpointTensors
    name: str

    def get_slice(self, _: str) -> "Mxfp4Tensor":
        return self

    def get_shape(self) -> list[int]:
        experts, outputs, groups = self.tensors.shape(self.name + SCALES)
        return [experts, groups * GROUP, outputs]

    def get_dtype(self) -> str:
        return "F32"

    def get_tensor(self, _: str) -> np.ndarray:
        return dequantized(self.tensors.read(self.name + BLOCKS), self.tensors.read(self.name + SCALES))


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers as float32 [experts, inputs, outputs]: value · 2^(scale - 127).

    Example:
        >>> blocks = np.zeros((1, 1, 1, 16), np.uint8)
        >>> blocks[..., 0] = 0xA3  # 1.5 in the low bits, then -1.0
        >>> print(dequantized(blocks, np.full((1, 1, 1), 128, np.uint8))[0, :3, 0])
        [ 3. -2.  0.]
    """
    pairs = np.stack([VALUES[blocks & 15], VALUES[blocks >> 4]], axis=-1).reshape(*scales.shape, GROUP)
    with np.errstate(over="ignore"):  # an exponent above 2^125 may be infinity, as in Hugging Face
        numbers = np.ldexp(pairs, scales.astype(np.int32)[..., None] - 127)
    return numbers.reshape(*scales.shape[:2], -1).swapaxes(1, 2)
