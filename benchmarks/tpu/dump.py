"""Reads the schedules of compiled kernels from a dump of libtpu.

A TPU core issues one bundle of instructions per cycle. libtpu writes the bundles of each kernel, with the loops around
them and the units that they use. Their number is a lower bound of the cycles: waits for memory are not in the schedule.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

# The columns of the utilization file.
UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
# The address of a bundle, its label if it is the target of a branch, and one > for each loop around it.
BUNDLE = re.compile(r"\s*(0|0x[0-9a-f]+)\s+(LB|LH|LE|PB|PF|CT)?\s*:\s*(>*)\s*\{")
BRANCH = "sbr.rel"


@dataclass(frozen=True)
class Stretch:
    """Consecutive bundles from a branch, or from the target of a branch, to the next."""

    bundles: int
    depth: int  # the number of loops around them; the loop over the grid is the first
    units: dict[str, int]  # the number of operations of each unit


@dataclass(frozen=True)
class Kernel:
    """The schedule of one kernel, in the order of its code."""

    name: str
    stretches: tuple[Stretch, ...]

    def visits(self) -> tuple[Stretch, ...]:
        """The stretches that compute a tile: those with at least half of the most matrix operations."""
        most = max(stretch.units["MXU"] for stretch in self.stretches)
        return tuple(stretch for stretch in self.stretches if 2 * stretch.units["MXU"] >= most > 0)

    def full_and_partial(self) -> tuple[int, int]:
        """The bundles of a FULL and of a PARTIAL visit; equal if the kernel has one visit, as splash's.

        A visit that masks pairs has more vector operations, though not always more bundles. Kernels of `pallas_tpu`
        have a third visit, with the most, which also replaces NaN and infinities by zeros. It runs where the inputs
        hold some.
        """
        visits = sorted(self.visits(), key=lambda visit: visit.units["VALU"])
        return visits[0].bundles, visits[min(1, len(visits) - 1)].bundles

    def row(self) -> int:
        """The bundles that a row of tiles costs apart from its visits: all others inside the loop over the grid.

        Each is counted once. The loops around the visits are not counted: they belong to the visits.
        """
        inside = self._loops_of_visits()
        return sum(s.bundles for n, s in enumerate(self.stretches) if s.depth > 0 and n not in inside)

    def _loops_of_visits(self) -> set[int]:
        """The places of all stretches that are in the innermost loop of some visit, or in loops inside of it."""
        found: set[int] = set()
        for visit in self.visits():
            at = next(n for n, stretch in enumerate(self.stretches) if stretch is visit)
            for places in (range(at, -1, -1), range(at, len(self.stretches))):
                for place in places:
                    if self.stretches[place].depth < visit.depth:
                        break
                    found.add(place)
        return found


def read(folder: Path) -> dict[str, Kernel]:
    """All kernels of a dump by name, without the numbers that XLA appends."""
    kernels = {}
    for path in sorted(folder.glob("*final_bundles.txt")):
        stamp, _, rest = path.name.partition("-")
        named = re.fullmatch(r"(.+?)(\.\d+)?-\d+-final_bundles\.txt", rest)
        used = sorted(folder.glob(f"{stamp}-*final_hlo-static-per-bundle-utilization.txt"))
        if named is not None and used:
            kernel = parse(named[1], path.read_text().splitlines(), used[-1].read_text())
            kernels.setdefault(kernel.name, kernel)
    return kernels


def parse(name: str, lines: Iterable[str], utilization: str) -> Kernel:
    """The kernel of a text of bundles and of the units that each bundle uses."""
    table = utilization.split("== UTILIZATION:")[1].strip().splitlines()
    rows = [[int(number) for number in line.split()] for line in table]
    depths, starts = [0] * len(rows), {0}
    for line in lines:
        found = BUNDLE.match(line)
        if found is None:
            continue
        at = int(found[1], 16)
        depths[at] = len(found[3])
        if found[2] or BRANCH in line:
            starts.add(at)
    places = [*sorted(starts), len(rows)]
    stretches = tuple(_stretch(rows[a:b], depths[a]) for a, b in pairwise(places) if b > a)
    return Kernel(name, stretches)


def _stretch(rows: list[list[int]], depth: int) -> Stretch:
    sums = [sum(column) for column in zip(*rows, strict=True)]
    return Stretch(len(rows), depth, dict(zip(UNITS, sums, strict=True)))
