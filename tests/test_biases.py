"""Biases computed from positions equal their dense arrays, which are never built."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan.biases import Distances, _buckets
from longspan.masks import rule
from longspan.testing import Shape, make_qkv
from tests.engines import RUNNING, every_engine, every_sparse_engine
from tests.selection import one_in

SHAPE = Shape(B=2, T=37, S=41, N=6, K=3, H=5)
SPARSE = [name for name in RUNNING if name != "reference"]
rng = np.random.default_rng(0)


# The dense arrays of biases.


@functools.cache
def t5_bucket(ahead, count, bidirectional, max_distance):
    """T5's definition for one distance, in the float32 that it is computed in."""
    first = 0
    if bidirectional:
        count //= 2
        first = count if ahead > 0 else 0
        distance = abs(ahead)
    else:
        distance = max(-ahead, 0)
    exact = count // 2
    if distance < exact:
        return first + distance
    share = np.float32(math.log(np.float32(distance) / np.float32(exact))) / np.float32(math.log(max_distance / exact))
    return first + min(exact + int(share * np.float32(count - exact)), count - 1)


def written_out(shape, entry, q_positions=None, kv_positions=None):
    """float64 [B, N, T, S] of `entry(b, n, q, k)`."""
    q_pos = np.broadcast_to(np.arange(shape.T) if q_positions is None else q_positions, (shape.B, shape.T))
    kv_pos = np.broadcast_to(np.arange(shape.S) if kv_positions is None else kv_positions, (shape.B, shape.S))
    b, n, _, _ = np.ogrid[: shape.B, : shape.N, :1, :1]
    values = entry(b, n, q_pos[:, None, :, None], kv_pos[:, None, None, :])
    return np.broadcast_to(np.asarray(values, np.float64), (shape.B, shape.N, shape.T, shape.S))


def floats(*shape, low=-1.0, high=1.0):
    return np.random.default_rng(len(shape)).uniform(low, high, shape).astype(np.float32)


class Kind:
    """A bias of some arrays, and the entry of its dense array."""

    def __init__(self, arrays, make, entry):
        self.arrays, self.make, self.entry = arrays, make, entry


def from_table(table, ahead, n, bidirectional, max_distance):
    bucket = np.vectorize(lambda a: t5_bucket(int(a), len(table), bidirectional, max_distance))
    return table[bucket(ahead), n]


