"""Decoding on the `cpu` engine: single tokens compared with a plain einsum, and caches sized by the mask."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import longspan as ls
from benchmarks.measure import alternate, ratio
from longspan.testing import Shape, make_qkv

KEYS = (16, 128, 1028, 4096, 32768)
HEADS, KV_HEADS, SIZE = 8, 2, 64
WINDOW, PINNED = 1024, 4
MASK = ls.Causal() & (ls.Window(WINDOW - 1, 0) | ls.Prefix(PINNED))


def by_einsum(q, k, v, seen=None):
    """Attention as people write it without a library."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k) * np.float32(q.shape[3] ** -0.5)
    weights = jax.nn.softmax(scores if seen is None else jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)


def small() -> list[list[str]]:
    """One query, 8/2 heads of 64, in a compiled loop: microseconds, and the ratio to those of the einsum."""
    rows = [["keys", "einsum, µs", "ours, µs", "ours / einsum", "with mask and positions"]]
    for keys in KEYS:
        q, k, v = make_qkv(Shape(1, 1, keys, HEADS, KV_HEADS, SIZE), jnp.float32)
        steps = max(10, 500_000 // (keys + 500))
        here = dict(q_positions=jnp.array([keys - 1]), kv_positions=jnp.arange(keys))
        ways: dict[str, Callable] = {
            "einsum": by_einsum,
            "ours": lambda q, k, v: ls.attention(q, k, v, engine="cpu"),
            "masked": lambda q, k, v, here=here: ls.attention(
                q, k, v, mask=ls.Causal() & ls.Window(10**6, 0), engine="cpu", **here
            ),
        }
        times = alternate({name: _looped(way, steps, q, k, v) for name, way in ways.items()}, rounds=9)
        each = {name: 1e6 * np.median(seconds) / steps for name, seconds in times.items()}
        over = [f"{ratio(times, name, 'einsum'):.2f}x" for name in ("ours", "masked")]
        rows.append([str(keys), f"{each['einsum']:.1f}", f"{each['ours']:.1f}", *over])
    return rows


def _looped(way: Callable, steps: int, q, k, v) -> Callable[[], object]:
    run = jax.jit(lambda q, k, v: jax.lax.fori_loop(0, steps, lambda _, q: 0.5 * q + 0.5 * way(q, k, v), q))
    return lambda: run(q, k, v)


def cached() -> list[list[str]]:
    """A step (append and attention) with a window of 1024 and 4 pinned tokens, and a prefill in chunks."""
    rows = [["measurement", "ours", "compared with", "ratio"]]
    times = alternate({f"{n // 1024}k": _steps(n) for n in (2048, 65536)} | {"by hand": _by_hand(65536)}, rounds=9)
    each = {name: f"{1e6 * np.median(seconds) / STEPS:.1f} µs" for name, seconds in times.items()}
    rows.append(["a step at 64k / at 2k", each["64k"], each["2k"], f"{ratio(times, '64k', '2k'):.2f}x"])
    rows.append(
        ["a step / einsum on a ring buffer", each["64k"], each["by hand"], f"{ratio(times, '64k', 'by hand'):.2f}x"]
    )
    plans = [ls.cache.plan(MASK, n + STEPS) for n in (2048, 65536)]
    size = [plan.nbytes(1, KV_HEADS, SIZE, jnp.float32) for plan in plans]
    rows.append(["cache bytes at 64k / at 2k", f"{size[1]:,}", f"{size[0]:,}", f"{size[1] / size[0]:.2f}x"])
    times = alternate({"chunks": _prefill(32768, 2048), "whole": _prefill(32768, 32768)})
    each = {name: f"{1e3 * np.median(seconds):.0f} ms" for name, seconds in times.items()}
    over = f"{ratio(times, 'chunks', 'whole'):.2f}x"
    rows.append(["prefill of 32k in chunks of 2k / in one call", each["chunks"], each["whole"], over])
    return rows


STEPS = 256


def _steps(position: int) -> Callable[[], object]:
    """`STEPS` decoding steps from a position on, in one program."""
    plan = ls.cache.plan(MASK, position + STEPS)
    cache = ls.cache.init(plan, 1, KV_HEADS, SIZE, jnp.float32)
    _, k, v = make_qkv(Shape(1, 1, position, HEADS, KV_HEADS, SIZE), jnp.float32)
    cache, _ = jax.jit(lambda cache, k, v: cache.append(k, v))(cache, k, v)
    x = make_qkv(Shape(1, 1, 1, HEADS, KV_HEADS, SIZE), jnp.float32)

    @jax.jit
    def run(cache, x):
        def step(_, carry):
            cache, q = carry
            cache, view = cache.append(x[1] + q[:, :, :KV_HEADS], x[2])
            return cache, ls.attention(q, **view.of(MASK), engine="cpu")

        return jax.lax.fori_loop(0, STEPS, step, (cache, x[0]))[1]

    return lambda: run(cache, x)


def _by_hand(position: int) -> Callable[[], object]:
    """The same with a hand-written ring buffer of the window and the pinned tokens."""
    slots = WINDOW + PINNED
    _, k, v = make_qkv(Shape(1, 1, slots, HEADS, KV_HEADS, SIZE), jnp.float32)
    x = make_qkv(Shape(1, 1, 1, HEADS, KV_HEADS, SIZE), jnp.float32)

    @jax.jit
    def run(k, v, x):
        def step(i, carry):
            k, v, q = carry
            place = PINNED + (position + i - PINNED) % WINDOW
            k = jax.lax.dynamic_update_slice(k, x[1] + q[:, :, :KV_HEADS], (0, place, 0, 0))
            v = jax.lax.dynamic_update_slice(v, x[2], (0, place, 0, 0))
            return k, v, by_einsum(q, k, v)

        return jax.lax.fori_loop(0, STEPS, step, (k, v, x[0]))[2]

    return lambda: run(k, v, x)


def _prefill(length: int, chunk: int) -> Callable[[], object]:
    q, k, v = make_qkv(Shape(1, length, length, HEADS, KV_HEADS, SIZE), jnp.float32)
    empty = ls.cache.init(ls.cache.plan(MASK, length), 1, KV_HEADS, SIZE, jnp.float32)

    @jax.jit
    def append(cache, q, k, v):
        cache, view = cache.append(k, v)
        return cache, ls.attention(q, **view.of(MASK), engine="cpu")

    pieces = [tuple(x[:, i : i + chunk] for x in (q, k, v)) for i in range(0, length, chunk)]

    def run():
        cache, outs = empty, []
        for piece in pieces:
            cache, out = append(cache, *piece)
            outs.append(out)
        return outs

    return run
