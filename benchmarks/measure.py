"""Timing by turns: every round runs the GEMM and all implementations, and ratios are taken within a round."""

import os
import platform
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import longspan as ls
from benchmarks.cases import Case
from longspan.testing import make_qkv

ROUNDS = 5
# Seconds between two implementations: the thread pools of BLAS and OpenMP spin for a while after their work is done,
# and the next implementation would share its cores with them.
PAUSE = 0.2
GEMM = 2048


def machine() -> dict[str, str | int]:
    """The processor and the versions."""
    model = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as info:
            model = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), model)
    return dict(
        cpu=model,
        cores=os.cpu_count() or 1,
        jax=jax.__version__,
        longspan=ls.__version__,
        python=platform.python_version(),
    )


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def gemm() -> Callable[[], object]:
    """The reference of a run: a large matrix product by NumPy or XLA, whichever is faster."""
    a = np.random.default_rng(0).normal(size=(GEMM, GEMM)).astype(np.float32)
    b = jnp.asarray(a)
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(b))
    ways = [lambda: a @ a, lambda: product(b)]
    return min(ways, key=lambda way: min(seconds(way) for _ in range(3)))


def alternate(runs: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """The seconds of each implementation in each round, after a pause and one run to warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(PAUSE)
            jax.block_until_ready(run())
            times[name].append(seconds(run))
    return times


def ratio(times: dict[str, list[float]], slow: str, fast: str) -> float:
    """The time of `slow` divided by that of `fast`, the median over rounds."""
    return float(np.median([a / b for a, b in zip(times[slow], times[fast], strict=True)]))


def of_peak(times: dict[str, list[float]], name: str, flops: float) -> float:
    """An implementation's FLOPs per second as a fraction of the GEMM's, the median over rounds."""
    peak = 2.0 * GEMM**3
    return float(np.median([(flops / t) / (peak / g) for t, g in zip(times[name], times["gemm"], strict=True)]))


def inputs(case: Case):
    return make_qkv(case.shape, jnp.float32)


def ours(case: Case, engine: str):
    """A function that runs a case on one of Longspan's engines, and its compiled program."""
    mask, bias = case.mask(), None
    if case.bias is not None:
        bias = case.bias()

    def forward(q, k, v, bias, mask):
        return ls.attention(q, k, v, mask=mask, bias=bias, engine=engine)

    def both(q, k, v, bias, mask):
        return jax.grad(lambda *x: forward(*x, mask).sum(), argnums=(0, 1, 2, 3))(q, k, v, bias)

    q, k, v = inputs(case)
    compiled = jax.jit(both if case.backward else forward).lower(q, k, v, bias, mask).compile()
    return (lambda: compiled(q, k, v, bias, mask)), compiled


def useful_flops(case: Case) -> float:
    """4·H for each allowed pair and head; forward and backward together count 3.5 times the forward."""
    q, k, v = inputs(case)
    flops = ls.explain(q, k, v, mask=case.mask(), engine="reference").useful_flops
    assert flops is not None
    return flops * (3.5 if case.backward else 1.0)


def table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
