"""What sequence parallel attention sends on TPUs, compiled for them without having one (`make accelerators`).

    python -m benchmarks.accelerators                    # forward and backward on v5e 4x4
    python -m benchmarks.accelerators v5e:16x16 1048576  # another topology and length

The programs are those of XLA:TPU, through the `xla` engine; they are never run. Needs libtpu.
"""

import os
import sys
import time

TOPOLOGY, LENGTH = "v5e:4x4", 16384
HEADS, KV_HEADS, SIZE = 8, 2, 128
QUIETLY = dict(
    JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
)  # fmt: skip


def masks(length: int) -> dict:
    """Name -> mask and order."""
    import numpy as np

    import longspan as ls

    drawn = np.random.default_rng(0).integers(0, length // 64, (HEADS, length // 64, 2))
    return {
        "window of 1024": (ls.Causal() & ls.Window(1023, 0), "contiguous"),
        "causal ring": (ls.Causal(), "zigzag"),
        "random blocks by head": (ls.Blocks(drawn, 64), "contiguous"),
        "Longformer, 2 global": (ls.Window(256, 256) | ls.Global((0, length // 2)), "contiguous"),
    }


def mesh_of(topology: str):
    """All chips of a topology in a row."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return Mesh(np.array(devices).reshape(-1), ("sp",))


def compile_both(mask, order: str, mesh, length: int):
    """(forward, both passes), compiled."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import longspan as ls

    here = NamedSharding(mesh, P(None, "sp"))
    q, k = (jax.ShapeDtypeStruct((1, length, n, SIZE), jnp.bfloat16, sharding=here) for n in (HEADS, KV_HEADS))

    def forward(q, k, v):
        return ls.parallel.attention(q, k, v, mask=mask, mesh=mesh, order=order, engine="xla")

    def both(q, k, v, dout):
        return jax.vjp(forward, q, k, v)[1](dout)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        there = jax.jit(forward, out_shardings=here).lower(q, k, k)
        back = jax.jit(both, out_shardings=(here,) * 3).lower(q, k, k, q)
    return there.compile(), back.compile()


def said(mask, order: str, mesh, length: int):
    """What `explain` says of the same call."""
    import jax
    import jax.numpy as jnp

    import longspan as ls

    q, k = (jax.ShapeDtypeStruct((1, length, n, SIZE), jnp.bfloat16) for n in (HEADS, KV_HEADS))
    return ls.explain(q, k, k, mask=mask, mesh=mesh, order=order, engine="xla")


def main(topology: str = TOPOLOGY, length: str = str(LENGTH)) -> None:
    os.environ.update(QUIETLY)
    from benchmarks.measure import table
    from tests.parallel.hlo import total

    mesh, count = mesh_of(topology), int(length)
    rows = [["mask", "forward, bytes", "said", "both, bytes", "said", "temporary, MB", "compiled in, s"]]
    for name, (mask, order) in masks(count).items():
        start = time.perf_counter()
        forward, both = compile_both(mask, order, mesh, count)
        seconds = time.perf_counter() - start
        plan = said(mask, order, mesh, count)
        temporary = both.memory_analysis().temp_size_in_bytes / 1e6
        told = f"{plan.sent_bytes:,}", f"{plan.sent_bytes + plan.sent_bytes_backward:,}"
        numbers = (
            f"{total(forward, trips=mesh.size - 1):,}",
            told[0],
            f"{total(both, trips=mesh.size - 1):,}",
            told[1],
            f"{temporary:.1f}",
            f"{seconds:.0f}",
        )
        rows.append([name, *numbers])
        print(name, flush=True)
    print(f"\n{topology}, {mesh.size} chips, {count:,} tokens, {HEADS}/{KV_HEADS} heads of {SIZE}, bfloat16")
    print(table(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
