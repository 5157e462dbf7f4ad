"""The `xla` engine: block-sparse attention in plain JAX. O(T) memory, forward and backward, anywhere JAX runs.

The outer loop runs over a few heads at a time, the next one over tiles of queries, and the inner one over the key tiles
that the layout lists, several neighbouring tiles at a time, with an online softmax. Operands are read and results are
written in place; only the keys and values of the current heads are copied, so that each head's are contiguous. The
backward pass recomputes tiles from (out, lse) in the same order and accumulates dk and dv in place, so it needs no
transposed layout. No T×T array exists, and the size of the program does not depend on T.
"""

from dataclasses import replace

from longspan.biases import terms
from longspan.combine import Result
from longspan.engines.contract import Engine
from longspan.engines.request import Request
from longspan.engines.xla.backward import backward
from longspan.engines.xla.forward import forward
from longspan.engines.xla.parts import TilePlan
from longspan.layout import BlockLayout

# By platform: queries per tile, keys per tile, key tiles per visit, heads per step.
# "cpu" was measured on 2 AVX2 cores with 8 heads of 64 in float32 (benchmarks/tiles.py). Larger visits amortise the
# cost of a step; smaller visits waste less at the edges of a mask. XLA gains little from a second core within one
# product of this size, but it runs independent products in parallel: hence several heads per step. The values of the
# other platforms fit their matrix units and were not measured.
TILES = {"cpu": (128, 128, 5, 4), "gpu": (128, 128, 4, 1), "tpu": (256, 256, 4, 1)}

# Up to this many intervals per row may be long ones, as those of windows. More intervals are single blocks of a table:
# visiting their neighbouring tiles too takes 3 to 4 times as long.
FEW_INTERVALS = 4


class Xla(Engine):
    """Block-sparse attention in plain JAX. It supports every feature on every platform."""

    name = "xla"

    def tiles(self, request: Request) -> tuple[int, int]:
        """The platform's tiles, smaller for short sequences."""
        q_tile, kv_tile, *_ = TILES.get(request.platform, TILES["cpu"])
        dims = request.dims
        return min(q_tile, max(dims["T"], 1)), min(kv_tile, max(dims["S"], 1))

    def run(self, request: Request, layout: BlockLayout) -> Result:
        floats = (request.q, request.k, request.v, terms(request.bias), request.sinks)
        return Result(*forward(_tile_plan(request, layout))(floats, (layout.lowered(), request.dropout)))

    def backward(self, request: Request, layout: BlockLayout, result: Result, delta, dout):
        floats = (request.q, request.k, request.v, terms(request.bias))
        backward_pass = backward(_tile_plan(request, layout))
        by_query = result.lse, result.lse_residual, delta, dout
        dq, dk, dv, dbias = backward_pass(floats, (layout.lowered(), request.dropout), *by_query)
        if request.bias is None:
            dbias = None
        elif not isinstance(request.bias, tuple):
            (dbias,) = dbias
        return dq, dk, dv, dbias


ENGINE = Xla()


def _tile_plan(request: Request, layout: BlockLayout) -> TilePlan:
    _, _, tiles_per_visit, max_heads = TILES.get(request.platform, TILES["cpu"])
    if layout.repeats or layout.starts.shape[3] > FEW_INTERVALS:  # the layout lists single tiles, without neighbours
        tiles_per_visit = 1
    tiles_per_visit = min(tiles_per_visit, layout.kv_tiles)
    plan = TilePlan(
        **request.dims,
        scale=request.scale,
        soft_cap=request.soft_cap,
        width=tiles_per_visit * layout.kv_tile,
        per_head=layout.starts.shape[1] > 1,
    )
    if plan.per_head or not plan.copies(layout):
        return plan
    return replace(plan, heads_per_step=max(n for n in range(1, max_heads + 1) if plan.K % n == 0))
