"""A library built from other sources raises an error: it is neither called nor ignored."""

import re
import shutil
import subprocess
from pathlib import Path

import jax.numpy as jnp
import pytest

import longspan as ls
from longspan.engines.cpu import library

ROOT = Path(__file__).parent.parent.parent
COMPILER = shutil.which("c++") or shutil.which("g++")
NUMBERED = f'extern "C" int longspan_abi() {{ return {library.ABI + 1}; }}'
STALE = {
    f"It has ABI {library.ABI + 1}, but this version calls ABI {library.ABI}.*make native.*install": NUMBERED,
    "has no ABI number, but this version calls": 'extern "C" const char* longspan_isas() { return "baseline"; }',
}


@pytest.fixture(params=STALE, ids=["another number", "none"])
def message(request, monkeypatch, tmp_path):
    """The error about a library that another version of longspan built, in place of the current one."""
    if COMPILER is None:
        pytest.skip("no compiler here")
    build = [COMPILER, "-shared", "-fPIC", "-x", "c++", "-", "-o", tmp_path / "stale.so"]
    subprocess.run(build, input=STALE[request.param], text=True, check=True)
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "stale.so")
    library._load.cache_clear()
    yield request.param
    library._load.cache_clear()


@pytest.mark.parametrize("engine", [pytest.param("auto", id="chosen"), pytest.param("cpu", id="named")])
def test_a_stale_library_is_an_error_not_a_slower_engine(message, engine):
    x = jnp.ones((1, 3, 2, 4))
    for call in (ls.attention, ls.explain, ls.attention):  # a second call raises too
        with pytest.raises(ImportError, match=message) as error:
            call(x, x, x, engine=engine)
        assert "\n" not in str(error.value)


def test_a_stale_library_does_not_keep_longspan_from_being_imported(message):
    library.register()  # as the import does
    with pytest.raises(ImportError, match=message):
        library.missing()


def test_a_stale_library_that_is_switched_off_is_not_touched(message, monkeypatch):
    monkeypatch.setenv("LONGSPAN_NATIVE", "0")
    x = jnp.ones((1, 3, 2, 4))
    assert ls.explain(x, x, x).engine == "xla"
    assert ls.attention(x, x, x).shape == x.shape


def test_both_sources_have_one_number():
    (number,) = re.findall(r"kAbi = (\d+);", (ROOT / "native" / "program.h").read_text("utf-8"))
    assert int(number) == library.ABI
