"""Longformer's and BigBird's attention with a sharded sequence."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan.parallel.order import stored
from longspan.testing import Shape, make_qkv
from tests.parallel.families import MESHES, NAMED, mesh_of_other_names

T = 48
KINDS = np.where(np.random.default_rng(0).random((2, T)) < 0.1, 1, 0)
KINDS[1, 40:] = -1


def both(call, *operands):
    """The output, and the gradients of all operands."""

    @jax.jit
    def run(*operands):
        out, pull = jax.vjp(call, *operands)
        return out, *pull(out)

    return run(*operands)


def assert_equal(got, want, at=slice(None)):
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, np.asarray(theirs)[:, at], rtol=1e-4, atol=2e-5)


CASES = {
    "global tokens": ("sp4", "contiguous", dict(window=3, token_kinds=KINDS)),
    "causal, dilated by head": (
        "dp2-tp2-sp2",
        "contiguous",
        dict(window=2, token_kinds=KINDS, dilation=(1, 2, 3, 1), causal=True),
    ),
    "zigzag": ("sp3", "zigzag", dict(window=3, token_kinds=KINDS)),
    "no kinds": ("sp4", "contiguous", dict(window=3)),
    "dropout": (
        "dp2-sp4",
        "contiguous",
        dict(window=3, token_kinds=KINDS, dropout_rate=0.3, dropout_key=jax.random.key(0)),
    ),
}

QUICK = ("global tokens", "no kinds")


@pytest.mark.check
@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_longformer_on_devices_equals_one(case):
    name, order, given = CASES[case]
    mesh = MESHES[name]()
    at = stored(T, mesh.shape["sp"], order)
    operands = [
        *make_qkv(Shape(2, T, T, 4, 2, 5), jnp.float32),
        *make_qkv(Shape(2, T, T, 4, 2, 5), jnp.float32, seed=1),
    ]
    there = given | ({} if "token_kinds" not in given else dict(token_kinds=given["token_kinds"][:, at]))
    want = both(lambda *x: ls.longformer_attention(*x, **given, engine="reference"), *operands)
    got = both(
        lambda *x: ls.longformer_attention(*x, **there, mesh=mesh, order=order, engine="cpu"),
        *(x[:, at] for x in operands),
    )
    assert_equal(got, want, at)


def called(pattern, *operands, **options):
    """One of the two patterns on [2, T, 4, 5], with dropout: it depends on the number of every row and head."""
    drop = dict(dropout_rate=0.3, dropout_key=jax.random.key(0))
    if pattern == "longformer":
        return ls.longformer_attention(*operands, window=3, token_kinds=KINDS, **drop, **options)
    return ls.bigbird_attention(*operands[:3], block_size=6, rand_attn=np.full((4, 6, 1), 7), **drop, **options)


def two_sets():
    shape = Shape(2, T, T, 4, 2, 5)
    return [*make_qkv(shape, jnp.float32), *make_qkv(shape, jnp.float32, seed=1)]


@pytest.mark.check
@pytest.mark.parametrize("pattern", ["longformer", "bigbird"])
def test_patterns_take_meshes_whose_axes_have_other_names(pattern):
    mesh = mesh_of_other_names()
    out = jax.jit(lambda *x: called(pattern, *x, mesh=mesh, **NAMED))(*two_sets())
    np.testing.assert_allclose(out, called(pattern, *two_sets(), engine="reference"), rtol=1e-4, atol=2e-5)
    assert out.sharding.spec == P("rows", "tokens", "model")


@pytest.mark.check
@pytest.mark.parametrize("pattern", ["longformer", "bigbird"])
def test_patterns_without_axes_of_the_meshs_names_split_the_sequence_alone(pattern):
    out = jax.jit(lambda *x: called(pattern, *x, mesh=mesh_of_other_names(), axis="tokens"))(*two_sets())
    assert out.sharding.spec == P(None, "tokens")


@pytest.mark.check
def test_bigbird_inside_a_shard_map_takes_the_names_of_its_axes():
    # Only with the names is dropout told which rows and heads of the whole a device holds.
    part = P("rows", None, "model")
    options = dict(block_size=6, dropout_rate=0.3, dropout_key=jax.random.key(0), engine="xla")
    blocks = np.full((1, 6, 1), 7)
    q, k, v = two_sets()[:3]

    @jax.jit
    @partial(jax.shard_map, mesh=mesh_of_other_names(), in_specs=part, out_specs=part)
    def split(*x):
        return ls.bigbird_attention(*x, rand_attn=blocks, batch_axes="rows", head_axis="model", **options)

    np.testing.assert_allclose(
        split(q, k, v), ls.bigbird_attention(q, k, v, rand_attn=blocks, **options), rtol=1e-4, atol=2e-5
    )


SLOW = [("sp3", True, "xla"), ("dp2-tp2-sp2", False, "xla"), ("dp2-tp2-sp2", True, "reference")]


@pytest.mark.check
@pytest.mark.parametrize(
    ("mesh", "traced", "engine"),
    [("sp3", False, "reference"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_bigbird_on_devices_counts_repeated_blocks_as_often(mesh, traced, engine):
    q, k, v = make_qkv(Shape(2, T, T, 4, 2, 5), jnp.float32)
    blocks = np.random.default_rng(1).integers(0, 8, (4, 6, 3))  # many are listed twice, or are near
    masks = dict(q_mask=KINDS >= 0, kv_mask=KINDS >= 0)
    blocks = jnp.asarray(blocks, jnp.int32) if traced else blocks
    given = dict(block_size=6, rand_attn=blocks, **masks, dropout_rate=0.2, dropout_key=jax.random.key(0))
    want = both(lambda *x: ls.bigbird_attention(*x, **given, engine="reference"), q, k, v)
    got = both(lambda *x: ls.bigbird_attention(*x, **given, mesh=MESHES[mesh](), engine=engine), q, k, v)
    assert_equal(got, want)


def test_bigbird_without_repeats_runs_on_any_engine():
    q, k, v = make_qkv(Shape(1, T, T, 2, 2, 5), jnp.float32)
    given = dict(block_size=4, rand_attn=np.full((1, 10, 0), 0))
    want = both(lambda *x: ls.bigbird_attention(*x, **given, engine="reference"), q, k, v)
    assert_equal(both(lambda *x: ls.bigbird_attention(*x, **given, mesh=MESHES["sp4"](), engine="cpu"), q, k, v), want)


def test_bigbird_in_zigzag_order_is_refused():
    x = jnp.ones((1, T, 2, 4))
    with pytest.raises(ValueError, match="depends on the slots"):
        ls.bigbird_attention(
            x, x, x, block_size=4, rand_attn=np.zeros((1, 10, 0), int), mesh=MESHES["sp4"](), order="zigzag"
        )
