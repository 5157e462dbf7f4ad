"""Named cases: masks and their shapes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import longspan as ls
from longspan.testing import Shape


@dataclass(frozen=True)
class Case:
    """A mask and a shape to measure."""

    name: str
    shape: Shape
    mask: Callable[[], ls.Mask]
    backward: bool = False
    bias: Callable[[], ls.Bias] | None = None


def documents(length: int, mean: int, seed: int = 0) -> np.ndarray:
    """Segment ids [1, length] of packed documents whose lengths vary around a mean."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(mean // 2, mean + mean // 2 + 1, size=2 * length // mean + 2)
    return np.repeat(np.arange(len(lengths)), lengths)[None, :length].astype(np.int32)


def square(length: int, heads: int = 8) -> Shape:
    return Shape(1, length, length, heads, heads, 64)


def alibi() -> ls.Bias:
    return ls.alibi(np.exp2(-np.arange(1.0, 9.0)).astype(np.float32))


def window() -> ls.Mask:
    return ls.Window(256, 256)


def between(length: int) -> ls.Mask:
    """The same pairs as `window`, as an interval per query."""
    slots = np.arange(length)
    return ls.Between(slots - 256, slots + 257)


WINDOW_8K = Case("window ±256, 8k", square(8192), window)
WINDOW_16K = Case("window ±256, 16k", square(16384), window)
WINDOW_16K_BOTH = Case("window ±256, 16k, both passes", square(16384), window, backward=True)
BETWEEN_16K = Case("between ±256, 16k", square(16384), lambda: between(16384))
BETWEEN_16K_BOTH = Case("between ±256, 16k, both passes", square(16384), lambda: between(16384), backward=True)
CAUSAL_2K = Case("causal, 2k", square(2048), ls.Causal)
CAUSAL_4K = Case("causal, 4k", square(4096), ls.Causal)
CAUSAL_16K = Case("causal, 16k", square(16384), ls.Causal)
CAUSAL_16K_BOTH = Case("causal, 16k, both passes", square(16384), ls.Causal, backward=True)
PACKED_32K = Case(
    "packed causal documents of 1k, 32k", square(32768), lambda: ls.Causal() & ls.Segments(documents(32768, 1024))
)
GROWTH = [Case(f"window ±256, {n}k, both passes", square(n * 1024, 2), window, backward=True) for n in (16, 64, 256)]
SHORTER = [
    Case(
        f"packed causal documents of {mean}, 16k",
        square(16384),
        lambda mean=mean: ls.Causal() & ls.Segments(documents(16384, mean)),
    )
    for mean in (8192, 2048, 512)
]
