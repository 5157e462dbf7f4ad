"""Random masks for Hypothesis: compositions of every rule."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.masks import (
    Band,
    Between,
    BlockCausal,
    Blocks,
    Causal,
    Chunk,
    Compare,
    Custom,
    Dense,
    Empty,
    FirstOfSegment,
    Full,
    Global,
    KvLengths,
    PerHead,
    Prefix,
    QLengths,
    Segments,
    TokenTypes,
    Window,
    array,
    member,
    position,
    slot,
)
from longspan.masks import number as constant


def masks(q_len: int, kv_len: int, *, batch: int = 2, heads: int = 2, leaves: int = 4):
    """A Hypothesis strategy for compositions of every rule, with static numbers and arrays, for these lengths."""
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

    def size_or_1(rng, size: int, chance_of_1: float) -> int:
        return 1 if rng.random() < chance_of_1 else size

    def ids(rng, length: int, low: int = -1):
        values = rng.integers(low, 3, size=(int(rng.choice([1, batch])), length))
        if rng.random() < 0.5:
            values = np.sort(values, axis=1)
        return values

    def dense(rng):
        sizes = [size_or_1(rng, n, 0.3) for n in (batch, heads, q_len, kv_len)]
        return Dense(rng.random(sizes) < 0.6)

    def dense_at(p):
        rng, offsets = p[0], list(p[1:])
        sizes = [size_or_1(rng, n, 0.3) for n in (batch, heads)]
        for side, length in enumerate((q_len, kv_len)):
            if rng.random() < 0.3:
                offsets[side] = None
                sizes.append(length)
            else:
                sizes.append(int(rng.integers(0, length + 2)))
        return Dense(rng.random(sizes) < 0.6, *offsets)

    def between(rng):
        shape = [size_or_1(rng, n, 0.5) for n in (batch, heads)] + [q_len]
        starts = rng.integers(-2, kv_len + 3, size=shape)
        if rng.random() < 0.5:
            starts = np.sort(starts, axis=2)
        width_shape = shape if rng.random() < 0.5 else [q_len]
        return Between(starts, starts + rng.integers(-1, kv_len + 1, size=width_shape))

    def blocks(rng):
        size = int(rng.integers(1, 4))
        shape = [int(rng.choice([1, heads])), -(-q_len // size), int(rng.integers(0, 4))]
        if rng.random() < 0.5:
            shape.insert(0, int(rng.choice([1, batch])))
        table = rng.integers(-1, max(1, -(-kv_len // size)), size=shape).astype(np.int32)
        if rng.random() < 0.5:
            return Blocks(table, size)
        return Blocks(jnp.asarray(table), size)

    def flags(rng, length: int):
        if rng.random() < 0.5:
            return rng.random((batch, length)) < 0.3
        return None

    def globals_(rng):
        indices = tuple(int(i) for i in rng.integers(0, max(1, span), size=int(rng.integers(0, 3))))
        q_flags, kv_flags = flags(rng, q_len), flags(rng, kv_len)
        rows, columns = bool(rng.random() < 0.7), bool(rng.random() < 0.7)
        return Global(indices, q_flags=q_flags, kv_flags=kv_flags, rows=rows, columns=columns)

    def term(rng, length: int, numbers: tuple):
        divide, modulo, plus = numbers if rng.random() < 0.5 else (1, None, 0)
        if rng.random() < 0.6:
            modulo = None
        steps = dict(divide=divide, modulo=modulo, plus=plus)
        shape = [int(rng.choice([1, batch])), length]
        if rng.random() < 0.3:
            shape.insert(1, int(rng.choice([1, heads])))
        is_sorted = rng.random() < 0.5
        entries = rng.integers(-3, 9, shape)
        if is_sorted:
            entries = np.sort(entries, axis=-1)
        places = tuple(int(i) for i in rng.integers(0, max(1, span), size=int(rng.integers(0, 4))))
        return [
            lambda: position(**steps),
            lambda: slot(**steps),
            lambda: array(entries, valid=_choice(rng, ["all", ">=0", "!=0"]), **steps),
            lambda: array(rng.random(shape) < 0.4),
            lambda: constant(int(rng.integers(-3, 9)) if rng.random() < 0.5 else rng.integers(-3, 9, batch)),
            lambda: member(places),
        ][int(rng.integers(0, 6))]()

    def compare(p):
        rng, mine, theirs = p
        relation = _choice(rng, ["<=", ">=", "<", ">", "=="])
        return Compare(term(rng, q_len, mine), relation, term(rng, kv_len, theirs), few=bool(rng.random() < 0.3))

    def custom(rng):
        sizes = dict(batch=int(rng.choice([1, batch])), heads=int(rng.choice([1, heads])))
        bounds = _bounds_by_head if rng.random() < 0.5 else None
        return Custom(_by_row_and_head, **sizes, bounds=bounds)

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
        st.tuples(seeds, *[st.tuples(number(1, 3), number(1, 4), number(-3, 3))] * 2).map(compare),
        seeds.map(blocks),
        seeds.map(dense),
        st.tuples(seeds, number(-2, q_len), number(-2, kv_len)).map(dense_at),
        st.sampled_from([Custom(_alternating), Custom(_alternating_bounded, bounds=_bounds)]),
        seeds.map(custom),
    )


# Jitted, because outside a program each operation would compile separately for every shape.
@jax.jit
def _alternating(q, k):
    return (q + k) % 3 != 0


@jax.jit
def _alternating_bounded(q, k):
    return q + k <= 5


def _bounds(q, kv):
    return q.first + kv.first <= 5, q.last + kv.last <= 5


@jax.jit
def _by_row_and_head(b, h, q, k):
    return (q - k) * (q - k) <= (b + 2 * h) * (b + 2 * h)


def _bounds_by_head(b, h, q, kv):
    far, low, high = b + 2 * h, q.first - kv.last, q.last - kv.first
    return (low <= far) & (high >= -far), (low >= -far) & (high <= far)


def _choice(rng, words: list[str]) -> Any:
    """One of some words, each with the same probability."""
    return str(rng.choice(words))
