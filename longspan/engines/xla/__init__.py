"""The `xla` engine: block-sparse attention in plain JAX. O(T) memory, forward and backward, anywhere JAX runs.

One loop over a few heads at a time, inside it one over tiles of queries, inside that one over the key tiles that the
layout lists, several neighbouring tiles at a time, with an online softmax. Operands are read and results written where
they lie; only these few heads' keys and values are copied, each head's side by side. The backward pass recomputes tiles
from (out, lse) in the same order and adds up dk and dv in place, so it needs no transposed layout. Nothing T×T exists,
and the program does not grow with T.
"""

from dataclasses import replace

from longspan.biases import terms
from longspan.combine import Result
from longspan.engines.contract import Engine
from longspan.engines.request import Request
from longspan.engines.xla.backward import backward
from longspan.engines.xla.forward import forward
from longspan.engines.xla.parts import Plan
from longspan.layout import BlockLayout

# By platform: queries in a tile, keys in a tile, how many key tiles are visited at once, how many heads side by side.
# "cpu" was measured on 2 AVX2 cores, 8 heads of 64, f32 (benchmarks/tiles.py): larger visits amortise the cost of a
# step, smaller ones waste less at the edges of a mask. XLA gains little from a second core in one product of this size,
# but runs products that do not wait for each other at once, hence the heads. The others are the shapes that their
# matrix units like, not measured.
TILES = {"cpu": (128, 128, 5, 4), "gpu": (128, 128, 4, 1), "tpu": (256, 256, 4, 1)}

# A row of so many intervals may be long ones, as of windows; of more they are the single blocks of a table, of which
# visiting their neighbours too takes 3 to 4 times as long.
FEW_INTERVALS = 4


class Xla(Engine):
    """Block-sparse attention in plain JAX; everything, everywhere."""

    name = "xla"

    def tiles(self, request: Request) -> tuple[int, int]:
        """The platform's tiles, smaller for short sides."""
        q_tile, kv_tile, *_ = TILES.get(request.platform, TILES["cpu"])
        dims = request.dims
        return min(q_tile, max(dims["T"], 1)), min(kv_tile, max(dims["S"], 1))

    def run(self, request: Request, layout: BlockLayout) -> Result:
        floats = (request.q, request.k, request.v, terms(request.bias), request.sinks)
        return Result(*forward(_plan(request, layout))(floats, (layout.lowered(), request.dropout)))

    def backward(self, request: Request, layout: BlockLayout, result: Result, delta, dout):
        floats = (request.q, request.k, request.v, terms(request.bias))
        run = backward(_plan(request, layout))
        given = result.lse, result.lse_residual, delta, dout
        dq, dk, dv, dbias = run(floats, (layout.lowered(), request.dropout), *given)
        if not isinstance(request.bias, tuple):
            dbias = dbias[0] if dbias else None
        return dq, dk, dv, dbias


ENGINE = Xla()


def _plan(request: Request, layout: BlockLayout) -> Plan:
    _, _, group, heads = TILES.get(request.platform, TILES["cpu"])
    # Layouts that list tiles one by one have few neighbours to visit together.
    listed = layout.repeats or layout.starts.shape[3] > FEW_INTERVALS
    group = 1 if listed else min(group, layout.kv_tiles)
    plan = Plan(
        **request.dims,
        scale=request.scale,
        soft_cap=request.soft_cap,
        width=group * layout.kv_tile,
        per_head=layout.starts.shape[1] > 1,
    )
    if plan.per_head or not plan.copies(layout):
        return plan
    return replace(plan, together=max(n for n in range(1, heads + 1) if plan.K % n == 0))
