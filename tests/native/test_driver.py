"""The kernel without XLA and Python, under sanitizers: random calls and invalid calls. Compiling takes minutes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("c++") is None, reason="no compiler here")
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_random_calls_match_a_naive_loop_and_invalid_calls_are_safe(tmp_path, sanitizers):
    options = ["-DLONGSPAN_TESTS=ON", f"-DLONGSPAN_SANITIZE={sanitizers}", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path, *options], check=True)
    subprocess.run(["cmake", "--build", tmp_path, "--target", "native_tests", "native_fuzz"], check=True)
    subprocess.run([tmp_path / "native_tests", "0", "100"], check=True)
    if sanitizers != "thread":  # invalid calls run on one thread
        subprocess.run([tmp_path / "native_fuzz", "0", "250"], check=True)
