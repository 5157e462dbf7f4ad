"""Programs for TPUs, compiled without one: they send what `explain` says (`make accelerators`)."""

import pytest

from benchmarks import accelerators
from tests.parallel import hlo

pytestmark = pytest.mark.accelerators
LENGTH = accelerators.LENGTH


@pytest.fixture(scope="module")
def mesh():
    patch = pytest.MonkeyPatch()
    for name, value in accelerators.QUIETLY.items():
        patch.setenv(name, value)
    yield accelerators.mesh_of(accelerators.TOPOLOGY)
    patch.undo()


@pytest.mark.parametrize("name", accelerators.masks(LENGTH))
def test_a_tpu_sends_what_explain_says(name, mesh):
    mask, order = accelerators.masks(LENGTH)[name]
    told = accelerators.said(mask, order, mesh, LENGTH)
    forward, both = accelerators.compile_both(mask, order, mesh, LENGTH)
    trips = mesh.size - 1  # of the ring, which XLA:TPU does not write down
    assert hlo.total(forward, trips=trips) == told.sent_bytes
    assert hlo.total(both, trips=trips) == told.sent_bytes + told.sent_bytes_backward