KINDS = {
    "alibi": Kind(
        lambda s: [floats(s.N, low=0.05, high=0.5)],
        lambda slopes: ls.alibi(slopes),
        lambda x, b, n, q, k: -x[0][n] * abs(q - k),
    ),
    "relative": Kind(
        lambda s: [floats(16, s.N)],
        lambda table: ls.relative_bias(table, max_distance=19),
        lambda x, b, n, q, k: from_table(x[0], k - q, n, True, 19),
    ),
    "relative, causal": Kind(
        lambda s: [floats(9, s.N)],
        lambda table: ls.relative_bias(table, bidirectional=False, max_distance=23),
        lambda x, b, n, q, k: from_table(x[0], k - q, n, False, 23),
    ),
    "score of rows and heads": Kind(
        lambda s: [floats(s.B, s.N)],
        lambda table: ls.ScoreBias(
            lambda b, h, q, k, table, every: table[b, h] * jnp.cos((q - 2 * k) // every[0]), table, jnp.array([3])
        ),
        lambda x, b, n, q, k: x[0][b, n] * np.cos((q - 2 * k) // 3),
    ),
    "score": Kind(
        lambda s: [floats(7)],
        lambda numbers: ls.ScoreBias(lambda q, k, numbers: numbers[(q + 3 * k) % 7], numbers),
        lambda x, b, n, q, k: x[0][(q + 3 * k) % 7],
    ),
    "sum": Kind(
        lambda s: [floats(1, 1, 1, s.S), floats(s.N, low=0.05, high=0.5), floats(16, s.N), floats(s.T, 1)[None, None]],
        lambda row, slopes, table, column: (
            row,
            ls.alibi(slopes),
            ls.relative_bias(table, max_distance=19),
            jnp.broadcast_to(column, (*column.shape[:3], row.shape[3])),
            ls.alibi(slopes),
            ls.relative_bias(table, max_distance=40),
        ),
        lambda x, b, n, q, k: sum_entry(x, n, q, k),
    ),
}
PLACES = dict(
    q_positions=np.random.default_rng(3).integers(0, 50, (SHAPE.B, SHAPE.T)),
    kv_positions=np.random.default_rng(4).integers(-9, 50, SHAPE.S),
)
IDS = np.sort(np.random.default_rng(5).integers(-1, 3, (SHAPE.B, SHAPE.S)))
CASES = {
    "causal": dict(mask=ls.Causal(4)),
    "positions, cap and sinks": dict(mask=ls.Window(19, 14), soft_cap=2.0, sinks=jnp.linspace(-1, 1, 6), **PLACES),
    "segments": dict(mask=ls.Segments(IDS[:, :37], IDS) & ls.Causal(4)),
    "per head": dict(mask=ls.PerHead(tuple(ls.Window(5 * n, 2) if n % 2 else ls.Causal(n) for n in range(6)))),
    "dropout": dict(dropout_rate=0.3, dropout_key=jax.random.key(1)),
}
CHOICES = [
    *[("alibi", case) for case in CASES],
    *[("relative", case) for case in ("positions, cap and sinks", "per head")],
    ("relative, causal", "segments"),
    ("score of rows and heads", "positions, cap and sinks"),
    ("score of rows and heads", "per head"),
    ("score", "causal"),
    ("sum", "causal"),
]


def sum_entry(x, n, q, k):
    """The dense bias of a call whose positions are the slot indices."""
    row, slopes, table, column = x
    once = from_table(table, k - q, n, True, 19) + from_table(table, k - q, n, True, 40)
    return row[0, 0, 0, k] + column[0, 0, q, 0] - 2 * slopes[n] * abs(q - k) + once


def dense_of(kind, arrays, shape, case):
    places = {name: case[name] for name in ("q_positions", "kv_positions") if name in case}
    return written_out(shape, lambda b, n, q, k: KINDS[kind].entry(arrays, b, n, q, k), **places)


def derivatives_of(kind, arrays, shape, case):
    """d dense / d array, for every array, by differences: biases are linear in their arrays."""
    zeros = [np.zeros(a.shape) for a in arrays]
    base = dense_of(kind, zeros, shape, case)
    for i, array in enumerate(arrays):
        columns = []
        for at in np.ndindex(*array.shape):
            one = [z.copy() for z in zeros]
            one[i][at] = 1.0
            columns.append(dense_of(kind, one, shape, case) - base)
        yield np.stack(columns).reshape(*array.shape, *base.shape)


def loss(q, k, v, bias, engine, case):
    out, lse = ls.attention(q, k, v, bias=bias, engine=engine, return_lse=True, **case)
    finite = jnp.where(jnp.isfinite(lse), lse, 0)
    return jnp.sin(out).sum() + jnp.cos(finite).sum(), (out, lse)


def close(got, want, scale=None):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    scale = max(1.0, np.abs(want[finite]).max(initial=0)) if scale is None else scale
    np.testing.assert_allclose(got[finite], want[finite], rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize(("kind", "case"), one_in(3, [pytest.param(*c, id=", ".join(c)) for c in CHOICES]))
def test_a_bias_equals_its_dense_array_in_both_passes(kind, case):
    arguments, arrays = CASES[case], KINDS[kind].arrays(SHAPE)
    q, k, v = make_qkv(SHAPE, jnp.float32)
    dense = dense_of(kind, arrays, SHAPE, arguments)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v, dense)]
        run = jax.jit(jax.value_and_grad(lambda *x: loss(*x, "reference", arguments), range(4), has_aux=True))
        (_, want), (*want_qkv, by_pair) = jax.tree.map(np.asarray, run(*wide))

    def biased(q, k, v, arrays, engine):
        return loss(q, k, v, KINDS[kind].make(*arrays), engine, arguments)

    for engine in RUNNING:
        if engine == "cpu" and kind.startswith("score"):
            with pytest.raises(NotImplementedError, match=r"engine='cpu' cannot run this.*only JAX can call"):
                biased(q, k, v, arrays, engine)
            continue
        run = jax.jit(jax.value_and_grad(biased, range(4), has_aux=True), static_argnums=4)
        (_, got), (*got_qkv, got_arrays) = run(q, k, v, [jnp.asarray(a) for a in arrays], engine)
        for a, b in zip((*got, *got_qkv), (*want, *want_qkv), strict=True):
            close(a, b)
        for a, slopes in zip(got_arrays, derivatives_of(kind, arrays, SHAPE, arguments), strict=True):
            terms = slopes * by_pair
            close(a, terms.sum((-4, -3, -2, -1)), scale=max(1.0, np.abs(terms).sum((-4, -3, -2, -1)).max()))


@pytest.mark.check
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", [Shape(3, 1, 2311, 4, 2, 16), Shape(2, 3, 130, 6, 2, 5)], ids=str)
def test_decoding_with_biases(shape, dtype):
    """A forward pass with few queries takes another path through the kernel."""
    q, k, v = make_qkv(shape, dtype)
    slopes, table = floats(shape.N, low=0.01, high=0.1), floats(32, shape.N)
    lengths = np.arange(1, shape.B + 1) * (shape.S // shape.B)
    places = dict(q_positions=(lengths[:, None] - np.arange(shape.T)[None, ::-1] - 1).astype(np.int32))
    mask = ls.Causal() & ls.KvLengths(lengths)
    dense = written_out(
        shape, lambda b, n, q, k: -slopes[n] * abs(q - k) + from_table(table, k - q, n, True, 128), **places
    )
    wanted = ls.attention(q, k, v, mask=mask, bias=jnp.asarray(dense, jnp.float32), engine="reference", **places)
    for engine in SPARSE:
        for bias in [(ls.alibi(slopes), ls.relative_bias(table)), (ls.relative_bias(table), ls.alibi(slopes))]:
            got = ls.attention(q, k, v, mask=mask, bias=bias, engine=engine, **places)
            units = 1e-5 if dtype == jnp.float32 else 2 * float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(
                np.asarray(got, np.float64), np.asarray(wanted, np.float64), rtol=0, atol=units * 4
            )
    only = ls.attention(q, k, v, mask=mask, bias=ls.alibi(slopes), engine="cpu", **places)
    exact = ls.attention(q, k, v, mask=mask, bias=ls.alibi(slopes), engine="reference", **places)
    np.testing.assert_allclose(np.asarray(only, np.float64), np.asarray(exact, np.float64), rtol=0, atol=units * 4)


def test_far_positions_keep_the_distances_between_them():
    """Positions of 2**29 do not fit into a float32; their differences do."""
    q, k, v = make_qkv(Shape(1, 5, 40, 2, 1, 8), jnp.float32)
    bias, far = ls.alibi(np.array([0.3, 0.7], np.float32)), 2**29 + 1
    wanted = ls.attention(q, k, v, bias=bias, q_positions=jnp.arange(5) * 7, engine="reference")
    for engine in RUNNING:
        places = dict(q_positions=jnp.arange(5) * 7 + far, kv_positions=jnp.arange(40) + far)
        close(ls.attention(q, k, v, bias=bias, engine=engine, **places), wanted)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("count", "most"), [(32, 128), (64, 256), (33, 100), (8, 37), (4, 3), (16, 1000)])
def test_buckets_are_those_of_the_definition(count, most, bidirectional):
    wanted = [t5_bucket(ahead, count, bidirectional, most) for ahead in range(-most, most + 1)]
    np.testing.assert_array_equal(_buckets(count, bidirectional, most), wanted)
    for beyond in (most + 1, 3 * most, 10**6):  # larger distances are in the last bucket
        assert t5_bucket(-beyond, count, bidirectional, most) == wanted[0]
        assert t5_bucket(beyond, count, bidirectional, most) == wanted[-1]


def test_buckets_of_t5_itself():
    """Where the buckets of 32 and 128 begin, as listed for the published checkpoints."""
    begins = [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
    buckets = _buckets(32, True, 128)
    np.testing.assert_array_equal(np.flatnonzero(np.diff(buckets[128:])) + 1, begins[1:])
    np.testing.assert_array_equal(buckets[:128][::-1], buckets[129:] - 16)


@every_engine
def test_minus_infinity_in_a_table_masks_its_keys(engine):
    q, k, v = make_qkv(SHAPE, jnp.float32)
    table = np.where(floats(16, 6) < -0.5, -np.inf, floats(16, 6)).astype(np.float32)
    table[:, 2] = -np.inf  # a head that sees nothing
    dense = written_out(SHAPE, lambda b, n, q, k: from_table(table, k - q, n, True, 19)).astype(np.float32)
    v = v.at[:, 7].set(np.nan)
    mask = ls.Causal(4) & ~ls.Dense(np.arange(41)[None] == 7)

    def total(q, bias, engine):
        return loss(q, k, v, bias, engine, dict(mask=mask))

    run = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=2)
    got, want = run(q, ls.relative_bias(table, max_distance=19), engine), run(q, jnp.asarray(dense), "reference")
    jax.tree.map(close, got, want)
    assert not np.asarray(got[0][1][0])[:, :, 2].any()


@rule
class Near(ls.Bias):
    """A user's bias by distance: numbers[n, k - q + 2], with 0 beyond ±2."""

    numbers: jax.Array

    def by_distance(self):
        return Distances(table=jnp.pad(self.numbers, ((0, 0), (1, 1))))


@every_engine
def test_a_users_bias(engine):
    q, k, v = make_qkv(SHAPE, jnp.float32)
    numbers = jnp.asarray(floats(6, 5))
    dense = written_out(SHAPE, lambda b, n, q, k: np.pad(numbers, ((0, 0), (1, 1)))[n, np.clip(k - q, -3, 3) + 3])

    def total(numbers):
        return jnp.sin(ls.attention(q, k, v, bias=Near(numbers), engine=engine)).sum()

    def dense_total(dense):
        return jnp.sin(ls.attention(q, k, v, bias=dense, engine="reference")).sum()

    value, grad = jax.value_and_grad(total)(numbers)
    want, by_pair = jax.value_and_grad(dense_total)(jnp.asarray(dense, jnp.float32))
    close(value, want, 10)
    wanted = [[np.asarray(by_pair)[:, n].sum(0).trace(a) for a in range(-2, 3)] for n in range(6)]
    close(grad, np.array(wanted), 10)


# Transformations


Q, K, V = make_qkv(Shape(B=2, T=37, S=37, N=4, K=2, H=5), jnp.float32)
SLOPES, TABLE = jnp.linspace(0.1, 0.4, 4), jnp.asarray(floats(16, 4))


def both(slopes, table):
    return (ls.alibi(slopes), ls.relative_bias(table, max_distance=19))


def scored(slopes, table):
    fn = lambda b, h, q, k, s, t: t[(q - k) % 16, h] - s[h] * (abs(q - k) * (b + 1)).astype(s.dtype)  # noqa: E731
    return ls.ScoreBias(fn, slopes, table)


def make_of(engine):
    return both if engine == "cpu" else scored


def summed(q, slopes, table, engine, make):
    return jnp.sin(ls.attention(q, K, V, mask=ls.Causal(), bias=make(slopes, table), engine=engine)).sum()


@pytest.mark.check
@every_engine
def test_jit_remat_scan_and_vmap(engine):
    make = make_of(engine)
    grad = jax.grad(summed, argnums=(0, 1, 2))
    many = jnp.stack([SLOPES, 2 * SLOPES])
    wanted = [grad(Q, slopes, TABLE, "reference", make) for slopes in many]
    wanted = jax.tree.map(lambda *xs: np.stack(xs), *wanted)

    def one(slopes):
        return grad(Q, slopes, TABLE, engine, make)

    def rematerialised(slopes):
        return jax.grad(jax.remat(summed, static_argnums=(3, 4)), argnums=(0, 1, 2))(Q, slopes, TABLE, engine, make)

    for got in (
        jax.jit(jax.vmap(one))(many),
        jax.jit(lambda many: jax.lax.map(one, many))(many),
        jax.jit(jax.vmap(rematerialised))(many),
    ):
        jax.tree.map(lambda a, b: close(a, b, 50), got, wanted)
    got = jax.jit(jax.vmap(lambda q: grad(q, SLOPES, TABLE, engine, make)))(jnp.stack([Q, 2 * Q]))
    wanted = [grad(q, SLOPES, TABLE, "reference", make) for q in (Q, 2 * Q)]
    jax.tree.map(lambda a, *b: close(a, np.stack(b), 50), got, *wanted)


@every_engine
def test_new_arrays_do_not_retrace(engine):
    traces, fn = [], lambda q, k, s: -s[0] * abs(q - k).astype(s.dtype)

    @jax.jit
    def step(q, bias):
        traces.append(1)
        return ls.attention(q, K, V, bias=bias, engine=engine)

    for times in (1.0, 2.0, 3.0):
        bias = ls.alibi(times * SLOPES) if engine == "cpu" else ls.ScoreBias(fn, times * SLOPES)
        step(Q, bias)
    assert len(traces) == 1


@pytest.mark.mesh
@every_engine
def test_shard_map_over_batch_and_heads(engine):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    here = P("data", None, "model")

    def local(q, k, v, slopes, table):
        return jnp.sin(ls.attention(q, k, v, mask=ls.Causal(), bias=both(slopes, table), engine=engine))

    specs = (here, here, here, P("model"), P(None, "model"))
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=here)
    operands = (Q, K, V, SLOPES, TABLE)
    got = jax.jit(jax.grad(lambda *x: sharded(*x).sum(), argnums=range(5)))(*operands)
    want = jax.grad(lambda *x: local(*x).sum(), argnums=range(5))(*operands)
    jax.tree.map(lambda a, b: close(a, b, 10), got, want)


