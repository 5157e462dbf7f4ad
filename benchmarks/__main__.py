"""Runs the benchmarks: `python -m benchmarks [group ...] [--json FILE]`; without a group, all of them."""

import argparse
import json
from collections.abc import Callable

from benchmarks import cpu, decoding, measure, planning, xla

GROUPS: dict[str, Callable[[], list[list[str]]]] = {
    "planning": planning.main,
    "xla": xla.speed,
    "growth": xla.growth,
    "documents": xla.documents,
    "cpu": cpu.speed,
    "between": cpu.intervals,
    "biases": cpu.biases,
    "crossover": cpu.crossover,
    "long": cpu.long,
    "decode": decoding.small,
    "cache": decoding.cached,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="groups to run; by default all")
    parser.add_argument("--json", help="also write the tables and the machine's description to this file")
    arguments = parser.parse_args()
    found = {"machine": measure.machine()}
    print(", ".join(f"{name}: {value}" for name, value in found["machine"].items()))
    for name in arguments.groups or GROUPS:
        print(f"\n{name}", flush=True)
        rows = GROUPS[name]()
        print(measure.table(rows), flush=True)
        found[name] = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
