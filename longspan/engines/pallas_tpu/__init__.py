"""The `pallas_tpu` engine: block-sparse attention in Pallas kernels for TPUs, forward and backward.

`passes` arranges a call for the kernels of `forward` and `backward`. `operands` are the arrays that a kernel reads,
`walk` runs a row of the grid over its tiles. Masks enter by `engines.door`: a kernel replays the answers to a rule's
questions, and has no code for any rule.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from longspan.combine import Result
from longspan.engines.contract import Engine
from longspan.engines.pallas_tpu.passes import run_backward, run_forward, run_forward_of_layer
from longspan.engines.request import Request
from longspan.layout import BlockLayout


@dataclass(frozen=True)
class PallasTpu(Engine):
    """Block-sparse attention on TPUs."""

    name = "pallas_tpu"

    interpret: Any = False
    fused: bool | None = None
    chip: str | None = None

    def tiles(self, request: Request) -> tuple[int, int]:
        dims = request.dims
        return min(128, -(-dims["T"] // 16) * 16), 128

    def run(self, request: Request, layout: BlockLayout) -> Result:
        return run_forward(request, layout, self.interpret, request.q.dtype)

    def forward(self, request: Request, layout: BlockLayout) -> Result:
        # Gradients of bias and sinks may be wider than 16 bits. They must not be computed from a rounded output.
        wide = request.bias is not None or request.sinks is not None
        return run_forward(request, layout, self.interpret, np.float32 if wide else request.q.dtype)

    def backward(self, request: Request, layout: BlockLayout, result: Result, delta, dout):
        fused, residual = self.fused is not False, result.lse_residual
        dq, dk, dv, dbias = run_backward(request, layout, self.interpret, fused, result.lse, residual, delta, dout)
        if dbias is not None and not isinstance(request.bias, tuple):
            (dbias,) = dbias
        return dq, dk, dv, dbias

    def run_layer(self, request: Request, layout: BlockLayout, k, v, layer, *, heads_first: bool = False):
        """Reads stacks [layers, B, K, S, H] in place if whole tiles fill S; other stacks would have to be copied."""
        if not heads_first or layout.kv_len % layout.kv_tile:
            return None
        return run_forward_of_layer(request, layout, self.interpret, k, v, layer)[:2]
