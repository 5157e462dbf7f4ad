"""The `cpu` engine: a native block-sparse kernel, forward and backward, called through the XLA FFI (see native/).

`operands` turns a request into what the kernel reads, `program` the mask, `biases` the bias; `call` teaches JAX how
such a call is batched and sharded; `library` finds the kernel.
"""

from dataclasses import replace

import numpy as np

from longspan.combine import Result
from longspan.engines.contract import Engine
from longspan.engines.cpu import library
from longspan.engines.cpu.biases import Biases, biases_of, differentiable_biases, unknown_bias
from longspan.engines.cpu.call import call, call_layer
from longspan.engines.cpu.operands import bit_bytes, dense_bit_bytes, prepare
from longspan.engines.cpu.program import unknown
from longspan.engines.request import Request
from longspan.layout import BlockLayout

DTYPES = ("float32", "bfloat16", "float16", "float64")
MOST_HEAD_SIZE = 256
MOST_BIT_BYTES = 1 << 30  # for rules that travel as bits: more than that is a surprise
TILE = 128  # what the kernel handles at once; larger tiles of a given layout are cut up inside


class Cpu(Engine):
    """Everything the reference computes, on CPUs, if the native library is there."""

    name = "cpu"

    def unsupported(self, request: Request) -> str | None:
        if request.platform != "cpu":
            return f"it runs on CPUs, and this runs on {request.platform}"
        if np.dtype(request.q.dtype).name not in DTYPES:
            return f"it computes {', '.join(DTYPES)}, not {np.dtype(request.q.dtype).name}"
        if (size := max(request.dims["H"], request.dims["Hv"])) > MOST_HEAD_SIZE:
            return f"its heads have at most {MOST_HEAD_SIZE} elements, not {size}"
        return unknown_bias(request) or _too_many_bits(request) or library.missing()

    def tiles(self, request: Request) -> tuple[int, int]:
        """The kernel's own tiles, smaller for short sides."""
        return min(TILE, max(request.dims["T"], 1)), min(TILE, max(request.dims["S"], 1))

    def notes(self, request: Request) -> tuple[str, ...]:
        return tuple(
            f"the kernel has no word for {part!r}: its truth travels as one bit for each pair of a visited tile"
            for part in unknown(request.mask)
        )

    def temporary_bytes(self, request: Request) -> int | None:
        return bit_bytes(request, *self.tiles(request)) or None

    def run(self, request: Request, layout: BlockLayout):
        return _forward("forward", request, layout)

    def run_layer(self, request: Request, layout: BlockLayout, k, v, layer):
        plan, floats, operands = prepare(request, layout, biases_of(request, layout), layer)
        starts, stops, *rest = operands
        return tuple(call_layer(plan, request.q, k, v, (starts, stops, *floats, *rest))[:2])

    def forward(self, request: Request, layout: BlockLayout) -> Result:
        # Gradients of bias and sinks may be wider than 16 bits, so then they must not be made from a rounded output.
        wide = (request.bias is not None or request.sinks is not None) and request.q.dtype.itemsize == 2
        return _forward("wide_forward" if wide else "forward", request, layout, by_tiles=True)

    def backward(self, request: Request, layout: BlockLayout, result: Result, delta, dout):
        biases, to_gradient = differentiable_biases(request, layout)
        plan, floats, operands = prepare(request, layout, biases)
        qkv, own = (request.q, request.k, request.v), (result.lse, result.lse_residual, dout, delta)
        dq, dk, dv, *by_query = call("backward", plan, qkv, floats, operands, own)
        array, table = None, None
        if biases.array is not None:
            (array,) = call("bias_gradient", plan, qkv, floats, operands, own)
        if biases.table is not None:
            (table,) = call("table_gradient", plan, qkv, floats, operands, own)
            table = table.reshape(biases.table.shape)
        slopes = by_query[0].sum((0, 1)) if by_query else None
        return dq, dk, dv, to_gradient(Biases(array, table, slopes))


ENGINE = Cpu()
library.register()


def _too_many_bits(request: Request) -> str | None:
    """Why the rules that the kernel does not know cannot travel as bits, if they are too many."""
    rules = unknown(request.mask)
    if not rules or dense_bit_bytes(request) <= MOST_BIT_BYTES:  # what is skipped only makes it less
        return None
    wanted = bit_bytes(request, *ENGINE.tiles(request))
    if wanted <= MOST_BIT_BYTES:
        return None
    return (
        f"its kernel has no word for {rules[0]!r}, whose truth would travel as one bit for each pair of every tile "
        f"that may be visited: {wanted / 2**30:.1f} GiB, and {MOST_BIT_BYTES / 2**30:.0f} GiB is the most. `xla` keeps "
        "no bits; a static `Window` or `Chunk` beside the rule, with `&`, makes them fewer"
    )


def _forward(kind: str, request: Request, layout: BlockLayout, *, by_tiles: bool = False) -> Result:
    plan, floats, operands = prepare(request, layout, biases_of(request, layout))
    return Result(*call(kind, replace(plan, by_tiles=by_tiles), (request.q, request.k, request.v), floats, operands))
