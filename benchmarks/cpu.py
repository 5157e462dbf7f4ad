"""Measurements of the `cpu` engine."""

import resource
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import longspan as ls
from benchmarks import cases, peers
from benchmarks.measure import alternate, gemm, of_peak, ours, ratio, seconds, useful_flops
from longspan.engines import ENGINES
from longspan.testing import Shape, make_qkv

BIG_BIRD = Shape(1, 4096, 4096, 8, 8, 64)
DECODE = Shape(1, 1, 32768, 32, 8, 128)
BIASED = Shape(1, 2048, 2048, 8, 8, 64)
LATENT = Shape(1, 2048, 2048, 8, 8, 192, 128)


def speed() -> list[list[str]]:
    """Compares the engine with the GEMM peak and with the installed peers."""
    rows = [["case", "ms", "of GEMM peak", "faster than peers"]]
    torch, hf = peers.installed("torch"), peers.installed("torch", "transformers")
    for case, others in (
        (cases.WINDOW_16K, ["flex", "longformer"]),
        (cases.WINDOW_16K_BOTH, ["longformer"]),
        (cases.CAUSAL_4K, ["sdpa"]),
        (cases.PACKED_32K, []),
    ):
        run, _ = ours(case, "cpu")
        runs = {"gemm": gemm(), "ours": run}
        if torch and "sdpa" in others:
            runs["torch SDPA"] = peers.torch_sdpa(case.shape)
        if torch and "flex" in others:
            runs["FlexAttention"] = peers.flex(case.shape, 256)
        if hf and "longformer" in others:
            runs["HF Longformer"], runs["projections"] = peers.hf_longformer(case.shape, 256, backward=case.backward)
        times = alternate(runs)
        rows.append(
            [
                case.name,
                f"{1e3 * np.median(times['ours']):.1f}",
                f"{of_peak(times, 'ours', useful_flops(case)):.3f}",
                _ratios(times),
            ]
        )
    return [*rows, _biased(torch), _latent(torch), _big_bird(hf), _decode()]


def _ratios(times: dict[str, list[float]]) -> str:
    """The speed relative to each peer. The time of projections, which are not attention, is subtracted."""
    return ", ".join(_faster(times, name) for name in times if name not in ("gemm", "ours", "projections"))


def _faster(times: dict[str, list[float]], name: str) -> str:
    whole = f"{ratio(times, name, 'ours'):.2f}x"
    if "projections" not in times or not name.startswith("HF"):
        return f"{whole} {name}"
    alone = [a - b for a, b in zip(times[name], times["projections"], strict=True)]
    return f"{ratio(times | {name: alone}, name, 'ours'):.2f}x {name} ({whole} with its projections)"


def _biased(torch: bool) -> list[str]:
    """A bias for every pair and head, added to the scores."""
    q, k, v = make_qkv(BIASED, jnp.float32)
    bias = jnp.asarray(np.random.default_rng(0).normal(size=(1, BIASED.N, BIASED.T, BIASED.S)), jnp.float32)
    run = jax.jit(lambda q, k, v, bias: ls.attention(q, k, v, bias=bias, engine="cpu"))
    peer = {"torch SDPA": peers.torch_sdpa(BIASED, bias)} if torch else {}
    times = alternate({"gemm": gemm(), "ours": lambda: run(q, k, v, bias)} | peer)
    share = of_peak(times, "ours", 4 * BIASED.H * BIASED.N * BIASED.T * BIASED.S)
    return [
        "a bias [1,8,2048,2048], 2k",
        f"{1e3 * np.median(times['ours']):.1f}",
        f"{share:.3f}",
        _ratios(times),
    ]


def _latent(torch: bool) -> list[str]:
    """Keys of 192 and values of 128 elements, as in multi-head latent attention."""
    q, k, v = make_qkv(LATENT, jnp.float32)
    run = jax.jit(lambda q, k, v: ls.attention(q, k, v, mask=ls.Causal(), engine="cpu"))
    peer = {"torch SDPA": peers.torch_sdpa(LATENT)} if torch else {}
    times = alternate({"gemm": gemm(), "ours": lambda: run(q, k, v)} | peer)
    share = of_peak(times, "ours", 2 * (192 + 128) * LATENT.N * LATENT.T * (LATENT.T + 1) / 2)
    return [
        "causal, H = 192, Hv = 128, 2k",
        f"{1e3 * np.median(times['ours']):.1f}",
        f"{share:.3f}",
        _ratios(times),
    ]


def _big_bird(hf: bool) -> list[str]:
    q, k, v = make_qkv(BIG_BIRD, jnp.float32)
    table = ls.bigbird_random_blocks(BIG_BIRD.T, block_size=64, num_random_blocks=3, num_heads=BIG_BIRD.N, seed=0)
    run = jax.jit(lambda q, k, v, t: ls.bigbird_attention(q, k, v, block_size=64, rand_attn=t, engine="cpu"))
    table = jnp.asarray(table)
    runs = {"gemm": gemm(), "ours": lambda: run(q, k, v, table)}
    if hf:
        runs["HF BigBird"], runs["projections"] = peers.hf_big_bird(BIG_BIRD, 64, 3)
    times = alternate(runs)
    blocks = BIG_BIRD.T // 64
    flops = 4 * BIG_BIRD.H * BIG_BIRD.N * 64 * 64 * (2 * blocks + 2 * 7 + (blocks - 4) * 8)
    name = "BigBird, block 64, r=3, 4k"
    return [
        name,
        f"{1e3 * np.median(times['ours']):.1f}",
        f"{of_peak(times, 'ours', flops):.3f}",
        _ratios(times),
    ]


