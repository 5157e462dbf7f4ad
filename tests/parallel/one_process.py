"""One of several processes with two devices each: computes attention on all devices and compares with one device.

Started by test_parallel_processes.py as `python one_process.py <port> <processes> <number>`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import longspan as ls
from longspan.testing import Shape, make_qkv


def main(port: str, processes: int, number: int) -> None:
    address = f"127.0.0.1:{port}"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address, num_processes=processes, process_id=number, coordinator_bind_address=address, initialization_timeout=60
    )
    assert jax.device_count() == 2 * processes
    mesh = ls.parallel.mesh(sp=2 * processes)
    q, k, v = (np.asarray(x) for x in make_qkv(Shape(1, 48, 48, 2, 1, 4), jnp.float32))
    ids = np.sort(np.random.default_rng(0).integers(0, 4, (1, 48)), axis=1)
    batch = ls.parallel.shard_batch(dict(q=q, k=k, v=v, segment_ids=ids), mesh)
    mask = {
        "window and global tokens": lambda ids: ls.Window(3, 2) | ls.Global((0, 30)),
        "documents": lambda ids: ls.Causal() & ls.Segments(ids),
    }
    for name, of in mask.items():
        got = both(ls.parallel.attention, *(batch[x] for x in "qkv"), batch["segment_ids"], of, mesh=mesh)
        want = both(ls.attention, q, k, v, ids, of, engine="reference")
        for mine, theirs in zip(got, want, strict=True):
            for shard in mine.addressable_shards:
                np.testing.assert_allclose(shard.data, np.asarray(theirs)[shard.index], rtol=1e-4, atol=2e-5)
        print(f"{name}: equal", flush=True)
    jax.distributed.shutdown()


def both(call, q, k, v, ids, of, **how):
    """The output, and the gradients."""

    @jax.jit
    def run(q, k, v, ids):
        out, pull = jax.vjp(lambda *x: call(*x, mask=of(ids), **how), q, k, v)
        return out, *pull(out)

    return run(q, k, v, ids)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
