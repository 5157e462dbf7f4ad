"""For a machine with a TPU: compares `pallas_tpu` with float64, times it, and writes a report to send back.

    python -m benchmarks.tpu.run REPORT.json                # some minutes; also writes REPORT.txt
    python -m benchmarks.tpu.run REPORT.json --only window  # cases whose name contains a word
    python -m benchmarks.tpu.run REPORT.json --interpret    # without a TPU, at toy sizes: no times worth having

The report is written after every case, so a crash loses nothing but its own case.
"""

import argparse
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measure import machine, table
from benchmarks.tpu import parity, times
from longspan.engines.pallas_tpu import PallasTpu

PACKAGES = ("jaxlib", "libtpu", "tokamax", "flywheel-tpu")


class Report:
    """What is known so far, and its two files."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        self.parity: list[parity.ParityResult] = []
        self.times: list[times.TimedResult] = []

    def add(self, result: parity.ParityResult | times.TimedResult) -> None:
        """Adds a result and writes both files."""
        if isinstance(result, parity.ParityResult):
            self.parity.append(result)
            print(f"{result.verdict:<10} {result.case}", flush=True)
        else:
            self.times.append(result)
            print(f"{result.verdict:<10} {result.case}, {result.passes}, {result.name}", flush=True)
        self.write()

    def write(self) -> None:
        found = dict(
            machine=self.about, parity=[r._asdict() for r in self.parity], times=[r._asdict() for r in self.times]
        )
        self.path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        self.path.with_suffix(".txt").write_text(self.text(), "utf-8")

    def text(self) -> str:
        """The report as tables."""
        lines = [f"{name}: {value}" for name, value in self.about.items()]
        right = sum(r.verdict == "ok" for r in self.parity)
        lines += ["", f"Parity with float64: {right} of {len(self.parity)} cases are ok", table(self._parity_rows())]
        if self.times:
            lines += ["", f"Times: {self.about['times']}", table(self._time_rows())]
        return "\n".join(lines) + "\n"

    def is_right(self) -> bool:
        return all(r.verdict == "ok" for r in self.parity)

    def _parity_rows(self) -> list[list[str]]:
        """For each case the result that is closest to its allowed error."""
        rows = [["case", "verdict", "closest", "error", "allowed"]]
        for result in self.parity:
            closest = ["", "", ""]
            if result.errors:
                part = max(result.errors, key=lambda part: _share(result.errors[part], result.allowed[part]))
                closest = [part, f"{result.errors[part]:.2e}", f"{result.allowed[part]:.2e}"]
            rows.append([result.case, result.verdict.replace("\n", " "), *closest])
        return rows

    def _time_rows(self) -> list[list[str]]:
        rows = [["case", "passes", "implementation", "verdict", "ms, median", "useful TFLOP/s"]]
        for result in self.times:
            numbers = ["", ""]
            if result.tflops is not None:
                numbers = [f"{1e3 * np.median(result.seconds):.3f}", f"{result.tflops:.1f}"]
            rows.append([result.case, result.passes, result.name, result.verdict.replace("\n", " "), *numbers])
        return rows


def _share(error: float, allowed: float) -> float:
    """Large for NaN, so that it is shown first."""
    share = error / max(allowed, 1e-300)
    return share if np.isfinite(share) else 1e300


def about(engine: PallasTpu) -> dict[str, Any]:
    """The machine and the versions."""
    found: dict[str, Any] = machine()
    found["devices"] = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    found["engine"] = repr(engine)
    found["times"] = "medians of rounds in turns"
    if engine.interpret:
        found["times"] = "interpreted, they say nothing about TPUs"
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs all cases; 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu.run", description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="the JSON file to write; a text file is written next to it")
    parser.add_argument("--interpret", action="store_true", help="interpret the kernels on this machine, at toy sizes")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    given = parser.parse_args(arguments)
    if not given.interpret and jax.default_backend() != "tpu":
        parser.error(f"JAX runs on {jax.default_backend()!r}, not on a TPU. Try the program with --interpret.")
    engine = PallasTpu(interpret=given.interpret)
    report = Report(given.report, about(engine))
    for case in parity.cases(given.interpret):
        if given.only in case.name:
            report.add(parity.run(case, engine))
    for case in times.cases(given.interpret):
        if given.only in case.name:
            for result in times.measure(case, engine, rounds=1 if given.interpret else times.ROUNDS):
                report.add(result)
    print(f"\n{report.text()}\nWrote {report.path} and {report.path.with_suffix('.txt')}.")
    return int(not report.is_right())


if __name__ == "__main__":
    sys.exit(main())
