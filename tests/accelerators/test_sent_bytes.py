"""Programs for TPUs, compiled without one: they send the bytes of `explain`."""

import pytest

from benchmarks.tpu import sent
from benchmarks.tpu.chips import mesh_of
from tests.parallel import hlo

pytestmark = pytest.mark.accelerators


@pytest.mark.parametrize("name", sent.masks(sent.LENGTH))
def test_a_tpu_sends_the_bytes_of_explain(name):
    mesh = mesh_of(sent.TOPOLOGY)
    mask, order = sent.masks(sent.LENGTH)[name]
    report = sent.explained(mask, order, mesh, sent.LENGTH)
    forward, both = sent.compile_both(mask, order, mesh, sent.LENGTH)
    trips = mesh.size - 1  # of the ring, which the text of XLA:TPU does not give
    assert hlo.total(forward, trips=trips) == report.sent_bytes
    assert hlo.total(both, trips=trips) == report.sent_bytes + report.sent_bytes_backward
