"""Both passes of a call: arranges the arrays, runs the kernels, and puts the results in the order of the call."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from longspan.combine import Result, combine
from longspan.engines.door import RecordedMask, record
from longspan.engines.pallas_tpu import arrange
from longspan.engines.pallas_tpu.backward import BackwardArrays, backward_over_keys, backward_over_queries
from longspan.engines.pallas_tpu.batching import folding_vmap
from longspan.engines.pallas_tpu.bias import KernelBias
from longspan.engines.pallas_tpu.forward import forward
from longspan.engines.pallas_tpu.operands import Operands
from longspan.engines.pallas_tpu.plan import TpuPlan
from longspan.engines.request import Request
from longspan.layout import BlockLayout
from longspan.masks.sides import KEYS, QUERIES


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PassArrays:
    """The arrays of a call that have all batch rows. The last four are those of the backward pass."""

    array_axes: ClassVar = dict(
        q="BTNH", k="BSKH", v="BSKH", lse="BTN", lse_residual="BTN", delta="BTN", dout="BTNH"
    )  # fmt: skip

    q: Any
    k: Any
    v: Any
    dropout: Any = None
    lse: Any = None
    lse_residual: Any = None
    delta: Any = None
    dout: Any = None

    @classmethod
    def of(cls, request: Request, **more: Any) -> "PassArrays":
        """The arrays of a request."""
        return cls(request.q, request.k, request.v, request.dropout, **more)


def run_forward(request: Request, layout: BlockLayout, interpret: Any, out_dtype: Any) -> Result:
    """The forward pass, with the sinks."""

    def run(x: PassArrays, bias: Any, layout: BlockLayout) -> tuple[Any, Any, Any]:
        plan = TpuPlan.of(request, x, layout, interpret, out_dtype)
        garbage = garbage_of(plan, x.v)
        return _forward_by_head(plan, x, bias, layout, garbage, *_keys_and_values(plan, x))

    out, lse, residual = folding_vmap(run)(PassArrays.of(request), request.bias, layout)
    return with_sinks(request, Result(out, lse, residual))


def run_forward_of_layer(request: Request, layout: BlockLayout, interpret: Any, k: Any, v: Any, layer: Any) -> Result:
    """The forward pass with one layer of stacks [layers, B, K, S, X], read in place."""
    x = PassArrays.of(request)
    plan = TpuPlan.of(request, x, layout, interpret, request.q.dtype)
    garbage = jnp.ones((plan.B,), np.int32)
    return with_sinks(request, Result(*_forward_by_head(plan, x, request.bias, layout, garbage, k, v, layer)))


def run_backward(
    request: Request, layout: BlockLayout, interpret: Any, fused: bool, lse: Any, lse_residual: Any, delta: Any,
    dout: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """(dq, dk, dv, dbias), dbias a tuple with the gradient of every term, or None."""

    def run(x: PassArrays, bias: Any, layout: BlockLayout) -> tuple[Any, Any, Any, Any]:
        return _differentiate(TpuPlan.of(request, x, layout, interpret, x.q.dtype), fused, x, bias, layout)

    x = PassArrays.of(request, lse=lse, lse_residual=lse_residual, delta=delta, dout=dout)
    # The gradient of a bias is summed over the batch rows of each example.
    return folding_vmap(run, folds=request.bias is None)(x, request.bias, layout)


def with_sinks(request: Request, result: Result) -> Result:
    """A result with the sinks in its softmax."""
    if request.sinks is None:
        return result
    sinks = jnp.broadcast_to(request.sinks.astype(np.float32), result.lse.shape)
    combined = combine([result._replace(out=result.out.astype(np.float32)), Result(None, sinks)])
    return combined._replace(out=combined.out.astype(result.out.dtype))


def garbage_of(plan: TpuPlan, *arrays: Any) -> Any:
    """int32 [B]: whether the kernels must look for garbage in keys that no query sees.

    With one tile of queries, to read all values beforehand would take as long as attention itself.
    """
    if plan.q_tiles == 1:
        return jnp.ones((plan.B,), np.int32)
    return arrange.has_garbage(*arrays)


def _keys_and_values(plan: TpuPlan, x: PassArrays) -> tuple[Any, Any]:
    return arrange.keys_by_head(plan, x.k), arrange.keys_by_head(plan, x.v)


def _forward_by_head(
    plan: TpuPlan, x: PassArrays, bias: Any, layout: BlockLayout, garbage: Any, k: Any, v: Any, layer: Any = None
) -> tuple[Any, Any, Any]:
    """(out [B, T, N, Hv], lse [B, T, N], its residual or None), of keys and values by head."""
    mask = record(layout, plan.B, plan.N)
    kernel_bias = KernelBias(bias, plan, layout, len(mask.answers))
    operands = Operands.of(plan, layout, QUERIES, mask, kernel_bias, garbage, layer)
    words = arrange.dropout_words(plan, x.dropout, layout)
    out, lse, residual = forward(operands, arrange.queries_by_head(plan, x.q), k, v, words)
    if residual is not None:
        residual = arrange.statistic_back(plan, residual)
    return arrange.queries_back(plan, out), arrange.statistic_back(plan, lse), residual


def _differentiate(plan: TpuPlan, fused: bool, x: PassArrays, bias: Any, layout: BlockLayout) -> tuple:
    mask = record(layout, plan.B, plan.N)
    kernel_bias = KernelBias(bias, plan, layout, len(mask.answers))
    garbage = garbage_of(plan, x.q, x.k, x.v, x.dout)
    k, v = _keys_and_values(plan, x)
    q, dout = arrange.queries_by_head(plan, x.q), arrange.queries_by_head(plan, x.dout)
    arrays = BackwardArrays(q, k, v, dout, _statistics(plan, x, layout))
    operands_of = partial(_operands_of_pass, plan, layout, mask, kernel_bias, garbage)
    sums, dk, dv, dbias = backward_over_keys(operands_of(KEYS), arrays, fused=fused)
    if fused:
        dq = (sums * plan.scale).astype(x.q.dtype)
    else:
        dq = backward_over_queries(operands_of(QUERIES), arrays)
    dk, dv = arrange.keys_back(plan, dk, x.k.dtype), arrange.keys_back(plan, dv, x.v.dtype)
    return arrange.queries_back(plan, dq), dk, dv, dbias


def _operands_of_pass(
    plan: TpuPlan, layout: BlockLayout, mask: RecordedMask, bias: KernelBias, garbage: Any, axis: int
) -> Operands:
    rows = layout if axis == QUERIES else layout.transpose()
    return Operands.of(plan, rows, axis, mask, bias, garbage)


def _statistics(plan: TpuPlan, x: PassArrays, layout: BlockLayout) -> dict[str, Any]:
    """The numbers of each query that the backward kernels read, by tile."""
    # Queries without keys have lse = -inf. Any finite value will do, because all their weights are masked. A very low
    # sink must not make the weights of masked scores greater than 0. NaN stays, so that the gradients are NaN as well.
    lse = jnp.where(jnp.isneginf(x.lse), 0, x.lse)
    if not plan.biased:
        lse = jnp.maximum(lse, plan.first_max)
    by_query = dict(lse=lse * plan.log_base, delta=x.delta)
    if plan.biased:
        by_query["residual"] = x.lse_residual
    found = {name: arrange.statistic_by_tile(plan, array) for name, array in by_query.items()}
    words = arrange.dropout_words(plan, x.dropout, layout)
    return found | {f"word {n}": word for n, word in enumerate(words)}
