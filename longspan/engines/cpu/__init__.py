"""The `cpu` engine: a native block-sparse kernel, forward and backward, called through the XLA FFI (see native/).

`operands` translates a request for the kernel, `program` its mask and `biases` its bias. `call` makes the foreign call
and defines how `vmap` batches it. `library` finds and loads the kernel. `product` and `put` are kernels for decoding.
"""

from dataclasses import replace

import numpy as np

from longspan.combine import Result
from longspan.engines.contract import Engine
from longspan.engines.cpu import library
from longspan.engines.cpu.biases import KernelBiases, differentiable_biases, kernel_biases, unsupported_bias
from longspan.engines.cpu.call import call, call_layer
from longspan.engines.cpu.operands import bit_bytes, dense_bit_bytes, prepare
from longspan.engines.cpu.program import unsupported_rules
from longspan.engines.request import Request
from longspan.layout import BlockLayout

DTYPES = ("float32", "bfloat16", "float16", "float64")
MAX_HEAD_DIM = 256
MAX_BIT_BYTES = 1 << 30  # of mask bits that JAX computes for the kernel: users do not expect more temporary memory
TILE = 128  # slots per side that the kernel handles at once; it splits larger tiles of a given layout


class Cpu(Engine):
    """Supports every feature of the reference on CPUs, except biases that only JAX can compute."""

    name = "cpu"

    def unsupported(self, request: Request) -> str | None:
        if request.platform != "cpu":
            return f"it runs on CPUs, and JAX's default backend here is {request.platform}"
        if np.dtype(request.q.dtype).name not in DTYPES:
            return f"it supports {', '.join(DTYPES)}, not {np.dtype(request.q.dtype).name}"
        if (head_dim := max(request.dims["H"], request.dims["Hv"])) > MAX_HEAD_DIM:
            return f"it supports a head dimension of at most {MAX_HEAD_DIM}, not {head_dim}"
        return unsupported_bias(request) or _too_many_bits(request) or library.missing()

    def tiles(self, request: Request) -> tuple[int, int]:
        """The kernel's own tiles, smaller for short sequences."""
        return min(TILE, max(request.dims["T"], 1)), min(TILE, max(request.dims["S"], 1))

    def notes(self, request: Request) -> tuple[str, ...]:
        return tuple(
            f"the native kernel cannot evaluate {part!r}. JAX evaluates it in the visited tiles and passes one "
            "bit per pair to the kernel"
            for part in unsupported_rules(request.mask)
        )

    def temporary_bytes(self, request: Request) -> int | None:
        return bit_bytes(request, *self.tiles(request)) or None

    def run(self, request: Request, layout: BlockLayout):
        return _forward("forward", request, layout)

    def run_layer(self, request: Request, layout: BlockLayout, k, v, layer, *, heads_first: bool = False):
        """The kernel takes the steps between slots and between heads as numbers, so it reads both orders in place."""
        plan, floats, operands = prepare(request, layout, kernel_biases(request, layout), layer)
        plan = replace(plan, heads_first=heads_first)
        starts, stops, *rest = operands
        return tuple(call_layer(plan, request.q, k, v, (starts, stops, *floats, *rest))[:2])

    def forward(self, request: Request, layout: BlockLayout) -> Result:
        # Gradients of bias and sinks may be wider than 16 bits. They must not be computed from a rounded output.
        if request.q.dtype.itemsize == 2 and (request.bias is not None or request.sinks is not None):
            return _forward("wide_forward", request, layout, by_tiles=True)
        return _forward("forward", request, layout, by_tiles=True)

    def backward(self, request: Request, layout: BlockLayout, result: Result, delta, dout):
        biases, to_gradient = differentiable_biases(request, layout)
        plan, floats, operands = prepare(request, layout, biases)
        qkv = request.q, request.k, request.v
        by_query = result.lse, result.lse_residual, dout, delta
        dq, dk, dv, *dslopes = call("backward", plan, qkv, floats, operands, by_query)
        array, table, slopes = None, None, None
        if biases.array is not None:
            (array,) = call("bias_gradient", plan, qkv, floats, operands, by_query)
        if biases.table is not None:
            (table,) = call("table_gradient", plan, qkv, floats, operands, by_query)
            table = table.reshape(biases.table.shape)
        if dslopes:  # [B, T, N]
            slopes = dslopes[0].sum((0, 1))
        return dq, dk, dv, to_gradient(KernelBiases(array, table, slopes))


ENGINE = Cpu()
library.register()


def _too_many_bits(request: Request) -> str | None:
    """The reason to refuse a mask whose unsupported rules would need too many bits; None if there is none."""
    rules = unsupported_rules(request.mask)
    if not rules or dense_bit_bytes(request) <= MAX_BIT_BYTES:  # an upper bound that is cheap to compute
        return None
    needed = bit_bytes(request, *ENGINE.tiles(request))
    if needed <= MAX_BIT_BYTES:
        return None
    return (
        f"its native kernel cannot evaluate {rules[0]!r}. JAX must evaluate this rule first and store one bit for "
        f"every pair of the tiles that may be visited. The bits take {needed / 2**30:.1f} GiB, and the limit is "
        f"{MAX_BIT_BYTES / 2**30:.0f} GiB. Use engine='xla', which stores no bits, or compose the rule with a static "
        "`Window` or `Chunk` by `&`"
    )


def _forward(kind: str, request: Request, layout: BlockLayout, *, by_tiles: bool = False) -> Result:
    plan, floats, operands = prepare(request, layout, kernel_biases(request, layout))
    return Result(*call(kind, replace(plan, by_tiles=by_tiles), (request.q, request.k, request.v), floats, operands))
