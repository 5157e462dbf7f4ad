"""The `pallas_tpu` engine: block-sparse attention in Pallas kernels for TPUs, forward and backward.

`operands` are the arrays that a kernel reads, `walk` runs a row over its tiles, `forward` and `backward` are the
kernels. Masks enter by `engines.door`: a kernel replays the answers to a rule's questions, and knows no rule by name.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.combine import Result, combine
from longspan.engines.contract import Engine
from longspan.engines.door import record
from longspan.engines.pallas_tpu import arrange
from longspan.engines.pallas_tpu.backward import BackwardArrays, backward_over_keys, backward_over_queries
from longspan.engines.pallas_tpu.bias import KernelBias
from longspan.engines.pallas_tpu.forward import forward
from longspan.engines.pallas_tpu.operands import Operands
from longspan.engines.pallas_tpu.plan import TpuPlan
from longspan.engines.request import Request
from longspan.layout import BlockLayout
from longspan.masks.sides import KEYS, QUERIES


@dataclass(frozen=True)
class PallasTpu(Engine):
    """Block-sparse attention on TPUs."""

    interpret: Any = False
    fused: bool | None = None
    chip: str | None = None
    name = "pallas_tpu"

    def tiles(self, request: Request) -> tuple[int, int]:
        dims = request.dims
        return min(128, -(-dims["T"] // 16) * 16), 128

    def run(self, request: Request, layout: BlockLayout) -> Result:
        return self._forward(request, layout, request.q.dtype)

    def forward(self, request: Request, layout: BlockLayout) -> Result:
        wide = request.bias is not None or request.sinks is not None
        return self._forward(request, layout, np.float32 if wide else request.q.dtype)

    def backward(self, request: Request, layout: BlockLayout, result: Result, delta, dout):
        plan = TpuPlan.of(request, layout, self.interpret)
        fused = self.fused is not False
        dq, dk, dv, dbias = _differentiate(plan, fused, request, layout, result.lse, result.lse_residual, delta, dout)
        if dbias is not None and not isinstance(request.bias, tuple):
            (dbias,) = dbias
        return dq, dk, dv, dbias

    def _forward(self, request: Request, layout: BlockLayout, out_dtype: Any) -> Result:
        plan = TpuPlan.of(request, layout, self.interpret, out_dtype)
        result = _attend(plan, request, layout)
        if request.sinks is None:
            return result
        sinks = jnp.broadcast_to(request.sinks.astype(np.float32), result.lse.shape)
        result = combine([result._replace(out=result.out.astype(np.float32)), Result(None, sinks)])
        return result._replace(out=result.out.astype(out_dtype))


def _attend(plan: TpuPlan, request: Request, layout: BlockLayout) -> Result:
    mask = record(layout, plan.B, plan.N)
    bias = KernelBias.of_request(request, layout, len(mask.answers))
    garbage = arrange.has_garbage(request.v)
    operands = Operands.of(plan, layout, QUERIES, mask, bias, garbage)
    q = arrange.queries_by_head(plan, request.q)
    k, v = arrange.keys_by_head(plan, request.k), arrange.keys_by_head(plan, request.v)
    words = arrange.dropout_words(plan, request.dropout, layout)
    out, lse, residual = forward(operands, q, k, v, words)
    if residual is not None:
        residual = arrange.statistic_back(plan, residual)
    return Result(arrange.queries_back(plan, out), arrange.statistic_back(plan, lse), residual)


def _differentiate(plan: TpuPlan, fused: bool, request: Request, layout: BlockLayout, lse, lse_residual, delta, dout):
    """(dq, dk, dv, dbias)."""
    mask = record(layout, plan.B, plan.N)
    bias = KernelBias.of_request(request, layout, len(mask.answers))
    garbage = arrange.has_garbage(request.q, request.k, request.v, dout)
    k, v = arrange.keys_by_head(plan, request.k), arrange.keys_by_head(plan, request.v)
    x = BackwardArrays(
        q=arrange.queries_by_head(plan, request.q),
        k=k,
        v=v,
        dout=arrange.queries_by_head(plan, dout),
        statistics=_statistics(plan, request, layout, lse, lse_residual, delta),
    )
    if not fused:
        rows = Operands.of(plan, layout, QUERIES, mask, bias, garbage)
        dq = backward_over_queries(rows, x)
    rows = Operands.of(plan, layout.transpose(), KEYS, mask, bias, garbage)
    sums, dk, dv, dbias = backward_over_keys(rows, x, fused=fused)
    if fused:
        dq = sums * plan.scale
    dq = arrange.queries_back(plan, dq)
    return dq, arrange.keys_back(plan, dk, k.dtype), arrange.keys_back(plan, dv, v.dtype), dbias


def _statistics(plan: TpuPlan, request: Request, layout: BlockLayout, lse, lse_residual, delta) -> dict[str, Any]:
    """The numbers of each query that the backward kernels read."""
    # Queries without keys have lse = -inf. Any finite value will do, because all their weights are masked. A very low
    # sink must not make the weights of masked scores greater than 0.
    level = jnp.where(jnp.isfinite(lse), lse, 0)
    if not plan.biased:
        level = jnp.maximum(level, plan.first_max)
    by_query = dict(lse=level * plan.log_base, delta=delta)
    if plan.biased:
        by_query["residual"] = lse_residual
    found = {name: arrange.statistic_by_tile(plan, x) for name, x in by_query.items()}
    for n, words in enumerate(arrange.dropout_words(plan, request.dropout, layout)):
        found[f"word {n}"] = words
    return found
