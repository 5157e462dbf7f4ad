"""A program that `jax.export` wrote runs in another process that has imported longspan and called nothing of it."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.engines.cpu import library

ROOT = Path(__file__).parent.parent.parent

# Fields by pickle, not `serialize()`: that needs a package which JAX itself does without.
WRITE = """
import dataclasses, pickle, sys
import jax, jax.numpy as jnp, longspan as ls
from jax import export
from longspan.engines.cpu.library import TARGETS

def loss(q, bias):
    return jnp.sum(ls.attention(q, q, q, mask=ls.Causal(), bias=bias, engine="cpu") ** 2)

trusted = [export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]
shapes = jax.ShapeDtypeStruct((1, 9, 2, 4), jnp.float32), jax.ShapeDtypeStruct((9, 9), jnp.float32)
written = export.export(jax.jit(jax.grad(loss, (0, 1))), disabled_checks=trusted)(*shapes)
fields = {field.name: getattr(written, field.name) for field in dataclasses.fields(written)}
pickle.dump(fields | {"_get_vjp": None}, open(sys.argv[1], "wb"))
"""

READ = """
import pickle, sys
import jax, jax.numpy as jnp, numpy as np, longspan
from jax import export

written = export.Exported(**pickle.load(open(sys.argv[1], "rb")))
q = jnp.arange(72, dtype=jnp.float32).reshape(1, 9, 2, 4) / 72
np.savez(sys.argv[1], *written.call(q, jnp.eye(9)))
"""


@pytest.mark.skipif(library.missing() is not None, reason="no native library")
def test_an_exported_program_runs_in_a_process_that_only_imports_longspan(tmp_path):
    for program in (WRITE, READ):
        command = [sys.executable, "-c", program, tmp_path / "program"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def loss(q, bias):
        return jnp.sum(ls.attention(q, q, q, mask=ls.Causal(), bias=bias, engine="reference") ** 2)

    wanted = jax.grad(loss, (0, 1))(jnp.arange(72, dtype=jnp.float32).reshape(1, 9, 2, 4) / 72, jnp.eye(9))
    got = np.load(tmp_path / "program.npz")
    for name, want in zip(got.files, wanted, strict=True):
        np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("native", ["0", "1"])
def test_importing_longspan_is_silent_with_and_without_the_library(native):
    program = f"import os; os.environ['LONGSPAN_NATIVE'] = {native!r}; import longspan"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
