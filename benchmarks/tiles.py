"""Compares tile sizes of the `xla` engine on this machine: `python -m benchmarks.tiles`."""

import jax
import numpy as np

from benchmarks import cases
from benchmarks.measure import alternate, gemm, of_peak, ours, table, useful_flops
from longspan.engines import xla

TILINGS = [(128, 128, 5, 1), (128, 128, 5, 2), (128, 128, 5, 4), (128, 128, 5, 8), (128, 64, 10, 4), (256, 256, 3, 4)]


def main() -> list[list[str]]:
    rows = [["queries, keys, tiles at once, heads", "case", "ms", "of GEMM peak"]]
    for case in (cases.WINDOW_16K, cases.WINDOW_16K_BOTH):
        runs = {"gemm": gemm()}
        for tiling in TILINGS:
            xla.TILES["cpu"] = tiling
            jax.clear_caches()
            runs[str(tiling)], _ = ours(case, "xla")
        times = alternate(runs)
        flops = useful_flops(case)
        for name in runs:
            if name != "gemm":
                rows.append(
                    [name, case.name, f"{1e3 * np.median(times[name]):.0f}", f"{of_peak(times, name, flops):.3f}"]
                )
    return rows


if __name__ == "__main__":
    print(table(main()))
