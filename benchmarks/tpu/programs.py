"""Compiles one program of `PROGRAMS` for a chip and dumps its kernels' schedules.

    python -m benchmarks.tpu.programs fused v5e FOLDER

libtpu reads the folder of dumps when it starts, so `dumped` runs each program in a process of its own.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.tpu.chips import ENVIRONMENT, compile_for
from benchmarks.tpu.dump import Kernel, read

LENGTH, HEAD_SIZE, TILE = 8192, 128, 512  # of queries and keys
ROOT = Path(__file__).parents[2]


def dumped(program: str, chip: str) -> dict[str, Kernel]:
    """The kernels of a program by name, compiled in another process. The dump, about 150 MB, is removed.

    Raises:
        RuntimeError: if the program does not compile, with the end of what the process printed.
    """
    with tempfile.TemporaryDirectory(prefix="longspan-dump-") as folder:
        command = [sys.executable, "-m", "benchmarks.tpu.programs", program, chip, folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{program} does not compile for {chip}:\n{(done.stdout + done.stderr)[-2000:]}")
        return read(Path(folder))


def _ours(chip: str, *, fused: bool):
    """Both passes of a causal call on `pallas_tpu`, one head, bfloat16."""
    import jax
    import jax.numpy as jnp

    import longspan as ls
    from longspan.engines.pallas_tpu import PallasTpu

    layout = ls.Causal().layout(LENGTH, LENGTH, q_tile=TILE, kv_tile=TILE)
    engine = PallasTpu(fused=fused, chip=chip)

    def both(q, k, v):
        return jax.vjp(lambda *x: ls.attention(*x, mask=layout, engine=engine), q, k, v)[1](q)

    x = jax.ShapeDtypeStruct((1, LENGTH, 1, HEAD_SIZE), jnp.bfloat16)
    return both, (x, x, x)


def _splash(chip: str, *, fused: bool):
    """The same call on JAX's splash attention, with the same tiles."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    apart = {} if fused else dict(block_q_dq=TILE, block_kv_dq=TILE)
    sizes = splash.BlockSizes(
        block_q=TILE, block_kv=TILE, block_kv_compute=TILE, block_q_dkv=TILE, block_kv_dkv=TILE,
        block_kv_dkv_compute=TILE, use_fused_bwd_kernel=fused, **apart,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((LENGTH, LENGTH))])
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=sizes)
    x = jax.ShapeDtypeStruct((1, LENGTH, HEAD_SIZE), jnp.bfloat16)
    return (lambda q, k, v: jax.vjp(kernel, q, k, v)[1](q)), (x, x, x)


PROGRAMS: dict[str, Callable[[str], tuple]] = {
    "fused": lambda chip: _ours(chip, fused=True),
    "apart": lambda chip: _ours(chip, fused=False),
    "splash fused": lambda chip: _splash(chip, fused=True),
    "splash apart": lambda chip: _splash(chip, fused=False),
}


def main(program: str, chip: str, folder: str) -> None:
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    os.environ.update(ENVIRONMENT, LIBTPU_INIT_ARGS=flags)
    function, arguments = PROGRAMS[program](chip)
    compile_for(chip, function, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
