"""Times of `pallas_tpu` in turns with splash, tokamax, flywheel and `xla`, by `python -m benchmarks.tpu.run`."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import longspan as ls
from benchmarks.measure import alternate
from benchmarks.peers import installed
from longspan.engines import Engine
from longspan.testing import Shape

ROUNDS = 5
DENSE_PAIRS = 2**28  # above this many pairs and heads, `xla` is not timed: it would take minutes


class TimedCase(NamedTuple):
    """One call to time, in bfloat16. A window counts the keys before the query."""

    name: str
    shape: Shape
    window: int | None  # None: causal
    documents: int | None = None  # the length of packed documents

    def mask(self) -> ls.Mask:
        mask: ls.Mask = ls.Causal()
        if self.window is not None:
            mask = mask & ls.Window(self.window, 0)
        if self.documents is not None:
            mask = mask & ls.Segments(np.arange(self.shape.T)[None] // self.documents)
        return mask


class TimedResult(NamedTuple):
    """The seconds of one implementation in each round; empty if it did not run."""

    case: str
    passes: str
    name: str
    verdict: str  # "ok", or what is wrong
    seconds: list[float]
    tflops: float | None  # useful TFLOP/s: of the allowed pairs alone


def cases(toy: bool = False) -> list[TimedCase]:
    if toy:
        return [TimedCase("causal, toy", Shape(B=1, T=32, S=32, N=2, K=1, H=16), None)]
    square = [
        TimedCase(f"{name}, {length // 1024}k", Shape(1, length, length, 8, 8, 128), window)
        for length, name, window in (
            (8192, "causal", None), (16384, "causal", None), (32768, "window 512", 511), (32768, "window 1024", 1023),
            (32768, "window 4096", 4095),
        )
    ]  # fmt: skip
    grouped = Shape(1, 8192, 8192, 16, 4, 128)
    return [
        *square,
        TimedCase("causal, 8k, 16 heads and 4 kv heads", grouped, None),
        TimedCase("causal documents of 2k, 16k", Shape(1, 16384, 16384, 8, 8, 128), None, documents=2048),
        TimedCase("causal, 8k, heads of 64", Shape(1, 8192, 8192, 8, 8, 64), None),
        TimedCase("causal, 8k, heads of 256", Shape(1, 8192, 8192, 4, 4, 256), None),
        TimedCase("window 1024, 1M", Shape(1, 2**20, 2**20, 4, 2, 128), 1023),
    ]


def measure(case: TimedCase, engine: Engine, rounds: int = ROUNDS) -> Iterator[TimedResult]:
    """The times of every implementation that supports a case, for the forward pass and for both."""
    useful = _useful_flops(case, engine)
    for passes in ("forward", "both"):
        runs, results = {}, []
        for name, attend in _implementations(case, engine).items():
            try:
                runs[name] = _compiled(attend, case, passes)
                results.append(TimedResult(case.name, passes, name, _repeatable(runs[name]), [], None))
            except Exception as error:
                runs.pop(name, None)
                yield TimedResult(case.name, passes, name, f"{type(error).__name__}: {str(error)[:500]}", [], None)
        times = alternate(runs, rounds)
        flops = useful * (3.5 if passes == "both" else 1.0)
        for result in results:
            seconds = times[result.name]
            yield result._replace(seconds=seconds, tflops=flops / float(np.median(seconds)) / 1e12)


def _useful_flops(case: TimedCase, engine: Engine) -> float:
    B, T, S, N, K, H, _ = case.shape
    q, k = (jax.ShapeDtypeStruct((B, length, heads, H), jnp.bfloat16) for length, heads in ((T, N), (S, K)))
    flops = ls.explain(q, k, k, mask=case.mask(), engine=engine).useful_flops
    assert flops is not None
    return flops


def _compiled(attend: Callable, case: TimedCase, passes: str) -> Callable[[], Any]:
    q, k, v = _qkv(case.shape)

    def both(q, k, v):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(out)

    compiled = jax.jit(both if passes == "both" else attend).lower(q, k, v).compile()
    return lambda: compiled(q, k, v)


def _qkv(shape: Shape) -> list[jax.Array]:
    """Drawn on the device: a million tokens would take minutes in NumPy."""
    B, T, S, N, K, H, _ = shape
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = ((B, T, N, H), (B, S, K, H), (B, S, K, H))
    return [jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True)]


def _repeatable(run: Callable[[], Any]) -> str:
    """ "ok", or what two runs show: copies that race with the computation give other bits, or NaN."""
    first, second = (jax.tree.map(np.asarray, run()) for _ in range(2))
    same = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)]
    finite = [bool(np.isfinite(x.astype(np.float32)).all()) for x in jax.tree.leaves(first)]
    if not all(finite):
        return "not finite"
    return "ok" if all(same) else "two runs differ"


def _implementations(case: TimedCase, engine: Engine) -> dict[str, Callable]:
    """Functions of q, k and v in [B, T, N, H], by name."""
    mask = case.mask()

    def longspan(chosen):
        return lambda q, k, v: ls.attention(q, k, v, mask=mask, engine=chosen)

    found: dict[str, Callable] = {"pallas_tpu": longspan(engine)}
    if case.window is not None or case.shape.T**2 * case.shape.N <= DENSE_PAIRS:
        found["xla"] = longspan("xla")
    if jax.default_backend() == "tpu":
        found |= _peers(case)
    return found


def _peers(case: TimedCase) -> dict[str, Callable]:
    found: dict[str, Callable] = {"splash": lambda q, k, v: _splash(case)(q, k, v)}
    window = case.window
    if case.documents is None and installed("tokamax"):
        import tokamax

        size = None if window is None else (window, 0)
        found["tokamax"] = lambda q, k, v: tokamax.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=size, implementation="mosaic"
        )
    if case.documents is None and installed("flywheel_tpu"):
        import flywheel_tpu

        sides = (-1, -1) if window is None else (window, 0)
        found["flywheel"] = lambda q, k, v: flywheel_tpu.flash_attn_func(q, k, v, causal=True, window_size=sides)
    return found


def _splash(case: TimedCase) -> Callable:
    """JAX's splash attention with the tiles that its users choose: 1024 × 1024 in steps of 512 keys, fused backward."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    T, group = case.shape.T, case.shape.N // case.shape.K
    mask: Any = masks.CausalMask((T, T))
    if case.window is not None:
        mask = mask & masks.LocalMask((T, T), (case.window, 0), offset=0)
    sizes = splash.BlockSizes(
        block_q=1024, block_kv=1024, block_kv_compute=512, block_q_dkv=1024, block_kv_dkv=1024,
        block_kv_dkv_compute=512, use_fused_bwd_kernel=True,
    )  # fmt: skip
    kernel = splash.make_splash_mqa_single_device(masks.MultiHeadMask([mask] * group), block_sizes=sizes)
    ids = None
    if case.documents is not None:
        numbers = jnp.arange(T, dtype=np.int32) // case.documents
        ids = splash.SegmentIds(q=numbers, kv=numbers)

    def attend(q, k, v):
        B, _, N, H = q.shape
        q = (q * jnp.asarray(H**-0.5, q.dtype)).reshape(B, T, N // group, group, H).transpose(0, 2, 3, 1, 4)
        k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
        by_head = jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=ids))
        out = jax.vmap(by_head)(q, k, v)  # [B, K, group, T, H]
        return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)

    return attend