@pytest.mark.mesh
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_sharded_slopes_and_tables_stay_with_their_heads_on_the_cpu_engine(kv_heads):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    operands = (Q, K[:, :, :kv_heads], V[:, :, :kv_heads], SLOPES, TABLE)
    heads = "model" if kv_heads > 1 else None
    specs = (P("data", None, "model"), *[P("data", None, heads)] * 2, P("model"), P(None, "model"))
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]

    def total(q, k, v, slopes, table, engine):
        return jnp.sin(ls.attention(q, k, v, mask=ls.Causal(), bias=both(slopes, table), engine=engine)).sum()

    run = jax.jit(jax.value_and_grad(total, range(5)), static_argnums=5)
    try:
        compiled = run.lower(*placed, "cpu").compile()
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    assert not re.search("all-gather|all-to-all|collective-permute", compiled.as_text())
    jax.tree.map(lambda a, b: close(a, b, 10), compiled(*placed), run(*operands, "reference"))


@pytest.mark.mesh
@pytest.mark.parametrize("engine", ["xla", "reference"])
def test_rows_and_heads_of_a_sharded_call_are_those_of_the_whole(engine):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    q, k, v = (jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for x in (Q, K, V))
    bias = ls.ScoreBias(lambda b, h, q, k: (5 * b + 2 * h) * jnp.sign(q - k))
    got = jax.jit(lambda q, k, v: ls.attention(q, k, v, bias=bias, engine=engine))(q, k, v)
    close(got, ls.attention(Q, K, V, bias=bias, engine="reference"))


