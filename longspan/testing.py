"""Parity and law helpers that we test ourselves with, for people who add a mask or an engine.

`assert_matches_reference` compares an engine with the dense reference, `assert_obeys_laws` checks a mask's three
granularities against each other, `masks` is a Hypothesis strategy for compositions of every rule.

Example:
    >>> q, k, v = make_qkv(Shape(B=1, T=7, S=11, N=6, K=3, H=5), jnp.float32)
    >>> assert_matches_reference("reference", q, k, v, ls.Causal())
    >>> assert_obeys_laws(ls.Causal() & ls.Window(2, 0), 7, 11)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan._attention import attention
from longspan._types import statistics_dtype
from longspan.engines import Engine
from longspan.layout import plan
from longspan.masks import (
    Band,
    Between,
    BlockCausal,
    Blocks,
    Causal,
    Chunk,
    Custom,
    Dense,
    Empty,
    FirstOfSegment,
    Full,
    Global,
    KvLengths,
    Mask,
    PerHead,
    Prefix,
    QLengths,
    Segments,
    TokenTypes,
    Window,
)

TIMES = 2  # how much further from float64 an engine may be than the reference: once for doing the same, once for luck
ROUNDING_UNITS = 8  # how many units in the last place an engine may be off where the reference happens to be exact


class Shape(NamedTuple):
    """The sizes of one call, one letter an axis."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int | None = None  # None: H

    def __str__(self) -> str:
        return "-".join(f"{axis}{size}" for axis, size in self._asdict().items() if size is not None)


def make_qkv(shape: Shape, dtype: Any, seed: int = 0):
    """Random q, k, v of a shape, spread enough that the softmax is far from uniform."""
    rng = np.random.default_rng(seed)
    B, T, S, N, K, H, Hv = shape
    sizes = ((B, T, N, H), (B, S, K, H), (B, S, K, H if Hv is None else Hv))
    return tuple(jnp.asarray(rng.normal(size=size, scale=1.5), dtype) for size in sizes)


def assert_matches_reference(
    engine: str | Engine | Sequence[str | Engine],
    q,
    k,
    v,
    mask: Any = None,
    *,
    run: Callable | None = None,
    **features: Any,
) -> None:
    """Asserts that an engine is as close to float64 as the reference is, in outputs, lse and all gradients.

    The reference runs twice, in float64 and in the dtype under test. The engine may be at most twice as far from
    float64 as the reference, plus a few rounding units.

    Args:
        engine: the engine under test by name, one of your own, or several.
        q: queries, as for `attention`.
        k: keys.
        v: values.
        mask: a mask, as for `attention`.
        run: a function with the signature of `attention` to test instead of `attention`.
        features: further arguments of `attention`: bias, sinks, scale, soft_cap, dropout, positions.
    """
    floats = {"q": q, "k": k, "v": v, **{n: features.pop(n) for n in ("bias", "sinks") if features.get(n) is not None}}
    engines = list(engine) if isinstance(engine, Sequence) and not isinstance(engine, str) else [engine]
    # The reference's own error in float64 cannot be seen, so it is that of float32, scaled to float64's unit.
    narrow = {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in floats.items()}
    shrink = float(jnp.finfo(q.dtype).eps / jnp.finfo(narrow["q"].dtype).eps)

    @jax.jit  # one program: compiling is nearly all of it
    def everything(narrow, floats, mask):
        near = _values_and_gradients(attention, "reference", narrow, mask, features)
        return near, [_values_and_gradients(run or attention, e, floats, mask, features) for e in engines]

    near, got = jax.tree.map(_as_numpy, everything(narrow, floats, mask))
    exact, scales = _exact(floats, mask, features)
    for part in exact:
        _assert_usable(part, near[part], exact[part])
    for name, results in zip(engines, got, strict=True):
        for part in exact:
            rounding = ROUNDING_UNITS * _unit(part, q.dtype, floats) * scales[part]
            allowed = TIMES * shrink * _distance(near[part], exact[part]) + rounding
            _assert_close(f"{getattr(name, 'name', name)}: {part}", results[part], exact[part], allowed)


def _values_and_gradients(call: Callable, engine, floats: dict[str, Any], mask, features) -> dict[str, jax.Array]:
    """Output, lse and the gradients of a random combination of both."""
    weights = _cotangents(floats["q"], floats["v"])

    def loss(floats):
        out, lse = call(**floats, mask=mask, engine=engine, return_lse=True, **features)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.vdot(out.astype(lse.dtype), weights[0]) + jnp.vdot(finite, weights[1]), (out, lse)

    grads, (out, lse) = jax.grad(loss, has_aux=True)(floats)
    return {"out": out, "lse": lse, **{f"d{name}": g for name, g in grads.items()}}


