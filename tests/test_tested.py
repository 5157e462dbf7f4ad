"""A JAX that was never tested is warned of when the package is imported, and works."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from longspan.tested_jax import TESTED, warn_unless_tested

ROOT = Path(__file__).parent.parent
IMPORT = "import jax; jax.__version__ = {version!r}; import longspan; print(longspan.Causal().show(2, 2))"


@pytest.mark.parametrize("version", ["0.10.2", "0.10.7", "0.10.3.dev20261117"])
def test_tested_releases_are_silent(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unless_tested(version)


def test_the_locked_release_is_a_tested_one():
    locked = re.search(r"^jax==(.+)$", (ROOT / "requirements.lock").read_text("utf-8"), re.MULTILINE)
    assert locked is not None and ".".join(locked[1].split(".")[:2]) in TESTED


@pytest.mark.parametrize("version", ["0.11.0", "0.1.0", "1.0", "0.100.0"])
def test_other_releases_are_warned_of_with_what_to_do(version):
    with pytest.warns(
        UserWarning, match=rf"never tested with JAX {version}, only with 0\.10.*pip install.*PYTHONWARNINGS"
    ):
        warn_unless_tested(version)


@pytest.mark.parametrize("version, hidden", [("0.10.2", False), ("99.0", False), ("99.0", True)])
def test_the_import_warns_once_and_goes_on(version, hidden):
    environment = os.environ | {"PYTHONWARNINGS": "ignore:longspan was never tested with" if hidden else ""}
    command = [sys.executable, "-c", IMPORT.format(version=version)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "#.\n##\n"
    assert done.stderr.count("UserWarning: longspan was never tested with JAX") == (version == "99.0" and not hidden)
    assert "<string>:1: UserWarning" in done.stderr or not done.stderr
