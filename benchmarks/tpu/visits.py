"""The bundles of a 512×512 visit, with those of splash attention from the same run.

    python -m benchmarks.tpu.visits [chip ...]

A static count of the compiler's schedule: a lower bound of the cycles, not a time.
"""

import sys
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.tpu.dump import Kernel
from benchmarks.tpu.programs import dumped

# The most bundles of a FULL and of a PARTIAL visit, for heads of 128 in bfloat16 with a causal mask.
GOALS = {
    "v5e": {
        "forward": (1134, 1172), "backward, fused": (2300, 2340), "dq": (1420, 1430), "dk and dv": (1905, 1930),
    },
    "v6e": {
        "forward": (860, 920), "backward, fused": (1530, 1700), "dq": (910, 950), "dk and dv": (1250, 1380),
    },
}  # fmt: skip
TOLERANCE = 0.03  # new versions of the compiler schedule a little differently
# (pass, program, its kernel, splash's program, splash's kernel)
PASSES = (
    ("forward", "fused", "longspan_forward", "splash fused", "splash_mha_fwd_residuals"),
    ("backward, fused", "fused", "longspan_backward", "splash fused", "splash_mha_dkv_no_residuals"),
    ("dq", "apart", "longspan_dq", "splash apart", "splash_mha_dq_no_residuals"),
    ("dk and dv", "apart", "longspan_dkv", "splash apart", "splash_mha_dkv_no_residuals"),
)


class Visit(NamedTuple):
    """The bundles of one kernel's visits on one chip."""

    chip: str
    name: str
    full: int
    partial: int
    splash: int
    row: int  # the bundles of a row apart from its visits

    def excess(self) -> float:
        """By how much the larger of both exceeds its goal; negative if it does not."""
        goals = GOALS[self.chip][self.name]
        return max(self.full / goals[0], self.partial / goals[1]) - 1

    def verdict(self) -> str:
        if self.excess() <= TOLERANCE:
            return "ok"
        return f"{self.excess():.1%} too many"


def measure(chips: Iterable[str] = GOALS) -> list[Visit]:
    """Compiles four programs for each chip, each in a process of its own."""
    found = []
    for chip in chips:
        kernels: dict[str, dict[str, Kernel]] = {}
        for _, program, _, splash, _ in PASSES:
            for each in (program, splash):
                if each not in kernels:
                    print(f"compiling {each} for {chip}", flush=True)
                    kernels[each] = dumped(each, chip)
        for name, program, kernel, splash, splash_kernel in PASSES:
            mine = kernels[program][kernel]
            theirs = kernels[splash][splash_kernel].full_and_partial()[0]
            found.append(Visit(chip, name, *mine.full_and_partial(), theirs, mine.row()))
    return found


def rows(visits: Iterable[Visit]) -> list[list[str]]:
    """The lines of the table. splash has one kind of visit, which always masks."""
    lines = [["chip", "kernel", "FULL / PARTIAL", "goal", "", "splash", "row's own bundles"]]
    for visit in visits:
        goal = GOALS[visit.chip][visit.name]
        numbers = f"{visit.full} / {visit.partial}", f"{goal[0]} / {goal[1]}"
        lines.append([visit.chip, visit.name, *numbers, visit.verdict(), str(visit.splash), str(visit.row)])
    return lines


def main(*chips: str) -> int:
    """Prints the table; the number of kernels that exceed their goal."""
    from benchmarks.measure import table

    found = measure(chips or GOALS)
    print("\nBundles of a visit of 512 queries and 512 keys: causal, heads of 128, bfloat16")
    print(table(rows(found)), flush=True)
    return sum(visit.verdict() != "ok" for visit in found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
