"""The parity matrix of `pallas_tpu`: every mask and feature against float64, forward and gradients, by `python -m
benchmarks.tpu.run`."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import longspan as ls
from longspan.engines import Engine
from longspan.testing import Shape, make_qkv
from longspan.testing.parity import compare
from tests.every_mask import every_mask

SHAPE = Shape(B=2, T=200, S=300, N=4, K=2, H=128)
TILES = 64, 128
TOY = Shape(B=1, T=24, S=40, N=2, K=1, H=16)  # for the interpreter: a second or two for each case
TOY_TILES = 16, 128


class ParityCase(NamedTuple):
    """One call to compare with float64."""

    name: str
    shape: Shape
    mask: Any
    dtype: str = "float32"
    tiles: tuple[int, int] | None = None  # None: those of the engine
    features: Callable[[], dict[str, Any]] = dict
    holes: bool = False  # whether keys and values that no query attends to are NaN


class ParityResult(NamedTuple):
    """The errors of one case by result, and the largest that are allowed; empty if the case did not run."""

    case: str
    verdict: str  # "ok", or what is wrong
    errors: dict[str, float]
    allowed: dict[str, float]


def cases(toy: bool = False) -> Iterator[ParityCase]:
    """All cases; with `toy`, a small shape for each."""
    shape, tiles = (TOY, TOY_TILES) if toy else (SHAPE, TILES)
    for name, mask in every_mask(shape.B, shape.N, shape.T, shape.S).items():
        yield ParityCase(f"mask: {name}", shape, mask, tiles=tiles)
    yield from _dtypes(shape)
    yield from _shapes(shape)
    yield from _features(shape)
    if not toy:
        yield from _long()


def _dtypes(shape: Shape) -> Iterator[ParityCase]:
    masks = every_mask(shape.B, shape.N, shape.T, shape.S)
    for name in ("full", "segments", "global, flags", "per head", "composed"):
        yield ParityCase(f"bfloat16: {name}", shape, masks[name], "bfloat16")


def _shapes(shape: Shape) -> Iterator[ParityCase]:
    mask = ls.Causal(shape.S - shape.T) & ls.Window(shape.S // 2, 0)
    sizes = (64, 80, 256) if shape.H > 64 else (8, 24)
    for size in sizes:
        yield ParityCase(f"shape: heads of {size}", shape._replace(H=size), mask)
    yield ParityCase("shape: values of another size", shape._replace(Hv=shape.H // 2), mask)
    yield ParityCase("shape: as many kv heads", shape._replace(K=shape.N), mask)
    yield ParityCase("shape: one kv head", shape._replace(K=1), mask, "bfloat16")
    yield ParityCase("shape: one query", shape._replace(T=1), ls.KvLengths(np.arange(shape.B) * 3 + 5))
    yield ParityCase("shape: seven queries", shape._replace(T=7), ls.Causal(shape.S - 7))


def _features(shape: Shape) -> Iterator[ParityCase]:
    B, T, S, N, *_ = shape
    mask = ls.Causal(S - T)
    rng = np.random.default_rng(1)
    key = jax.random.key(1)

    def drawn(*size: int) -> np.ndarray:
        return rng.normal(size=size).astype(np.float32)

    def holes(*size: int) -> np.ndarray:
        return np.where(rng.random(size) < 0.1, -np.inf, drawn(*size)).astype(np.float32)

    moved = dict(q_positions=rng.permutation(T)[None], kv_positions=np.sort(rng.integers(0, S, (B, S))))
    features: dict[str, dict[str, Any]] = {
        "soft cap": dict(soft_cap=3.0),
        "negative scale": dict(scale=-0.3),
        "sinks": dict(sinks=drawn(N)),
        "positions": moved,
        "dropout": dict(dropout_rate=0.3, dropout_key=key),
        "dropout and positions": dict(dropout_rate=0.3, dropout_key=key, **moved),
        "bias by pair": dict(bias=holes(B, N, T, S)),
        "bias by pair, one head": dict(bias=holes(1, 1, T, S)),
        "bias by key": dict(bias=drawn(1, N, 1, S)),
        "bias by query": dict(bias=drawn(B, 1, T, 1)),
        "ALiBi": dict(bias=ls.alibi(np.abs(drawn(N)))),
        "relative bias": dict(bias=ls.relative_bias(drawn(16, N), max_distance=19)),
        "bias by function": dict(bias=ls.ScoreBias(slower, drawn(N), np.arange(1, B + 1, dtype=np.int32))),
        "all": dict(bias=holes(B, N, T, S), sinks=drawn(N), soft_cap=3.0, dropout_rate=0.2, dropout_key=key),
    }
    for name, given in features.items():
        yield ParityCase(f"feature: {name}", shape, mask, features=lambda given=given: given)
    lengths = ls.KvLengths(np.arange(B) + S // 2) & ls.QLengths(np.arange(B) + T // 2)
    yield ParityCase("feature: NaN in masked tokens", shape, lengths & mask, holes=True)


def _long() -> Iterator[ParityCase]:
    """The engine's own tiles, several in each row."""
    for length in (2048, 3000):
        shape = Shape(B=1, T=length, S=length, N=2, K=1, H=128)
        for dtype in ("float32", "bfloat16"):
            yield ParityCase(f"long: causal, {length}, {dtype}", shape, ls.Causal(), dtype)
            window = ls.Causal() & (ls.Window(511, 0) | ls.Prefix(4))
            yield ParityCase(f"long: window, {length}, {dtype}", shape, window, dtype)


def slower(b, h, q, k, slopes, every):
    """A bias as users define one: it reads arrays by row and by head, and is no function of the distance alone."""
    distance = jnp.abs(q - k) // every[b] + q % 3
    return -slopes[h] * jnp.log1p(distance.astype(slopes.dtype))


def run(case: ParityCase, engine: Engine) -> ParityResult:
    """Runs one case. An exception is a result too: the rest of the report is worth having."""
    try:
        return _run(case, engine)
    except Exception as error:
        return ParityResult(case.name, f"{type(error).__name__}: {str(error)[:500]}", {}, {})


def _run(case: ParityCase, engine: Engine) -> ParityResult:
    q, k, v = make_qkv(case.shape, jnp.dtype(case.dtype))
    mask, features = case.mask, case.features()
    if case.tiles is not None:
        mask = mask.layout(case.shape.T, case.shape.S, q_tile=case.tiles[0], kv_tile=case.tiles[1])
    if case.holes:
        q, k, v = _with_holes(case, q, k, v)
    (results,) = compare([engine], q, k, v, mask, **features)
    wrong = [part for part, compared in results.items() if not compared.is_close()]
    verdict = f"wrong: {', '.join(wrong)}" if wrong else "ok"
    errors = {part: compared.error for part, compared in results.items()}
    return ParityResult(case.name, verdict, errors, {part: compared.allowed for part, compared in results.items()})


def _with_holes(case: ParityCase, q, k, v):
    """NaN where the mask allows no pair of a query, or of a key."""
    B, T, S, N, *_ = case.shape
    allowed = np.broadcast_to(case.mask.dense(T, S), (B, N, T, S)).any(1)
    unused_q, unused_k = ~allowed.any(2), ~allowed.any(1)
    q = jnp.where(unused_q[..., None, None], jnp.nan, q)
    k, v = (jnp.where(unused_k[..., None, None], jnp.nan, x) for x in (k, v))
    return q, k, v
