"""The `pallas_tpu` engine: block-sparse attention in Pallas kernels for TPUs, forward and backward.

`passes` arranges a call for the kernels of `forward` and `backward`. `operands` are the arrays that a kernel reads,
`walk` runs a row of the grid over its tiles. Masks enter by `engines.door`: a kernel replays the answers to a rule's
questions, and has no code for any rule.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from longspan.combine import Result
from longspan.engines.contract import Engine
from longspan.engines.pallas_tpu.chips import TpuChip, chip_named, chip_of_kind, known_chips
from longspan.engines.pallas_tpu.report import ChipReport
from longspan.engines.pallas_tpu.sizes import copied_bytes, misfit
from longspan.engines.pallas_tpu.tiling import INTERPRETED_TILE, tiles_for
from longspan.engines.partition import may_run_on_several_devices
from longspan.engines.request import Request
from longspan.layout import BlockLayout
from longspan.tile_kinds import Counts

# Chips on which somebody has run `make accelerators-run` and reported that all results are right. It is empty: the
# kernels were compiled for every chip of `chips`, and interpreted, but never run on one. engine="auto" must not choose
# kernels in silence that were never run.
PROVEN: tuple[str, ...] = ()

MAX_HEAD_DIM = 256
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class PallasTpu(Engine):
    """Block-sparse attention on TPUs v4, v5e, v5p, v6e and tpu7x, forward and backward, for every mask and bias.

    `engine="pallas_tpu"` is `PallasTpu()`. The kernels are compiled for these chips and interpreted in tests, but they
    were never run on a TPU. Therefore `engine="auto"` does not choose them.

    Args:
        interpret: True interprets the kernels on any platform, slowly, to test results without a TPU. It may also be
            `jax.experimental.pallas.tpu.InterpretParams`.
        fused: False computes dq in a kernel apart from dk and dv. The fused kernel, the default, issues fewer
            instructions on every chip: 2,273 instead of 3,321 for 512 queries and 512 keys on v5e. dq depends on the
            order of the rows of the grid, which run one after the other on one core, also on chips with two cores.
        chip: the chip to plan for: "v4", "v5e", "v5p", "v6e" or "tpu7x". By default it is the one that JAX found. Give
            it to compile for a TPU on a machine without one, and to interpret with the tiles and limits of a chip.

    Example:
        >>> from longspan.engines.pallas_tpu import PallasTpu
        >>> q = k = v = jnp.ones((1, 16, 2, 8))
        >>> ls.attention(q, k, v, mask=ls.Causal(), engine=PallasTpu(interpret=True)).shape
        (1, 16, 2, 8)
    """

    name = "pallas_tpu"
    platform = "tpu"

    interpret: Any = False
    fused: bool | None = None
    chip: str | None = None

    def __post_init__(self) -> None:
        if self.chip is not None:
            chip_named(self.chip)

    @property
    def is_fused(self) -> bool:
        """Whether one backward kernel computes dq, dk and dv."""
        return self.fused is not False

    def chip_for(self, request: Request) -> TpuChip | None:
        """The chip to plan for; None if there is none, or if the kernels were never compiled for it."""
        if self.chip is not None:
            return chip_named(self.chip)
        if self.interpret or request.platform != "tpu":
            return None
        return chip_of_kind(_device_kind())

    def unsupported(self, request: Request) -> str | None:
        chip, dtype = self.chip_for(request), np.dtype(request.q.dtype).name
        if chip is None and not self.interpret:
            return _no_chip(request)
        if dtype not in DTYPES:
            return f"it supports {' and '.join(DTYPES)}, not {dtype}"
        if (head_dim := max(request.dims["H"], request.dims["Hv"])) > MAX_HEAD_DIM:
            return f"it supports a head dimension of at most {MAX_HEAD_DIM}, not {head_dim}"
        if chip is None or not request.has_pairs:
            return None
        return misfit(request, chip, *self.tiles(request), fused=self.is_fused, planned=request.layout is not None)

    def unproven(self, request: Request) -> str | None:
        chip = self.chip_for(request)
        if chip is None or chip.name in PROVEN:
            return None
        return (
            f"its kernels were compiled for {chip.name}, but nobody has reported a run on this chip. To run the "
            "kernels, pass engine='pallas_tpu'"
        )

    def tiles(self, request: Request) -> tuple[int, int]:
        if request.layout is not None:
            return request.layout.q_tile, request.layout.kv_tile
        chip = self.chip_for(request)
        if chip is None or not request.has_pairs:
            return min(INTERPRETED_TILE, -(-max(request.dims["T"], 1) // 16) * 16), INTERPRETED_TILE
        return tiles_for(request, chip, fused=self.is_fused)

    def notes(self, request: Request) -> tuple[str, ...]:
        if self.interpret:
            return ("the kernels are interpreted: that is slow, and for tests only",)
        return ()

    def report(self, request: Request, layout: BlockLayout | None, counts: Counts | None) -> ChipReport | None:
        """What `explain` prints about the chip; None without one. `layout` and `counts` are None where unknown."""
        chip = self.chip_for(request)
        if chip is None or not request.has_pairs:
            return None
        is_proven, tiles = chip.name in PROVEN, self.tiles(request)
        return ChipReport.of(chip, request, tiles, layout, counts, fused=self.is_fused, is_proven=is_proven)

    def temporary_bytes(self, request: Request) -> int | None:
        """The copies of q, k, v and out with heads before tokens."""
        return copied_bytes(request, *self.tiles(request)) or None

    def run(self, request: Request, layout: BlockLayout) -> Result:
        from longspan.engines.pallas_tpu.passes import run_forward

        return run_forward(request, layout, self.interpret, request.q.dtype)

    def forward(self, request: Request, layout: BlockLayout) -> Result:
        from longspan.engines.pallas_tpu.passes import run_forward

        # Gradients of bias and sinks may be wider than 16 bits. They must not be computed from a rounded output.
        wide = request.bias is not None or request.sinks is not None
        return run_forward(request, layout, self.interpret, np.float32 if wide else request.q.dtype)

    def backward(self, request: Request, layout: BlockLayout, result: Result, delta, dout):
        from longspan.engines.pallas_tpu.passes import run_backward

        residual = result.lse_residual
        dq, dk, dv, dbias = run_backward(
            request, layout, self.interpret, self.is_fused, result.lse, residual, delta, dout
        )
        if dbias is not None and not isinstance(request.bias, tuple):
            (dbias,) = dbias
        return dq, dk, dv, dbias

    def run_layer(self, request: Request, layout: BlockLayout, k, v, layer, *, heads_first: bool = False):
        """Reads stacks [layers, B, K, S, H] in place if whole tiles fill S; other stacks would have to be copied."""
        if not heads_first or layout.kv_len % layout.kv_tile or may_run_on_several_devices():
            return None  # XLA cannot split a kernel over devices by itself
        from longspan.engines.pallas_tpu.passes import run_forward_of_layer

        return run_forward_of_layer(request, layout, self.interpret, k, v, layer)[:2]


def _device_kind() -> str:
    """The name of the TPU, as JAX gives it."""
    return jax.devices("tpu")[0].device_kind


def _no_chip(request: Request) -> str:
    if request.platform == "tpu":
        return (
            f"its kernels were never compiled for {_device_kind()!r}, only for {known_chips()}. engine='xla' runs here"
        )
    return (
        f"it needs a TPU, but JAX's default backend here is {request.platform}. "
        "longspan.engines.PallasTpu(interpret=True) interprets the kernels on any platform, for tests; "
        "engine='xla' runs on every platform"
    )
