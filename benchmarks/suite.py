"""CPU seconds of the test suite by kind of test, and its slowest tests: python -m benchmarks.suite REPORT.xml ...

The reports are those of `make test ARGS=--junitxml=build/tests.xml`.
"""

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator

KINDS = {  # a test belongs to the first kind that its name contains
    "golden": "golden", "tests.parallel": "parallel", "tests.sharding": "sharding", "tests.cache": "cache",
    "tests.cli": "cli", "tests.maskinfo": "maskinfo", "tests.nn": "nn", "tests.patterns": "patterns",
    "tests.native": "native", "test_encoders": "encoders", "test_families": "encoders", "tests.models": "decoders",
    "test_parity": "matrix", "test_laws": "properties", "test_readme": "docs and pictures",
    "test_gallery": "docs and pictures", "test_notebooks": "docs and pictures", "test_pictures": "docs and pictures",
    "test_render": "docs and pictures", "longspan.": "doctests",
}  # fmt: skip
SLOWEST = 25


def seconds(path: str) -> Iterator[tuple[str, str, float]]:
    """(file, test, CPU seconds) of each test in a report."""
    for case in ET.parse(path).iter("testcase"):
        spent = [p.get("value") for p in case.iter("property") if p.get("name") == "cpu_seconds"]
        yield case.get("classname", ""), case.get("name", ""), float(spent[0] if spent else case.get("time", 0))


def kind_of(file: str) -> str:
    return next((kind for part, kind in KINDS.items() if part in file), "core")


def main(paths: list[str]) -> None:
    tests = [test for path in paths for test in seconds(path)]
    spent, counted = Counter(), Counter()
    for file, _, cpu in tests:
        spent[kind_of(file)] += cpu
        counted[kind_of(file)] += 1
    print(f"{'kind':<20}{'tests':>8}{'CPU s':>8}")
    for kind, cpu in spent.most_common():
        print(f"{kind:<20}{counted[kind]:>8}{cpu:>8.0f}")
    print(f"{'all':<20}{len(tests):>8}{sum(spent.values()):>8.0f}\n")
    for file, name, cpu in sorted(tests, key=lambda test: -test[2])[:SLOWEST]:
        print(f"{cpu:>8.1f}  {file}::{name}")


if __name__ == "__main__":
    main(sys.argv[1:])
