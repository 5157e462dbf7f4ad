"""A source build without a compiler installs, runs on `xla` and reports the reason; a variable can forbid it."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "c89", "c99", "icx", "icpx", "nvc++")
CALL = """
import jax.numpy as jnp, longspan as ls
x = jnp.ones((1, 9, 2, 4))
report = ls.explain(x, x, x, mask=ls.Causal())
assert report.engine == "xla", report
assert "was not built" in report.refused["cpu"] and "LONGSPAN_NATIVE=require" in str(report)
assert ls.attention(x, x, x, mask=ls.Causal()).shape == x.shape
print(ls.__file__)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The project's files, without build products."""
    folder = tmp_path_factory.mktemp("source") / "longspan"
    unwanted = shutil.ignore_patterns(".*", "build", "*.so", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=unwanted)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """This environment, with a PATH that has every program except the compilers."""
    folder = tmp_path_factory.mktemp("programs")
    for directory in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in directory.iterdir() if directory.is_dir() else ():
            name = program.name.split("-")
            is_compiler = any(part in COMPILERS for part in name)
            if not is_compiler and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    hidden = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "LONGSPAN_NATIVE")}
    return hidden | {"PATH": str(folder)}


def install(source: Path, target: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    return subprocess.run([*command, "--target", target, source], env=environment, capture_output=True, text=True)


def test_it_installs_and_works_on_xla(source, environment, tmp_path):
    assert shutil.which("c++", path=environment["PATH"]) is None
    done = install(source, tmp_path / "lib", environment)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.so"))
    there = environment | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "lib"), sysconfig.get_path("purelib")])}
    # -S: without the import hook of an editable installation.
    done = subprocess.run([sys.executable, "-S", "-c", CALL], env=there, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_required_it_fails(source, environment, tmp_path):
    done = install(source, tmp_path / "lib", environment | {"LONGSPAN_NATIVE": "require"})
    assert done.returncode != 0 and "CMake" in done.stdout + done.stderr
