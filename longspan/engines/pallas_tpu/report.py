"""What `explain(chip=)` prints about a call on a TPU: memory, copies, and cycles outside of visits."""

from dataclasses import dataclass, replace

import numpy as np

from longspan.engines.pallas_tpu.chips import SMEM_LIMIT, TpuChip
from longspan.engines.pallas_tpu.plan import distinguishes_heads
from longspan.engines.pallas_tpu.sizes import NAMES, call_sizes, padded
from longspan.engines.request import Request
from longspan.layout import BlockLayout
from longspan.tile_kinds import Counts


@dataclass(frozen=True)
class ChipReport:
    """A call of `pallas_tpu` on one chip, from static counts. Counts of visits are None where they depend on data.

    Example:
        >>> x = jax.ShapeDtypeStruct((1, 4096, 4, 64), jnp.bfloat16)
        >>> report = ls.explain(x, x, x, mask=ls.Causal(), chip="v5e").chip
        >>> report.chip, report.vmem_limit, report.lanes
        ('v5e', 16777216, 0.5)
    """

    chip: str
    is_proven: bool  # whether somebody has run the kernels on this chip
    vmem_bytes: dict[str, int]  # by kernel
    vmem_limit: int
    smem_bytes: dict[str, int]
    smem_limit: int
    lanes: float  # the share of the lanes of a head that hold numbers; heads are padded to multiples of 128
    copied_bytes: int | None = None  # from HBM, and results back, forward
    useful_products: float | None = None  # the share of products that are of allowed pairs and not of padding, forward
    row_share: float | None = None  # the share of the modelled time that rows take outside of visits, forward

    @classmethod
    def of(
        cls, chip: TpuChip, request: Request, tiles: tuple[int, int], layout: BlockLayout | None, counts: Counts | None,
        *, fused: bool, is_proven: bool,
    ) -> "ChipReport":  # fmt: skip
        """The report of a call with these tiles; `layout` and `counts` are None where they depend on data."""
        sizes = call_sizes(request, *tiles, fused=fused)
        H, Hv = request.dims["H"], request.dims["Hv"]
        report = cls(
            chip=chip.name,
            is_proven=is_proven,
            vmem_bytes={NAMES[name]: kernel.vmem for name, kernel in sizes.kernels.items()},
            vmem_limit=chip.vmem_limit,
            smem_bytes={NAMES[name]: kernel.smem for name, kernel in sizes.kernels.items()},
            smem_limit=SMEM_LIMIT,
            lanes=(H + Hv) / (padded(H) + padded(Hv)),
        )
        if counts is None or layout is None:
            return report
        B, N, heads = request.dims["B"], request.dims["N"], request.dims["K"]
        if distinguishes_heads(request, layout):
            heads = N
        copies = B * heads / _distinct(layout)
        rows, forward = layout.q_tiles * B * heads, sizes.forward
        visits = copies * (counts.full + counts.partial + counts.empty)
        q_rows = N // heads * layout.q_tile
        bundles = chip.visit_bundles(q_rows, layout.kv_tile, max(H, Hv), np.dtype(request.q.dtype).itemsize)
        costs = chip.model(
            (copies * counts.full, copies * counts.partial), rows, bundles, chip.own_bundles(q_rows), forward.visit
        )
        executed = (counts.full + counts.partial) * layout.q_tile * layout.kv_tile
        return replace(
            report,
            copied_bytes=round(visits * forward.visit + rows * forward.row),
            useful_products=report.lanes * counts.pairs / max(executed, 1),
            row_share=costs.share,
        )


def _distinct(layout: BlockLayout) -> int:
    """How many pairs of batch row and head the counts of a layout are summed over."""
    q, _ = layout.sides(xp=np)
    planes = np.array(list(layout.planes()))[-1] + 1
    return int(max(q.batch.size, planes[0]) * max(q.head.size, planes[1]))
