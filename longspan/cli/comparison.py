"""The demo's comparison of sparse and dense attention under one mask: seconds, bytes and errors."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from longspan.cli.library import library

PARTS = 32  # parts of the queries in which dense attention runs: few machines hold all scores at once
ROWS = 64  # the rows that are also computed in float64
HEAD_DIM = 64


class Measurement(NamedTuple):
    """One implementation's time, temporary memory and error."""

    name: str
    seconds: float
    bytes: int  # of the compiled program, without q, k, v and its result
    error: float  # the largest difference from float64, in `ROWS` rows


class Comparison(NamedTuple):
    """Both measurements, and the largest difference between the two outputs."""

    dense: Measurement
    sparse: Measurement
    difference: float


def compare_with_dense(mask: Any, tokens: int, report: Callable[[int], Any]) -> Comparison:
    """Runs sparse and dense attention of one head. `report` is called with the number of finished parts of `PARTS`."""
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
    exact = _in_float64(mask, qkv, rows)
    engine = ls.explain(*qkv, mask=mask).engine
    return Comparison(
        Measurement("dense, jax.nn", dense_seconds, dense_bytes(tokens), _largest_difference(dense[rows], exact)),
        Measurement(f"sparse, {engine}", seconds, _temporary_bytes(program), _largest_difference(sparse[rows], exact)),
        _largest_difference(sparse, dense),
    )


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the seconds of the faster of two runs: the first one starts threads."""
    import jax

    seconds, out = [], None
    for _ in range(2):
        start = time.perf_counter()
        out = jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return out, min(seconds)


def _dense(mask: Any, qkv: Any, report: Callable[[int], Any]) -> tuple[np.ndarray, float]:
    """Dense attention in parts of the queries, under the dense mask: float32 [T, H], and the seconds."""
    import jax
    import jax.numpy as jnp

    q, k, v = qkv
    tokens = q.shape[1]
    part = -(-tokens // PARTS)

    @jax.jit
    def attend(q, k, v, first):
        allowed = mask.dense(part, tokens, q_positions=first + jnp.arange(part))
        return jax.nn.dot_product_attention(q, k, v, mask=allowed)

    # The last part may overlap the one before, so that all parts have one shape and one program.
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
    """The memory of dense attention of all tokens at once, with its mask: compiled, not run."""
    import jax
    import jax.numpy as jnp

    x = jax.ShapeDtypeStruct((1, tokens, 1, HEAD_DIM), jnp.float32)
    allowed = jax.ShapeDtypeStruct((1, 1, tokens, tokens), jnp.bool_)
    program = jax.jit(lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, mask=mask))
    return _temporary_bytes(program.lower(x, x, x, allowed).compile()) + tokens**2


def _temporary_bytes(program: Any) -> int:
    return int(getattr(program.memory_analysis(), "temp_size_in_bytes", 0))


def _in_float64(mask: Any, qkv: Any, rows: np.ndarray) -> np.ndarray:
    """Rows of the output by the definition of attention, in NumPy's float64."""
    q, k, v = np.stack(qkv).astype(np.float64)[:, 0, :, 0]
    allowed = np.asarray(mask.dense(len(rows), len(k), q_positions=rows))[0, 0]
    scores = np.where(allowed, q[rows] @ k.T / np.sqrt(HEAD_DIM), -np.inf)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True) @ v


def _largest_difference(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(np.float64) - other).max())  # NumPy's maximum propagates NaN
