"""Attention with a sharded sequence equals one device: values, lse and all gradients, for every family."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.parallel.order import stored
from longspan.testing import assert_matches_reference
from tests.engines import available, every_sparse_engine
from tests.parallel.families import BY_TOKEN, FAMILIES, IDS, MESHES, B, N, T, operands
from tests.selection import one_in

WHOLE = np.arange(T)
XLA = ("causal window", "window and prefix")


def shared(mesh, **more):
    """`ls.parallel.attention` on a mesh, with the signature of `ls.attention`."""
    return partial(ls.parallel.attention, mesh=MESHES[mesh](), global_capacity=6, **more)


# The default suite has others of their kind.
LATER = (
    "dilated window", "wide window", "block causal", "token types", "custom by row and head", "first of documents",
    "a user's by slot", "window and flags", "full",
)  # fmt: skip


# In `make test`: a halo, a ring, global keys, global queries, documents and random blocks.
FIRST = ("causal window", "causal", "window and global tokens", "causal documents", "random blocks")


def covering():
    """Nearly every family once, spread evenly over meshes and engines."""
    meshes = list(MESHES)
    for i, family in enumerate(FAMILIES):
        # `xla` takes long to compile: a halo and global keys here, every family in the slow suite.
        engine = "xla" if family in XLA else "cpu"
        mesh = meshes[XLA.index(family) if family in XLA else i % 5]
        marks = [pytest.mark.slow] if family in LATER else [pytest.mark.check] if family not in FIRST else []
        yield pytest.param(family, mesh, engine, marks=marks)


@pytest.mark.parametrize(("family", "mesh", "engine"), list(covering()))
def test_a_sharded_sequence_equals_one_device(family, mesh, engine):
    assert_matches_reference(engine, *operands(), FAMILIES[family](WHOLE), run=shared(mesh))


@pytest.mark.slow
@every_sparse_engine
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_every_mesh(family, mesh, engine):
    assert_matches_reference(engine, *operands(), FAMILIES[family](WHOLE), run=shared(mesh))


def zigzag(mesh: str, family: str):
    """`ls.parallel.attention` in zigzag order, for operands in contiguous order."""
    shards = MESHES[mesh]().shape["sp"]
    at = stored(48, shards, "zigzag")

    def run(q, k, v, *, mask, return_lse, **rest):
        del mask
        q, k, v = (x[:, at] for x in (q, k, v))
        out, lse = shared(mesh, order="zigzag")(q, k, v, mask=FAMILIES[family](at), return_lse=True, **rest)
        return tuple(x[:, np.argsort(at)] for x in (out, lse))

    return run


ZIGZAG = [
    ("causal", "sp8", "cpu"), ("window and global tokens", "sp4", "cpu"), ("causal documents", "sp3", "cpu"),
    ("window and flags", "dp2-tp2-sp2", "cpu"), ("window", "sp3", "xla"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "mesh", "engine"), one_in(5, available(*ZIGZAG)))
def test_zigzag_order_equals_one_device(family, mesh, engine):
    assert_matches_reference(engine, *operands(48), BY_TOKEN[family](np.arange(48)), run=zigzag(mesh, family))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", BY_TOKEN)
def test_every_family_by_token_in_zigzag_order(family, mesh):
    assert_matches_reference("cpu", *operands(48), BY_TOKEN[family](np.arange(48)), run=zigzag(mesh, family))


@pytest.mark.check
@pytest.mark.parametrize(("axis", "shape"), [(2, (1, N, 48, 1)), (3, (B, 1, 1, 48))], ids=["by query", "by key"])
def test_biases_by_token_follow_the_zigzag_order(axis, shape):
    at, mask = stored(48, 4, "zigzag"), ls.Causal() & (ls.Window(9, 0) | ls.Global((20,)))

    def run(q, k, v, *, mask, bias, return_lse, **rest):
        q, k, v = (x[:, at] for x in (q, k, v))
        bias = jnp.take(bias, at, axis=axis)
        out, lse = shared("sp4", order="zigzag")(q, k, v, mask=mask, bias=bias, return_lse=True, **rest)
        return tuple(x[:, np.argsort(at)] for x in (out, lse))

    assert_matches_reference("cpu", *operands(48), mask, run=run, bias=floats(*shape))


def floats(*shape, seed=3):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


KEY = jax.random.key(1)
PACKED = np.asarray(ls.positions_from_segments(np.sort(IDS[:, :T], axis=1)))
FEATURES = {
    "a bias of all pairs": (ls.Window(3, 2), dict(bias=floats(B, N, T, T)), "dp2-tp2-sp2"),
    "a bias by key": (ls.Causal(), dict(bias=floats(1, N, 1, T)), "dp2-tp2-sp2"),
    "a bias by query under global tokens": (ls.Window(3, 3) | ls.Global((0,)), dict(bias=floats(B, 1, T, 1)), "sp3"),
    "a bias of a global token by key": (ls.Window(3, 3) | ls.Global((9,)), dict(bias=floats(1, 1, 1, T)), "sp4"),
    "several biases": (
        ls.Causal() & (ls.Window(4, 0) | ls.Prefix(2)), dict(bias=(ls.alibi(floats(N)), floats(1, 1, T, T))), "sp3",
    ),
    "ALiBi": (ls.Causal(), dict(bias=ls.alibi(floats(N))), "dp2-tp2-sp2"),
    "T5 buckets": (
        ls.Window(5, 5) | ls.Global((3,)), dict(bias=ls.relative_bias(floats(8, N), max_distance=16)), "dp2-tp2-sp2",
    ),
    "a bias by row and head": (
        ls.Window(5, 0),
        dict(bias=ls.ScoreBias(lambda b, h, q, k, x: x[b, h] * abs(q - k).astype(x.dtype), floats(B, N))),
        "dp2-tp2-sp2",
    ),
    "sinks": (ls.Causal() & (ls.Window(4, 0) | ls.Prefix(2)), dict(sinks=floats(N)), "dp2-tp2-sp2"),
    "sinks of global rows, capped": (ls.Window(2, 2) | ls.Global((0, 30)), dict(sinks=floats(N), soft_cap=2.0), "sp8"),
    "dropout in a ring": (ls.Causal(), dict(dropout_rate=0.3, dropout_key=KEY), "dp2-tp2-sp2"),
    "dropout of global tokens": (
        ls.Window(4, 2) | ls.Global((5,)), dict(dropout_rate=0.3, dropout_key=KEY, sinks=floats(N)), "dp2-tp2-sp2",
    ),
    "everything, by head": (
        FAMILIES["listed blocks"](WHOLE),
        dict(
            bias=(ls.alibi(floats(N)), floats(1, N, T, T), floats(B, 1, 1, T)), dropout_rate=0.3, dropout_key=KEY,
            sinks=floats(N), soft_cap=3.0,
        ),
        "sp8",
    ),
    "a bias whose heads nobody knows, by head": (
        FAMILIES["listed blocks"](WHOLE),
        dict(bias=ls.ScoreBias(lambda b, h, q, k, x: x[b, h] * abs(q - k).astype(x.dtype), floats(B, N))),
        "dp2-tp2-sp2",
    ),
    "packed positions": (
        ls.Causal() & ls.Segments(np.sort(IDS[:, :T], axis=1)), dict(q_positions=PACKED, kv_positions=PACKED), "sp4",
    ),
    "positions apart": (
        ls.Window(3, 0), dict(q_positions=np.arange(T) * 2, kv_positions=np.arange(T) * 2 + 1), "sp3",
    ),
    "a scale": (ls.Chunk(9), dict(scale=0.3), "sp8"),
}  # fmt: skip


SLOWER = (
    "a bias of a global token by key",
    "a bias by row and head",
    "a bias whose heads nobody knows, by head",
    "T5 buckets",
    "several biases",
    "positions apart",
)


@pytest.mark.parametrize(
    "feature",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOWER else pytest.mark.check) for name in FEATURES],
)
def test_features_are_those_of_one_device(feature):
    mask, given, mesh = FEATURES[feature]
    assert_matches_reference("auto", *operands(), mask, run=shared(mesh), **given)


@pytest.mark.check
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 3)], ids=["one", "three"])
def test_key_value_heads_that_the_axis_does_not_divide_are_repeated(heads, kv_heads):
    q, k, v = ls.testing.make_qkv(ls.testing.Shape(2, 19, 19, heads, kv_heads, 5), jnp.float32)
    assert_matches_reference("cpu", q, k, v, ls.Window(4, 1), run=shared("dp2-tp2-sp2"))


@pytest.mark.check
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64], ids=["bf16", "f64"])
@pytest.mark.parametrize("family", [pytest.param("window and global tokens", marks=pytest.mark.slow), "causal"])
def test_other_dtypes(family, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        assert_matches_reference("cpu", *operands(dtype=dtype), FAMILIES[family](WHOLE), run=shared("sp3"))


def test_a_mask_info_gives_its_mask_and_positions():
    q, k, v = operands()
    info = ls.MaskInfo.from_segments(np.sort(IDS[:, :T], axis=1)).apply_causal()
    info = info.replace(q_positions=PACKED, kv_positions=PACKED)
    got = ls.parallel.attention(q, k, v, mask=info, mesh=MESHES["dp2-sp4"]())
    np.testing.assert_allclose(got, ls.attention(q, k, v, mask=info, engine="reference"), rtol=1e-5, atol=1e-5)


def test_bools_and_calls_without_a_batch_axis():
    q, k, v = (x[0] for x in operands())
    mask = np.random.default_rng(1).random((T, T)) < 0.4
    got, lse = ls.parallel.attention(q, k, v, mask=mask, mesh=MESHES["sp3"](), return_lse=True)
    want = ls.attention(q, k, v, mask=mask, engine="reference", return_lse=True)
    for mine, theirs in zip((got, lse), want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_traced_scale_has_a_gradient():
    q, k, v = operands()

    def loss(call, scale, **more):
        return call(q, k, v, mask=ls.Window(3, 0), scale=scale, **more).sum()

    got = jax.grad(lambda s: loss(ls.parallel.attention, s, mesh=MESHES["sp3"]()))(jnp.float32(0.4))
    want = jax.grad(lambda s: loss(ls.attention, s, engine="reference"))(jnp.float32(0.4))
    np.testing.assert_allclose(got, want, rtol=1e-4)
