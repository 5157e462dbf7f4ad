"""The memory that the kernels of a call need, from the buffers that they allocate, before anything is compiled.

`call_sizes` runs the functions that build the kernels with arrays without values. The kernels themselves are not run:
`refs.Measured` notes their blocks and buffers instead.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from longspan.engines.door import PAIRS, record
from longspan.engines.pallas_tpu.chips import MIB, SMEM_LIMIT, TpuChip
from longspan.engines.pallas_tpu.plan import distinguishes_heads
from longspan.engines.request import Request

LANES, SUBLANES = 128, 8
KEPT = 256  # calls whose sizes are kept

# Bytes per pair of a visit for intermediate results, which the compiler spills to VMEM. Compiled for v5e and v6e, the
# forward kernel takes at most 5.4 in bfloat16 and 10.8 in float32, the backward kernels 8.6, and 26 in float32.
SPILLED = {2: dict(forward=8, backward=9, dkv=8, dq=8), 4: dict(forward=12, backward=28, dkv=28, dq=28)}
BY_QUERY = ("forward", "dq")  # kernels that compute all query heads of a row at once, the others one after the other

NAMES = dict(
    forward="forward kernel", backward="fused backward kernel", dkv="kernel of dk and dv", dq="kernel of dq"
)  # fmt: skip
CURES = dict(
    VMEM="Plan smaller tiles with `mask.layout(..., q_tile=, kv_tile=)`",
    SMEM="Plan larger tiles with `mask.layout(..., q_tile=, kv_tile=)`",
)

MAX_PAIRS = 256 * MIB


class KernelSizes(NamedTuple):
    """Bytes of one kernel."""

    vmem: int  # blocks, two of each, buffers, and the scores of a visit
    smem: int
    visit: int  # that each visit copies from HBM, and back
    row: int  # blocks that each row of the grid copies


class CallSizes(NamedTuple):
    """Bytes of a call: of its kernels by name, and of the arrays that its mask needs."""

    kernels: dict[str, KernelSizes]
    pairs: int  # one byte per pair, for rules that are arrays of pairs
    whole_registers: bool  # whether tiles of keys must fill the 128 lanes of registers
    indexes_arrays: bool  # whether it reads them at indices computed in a kernel

    @property
    def forward(self) -> KernelSizes:
        return self.kernels["forward"]


def call_sizes(request: Request, q_tile: int, kv_tile: int, *, fused: bool) -> CallSizes:
    """The sizes of a request's kernels with these tiles, forward and backward; a layout of the caller has its own."""
    leaves, structure = jax.tree.flatten(request)
    return _call_sizes(structure, tuple(map(_shape_of, leaves)), q_tile, kv_tile, fused)


def misfit(request: Request, chip: TpuChip, q_tile: int, kv_tile: int, *, fused: bool, planned: bool) -> str | None:
    """The reason why a call does not fit a chip with these tiles, `planned` by the caller or by the engine."""
    sizes = call_sizes(request, q_tile, kv_tile, fused=fused)
    if planned and (reason := _wrong_tiles(request, q_tile, kv_tile, sizes)):
        return reason
    if sizes.pairs > MAX_PAIRS:
        return (
            f"the mask needs {_mib(sizes.pairs)} for arrays with one byte per pair, and at most {_mib(MAX_PAIRS)} are "
            "supported. Define the rule by position or by arrays of one entry per token, or use engine='xla'"
        )
    if sizes.indexes_arrays:
        return (
            "a function of a Custom or ScoreBias rule reads an array at indices that depend on the positions of "
            "queries or keys, and the compiler for TPUs supports no such reads in a kernel. Indices by batch row and "
            "head are supported. For other indices use engine='xla'"
        )
    for name, kernel in sizes.kernels.items():
        for memory, used, limit in (("VMEM", kernel.vmem, chip.vmem_limit), ("SMEM", kernel.smem, SMEM_LIMIT)):
            if used > limit:
                return (
                    f"its {NAMES[name]} needs {_mib(used)} of {memory} with tiles of {q_tile} x {kv_tile}, and "
                    f"{chip.name} has {_mib(limit)} for a kernel. {CURES[memory]}, or use engine='xla'"
                )
    return None


def fits(request: Request, chip: TpuChip, q_tile: int, kv_tile: int, *, fused: bool) -> bool:
    """Whether all kernels of a call fit VMEM with these tiles."""
    sizes = call_sizes(request, q_tile, kv_tile, fused=fused)
    return max(kernel.vmem for kernel in sizes.kernels.values()) <= chip.vmem_limit


