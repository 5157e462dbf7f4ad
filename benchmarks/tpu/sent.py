"""The bytes that sequence-parallel attention sends on TPUs, from programs compiled without a TPU (`make accelerators`).

    python -m benchmarks.tpu.sent                    # forward and backward on v5e 4x4
    python -m benchmarks.tpu.sent v5e:16x16 1048576  # another topology and length

XLA:TPU compiles the programs of the `xla` engine, and they are never run. This needs libtpu.
"""

import os
import sys
import time

from benchmarks.tpu.chips import ENVIRONMENT, mesh_of

TOPOLOGY, LENGTH = "v5e:4x4", 16384
HEADS, KV_HEADS, SIZE = 8, 2, 128


def masks(length: int) -> dict:
    """The mask and the order of each case, by name."""
    import numpy as np

    import longspan as ls

    drawn = np.random.default_rng(0).integers(0, length // 64, (HEADS, length // 64, 2))
    return {
        "window of 1024": (ls.Causal() & ls.Window(1023, 0), "contiguous"),
        "causal ring": (ls.Causal(), "zigzag"),
        "random blocks by head": (ls.Blocks(drawn, 64), "contiguous"),
        "Longformer, 2 global": (ls.Window(256, 256) | ls.Global((0, length // 2)), "contiguous"),
    }


def compile_both(mask, order: str, mesh, length: int):
    """The compiled programs of the forward pass and of both passes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import longspan as ls

    here = NamedSharding(mesh, P(None, "sp"))
    q = jax.ShapeDtypeStruct((1, length, HEADS, SIZE), jnp.bfloat16, sharding=here)
    k = jax.ShapeDtypeStruct((1, length, KV_HEADS, SIZE), jnp.bfloat16, sharding=here)

    def forward(q, k, v):
        return ls.parallel.attention(q, k, v, mask=mask, mesh=mesh, order=order, engine="xla")

    def both(q, k, v, dout):
        return jax.vjp(forward, q, k, v)[1](dout)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered_forward = jax.jit(forward, out_shardings=here).lower(q, k, k)
        lowered_both = jax.jit(both, out_shardings=(here,) * 3).lower(q, k, k, q)
    return lowered_forward.compile(), lowered_both.compile()


def explained(mask, order: str, mesh, length: int):
    """The report of `explain` for the same call."""
    import jax
    import jax.numpy as jnp

    import longspan as ls

    q = jax.ShapeDtypeStruct((1, length, HEADS, SIZE), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, length, KV_HEADS, SIZE), jnp.bfloat16)
    return ls.explain(q, k, k, mask=mask, mesh=mesh, order=order, engine="xla")


def main(topology: str = TOPOLOGY, length: str = str(LENGTH)) -> None:
    os.environ.update(ENVIRONMENT)
    from benchmarks.measure import table
    from tests.parallel.hlo import total

    mesh, count = mesh_of(topology), int(length)
    rows = [["mask", "forward, bytes", "by explain", "both, bytes", "by explain", "temporary, MB", "compile time, s"]]
    for name, (mask, order) in masks(count).items():
        start = time.perf_counter()
        forward, both = compile_both(mask, order, mesh, count)
        seconds = time.perf_counter() - start
        report = explained(mask, order, mesh, count)
        temporary = both.memory_analysis().temp_size_in_bytes / 1e6
        numbers = (
            f"{total(forward, trips=mesh.size - 1):,}",
            f"{report.sent_bytes:,}",
            f"{total(both, trips=mesh.size - 1):,}",
            f"{report.sent_bytes + report.sent_bytes_backward:,}",
            f"{temporary:.1f}",
            f"{seconds:.0f}",
        )
        rows.append([name, *numbers])
        print(name, flush=True)
    print(f"\n{topology}, {mesh.size} chips, {count:,} tokens, {HEADS}/{KV_HEADS} heads of {SIZE}, bfloat16")
    print(table(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
