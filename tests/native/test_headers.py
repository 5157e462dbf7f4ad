"""Every header of the kernel compiles alone, as an editor opens it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parent.parent.parent / "native"
HEADERS = sorted(NATIVE.rglob("*.h"))
COMPILER = shutil.which("c++") or shutil.which("g++")


@pytest.mark.skipif(COMPILER is None, reason="no compiler here")
@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_a_header_parses_alone_and_twice(header):
    twice = f'#include "{header}"\n' * 2
    subprocess.run([COMPILER, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"], input=twice, text=True, check=True)


def test_the_kernel_includes_nothing_of_the_standard_library():
    # An inline function of it, compiled for AVX-512, could be the copy that the linker keeps for every machine.
    waiting, seen = ["kernel.cpp"], set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        text = (NATIVE / name).read_text("utf-8")
        assert set(re.findall(r"#include <(.*)>", text)) <= {"stddef.h", "stdint.h", "stdlib.h"}, name
        waiting += set(re.findall(r'#include "(.*)"', text)) - seen
    assert {"simd.h", "problem.h"} <= seen
