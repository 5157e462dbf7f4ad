"""Settings of tests that compile for TPUs (`make accelerators`)."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from benchmarks.tpu.chips import ENVIRONMENT


@pytest.fixture(scope="session", autouse=True)
def _libtpu_is_quiet():
    patch = pytest.MonkeyPatch()
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_stored():
    """JAX can write programs for absent devices to its compilation cache, but not read them: a second run fails."""
    directory = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()
