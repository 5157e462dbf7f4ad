"""Programs of four TPUs with `pallas_tpu` in `shard_map` and in `ls.parallel` (`make accelerators`). Nothing runs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import longspan as ls
from benchmarks.tpu.chips import TOPOLOGIES, compile_on, mesh_of
from longspan.engines.pallas_tpu import PallasTpu
from tests.accelerators.compiling import kernels
from tests.parallel import hlo

pytestmark = pytest.mark.accelerators

SIZE = 128
ORDERS = {
    "ring, causal": (ls.Causal(), "zigzag"),
    "halo, window": (ls.Causal() & ls.Window(1023, 0), "contiguous"),
}


def qkv(B: int, T: int):
    return tuple(jax.ShapeDtypeStruct((B, T, heads, SIZE), jnp.bfloat16) for heads in (4, 2, 2))


def both(attend, mesh, spec, arrays):
    """The compiled program of the output and the gradients."""

    def run(q, k, v):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(out)

    return compile_on(mesh, spec, run, *arrays)


@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
@pytest.mark.parametrize("fused", [True, False])
def test_shards_of_a_batch_send_nothing(chip, fused):
    mesh, engine = mesh_of(TOPOLOGIES[chip], "dp"), PallasTpu(fused=fused, chip=chip)

    def attend(q, k, v):
        return ls.attention(q, k, v, mask=ls.Causal(), engine=engine)

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=True)
    compiled = both(sharded, mesh, P("dp"), qkv(8, 1024))
    assert not hlo.sent(compiled)
    assert len(kernels(compiled)) == 3 - fused


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ORDERS)
def test_sharded_sequences_gather_nothing(name, fused):
    mask, order = ORDERS[name]
    mesh, engine = mesh_of(TOPOLOGIES["v5e"]), PallasTpu(fused=fused, chip="v5e")

    def attend(q, k, v):
        return ls.parallel.attention(q, k, v, mask=mask, mesh=mesh, order=order, engine=engine)

    arrays = qkv(1, 8192)
    compiled = both(attend, mesh, P(None, "sp"), arrays)
    assert set(hlo.sent(compiled, trips=mesh.size - 1)) == {"collective-permute"}
    assert "longspan_forward" in kernels(compiled)
    report = ls.explain(*arrays, mask=mask, mesh=mesh, order=order, engine=engine)
    assert hlo.total(compiled, trips=mesh.size - 1) == report.sent_bytes + report.sent_bytes_backward
