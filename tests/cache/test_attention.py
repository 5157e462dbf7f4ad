"""Decoding equals the full pass: prompts in chunks, then token by token, with the slots of the plan."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from tests.cache.brute import truth

B, L, N, K, H, Hv = 2, 29, 4, 2, 6, 5
CHUNK, PROMPTS = 8, (19, 13)  # ragged prompts, in chunks of 8
IDS = np.stack([np.repeat([0, 1, 2], [7, 9, 13]), np.repeat([3, 4], [12, 17])])
TABLE = np.stack([np.arange(8), np.maximum(np.arange(8) - 1, 0), np.array([0, 0, 1, 0, 2, 4, 1, 3])], axis=1)[None]


class Case(NamedTuple):
    mask: Any
    slots: int  # the largest allowed capacity
    engines: tuple[str, ...] = ("cpu",)
    dtype: Any = jnp.float32
    whole: int = 0  # tied positions at the start of the prompt


CASES = {
    "window": Case(ls.Causal() & ls.Window(5, 0), 6, ("cpu", "xla")),
    "window, bfloat16": Case(ls.Causal() & ls.Window(5, 0), 6, ("cpu",), jnp.bfloat16),
    "window and pinned": Case(ls.Causal() & (ls.Window(5, 0) | ls.Prefix(2)), 8),
    "causal Longformer": Case(ls.longformer(4, causal=True) | ls.Causal() & ls.Global((1, 9)), 14, ("cpu", "xla")),
    "causal BigBird": Case(ls.Causal() & ls.Blocks(TABLE, 4), L),
    "packed prompts": Case(ls.Causal() & ls.Window(5, 0) & ls.Segments(IDS), 6, ("cpu", "xla")),
    "prefix-LM": Case(ls.Causal() | ls.Prefix(7), L, whole=7),
    "a window per head": Case(ls.Causal() & ls.PerHead(tuple(ls.Window(w, 0) for w in (1, 2, 4, 7))), 8),
}


def inputs(dtype):
    rng = np.random.default_rng(0)
    sizes = (N, H), (K, H), (K, Hv)
    return [jnp.asarray(rng.normal(size=(B, L, *size), scale=1.5), dtype) for size in sizes]


def full_pass(q, k, v, mask):
    """Dense, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    allowed = np.concatenate([truth(mask, L, L)] * (N // 2), axis=1) if mask.heads == 1 else _heads(mask)
    weights = np.where(allowed, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bnts,bsnh->btnh", weights, v)


def _heads(mask):
    return np.stack([truth(mask.of_head(h), L, L)[:, 0] for h in range(N)], axis=1)


@pytest.mark.parametrize(
    ("name", "engine"), [(name, engine) for name, case in CASES.items() for engine in case.engines]
)
def test_decoding_equals_the_full_pass(name, engine):
    case = CASES[name]
    q, k, v = inputs(case.dtype)
    plan = ls.cache.plan(case.mask, L)
    assert plan.capacity <= case.slots
    cache = ls.cache.init(plan, B, K, H, case.dtype, v_head_dim=Hv)
    cache = jax.tree.map(lambda x: x * np.nan if jnp.issubdtype(x.dtype, jnp.floating) else x, cache)
    out, traces = np.full((B, L, N, Hv), np.nan), []

    @jax.jit
    def step(cache, q, k, v, lengths):
        traces.append(q.shape)
        cache, view = cache.append(k, v, lengths)
        return cache, ls.attention(q, **view.of(case.mask), engine=engine)

    done = np.zeros(B, int)

    def feed(count, lengths):
        nonlocal cache
        tokens = [np.full((B, count, *x.shape[2:]), np.nan) for x in (q, k, v)]
        for mine, x in zip(tokens, (q, k, v), strict=True):
            for row, n in enumerate(lengths):
                mine[row, :n] = np.asarray(x, np.float64)[row, done[row] : done[row] + n]
        cache, seen = step(cache, *(jnp.asarray(x, case.dtype) for x in tokens), jnp.asarray(lengths))
        for row, n in enumerate(lengths):
            out[row, done[row] : done[row] + n] = np.asarray(seen, np.float64)[row, :n]
        done[:] += lengths

    while (done < PROMPTS).any():
        feed(CHUNK, np.minimum(CHUNK, PROMPTS - done))
    while (done < L).any():
        feed(1, np.minimum(1, L - done))
    assert not cache.overflowed.any()
    assert traces == [(B, CHUNK, N, H), (B, 1, N, H)], "one trace for chunks, one for tokens"
    scale = 32 * float(jnp.finfo(case.dtype).eps) * np.abs(np.asarray(v, np.float64)).max()
    np.testing.assert_allclose(out, full_pass(q, k, v, case.mask), rtol=0, atol=scale)
