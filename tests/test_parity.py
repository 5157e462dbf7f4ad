"""One matrix for all engines: every mask, shape, dtype, feature and tiling against the float64 reference.

The default suite runs a selection in which every pair of choices occurs, and features together, but for a few choices
(`NOT_BY_MASK`) that meet all others, not every mask; `make slow` runs the whole product of masks, shapes, features by
themselves and dtypes, where the tilings take turns.
"""

import itertools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.testing import Shape, assert_matches_reference, make_qkv
from tests.engines import RUNNING, every_sparse_engine

DROPPED = dict(dropout_rate=0.3, dropout_key=jax.random.key(5))

SHAPES = {
    str(shape): shape
    for shape in (
        Shape(B=2, T=7, S=11, N=6, K=3, H=5),
        Shape(B=1, T=1, S=13, N=2, K=1, H=3, Hv=9),
        Shape(B=3, T=37, S=29, N=4, K=4, H=17, Hv=11),
        Shape(B=1, T=67, S=67, N=2, K=2, H=64),
    )
}
MASKS: dict[str, Callable[[np.random.Generator, Shape], ls.Mask | None]] = {
    "none": lambda rng, s: None,
    "empty": lambda rng, s: ls.Empty(),
    "causal": lambda rng, s: ls.Causal(s.S - s.T),
    "window": lambda rng, s: ls.Window(3, 2),
    "dilated": lambda rng, s: ls.Window(3, 2, dilation=3),
    "causal window": lambda rng, s: ls.Causal(s.S - s.T) & ls.Window(s.S, 0),
    "chunk, traced": lambda rng, s: ls.Chunk(jnp.asarray(4)),
    "block causal": lambda rng, s: ls.BlockCausal(np.arange(s.B) + 3),
    "prefix": lambda rng, s: ls.Causal() | ls.Prefix(2),
    "lengths": lambda rng, s: ls.Causal(5) & ls.KvLengths(np.arange(s.B) * 4 % (s.S + 1)),
    "query lengths": lambda rng, s: ls.Causal(5) & ls.QLengths(jnp.asarray(np.arange(s.B) * 3 % (s.T + 1))),
    "between": lambda rng, s: between(rng, s.B, s.N, s.T, s.S),
    "segments": lambda rng, s: ls.Segments(ids(rng, s.B, s.T), ids(rng, s.B, s.S)),
    "packed": lambda rng, s: ls.Causal(s.S - s.T) & ls.Segments(np.sort(ids(rng, 1, s.T)), np.sort(ids(rng, 1, s.S))),
    "packed, pinned": lambda rng, s: (
        (ls.Window(2, 0) | ls.FirstOfSegment(ids(rng, s.B, s.T), 2, kv_ids=ids(rng, 1, s.S))) & ls.Causal(s.S - s.T)
    ),
    "types": lambda rng, s: ls.TokenTypes(ids(rng, s.B, s.T), ids(rng, s.B, s.S)) | ls.Causal(-1),
    "global": lambda rng, s: ls.Window(2, 1) | ls.Global((0, s.S // 2)),
    "flags": lambda rng, s: ls.Window(1, 1) | ls.Global(q_flags=flags(rng, s.B, s.T), kv_flags=flags(rng, s.B, s.S)),
    "blocks": lambda rng, s: ls.Blocks(rng.integers(-1, -(-s.S // 4), (s.N, -(-s.T // 4), 2)), 4),
    "blocks, rows": lambda rng, s: (
        ls.Blocks(jnp.asarray(rng.integers(-1, -(-s.S // 4), (s.B, s.N, -(-s.T // 4), 3))), 4) & ls.Causal(3)
    ),
    "dense": lambda rng, s: ls.Dense(rng.random((s.B, 1, s.T, s.S)) < 0.4),
    "dense behind a prefix": lambda rng, s: (
        ls.Prefix(s.S // 2)
        | ls.Dense(rng.random((1, s.N, s.T // 2 + 1, s.S // 3)) < 0.6, s.T // 3, jnp.asarray(np.arange(s.B) + s.S // 2))
    ),
    "per head": lambda rng, s: ls.PerHead(tuple(ls.Window(n, 1) if n % 2 else ls.Causal(n) for n in range(s.N))),
    "custom": lambda rng, s: ls.Custom(lambda q, k: (q + k) % 3 == 0) & ls.Causal(8),
    "custom, rows": lambda rng, s: ls.Custom(by_row_and_head, batch=s.B, heads=s.N, bounds=bounds_by_row_and_head),
    "negated": lambda rng, s: ~(ls.Chunk(3) | ls.Causal(-2)),
}
FEATURES: dict[str, Callable[[np.random.Generator, Shape, object], dict]] = {
    "plain": lambda rng, s, dtype: {},
    "head bias, sinks, scale and cap": lambda rng, s, dtype: dict(
        bias=normal(rng, (1, s.N, 1, s.S), dtype),
        sinks=normal(rng, s.N, dtype),
        scale=0.7,
        soft_cap=2.5,
    ),
    "row bias, dropout and positions": lambda rng, s, dtype: dict(
        bias=normal(rng, (s.B, 1, s.T, 1), dtype), **DROPPED, **moved(rng, s)
    ),
    "all": lambda rng, s, dtype: dict(
        sinks=normal(rng, s.N, dtype),
        bias=holes(rng, rng.normal(size=(s.B, s.N, s.T, s.S)), dtype),
        soft_cap=3.0,
        dropout_rate=0.2,
        dropout_key=jax.random.key(6),
    ),
}
APART: dict[str, Callable[[np.random.Generator, Shape, object], dict]] = {  # by themselves, in the whole product
    "head bias, scale and cap": lambda rng, s, dtype: dict(
        bias=normal(rng, (1, s.N, 1, s.S), dtype), scale=0.7, soft_cap=2.5
    ),
    "row bias and sinks": lambda rng, s, dtype: dict(
        bias=normal(rng, (s.B, 1, s.T, 1), dtype), sinks=normal(rng, s.N, dtype)
    ),
    "dropout and positions": lambda rng, s, dtype: dict(**DROPPED, **moved(rng, s)),
}
COMPUTED: dict[str, Callable[[np.random.Generator, Shape, object], dict]] = {
    "alibi": lambda rng, s, dtype: dict(
        bias=ls.alibi(as_jax(rng.uniform(0.05, 0.5, s.N), dtype)),
        sinks=normal(rng, s.N, dtype),
        q_positions=rng.integers(0, s.S, (s.B, s.T)),
    ),
    "relative": lambda rng, s, dtype: dict(
        bias=(
            ls.relative_bias(holes(rng, rng.normal(size=(16, s.N)), dtype), max_distance=19),
            normal(rng, (s.B, 1, s.T, s.S), dtype),
        ),
        soft_cap=2.5,
    ),
    "score": lambda rng, s, dtype: dict(
        bias=(
            ls.alibi(as_jax(rng.uniform(0.05, 0.5, s.N), dtype)),
            ls.ScoreBias(cells, normal(rng, (s.N, 5), dtype), rng.integers(1, 4, s.B).astype(np.int32)),
        ),
        dropout_rate=0.2,
        dropout_key=jax.random.key(7),
    ),
}
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16, "f64": jnp.float64}
TILINGS = {"own tiles": None, "tiles 8x4": (8, 4), "tiles 3x5": (3, 5)}
AXES = (MASKS, SHAPES, FEATURES, DTYPES, TILINGS)
NOT_BY_MASK = (
    "B1-T1-S13-N2-K1-H3-Hv9", "B1-T67-S67-N2-K2-H64", "plain", "head bias, sinks, scale and cap", "f16", "f64",
    "tiles 8x4",
)  # fmt: skip
ONE_BY_ONE = {name: FEATURES[name] for name in ("plain", "all")} | APART | COMPUTED
EVERY_AXIS = (MASKS, SHAPES, ONE_BY_ONE, DTYPES, TILINGS)
SOME_COMPUTED = [  # the others are in the whole product
    ("causal", "B2-T7-S11-N6-K3-H5", "alibi", "f32", "tiles 3x5"),
    ("per head", "B3-T37-S29-N4-K4-H17-Hv11", "alibi", "bf16", "own tiles"),
    ("none", "B1-T1-S13-N2-K1-H3-Hv9", "relative", "f32", "own tiles"),
    ("segments", "B3-T37-S29-N4-K4-H17-Hv11", "relative", "f64", "tiles 3x5"),
    ("global", "B2-T7-S11-N6-K3-H5", "score", "f32", "tiles 8x4"),
    ("lengths", "B3-T37-S29-N4-K4-H17-Hv11", "score", "bf16", "own tiles"),
]
TESTED = [name for name in RUNNING if name != "reference"]


def as_jax(values, dtype):
    """Rounded in NumPy: JAX would compile a program per shape."""
    return jnp.asarray(values.astype(dtype), dtype)


def normal(rng, size, dtype):
    return as_jax(rng.normal(size=size), dtype)


def ids(rng, batch, length):
    return rng.integers(-1, 3, (batch, length))


def between(rng, batch, heads, length, keys):
    starts = rng.integers(-1, keys, (batch, heads, length))
    return ls.Between(jnp.asarray(starts), starts[:, :1] + rng.integers(0, 6, length))


def flags(rng, batch, length):
    return rng.random((batch, length)) < 0.2


def moved(rng, shape):
    return dict(
        q_positions=rng.permutation(shape.T)[None], kv_positions=np.sort(rng.integers(0, shape.S, (shape.B, shape.S)))
    )


def cells(b, h, q, k, table, every):
    return table[h, (q + 2 * k) // every[b] % 5]


def holes(rng, values, dtype):
    return as_jax(np.where(rng.random(values.shape) < 0.1, -np.inf, values), dtype)


def by_row_and_head(b, h, q, k):
    return (k <= q + b) & (q - k <= 3 * h + 1)


def bounds_by_row_and_head(b, h, q, kv):
    low, high = q.first - kv.last, q.last - kv.first
    return (high >= -b) & (low <= 3 * h + 1), (low >= -b) & (high <= 3 * h + 1)


TRIES = 300  # combinations that are tried for each that is taken: with 30 a fifth more are needed


def pairwise(*axes):
    """Combinations in which (nearly) every pair of choices occurs: greedily, the one with most new pairs first."""
    pick, axes = np.random.default_rng(0), [list(axis) for axis in axes]
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(axes)), 2)
        for x in axes[a]
        for y in axes[b]
        if not (a == 0 and y in NOT_BY_MASK)
    }
    while missing:
        fixed = dict(min(missing, key=str))
        drawn = [pick.integers(len(axis), size=TRIES) for axis in axes]
        tries = [[fixed.get(i, axis[drawn[i][n]]) for i, axis in enumerate(axes)] for n in range(TRIES)]
        covered = [set(itertools.combinations(enumerate(choice), 2)) & missing for choice in tries]
        best = max(range(TRIES), key=lambda i: len(covered[i]))
        missing -= covered[best]
        yield tuple(tries[best])


def check(mask_name, shape_name, feature, dtype_name, tiling):
    """Every engine that says it can run a choice matches the reference; one that says it cannot raises its reason."""
    rng = np.random.default_rng([*",".join((mask_name, shape_name, feature, dtype_name, tiling)).encode()])
    shape, dtype = SHAPES[shape_name], DTYPES[dtype_name]
    with jax.enable_x64(dtype_name == "f64"):
        q, k, v = make_qkv(shape, dtype)
        arguments = (FEATURES | ONE_BY_ONE)[feature](rng, shape, dtype)
        mask = MASKS[mask_name](rng, shape)
        if TILINGS[tiling] is not None:
            q_tile, kv_tile = TILINGS[tiling]
            places = {name: arguments.pop(name) for name in ("q_positions", "kv_positions") if name in arguments}
            mask = (ls.Full() if mask is None else mask).layout(
                shape.T, shape.S, q_tile=q_tile, kv_tile=kv_tile, **places
            )
        running = []
        for engine in TESTED:
            try:
                ls.explain(q, k, v, mask=mask, engine=engine, **arguments)
                running.append(engine)
            except NotImplementedError as refusal:
                with pytest.raises(NotImplementedError, match=re.escape(str(refusal))):
                    ls.attention(q, k, v, mask=mask, engine=engine, **arguments)
        assert running, "no engine but the reference ran"
        assert_matches_reference(running, q, k, v, mask, **arguments)


def marked(choices):
    """The choices as parameters; every sixth, a dozen in all, belongs to the quick suite.

    `make test` runs these, and one for each mask, feature and dtype that is not among them.
    """
    choices = list(choices)
    seen = {name for choice in choices[::6] for name in choice}
    found = []
    for place, choice in enumerate(choices):
        mask, _, feature, dtype, _ = choice
        marks = [] if {mask, feature, dtype} - seen else [pytest.mark.check]
        seen |= {mask, feature, dtype}
        found.append(pytest.param(choice, id=", ".join(choice), marks=marks if place % 6 else [pytest.mark.quick]))
    return found


@pytest.mark.parametrize("choice", marked([*pairwise(*AXES), *SOME_COMPUTED]))
def test_engines_match_the_reference(choice):
    check(*choice)


@every_sparse_engine
@pytest.mark.parametrize("level", [-1e5, -1e9, float(np.finfo(np.float32).min)])
def test_gradients_of_rows_whose_bias_is_as_low_as_people_mask_with(engine, level):
    """A float cannot hold such a score and the logarithm of a sum. Compared in float32: there the weights are equal."""
    q, k, v = make_qkv(Shape(B=1, T=7, S=11, N=6, K=3, H=5), jnp.float32)
    bias = np.zeros((1, 1, 7, 11), np.float32)
    bias[:, :, 2:4] = bias[:, :, 5, 1:] = level
    weights = np.random.default_rng(0).normal(size=q.shape).astype(np.float32)

    def loss(floats, engine):
        return jnp.vdot(ls.attention(*floats, mask=ls.Causal(8), bias=bias, engine=engine), weights)

    got, want = (jax.jit(jax.grad(loss), static_argnums=1)((q, k, v), name) for name in (engine, "reference"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def every_combination():
    """All masks, shapes, features and dtypes; neighbours in the list differ in their tiling."""
    tilings = itertools.cycle(TILINGS)
    return [(*choice, next(tilings)) for choice in itertools.product(*EVERY_AXIS[:-1])]


@pytest.mark.slow
@pytest.mark.parametrize("choice", every_combination(), ids=", ".join)
def test_engines_match_the_reference_in_every_combination(choice):
    check(*choice)
