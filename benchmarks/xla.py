"""Measurements of the `xla` engine."""

import numpy as np

from benchmarks import cases, peers
from benchmarks.measure import alternate, gemm, of_peak, ours, ratio, seconds, useful_flops


def speed() -> list[list[str]]:
    """Compares the engine with dense attention and the GEMM peak."""
    rows = [["case", "ms", "of GEMM peak", "faster than jax.nn", "temporary MiB"]]
    for case, peer in (
        (cases.WINDOW_8K, lambda: peers.jax_nn(cases.WINDOW_8K.shape, window=256)),
        (cases.WINDOW_16K, None),
        (cases.WINDOW_16K_BOTH, None),
        (cases.CAUSAL_2K, lambda: peers.jax_nn(cases.CAUSAL_2K.shape, causal=True)),
        (cases.PACKED_32K, None),
    ):
        run, compiled = ours(case, "xla")
        runs = {"gemm": gemm(), "ours": run}
        if peer:
            runs["jax.nn"] = peer()
        times = alternate(runs)
        rows.append(
            [
                case.name,
                f"{1e3 * np.median(times['ours']):.1f}",
                f"{of_peak(times, 'ours', useful_flops(case)):.3f}",
                f"{ratio(times, 'jax.nn', 'ours'):.2f}x" if peer else "",
                f"{compiled.memory_analysis().temp_size_in_bytes / 2**20:.0f}",
            ]
        )
    return rows


def growth() -> list[list[str]]:
    """Time and temporary memory for growing lengths."""
    rows = [["case", "ms", "time / linear growth", "temporary / (q+k+v)", "lowered characters", "compile time, s"]]
    programs = {case.name: ours(case, "xla") for case in cases.GROWTH}
    times = alternate({name: run for name, (run, _) in programs.items()})
    shortest = cases.GROWTH[0]
    for case in cases.GROWTH:
        text, compile_seconds = lowering(case)
        size = 3 * 4 * case.shape.T * case.shape.N * case.shape.H
        rows.append(
            [
                case.name,
                f"{1e3 * np.median(times[case.name]):.0f}",
                f"{ratio(times, case.name, shortest.name) * shortest.shape.T / case.shape.T:.3f}",
                f"{programs[case.name][1].memory_analysis().temp_size_in_bytes / size:.2f}",
                str(text),
                f"{compile_seconds:.1f}",
            ]
        )
    return rows


def lowering(case: cases.Case) -> tuple[int, float]:
    """Characters of the lowered program, and seconds to compile it."""
    import time

    import jax

    import longspan as ls

    q = jax.ShapeDtypeStruct((case.shape.B, case.shape.T, case.shape.N, case.shape.H), "float32")
    loss = jax.grad(lambda *x: ls.attention(*x, mask=case.mask(), engine="xla").sum(), argnums=(0, 1, 2))
    lowered = jax.jit(loss).lower(q, q, q)
    start = time.perf_counter()
    lowered.compile()
    return len(lowered.as_text()), time.perf_counter() - start


def documents() -> list[list[str]]:
    """One compiled program for documents of different lengths: the time depends on the lengths."""
    import jax
    import jax.numpy as jnp

    import longspan as ls

    q, k, v = map(jnp.asarray, _inputs(cases.SHORTER[0]))
    step = jax.jit(lambda ids: ls.attention(q, k, v, mask=ls.Causal() & ls.Segments(ids), engine="xla"))
    rows = [["documents of about", "ms", "compiled programs"]]
    for case, mean in zip(cases.SHORTER, (8192, 2048, 512), strict=True):
        ids = jnp.asarray(cases.documents(case.shape.T, mean))
        jax.block_until_ready(step(ids))
        took = min(seconds(lambda: step(ids)) for _ in range(3))  # noqa: B023
        rows.append([str(mean), f"{1e3 * took:.0f}", str(step._cache_size())])
    return rows


def _inputs(case: cases.Case):
    from benchmarks.measure import inputs

    return inputs(case)