def _exact(floats: dict[str, Any], mask, features) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The reference's results in float64, and the size of what each of them adds up."""
    q, k = floats["q"], floats["k"]
    weights = _cotangents(q, floats["v"])
    wide = {name: np.asarray(x, np.float64) for name, x in floats.items()}
    if "bias" in wide:  # written out, to see what its gradient is the sum of
        wide["bias"] = np.broadcast_to(wide["bias"], (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))

    @jax.jit
    def everything(wide, mask):
        results = _values_and_gradients(attention, "reference", wide, mask, features)
        kept = whole = _weights(wide, mask, features)
        if features.get("dropout_rate", 0) > 0:
            whole = _weights(wide, mask, features | dict(dropout_rate=0.0))
        return results, kept, whole

    with jax.enable_x64(True):
        exact, kept, whole = everything(jax.tree.map(jnp.asarray, wide), mask)
        assert all(x.dtype == jnp.float64 for x in exact.values()), "float64 was truncated"
        exact, kept, whole = jax.tree.map(_as_numpy, (exact, kept, whole))
    scales = {part: float(np.abs(x[np.isfinite(x)]).max(initial=0)) for part, x in exact.items()}
    if "bias" in floats:
        terms = exact["dbias"]
        exact["dbias"] = _sum_to(terms, floats["bias"].shape)
        scales["dbias"] = _sum_to(np.abs(terms), floats["bias"].shape).max(initial=0)
    if "sinks" in floats:
        scales["dsinks"] = _sink_scale(wide["sinks"], exact, weights)
    return exact, scales | _score_scales(wide, exact, weights, features, kept, whole)


def assert_obeys_laws(
    mask: Mask, q_len: int, kv_len: int, *, q_tile: int = 3, kv_tile: int = 2, q_positions=None, kv_positions=None
) -> None:
    """Asserts that a mask's `classify` never lies and that its layout visits every allowed pair exactly once.

    Args:
        mask: any mask, yours included.
        q_len: number of queries.
        kv_len: number of keys.
        q_tile: queries in a tile.
        kv_tile: keys in a tile.
        q_positions: positions of the queries, as for `attention`.
        kv_positions: positions of the keys.
    """
    positions = dict(q_positions=q_positions, kv_positions=kv_positions)
    layout = plan(mask, q_len, kv_len, q_tile, kv_tile, **positions, xp=np)
    q, kv = layout.sides(xp=np)
    shape = (q.batch.size, q.head.size, q_len, kv_len)
    truth = np.broadcast_to(np.asarray(mask.allowed(q.slots(), kv.slots())), shape)
    some, every = (
        np.broadcast_to(np.asarray(kind), (*shape[:2], layout.q_tiles, layout.kv_tiles))
        for kind in mask.classify(q.tiles(q_tile), kv.tiles(kv_tile))
    )
    visits, mirrored = _visits(layout, shape[:2]), _visits(layout.transpose(), shape[:2]).swapaxes(2, 3)
    for b, n, i, j in np.ndindex(*some.shape):
        tile = truth[b, n, i * q_tile : (i + 1) * q_tile, j * kv_tile : (j + 1) * kv_tile]
        where = f"{mask!r}, batch {b}, head {n}, tile ({i}, {j})"
        assert some[b, n, i, j] or not tile.any(), f"classify says EMPTY, but a pair is allowed: {where}"
        assert not every[b, n, i, j] or tile.all(), f"classify says FULL, but a pair is not allowed: {where}"
        for times, name in ((visits[b, n, i, j], "layout"), (mirrored[b, n, i, j], "transpose")):
            assert tile.any() <= times <= 1, f"visited {times} times by the {name}: {where}"


def _visits(layout, planes: tuple[int, int]) -> np.ndarray:
    """How often a layout visits each pair of tiles."""
    rows, tiles = (layout.kv_tiles, layout.q_tiles) if layout.is_transposed else (layout.q_tiles, layout.kv_tiles)
    times = np.zeros((*planes, rows, tiles), int)
    for b, n in np.ndindex(*planes):
        for row, tile in layout.entries(b, n):
            np.add.at(times[b, n], (row, tile), 1)
    return times


def masks(q_len: int, kv_len: int, *, batch: int = 2, heads: int = 2, leaves: int = 4):
    """A Hypothesis strategy: compositions of every rule, with static and array numbers, for these lengths."""
    from hypothesis import strategies as st

    rule = _rules(st, q_len, kv_len, batch, heads)

    def extend(inner):
        pairs = st.tuples(inner, inner)
        return st.one_of(
            pairs.map(lambda p: p[0] & p[1]),
            pairs.map(lambda p: p[0] | p[1]),
            inner.map(lambda m: ~m),
            st.lists(inner, min_size=heads, max_size=heads).map(lambda ms: PerHead(tuple(ms))),
            inner.map(lambda m: PerHead((m,))),
        )

    return st.recursive(rule, extend, max_leaves=leaves)


