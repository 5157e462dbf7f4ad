"""The TPU chips that the kernels are compiled for: their limits, and a static model of the kernels' time on them.

Nothing here was measured on a chip. Bundles are instructions that a compiled kernel issues, one per cycle at best: they
are counted in the kernel's final schedule. The model adds

    visits · max(bundles of a visit, cycles of its copies)  +  rows · (a row's own bundles + exposed copies)

for the visits of one pass. Rows begin their copies while the row before ends, so only what takes longer than the last
visit and a row's own bundles is exposed. The model's cycles are a lower bound of real ones, and are never shown as
times. Only shares and the order of alternatives are used: the tiles of each chip, and a row's own share in `explain`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MIB = 1 << 20
SMEM_LIMIT = MIB
LATENCY = 1e-6  # seconds from the start of a copy to its first bytes, assumed for every chip
MEASURED_ROWS, MEASURED_KEYS = 512, 512  # the tile whose bundles the records hold
MEASURED_HEAD = 128

Count = int | float


class Bundles(NamedTuple):
    """Bundles of one kernel at 512 query rows and 512 keys, heads of 128, bfloat16, `Causal()`."""

    full: int
    partial: int


class RowCosts(NamedTuple):
    """The modelled cycles of one pass, of visits and of rows' own cost."""

    visits: float
    rows: float

    @property
    def share(self) -> float:
        """The share of rows' own cost."""
        return self.rows / max(self.visits + self.rows, 1)


@dataclass(frozen=True)
class TpuChip:
    """One TPU chip, or one of its cores where kernels run on one core.

    Attributes:
        name: as `PallasTpu(chip=)` takes it.
        device_kinds: the names that JAX gives to the chip's devices.
        clock: cycles per second, from the published peak and the size of the matrix units.
        bandwidth: bytes per second between HBM and one core, published.
        vmem_limit: bytes that the compiler grants to a kernel by default.
        matrix_width: the side of a matrix unit. A product of heads up to this size is one pass.
        forward, fused: bundles of a visit of the forward kernel and of the fused backward kernel.
        row: bundles at the begin and the end of a row of the forward kernel.
        q_rows: query rows of a visit that the model prefers: those of all query heads that share a key/value head.
        keys: keys of a visit that the model prefers.
        rows_factor, keys_factor: bundles per pair, relative to 512×512, by query rows and by keys of a visit.
    """

    name: str
    device_kinds: tuple[str, ...]
    clock: float
    bandwidth: float
    vmem_limit: int
    matrix_width: int
    forward: Bundles
    fused: Bundles
    row: int
    q_rows: int
    keys: int
    rows_factor: tuple[tuple[int, float], ...]
    keys_factor: tuple[tuple[int, float], ...]

    def visit_bundles(self, rows: int, keys: int, head_dim: int = MEASURED_HEAD, itemsize: int = 2) -> tuple:
        """(FULL, PARTIAL) bundles of a forward visit of other sizes, scaled from the counted ones."""
        area = rows * keys / (MEASURED_ROWS * MEASURED_KEYS)
        factor = area * _factor(self.rows_factor, rows) * _factor(self.keys_factor, keys)
        factor *= -(-head_dim // self.matrix_width)
        if itemsize == 4:
            factor *= 6  # passes of a float32 product in full precision
        return self.forward.full * factor, self.forward.partial * factor

    def model(
        self, visits: Sequence[Count], rows: Count, bundles: Sequence[Count], own: Count, visit_bytes: int
    ) -> RowCosts:
        """The cycles of (FULL, PARTIAL) visits, each of which copies `visit_bytes`, and of rows' own bundles."""
        copies = visit_bytes / self.bandwidth * self.clock
        busy = sum(count * max(cost, copies) for count, cost in zip(visits, bundles, strict=True))
        exposed = max(0.0, copies + LATENCY * self.clock - (bundles[1] + own))
        return RowCosts(busy, rows * (own + exposed))

    def own_bundles(self, rows: int) -> float:
        """The bundles at the begin and the end of a row of the grid with this number of query rows."""
        return self.row * rows / MEASURED_ROWS


def chip_named(name: str) -> TpuChip:
    """The record of a chip.

    Example:
        >>> chip_named("v5e").vmem_limit // 2**20
        16
    """
    if name not in CHIPS:
        raise ValueError(f"chip={name!r} is not one of {known_chips()}.")
    return CHIPS[name]


def chip_of_kind(device_kind: str) -> TpuChip | None:
    """The record of the chip with a `device_kind` of JAX; None if the kernels were never compiled for it.

    Example:
        >>> chip_of_kind("TPU v5 lite").name, chip_of_kind("TPU v3")
        ('v5e', None)
    """
    for chip in CHIPS.values():
        if device_kind in chip.device_kinds:
            return chip
    return None


def known_chips() -> str:
    """The names of all chips, for messages."""
    return ", ".join(map(repr, CHIPS))


def _factor(table: tuple[tuple[int, float], ...], size: int) -> float:
    """The entry of the greatest size that is not above `size`; below all sizes the first, grown as tiles shrink."""
    least, factor = table[0]
    if size < least:
        return factor * least / size
    for known, value in table:
        if known <= size:
            factor = value
    return factor


# Bundles per pair of forward visits of other sizes, FULL, relative to 512×512. On chips with wider matrix units small
# tiles cost more. v4 and v5p have the entries of v5e, and tpu7x those of v6e: their matrix units have the same width.
_NARROW = dict(
    rows_factor=((128, 1.64), (256, 1.08), (512, 1.0), (1024, 1.03)),
    keys_factor=((256, 1.38), (512, 1.0), (1024, 1.08)),
)
_WIDE = dict(rows_factor=((256, 1.41), (512, 1.0), (1024, 0.85)), keys_factor=((256, 1.76), (512, 1.0), (1024, 0.96)))

CHIPS = {
    chip.name: chip
    for chip in (
        TpuChip(
            "v4", ("TPU v4",), clock=1.05e9, bandwidth=614e9, vmem_limit=16 * MIB, matrix_width=128,
            forward=Bundles(1465, 1622), fused=Bundles(2637, 2715), row=246 + 759, q_rows=512, keys=512, **_NARROW,
        ),
        TpuChip(
            "v5e", ("TPU v5 lite", "TPU v5e"), clock=1.5e9, bandwidth=819e9, vmem_limit=16 * MIB, matrix_width=128,
            forward=Bundles(1136, 1126), fused=Bundles(2273, 2398), row=196 + 387, q_rows=512, keys=512, **_NARROW,
        ),
        TpuChip(
            "v5p", ("TPU v5", "TPU v5p"), clock=1.75e9, bandwidth=1382e9, vmem_limit=16 * MIB, matrix_width=128,
            forward=Bundles(1140, 1174), fused=Bundles(2297, 2413), row=196 + 415, q_rows=512, keys=512, **_NARROW,
        ),
        TpuChip(
            "v6e", ("TPU v6 lite", "TPU v6e"), clock=1.75e9, bandwidth=1640e9, vmem_limit=32 * MIB, matrix_width=256,
            forward=Bundles(860, 924), fused=Bundles(1486, 1510), row=100 + 195, q_rows=1024, keys=512, **_WIDE,
        ),
        TpuChip(
            "tpu7x", ("TPU7x",), clock=2.2e9, bandwidth=3690e9, vmem_limit=32 * MIB, matrix_width=256,
            forward=Bundles(864, 923), fused=Bundles(1421, 1533), row=96 + 190, q_rows=1024, keys=512, **_WIDE,
        ),
    )
}  # fmt: skip
