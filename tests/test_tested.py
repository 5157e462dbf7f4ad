"""An untested JAX release works silently; `longspan info` reports it, and so do errors that it may explain."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import longspan as ls
from longspan.engines import Engine
from longspan.tested_jax import TESTED, note_untested, untested, untested_jax_noted

ROOT = Path(__file__).parent.parent
NOTE = "longspan was tested with JAX 0.10, not with JAX 99.0. If something fails, try `pip install 'jax==0.10.*'`."
X = jnp.ones((1, 4, 2, 3))


def python(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::UserWarning", "-c", f"import jax; jax.__version__ = '99.0'\n{program}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def untested_jax(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "99.0")


class Outdated(Engine):
    """An engine that uses a name, or an argument, that JAX no longer has."""

    name = "outdated"

    def __init__(self, error: Exception):
        self.error = error

    def run(self, request, layout):
        raise self.error


@pytest.mark.parametrize("version", ["0.10.2", "0.10.7", "0.10.3.dev20261117"])
def test_tested_releases_have_no_note(version):
    assert untested(version) is None


@pytest.mark.parametrize("version", ["0.11.0", "0.1.0", "1.0", "0.100.0"])
def test_the_note_names_the_release_and_what_to_install(version):
    assert untested(version) == NOTE.replace("99.0", version)


def test_the_locked_release_is_a_tested_one():
    locked = re.search(r"^jax==(.+)$", (ROOT / "requirements.lock").read_text("utf-8"), re.MULTILINE)
    assert locked is not None and ".".join(locked[1].split(".")[:2]) in TESTED


def test_the_import_of_the_package_is_silent():
    done = python("import longspan; print(longspan.Causal().show(2, 2))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "#.\n##\n", "")


def test_an_import_that_fails_has_the_note():
    done = python("import jax.custom_batching; del jax.custom_batching.custom_vmap\nimport longspan")
    assert done.returncode == 1
    error, note = done.stderr.splitlines()[-2:]
    assert error.startswith("ImportError: cannot import name 'custom_vmap'") and note == NOTE


@pytest.mark.parametrize("kind", [AttributeError, ImportError, TypeError])
def test_errors_that_a_changed_jax_may_cause_have_the_note(kind, untested_jax):
    with pytest.raises(kind, match="no such name") as raised:
        ls.attention(X, X, X, engine=Outdated(kind("no such name")))
    assert NOTE in raised.value.__notes__


def test_other_errors_have_no_note(untested_jax):
    with pytest.raises(TypeError, match="`mask` must be") as raised:
        ls.attention(X, X, X, mask=3)  # type: ignore[call-overload]
    assert NOTE not in getattr(raised.value, "__notes__", ())
    with pytest.raises(ValueError, match="wrong") as refused:
        ls.attention(X, X, X, engine=Outdated(ValueError("wrong")))
    assert NOTE not in getattr(refused.value, "__notes__", ())


def test_a_tested_release_adds_no_note_and_an_untested_one_adds_it_once(monkeypatch):
    error = TypeError("no such argument")
    with pytest.raises(TypeError), untested_jax_noted():
        raise error
    assert not hasattr(error, "__notes__")
    monkeypatch.setattr(jax, "__version__", "99.0")
    with pytest.raises(TypeError), untested_jax_noted(), untested_jax_noted():
        raise error
    note_untested(error)
    assert error.__notes__ == [NOTE]


def test_info_reports_an_untested_release():
    pytest.importorskip("typer")
    done = python("from longspan.cli.info import info; info(); info(as_json=True)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == NOTE and f'"untested_jax": "{NOTE}"' in done.stdout
