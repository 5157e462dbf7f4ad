"""Planning a million tokens: the seconds and the peak memory of each plan, each in its own process."""

import json
import resource
import subprocess
import sys
import time

LENGTH = 2**20
PLANS = ("window and documents", "window and global", "documents under jit")


def plan(name: str):
    import jax
    import numpy as np

    import longspan as ls
    from benchmarks.cases import documents

    if name == "window and global":
        mask = ls.Window(256, 256) | ls.Global(tuple(range(0, LENGTH, LENGTH // 64)))
        return lambda: mask.layout(LENGTH, LENGTH)
    ids = documents(LENGTH, 1024)
    if name == "window and documents":
        mask = ls.Causal() & ls.Window(4095, 0) & ls.Segments(ids)
        return lambda: mask.layout(LENGTH, LENGTH)
    traced = jax.jit(lambda ids: (ls.Causal() & ls.Segments(ids)).layout(LENGTH, LENGTH))
    held = jax.numpy.asarray(np.asarray(ids))
    compiled = traced.lower(held).compile()
    return lambda: jax.block_until_ready(compiled(held).starts)


def measure(name: str) -> dict[str, float]:
    run = plan(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    run()
    took = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The peak never decreases, so memory below the peak of the imports does not count as "more".
    return dict(seconds=took, more_megabytes=(after - before) / 1024, peak_megabytes=after / 1024)


def main() -> list[list[str]]:
    rows = [["plan of 1,048,576 tokens", "seconds", "above the peak at start (MiB)", "peak of the process (MiB)"]]
    for name in PLANS:
        command = [sys.executable, "-m", "benchmarks.planning", name]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows.append(
            [name, f"{found['seconds']:.2f}", f"{found['more_megabytes']:.0f}", f"{found['peak_megabytes']:.0f}"]
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