def _rules(st, q_len: int, kv_len: int, batch: int, heads: int):
    span = max(q_len, kv_len)
    seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)

    def number(low: int, high: int):
        scalar = st.integers(low, high)
        rows = st.lists(scalar, min_size=batch, max_size=batch).map(lambda xs: np.array(xs, np.int32))
        return st.one_of(scalar, scalar.map(lambda x: np.array(x, np.int32)), rows)

    def ids(rng, length: int, low: int = -1):
        values = rng.integers(low, 3, size=(int(rng.choice([1, batch])), length))
        return np.sort(values, axis=1) if rng.random() < 0.5 else values

    def dense(rng):
        sizes = [(n, 1)[int(rng.random() < 0.3)] for n in (batch, heads, q_len, kv_len)]
        return Dense(rng.random(sizes) < 0.6)

    def dense_at(p):
        rng, offsets = p[0], list(p[1:])
        sizes = [(n, 1)[int(rng.random() < 0.3)] for n in (batch, heads)]
        for side, length in enumerate((q_len, kv_len)):
            if rng.random() < 0.3:
                offsets[side] = None
            sizes.append(int(rng.integers(0, length + 2)) if offsets[side] is not None else length)
        return Dense(rng.random(sizes) < 0.6, *offsets)

    def between(rng):
        shape = [(n, 1)[int(rng.random() < 0.5)] for n in (batch, heads)] + [q_len]
        starts = rng.integers(-2, kv_len + 3, size=shape)
        if rng.random() < 0.5:
            starts = np.sort(starts, axis=2)
        widths = rng.integers(-1, kv_len + 1, size=shape if rng.random() < 0.5 else q_len)
        return Between(starts, starts + widths)

    def blocks(rng):
        size = int(rng.integers(1, 4))
        shape = (int(rng.choice([1, heads])), -(-q_len // size), int(rng.integers(0, 4)))
        shape = (int(rng.choice([1, batch])), *shape) if rng.random() < 0.5 else shape
        table = rng.integers(-1, max(1, -(-kv_len // size)), size=shape).astype(np.int32)
        return Blocks(table if rng.random() < 0.5 else jnp.asarray(table), size)

    def globals_(rng):
        indices = tuple(int(i) for i in rng.integers(0, max(1, span), size=int(rng.integers(0, 3))))
        flags = [rng.random((batch, n)) < 0.3 if rng.random() < 0.5 else None for n in (q_len, kv_len)]
        rows, columns = (bool(rng.random() < 0.7) for _ in range(2))
        return Global(indices, q_flags=flags[0], kv_flags=flags[1], rows=rows, columns=columns)

    def custom(rng):
        apart = [int(rng.choice([1, n])) for n in (batch, heads)]
        bounds = _bounds_by_head if rng.random() < 0.5 else None
        return Custom(_by_row_and_head, batch=apart[0], heads=apart[1], bounds=bounds)

    return st.one_of(
        st.sampled_from([Full(), Empty()]),
        number(-span, span).map(Causal),
        st.tuples(number(-span, span), number(-span, span)).map(lambda p: Band(*p)),
        st.tuples(number(0, span), number(0, span), number(1, 3)).map(lambda p: Window(*p)),
        st.tuples(number(0, span), number(0, span)).map(lambda p: Window(*p)),
        number(1, span + 1).map(Chunk),
        number(1, span + 1).map(BlockCausal),
        number(0, span).map(Prefix),
        number(0, kv_len).map(KvLengths),
        number(0, q_len).map(QLengths),
        seeds.map(between),
        seeds.map(lambda rng: Segments(ids(rng, q_len), ids(rng, kv_len))),
        st.tuples(seeds, number(0, 3)).map(lambda p: FirstOfSegment(ids(p[0], q_len), p[1], kv_ids=ids(p[0], kv_len))),
        seeds.map(
            lambda rng: TokenTypes(ids(rng, q_len, 0), ids(rng, kv_len, 0), zero=str(rng.choice(["q", "kv", "none"])))
        ),
        seeds.map(globals_),
        seeds.map(blocks),
        seeds.map(dense),
        st.tuples(seeds, number(-2, q_len), number(-2, kv_len)).map(dense_at),
        st.sampled_from([Custom(_alternating), Custom(_alternating_bounded, bounds=_bounds)]),
        seeds.map(custom),
    )


def _alternating(q, k):
    return (q + k) % 3 != 0


def _alternating_bounded(q, k):
    return q + k <= 5


def _bounds(q, kv):
    return q.first + kv.first <= 5, q.last + kv.last <= 5


def _by_row_and_head(b, h, q, k):
    return (q - k) * (q - k) <= (b + 2 * h) * (b + 2 * h)


def _bounds_by_head(b, h, q, kv):
    far, low, high = b + 2 * h, q.first - kv.last, q.last - kv.first
    return (low <= far) & (high >= -far), (low >= -far) & (high <= far)


def _cotangents(q, v):
    """Weights of out and lse: float32's numbers in every dtype, so that passes in different ones have the same."""
    rng = np.random.default_rng(1)
    sizes = (*q.shape[:3], v.shape[3]), q.shape[:3]
    return tuple(rng.normal(size=size).astype(np.float32).astype(statistics_dtype(q.dtype)) for size in sizes)


def _as_numpy(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def _unit(name: str, dtype: Any, floats: dict[str, Any]) -> float:
    """The rounding unit of a result: its own dtype's."""
    if name == "lse":
        return float(jnp.finfo(statistics_dtype(dtype)).eps)
    return float(jnp.finfo(floats[name[1:]].dtype if name[1:] in floats else dtype).eps)


def _sum_to(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sums over the axes along which `shape` is broadcast."""
    full = (1,) * (array.ndim - len(shape)) + tuple(shape)
    return array.sum(tuple(i for i, n in enumerate(full) if n == 1), keepdims=True).reshape(shape)


def _sink_scale(sinks: np.ndarray, exact: dict[str, np.ndarray], weights) -> float:
    """What a sink's gradient adds up over queries and head elements, as roots of summed squares.

    The terms cancel, their rounding errors do not: those add up as a random walk does.
    """
    weight = np.where(np.isfinite(exact["lse"]), np.exp(sinks.reshape(1, 1, -1) - exact["lse"]), 0)
    squares = np.square(weights[0] * exact["out"]).sum(-1) + np.square(weights[1])
    return float(np.sqrt((np.square(weight) * squares).sum((0, 1))).max(initial=0))


def _score_scales(wide, exact: dict[str, np.ndarray], cotangents, features, kept, whole) -> dict[str, float]:
    """What the gradients of q and k add up, as roots of summed squares: p * (dp - sum(dout * out)) * (k or q).

    Kernels that keep no weights take the difference between two numbers that were rounded apart. The dense softmax
    subtracts the mean of the very dp, so that where one weight is nearly 1 its errors cancel and theirs do not.
    """
    (B, _, N, H), (S, K) = wide["q"].shape, wide["k"].shape[1:3]
    scale = features.get("scale") or H**-0.5
    q, k, v = (np.nan_to_num(wide[name], posinf=0, neginf=0) for name in "qkv")  # unseen places may hold anything
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    dout, dlse = (np.asarray(x, np.float64) for x in cotangents)
    dp = np.square(kept) * np.einsum("btnh,bsnh->btns", np.square(dout), np.square(v))
    delta = np.square(whole) * (np.square(dout * exact["out"]).sum(-1) + np.square(dlse))[..., None]
    squares = (dp + delta) * scale**2
    if features.get("soft_cap") is not None:
        scores = np.einsum("btnh,bsnh->btns", q, k) * scale
        squares *= np.square(1 - np.square(np.tanh(scores / features["soft_cap"])))
    dq = np.einsum("btns,bsnh->btnh", squares, np.square(k))
    dk = np.einsum("btns,btnh->bsnh", squares, np.square(q)).reshape(B, S, K, N // K, H).sum(3)
    return {name: float(np.sqrt(x).max(initial=0)) for name, x in (("dq", dq), ("dk", dk))}


def _weights(wide, mask, features) -> jax.Array:
    """The reference's weights [B, T, N, S]: what it returns for unit vectors as values."""
    B, S, K, _ = wide["k"].shape
    units = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, K, S))
    return attention(**{**wide, "v": units}, mask=mask, engine="reference", **features)


def _assert_usable(what: str, near: np.ndarray, exact: np.ndarray) -> None:
    """The reference can judge: compared with NaN, or with a tolerance that is not finite, everything would pass."""
    assert not np.isnan(exact).any(), f"{what}: the reference itself gives NaN. Is there one that a query sees?"
    finite = np.isfinite(exact)
    assert np.isfinite(near[finite]).all(), f"{what}: the reference overflows in the dtype under test, not in float64"


def _distance(near: np.ndarray, exact: np.ndarray) -> float:
    finite = np.isfinite(exact)
    return float(np.abs(near[finite] - exact[finite]).max(initial=0))


def _assert_close(what: str, got: np.ndarray, exact: np.ndarray, allowed: float) -> None:
    assert got.shape == exact.shape, f"{what}: shape {got.shape}, expected {exact.shape}"
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(got[~finite], exact[~finite], err_msg=what)
    assert np.all(np.isfinite(got[finite])), f"{what}: not finite where the reference is"
    error = np.abs(got[finite] - exact[finite]).max(initial=0)
    assert error <= allowed, f"{what}: off by {error:.3g}, allowed {allowed:.3g}"
