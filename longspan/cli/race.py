"""What the demo measures: a mask's attention, sparse and dense: seconds, bytes, and how exact they are."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from longspan.cli.library import library

PARTS = 32  # of the queries, one after the other: dense scores of all of them at once fit few machines
ROWS = 64  # that are computed in float64
HEAD_DIM = 64


class Finish(NamedTuple):
    """How somebody came in: bytes are what a compiled program takes besides q, k, v and its result."""

    name: str
    seconds: float
    bytes: int
    error: float  # at most so far from float64, in those rows


class Race(NamedTuple):
    """Both, and how far apart they are anywhere."""

    dense: Finish
    sparse: Finish
    apart: float


def race(mask: Any, tokens: int, report: Callable[[int], Any]) -> Race:
    """Attention of one head with a mask of positions; `report` is told how many of `PARTS` are done."""
    ls = library()
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 3)
    qkv = tuple(jax.random.normal(key, (1, tokens, 1, HEAD_DIM), jnp.float32) for key in keys)
    program = jax.jit(lambda q, k, v: ls.attention(q, k, v, mask=mask)).lower(*qkv).compile()
    out, seconds = _timed(lambda: program(*qkv))
    sparse = np.asarray(out)[0, :, 0]
    dense, dense_seconds = _dense(mask, qkv, report)
    rows = np.linspace(0, tokens - 1, min(ROWS, tokens)).astype(int)
    exact = _exactly(mask, qkv, rows)
    engine = ls.explain(*qkv, mask=mask).engine
    return Race(
        Finish("dense, jax.nn", dense_seconds, dense_bytes(tokens), _apart(dense[rows], exact)),
        Finish(f"sparse, {engine}", seconds, _temporary(program), _apart(sparse[rows], exact)),
        _apart(sparse, dense),
    )


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the seconds of the better of two runs: the first one warms threads up."""
    import jax

    seconds, out = [], None
    for _ in range(2):
        start = time.perf_counter()
        out = jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return out, min(seconds)


def _dense(mask: Any, qkv: Any, report: Callable[[int], Any]) -> tuple[np.ndarray, float]:
    """Every pair computed, part by part of the queries, and the mask's truth read: float32 [T, H], and the seconds."""
    import jax
    import jax.numpy as jnp

    q, k, v = qkv
    tokens = q.shape[1]
    part = -(-tokens // PARTS)

    @jax.jit
    def attend(q, k, v, first):
        allowed = mask.dense(part, tokens, q_positions=first + jnp.arange(part))
        return jax.nn.dot_product_attention(q, k, v, mask=allowed)

    # The last part may begin earlier: all of one shape, one program.
    firsts = [min(at, tokens - part) for at in range(0, tokens, part)]
    program = attend.lower(q[:, :part], k, v, firsts[0]).compile()
    out, seconds = np.zeros((tokens, HEAD_DIM), np.float32), 0.0
    for done, first in enumerate(firsts):
        piece = jax.block_until_ready(q[:, first : first + part])
        start = time.perf_counter()
        found = jax.block_until_ready(program(piece, k, v, first))
        seconds += time.perf_counter() - start
        out[first : first + part] = np.asarray(found)[0, :, 0]
        report(done + 1)
    return out, seconds


def dense_bytes(tokens: int) -> int:
    """What dense attention of all tokens at once takes, mask included: compiled to be asked, not run."""
    import jax
    import jax.numpy as jnp

    x = jax.ShapeDtypeStruct((1, tokens, 1, HEAD_DIM), jnp.float32)
    allowed = jax.ShapeDtypeStruct((1, 1, tokens, tokens), jnp.bool_)
    program = jax.jit(lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, mask=mask))
    return _temporary(program.lower(x, x, x, allowed).compile()) + tokens**2


def _temporary(program: Any) -> int:
    return int(getattr(program.memory_analysis(), "temp_size_in_bytes", 0))


def _exactly(mask: Any, qkv: Any, rows: np.ndarray) -> np.ndarray:
    """Some rows by the definition, in NumPy's float64."""
    q, k, v = (np.asarray(x, np.float64)[0, :, 0] for x in qkv)
    allowed = np.asarray(mask.dense(len(rows), len(k), q_positions=rows))[0, 0]
    scores = np.where(allowed, q[rows] @ k.T / np.sqrt(HEAD_DIM), -np.inf)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True) @ v


def _apart(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(np.float64) - other).max())  # NumPy's maximum: NaN stays NaN