def copied_bytes(request: Request, q_tile: int, kv_tile: int) -> int:
    """Bytes of q, k, v and out with heads before tokens, of those that must be copied for that.

    Heads are padded to whole vector registers, tokens to whole tiles. One head, or one token, needs no other order.
    """
    B, T, S, N, K, H, Hv = request.dims.values()
    total = 0
    for tokens, heads, tile in ((T, N, q_tile), (S, K, kv_tile)):
        if min(tokens, heads) > 1 or tokens % tile:
            total += B * heads * -(-tokens // tile) * tile
    return total * (padded(H) + padded(Hv)) * np.dtype(request.q.dtype).itemsize


def padded(head_dim: int) -> int:
    """The lanes that a head takes."""
    return -(-head_dim // LANES) * LANES


def _wrong_tiles(request: Request, q_tile: int, kv_tile: int, sizes: "CallSizes") -> str | None:
    """The reason why a chip cannot run with the tiles of a layout."""
    dtype = np.dtype(request.q.dtype)
    of_queries = of_keys = SUBLANES * 4 // dtype.itemsize
    call = dtype.name
    if sizes.whole_registers:
        of_keys, call = LANES, f"{dtype.name} and a bias that has one number per pair or a table by distance"
    if q_tile % of_queries == 0 and kv_tile % of_keys == 0:
        return None
    cure = f"q_tile={-(-q_tile // of_queries) * of_queries}, kv_tile={-(-kv_tile // of_keys) * of_keys}"
    return (
        f"with {call}, q_tile must be a multiple of {of_queries} and kv_tile a multiple of {of_keys}, but the layout "
        f"has tiles of {q_tile} x {kv_tile}. Plan it with `mask.layout(..., {cure})`"
    )


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"


def _shape_of(x: Any) -> tuple[tuple[int, ...], Any]:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return tuple(x.shape), x.dtype
    return np.shape(x), np.asarray(x).dtype


@lru_cache(maxsize=KEPT)
def _call_sizes(structure: Any, shapes: tuple, q_tile: int, kv_tile: int, fused: bool) -> CallSizes:
    # `passes` imports Pallas, which takes a tenth of the time of `import longspan`.
    from longspan.engines.pallas_tpu.passes import run_backward, run_forward
    from longspan.engines.pallas_tpu.refs import Measured

    kernels: dict[str, KernelSizes] = {}
    answers: list[tuple[str, int]] = []
    notes: list[tuple[bool, bool]] = []

    def run(request: Request) -> None:
        request = request.with_scale().with_features().with_layout(q_tile, kv_tile)
        layout, dims = request.layout, request.dims
        assert layout is not None
        for answer in record(layout, dims["B"], dims["N"]).answers:
            answers.append((answer.kind, math.prod(answer.array.shape) * answer.array.dtype.itemsize))
        rows = layout.q_tile
        if not distinguishes_heads(request, layout):
            rows *= dims["N"] // dims["K"]

        def note(name: str, refs: Any) -> None:
            notes.append((refs.whole_registers, refs.indexes_arrays))
            name = name.removeprefix("longspan_")
            visited = rows if name in BY_QUERY else layout.q_tile
            spilled = SPILLED[np.dtype(request.q.dtype).itemsize][name]
            kernels[name] = _kernel_sizes(refs, spilled * visited * layout.kv_tile)

        measured = Measured(note)
        out, lse, residual, *_ = run_forward(request, layout, measured, request.q.dtype)
        if residual is None:
            residual = lse
        run_backward(request, layout, measured, fused, lse, residual, lse, out)

    jax.eval_shape(run, structure.unflatten([jax.ShapeDtypeStruct(*shape) for shape in shapes]))
    pairs = sum(size for kind, size in answers if kind == PAIRS)
    whole_registers, indexes_arrays = map(any, zip(*notes, strict=True))
    return CallSizes(kernels, pairs, whole_registers, indexes_arrays)


def _kernel_sizes(refs: Any, intermediates: int) -> KernelSizes:
    """The sizes of a kernel, from the blocks and buffers that it would allocate."""
    arrays = {name: (array.shape, array.dtype) for name, array in refs.arrays.items()}
    results = {name: (shape, dtype) for name, (shape, dtype, _) in refs.results.items()}
    specs = refs.specs | {name: spec for name, (_, _, spec) in refs.results.items()}
    blocks, smem = 0, 0
    vmem = intermediates
    for name, (shape, dtype) in (arrays | results).items():
        space, block = str(specs[name].memory_space), specs[name].block_shape
        if block is None:
            vmem += (space == "vmem") * _padded(shape, dtype)
        elif space == "smem":
            smem += 2 * _padded(block, dtype)
        else:
            blocks += _padded(block, dtype)
    visit = 0
    for name, buffer in refs.scratch.items():
        space = str(buffer.memory_space)
        if space not in ("vmem", "smem"):
            continue  # semaphores
        size = _padded(buffer.shape, buffer.dtype)
        vmem += (space == "vmem") * size
        smem += (space == "smem") * size
        if name.endswith(" buffers"):
            copies = 1 + (name.removesuffix(" buffers") in refs.aliases)
            visit += copies * size // 2
    return KernelSizes(vmem + 2 * blocks, smem, visit, blocks)


def _padded(shape: Any, dtype: Any) -> int:
    """The bytes of an array in registers' tiles; axes of a block that are None have one element."""
    sizes = [1 if size is None else size for size in shape]
    itemsize = np.dtype(dtype).itemsize
    *outer, second, last = [1, *sizes]
    sublanes = min(SUBLANES * 4 // itemsize, 1 << (second - 1).bit_length())
    return math.prod(outer) * -(-second // sublanes) * sublanes * -(-last // LANES) * LANES * itemsize
