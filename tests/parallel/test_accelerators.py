"""Programs for TPUs, compiled without one: they send the bytes of `explain` (`make accelerators`)."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from benchmarks import accelerators
from tests.parallel import hlo

pytestmark = pytest.mark.accelerators
LENGTH = accelerators.LENGTH


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_kept():
    """Programs for absent devices can be written to JAX's compilation cache but not read back: a second run fails."""
    directory = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def mesh():
    patch = pytest.MonkeyPatch()
    for name, value in accelerators.QUIETLY.items():
        patch.setenv(name, value)
    yield accelerators.mesh_of(accelerators.TOPOLOGY)
    patch.undo()


@pytest.mark.parametrize("name", accelerators.masks(LENGTH))
def test_a_tpu_sends_the_bytes_of_explain(name, mesh):
    mask, order = accelerators.masks(LENGTH)[name]
    told = accelerators.said(mask, order, mesh, LENGTH)
    forward, both = accelerators.compile_both(mask, order, mesh, LENGTH)
    trips = mesh.size - 1  # of the ring, which the text of XLA:TPU does not give
    assert hlo.total(forward, trips=trips) == told.sent_bytes
    assert hlo.total(both, trips=trips) == told.sent_bytes + told.sent_bytes_backward