def _decode() -> list[str]:
    """One query over a long cache: bytes of k and v per second, relative to a memory copy."""
    q, k, v = make_qkv(DECODE, jnp.float32)
    run = jax.jit(lambda q, k, v: ls.attention(q, k, v, engine="cpu"))
    source = np.ones(64 * 2**20, np.float32)
    target = np.ones_like(source)
    times = alternate({"copy": lambda: np.copyto(target, source), "ours": lambda: run(q, k, v)}, rounds=15)
    read, copied = k.nbytes + v.nbytes, 2 * source.nbytes
    share = np.median([(read / t) / (copied / c) for t, c in zip(times["ours"], times["copy"], strict=True)])
    return [
        "decode, 32/8 heads of 128, 32k",
        f"{1e3 * np.median(times['ours']):.2f}",
        "",
        f"{share:.2f} of memory bandwidth",
    ]


def intervals() -> list[list[str]]:
    """`Between` compared with the equal `Window`: the cost of an interval per query."""
    rows = [["case", "engine", "ms", "window, ms", "times as long"]]
    for case, window in (
        (cases.BETWEEN_16K, cases.WINDOW_16K),
        (cases.BETWEEN_16K_BOTH, cases.WINDOW_16K_BOTH),
    ):
        for engine in ("cpu", "xla"):
            times = alternate({"between": ours(case, engine)[0], "window": ours(window, engine)[0]})
            each = [f"{1e3 * np.median(times[name]):.1f}" for name in ("between", "window")]
            rows.append([case.name, engine, *each, f"{ratio(times, 'between', 'window'):.2f}"])
    return rows


def biases() -> list[list[str]]:
    """The cost of ALiBi: each call compared with the same call without it."""
    rows = [["case", "ms", "without, ms", "times as long"]]
    for case in (cases.CAUSAL_16K, cases.CAUSAL_16K_BOTH):
        biased = replace(case, name=f"ALiBi {case.name}", bias=cases.alibi)
        times = alternate({"plain": ours(case, "cpu")[0], "biased": ours(biased, "cpu")[0]})
        took = {name: f"{1e3 * np.median(t):.1f}" for name, t in times.items()}
        rows.append([biased.name, took["biased"], took["plain"], f"{ratio(times, 'biased', 'plain'):.3f}"])
    return rows


LAP = 0.02  # seconds for which a call that is too short to be timed is repeated


def _repeat(run, often: int) -> object:
    for _ in range(often - 1):
        jax.block_until_ready(run())
    return run()


def crossover() -> list[list[str]]:
    """The sizes at which `engine="auto"` should not choose `cpu`: small to medium calls on every engine."""
    rows = [["8 heads of 64, f32 if not named", "pass", *(f"{name}, us" for name in ENGINES), "fastest"]]
    for T, S in ((1, 64), (1, 2048), (16, 16), (64, 64), (256, 256), (1024, 1024)):
        shape = Shape(1, T, S, 8, 8, 64)
        rows += _fastest(f"causal, T={T}, S={S}", shape, dict(mask=ls.Causal(S - T)))
    rng, T = np.random.default_rng(0), 512
    shape = Shape(1, T, T, 8, 8, 64)
    for name, arguments in {
        "bias": dict(bias=jnp.asarray(rng.normal(size=(1, 8, T, T)), jnp.float32)),
        "dropout": dict(mask=ls.Causal(), dropout_rate=0.1, dropout_key=jax.random.key(0)),
        "Dense": dict(mask=ls.Dense(rng.random((1, 1, T, T)) < 0.5)),
        "Custom": dict(mask=ls.Custom(lambda q, k: (q + k) % 3 != 0)),
        "shuffled positions": dict(mask=ls.Causal(), q_positions=rng.permutation(T)[None]),
    }.items():
        rows += _fastest(f"{name}, T={T}", shape, arguments)
    rows += _fastest(f"causal, T={T}, bf16", shape, dict(mask=ls.Causal()), jnp.bfloat16)
    rows += _fastest(f"causal, T={T}, heads of 5", shape._replace(H=5), dict(mask=ls.Causal()))
    return rows


def _fastest(title: str, shape: Shape, arguments: dict, dtype=jnp.float32) -> list[list[str]]:
    """A row for the forward pass and one for both passes, in microseconds."""
    q, k, v = make_qkv(shape, dtype)
    rows = []
    for passes in ("forward", "both"):
        runs = {}
        for engine in ENGINES:
            forward = partial(ls.attention, engine=engine, **arguments)
            both = jax.grad(lambda *x, f=forward: f(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))
            runs[engine] = partial(jax.jit(forward if passes == "forward" else both), q, k, v)
            jax.block_until_ready(runs[engine]())
        often = {name: max(1, int(LAP / min(seconds(run) for _ in range(5)))) for name, run in runs.items()}
        times = alternate({name: partial(_repeat, run, often[name]) for name, run in runs.items()})
        each = {name: 1e6 * float(np.median(t)) / often[name] for name, t in times.items()}
        rows.append([title, passes, *(f"{us:.0f}" for us in each.values()), min(each, key=lambda name: each[name])])
    return rows


def long() -> list[list[str]]:
    """A million tokens, both passes: the time per token relative to 64k tokens, and the process's peak memory."""
    rows = [["case", "ms", "time per token / that at 64k", "peak resident MiB"]]
    first = None
    for length in (65536, 1_000_000):
        case = cases.Case(f"window ±256, {length:,}, 1 head, both passes", cases.square(length, 1), cases.window, True)
        run, _ = ours(case, "cpu")
        run()
        took = min(seconds(run) for _ in range(3)) / length
        first = first or took
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append([case.name, f"{1e3 * took * length:.0f}", f"{took / first:.3f}", f"{peak:.0f}"])
    return rows
