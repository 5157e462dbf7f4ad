"""A static model of the forward pass: the share of the time that rows of tiles cost apart from their visits.

    cycles = sum over visits of max(bundles, copy) + sum over rows of (own bundles + exposed part of the first copy)

The model ranks tiles and finds what matters next. It is a lower bound, so it must not be read as a time.
"""

from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.tpu.visits import Visit

LENGTH, HEAD_SIZE, TILE, BYTES = 65536, 128, 512, 2  # causal self-attention in bfloat16
LATENCY = 1e-6  # seconds until a copy starts to arrive
GOAL_OF, GOAL = ("v5e", "window 512"), 0.30  # the only case with a goal, and its largest share


class Chip(NamedTuple):
    """The clock that the published peak implies, in Hz, and the published bandwidth, in bytes per second."""

    clock: float
    bandwidth: float


CHIPS = dict(v5e=Chip(1.5e9, 819e9), v6e=Chip(1.75e9, 1640e9))


class Share(NamedTuple):
    """The share of the modelled cycles that rows cost apart from their visits."""

    chip: str
    mask: str
    rows: float
    unhidden: float  # the same if no row's first copy started before the row

    def verdict(self) -> str:
        if (self.chip, self.mask) != GOAL_OF:
            return "ok, no goal"
        if self.rows <= GOAL:
            return f"ok, at most {GOAL:.0%}"
        return f"above {GOAL:.0%}"


def masks() -> dict:
    import longspan as ls

    windows = {f"window {size}": ls.Causal() & ls.Window(size - 1, 0) for size in (512, 1024, 4096)}
    return windows | {"causal": ls.Causal()}


def share(visit: Visit, mask) -> tuple[float, float]:
    """The share of rows, with the first copies started early and without."""
    from longspan.layout import count

    chip = CHIPS[visit.chip]
    counted = count(mask.layout(LENGTH, LENGTH, q_tile=TILE, kv_tile=TILE))
    copy = 2 * TILE * HEAD_SIZE * BYTES / chip.bandwidth * chip.clock
    visits = counted.full * max(visit.full, copy) + counted.partial * max(visit.partial, copy)
    waited = copy + LATENCY * chip.clock
    # The first copy of a row starts with the last visit of the row before. It arrives during this visit, the end of
    # that row and the start of this one.
    exposed = max(0.0, waited - visit.partial - visit.row)
    shares = []
    for each in (exposed, waited):
        rows = LENGTH // TILE * (visit.row + each)
        shares.append(rows / (rows + visits))
    return shares[0], shares[1]


def measure(visits: Iterable[Visit]) -> list[Share]:
    """The shares for every mask, from the bundles of the forward kernels."""
    forward = [visit for visit in visits if visit.name == "forward" and visit.chip in CHIPS]
    return [Share(visit.chip, name, *share(visit, mask)) for visit in forward for name, mask in masks().items()]


def rows(shares: Iterable[Share]) -> list[list[str]]:
    lines = [["chip", "mask", "share of rows", "", "without early copies"]]
    for found in shares:
        lines.append([found.chip, found.mask, f"{found.rows:.0%}", found.verdict(), f"{found.unhidden:.0%}"])
    return lines