@every_sparse_engine
@pytest.mark.parametrize("kind", ["alibi", "relative", "score"])
def test_no_array_of_t_times_s_exists(engine, kind):
    if engine == "cpu" and kind == "score":
        pytest.skip("refused")
    T = 8192
    make = {
        "alibi": ls.alibi,
        "relative": lambda slopes: ls.relative_bias(jnp.broadcast_to(slopes, (32, 2))),
        "score": lambda slopes: ls.ScoreBias(lambda b, h, q, k, s: -s[h] * abs(q - k).astype(s.dtype), slopes),
    }[kind]
    x = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)

    def total(q, k, v, slopes):
        return ls.attention(q, k, v, mask=ls.Causal(), bias=make(slopes), engine=engine).sum()

    lowered = jax.jit(jax.grad(total, range(4))).lower(x, x, x, jax.ShapeDtypeStruct((2,), jnp.float32))
    compiled = lowered.compile()
    shapes = re.findall(r"(?:pred|[sufb]+\d+)\[([\d,]+)\]", compiled.as_text())
    assert max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes) < T * T / 8
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * 3 * 4 * T * 2 * 16


@pytest.mark.parametrize("kind", ["alibi", "relative"])
def test_the_same_call_gives_the_same_bits(kind):
    q, k, v = make_qkv(Shape(2, 700, 700, 4, 2, 16), jnp.float32)
    make = {"alibi": ls.alibi, "relative": lambda s: ls.relative_bias(jnp.broadcast_to(s, (32, 4)))}[kind]

    @jax.jit
    def gradient(slopes):
        return jax.grad(lambda s: ls.attention(q, k, v, mask=ls.Causal(), bias=make(s), engine="cpu").sum())(slopes)

    first = np.asarray(gradient(SLOPES))
    for _ in range(5):
        np.testing.assert_array_equal(np.asarray(gradient(SLOPES)), first)
