"""Rotary positions, query/key norms and sinks in linen and NNX modules, compared with NumPy."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import longspan as ls
from longspan.nn import linen as in_linen
from longspan.nn import nnx as in_nnx

pytestmark = pytest.mark.check

B, T, D, N, K, H, OUT = 2, 16, 10, 4, 2, 6, 7
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
KINDS = jnp.asarray(np.random.default_rng(1).choice([-1, 0, 0, 1], (B, T)))
POSITIONS = jnp.asarray(np.random.default_rng(2).permuted(np.tile(np.arange(3, 3 + T), (B, 1)), axis=1))
MASK = ls.Causal() & ls.Window(4, 0)
# D = 4 of H = 6 features, and a factor that is not 1.
YARN = dict(
    rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=8, partial_rotary_factor=0.7
)
PAIR = ls.rope.frequencies(YARN, H)
SIZES = dict(num_heads=N, num_kv_heads=K, head_dim=H, out_features=OUT)
OWN = {
    "SelfAttention": {},
    "LongformerSelfAttention": dict(window=2),
    "BigBirdSelfAttention": dict(block_size=2, num_random_blocks=1),
}
every_module = pytest.mark.parametrize("name", OWN)


def both(name, **more):
    """The linen module and its parameters, far from their defaults, and the NNX module with the same parameters."""
    layer = getattr(in_linen, name)(**SIZES, **OWN[name], **more)
    params = nn.unbox(layer.init(jax.random.key(3), X)["params"])
    leaves, tree = jax.tree.flatten(params)
    random = np.random.default_rng(4)
    params = jax.tree.unflatten(tree, [x + jnp.asarray(random.normal(0, 0.3, x.shape), x.dtype) for x in leaves])
    twin = getattr(in_nnx, name)(**SIZES, **OWN[name], **more, in_features=D, rngs=nnx.Rngs(4))
    state = nnx.state(twin, nnx.Param)
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(state)) == jax.tree.map(jnp.shape, params)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(twin, state)
    return layer, params, twin


def runs(name, **more):
    """The calls of both kinds of modules, and their parameters."""
    layer, params, twin = both(name, **more)
    return (lambda *args, **call: layer.apply({"params": params}, *args, **call)), twin, params


def projected(params, part):
    kernel, bias = (np.asarray(params[part][name], np.float64) for name in ("kernel", "bias"))
    return np.einsum("btd,dnh->btnh", np.asarray(X, np.float64), kernel) + bias


def turned(x, positions, pair=PAIR, interleaved=False):
    """Pairs of features as complex numbers."""
    inv_freq, factor = (np.asarray(p, np.float64) for p in pair)
    angles = np.broadcast_to(np.asarray(positions), (B, T))[:, :, None, None] * inv_freq
    half = inv_freq.shape[-1]
    one, two = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    z = (x[..., one] + 1j * x[..., two]) * np.exp(1j * angles) * factor
    out = np.array(x)
    out[..., one], out[..., two] = z.real, z.imag
    return out


def normed(params, part, x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(params[part]["scale"], np.float64)


def joined(params, out):
    kernel, bias = (np.asarray(params["out"][name], np.float64) for name in ("kernel", "bias"))
    return np.einsum("btnh,nhd->btd", np.asarray(out, np.float64), kernel) + bias


def by_hand(params, positions, *, rope=True, interleaved=False, qk_norm=False, sinks=False):
    """Dense softmax attention in float64, with projections, norms and rotations."""
    q, k, v = (projected(params, part) for part in ("query", "key", "value"))
    if qk_norm:
        q, k = normed(params, "query_norm", q), normed(params, "key_norm", k)
    if rope:
        q, k = (turned(x, positions, interleaved=interleaved) for x in (q, k))
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    at = np.broadcast_to(np.asarray(positions), (B, T))
    behind = at[:, :, None] - at[:, None, :]
    weights = np.where(((behind >= 0) & (behind <= 4))[:, None], np.exp(scores), 0)
    sink = np.exp(np.asarray(params["sink"], np.float64))[None, :, None, None] if sinks else 0
    weights = weights / (weights.sum(-1, keepdims=True) + sink)
    return joined(params, np.einsum("bnts,bsnh->btnh", weights, v))


@pytest.mark.parametrize(
    "options",
    [
        dict(rope=YARN),
        dict(rope=PAIR, rope_interleaved=True),
        dict(qk_norm=True),
        dict(sinks=True),
        dict(rope=YARN, qk_norm=True, sinks=True),
    ],
    ids=["rope", "interleaved", "norm", "sinks", "all"],
)
def test_self_attention_is_what_it_is_by_hand(options):
    *calls, params = runs("SelfAttention", **options)
    hand = dict(options, rope="rope" in options)
    hand["interleaved"] = hand.pop("rope_interleaved", False)
    for run in calls:
        np.testing.assert_allclose(run(X, mask=MASK), by_hand(params, np.arange(T), **hand), rtol=0, atol=2e-5)
        got = run(X, mask=MASK, positions=POSITIONS)
        np.testing.assert_allclose(got, by_hand(params, POSITIONS, **hand), rtol=0, atol=2e-5)


def test_longformer_rotates_both_sets_of_queries_and_keys():
    *calls, params = runs("LongformerSelfAttention", rope=YARN)
    for kinds, positions in ((KINDS, POSITIONS), (KINDS, None), (None, POSITIONS[0])):
        at = np.arange(T) if positions is None else positions
        arrays = [projected(params, part) for part in ("query", "key", "value")]
        arrays += [projected(params, f"{part}_global") for part in ("query", "key", "value")]
        arrays = [jnp.asarray(x if i % 3 == 2 else turned(x, at), jnp.float32) for i, x in enumerate(arrays)]
        want = joined(params, ls.longformer_attention(*arrays, window=2, token_kinds=kinds))
        for run in calls:
            np.testing.assert_allclose(run(X, token_kinds=kinds, positions=positions), want, rtol=0, atol=2e-5)


def test_bigbird_rotates_queries_and_keys():
    *calls, params = runs("BigBirdSelfAttention", rope=YARN)
    blocks = np.random.default_rng(2).integers(0, 8, (N, 6, 1)).astype(np.int32)
    for positions in (None, POSITIONS):
        at = np.arange(T) if positions is None else positions
        arrays = [turned(projected(params, "query"), at), turned(projected(params, "key"), at)]
        arrays = [jnp.asarray(x, jnp.float32) for x in (*arrays, projected(params, "value"))]
        want = joined(params, ls.bigbird_attention(*arrays, block_size=2, rand_attn=blocks))
        for run in calls:
            np.testing.assert_allclose(run(X, rand_attn=blocks, positions=positions), want, rtol=0, atol=2e-5)


@every_module
def test_rope_is_given_to_the_module_or_to_the_call_and_may_be_traced(name):
    layer, params, twin = both(name, rope=YARN)
    plain, _, plain_twin = both(name)
    want = layer.apply({"params": params}, X)
    assert np.abs(want - plain.apply({"params": params}, X)).max() > 0.01
    np.testing.assert_allclose(twin(X), want, rtol=1e-5, atol=1e-5)
    for rope in (PAIR, (jnp.asarray(PAIR[0]), jnp.float32(PAIR[1])), (PAIR[0].tolist(), PAIR[1])):
        again = getattr(in_linen, name)(**SIZES, **OWN[name], rope=rope).clone()
        hash(again)
        np.testing.assert_allclose(jax.jit(again.apply)({"params": params}, X), want, rtol=1e-5, atol=1e-5)
    in_call = jax.jit(lambda pair: plain.apply({"params": params}, X, rope=pair))
    np.testing.assert_allclose(in_call(PAIR), want, rtol=1e-5, atol=1e-5)
    rows = (np.stack([PAIR[0]] * B), PAIR[1])
    np.testing.assert_allclose(nnx.jit(lambda m, pair: m(X, rope=pair))(plain_twin, rows), want, rtol=1e-5, atol=1e-5)
    other = (PAIR[0] * 2, PAIR[1])
    assert np.abs(layer.apply({"params": params}, X, rope=other) - want).max() > 0.001
    assert np.abs(twin(X, rope=other) - want).max() > 0.001


def test_parameters_with_lists_hash_so_that_a_module_can_be_compiled():
    lists = dict(short_factor=[1.0, 1.5, 2.0], long_factor=[2.0, 3.0, 4.0], original_max_position_embeddings=8)
    longrope = dict(rope_scaling=dict(type="su", factor=2.0, **lists), rope_theta=100.0)
    layer, params, twin = both("SelfAttention", rope=longrope)
    assert hash(layer) == hash(layer.clone())
    got = jax.jit(layer.apply)({"params": params}, X)
    np.testing.assert_allclose(got, nnx.jit(lambda m: m(X))(twin), rtol=1e-5, atol=1e-5)
    pair = ls.rope.frequencies(longrope, H)
    np.testing.assert_allclose(got, both("SelfAttention", rope=pair)[2](X), rtol=1e-5, atol=1e-5)


def test_rope_takes_the_positions_that_a_bound_mask_holds():
    ids = np.repeat([[0, 1, -1], [5, 3, 3]], [7, 5, 4], axis=1)
    positions = np.asarray(ls.positions_from_segments(ids))
    end = np.iinfo(np.int32).max
    padded = np.where(ids < 0, end, positions)
    info = ls.MaskInfo.from_segments(ids).replace(q_positions=positions, kv_positions=padded)
    layout = MASK.layout(T, T, q_positions=positions, kv_positions=positions)
    for run in runs("SelfAttention", rope=YARN)[:2]:
        want = run(X, mask=ls.Segments(ids), positions=positions)
        np.testing.assert_allclose(run(X, mask=info), want, rtol=1e-5, atol=1e-5)
        assert np.abs(run(X, mask=ls.Segments(ids)) - want).max() < 1e-4  # distances within a document are the same
        np.testing.assert_allclose(run(X, mask=layout), run(X, mask=MASK, positions=positions), rtol=1e-5, atol=1e-5)


def test_parameters_of_norms_and_sinks_have_names_and_gradients():
    layer, params, twin = both("SelfAttention", qk_norm=True, sinks=True, rope=YARN)
    assert params["query_norm"]["scale"].shape == params["key_norm"]["scale"].shape == (H,)
    assert params["sink"].shape == (N,)
    mine = jax.grad(lambda params: (layer.apply({"params": params}, X, mask=MASK) ** 2).sum())(params)
    theirs = nnx.to_pure_dict(nnx.grad(lambda twin: (twin(X, mask=MASK) ** 2).sum())(twin))
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    for part in (mine["query_norm"]["scale"], mine["key_norm"]["scale"], mine["sink"]):
        assert np.abs(part).max() > 0.01


def test_norms_and_sinks_start_as_one_and_zero():
    layer = in_linen.SelfAttention(**SIZES, qk_norm=True, sinks=True, param_dtype=jnp.bfloat16)
    params = layer.init(jax.random.key(0), X.astype(jnp.bfloat16))["params"]
    twin = in_nnx.SelfAttention(
        **SIZES, qk_norm=True, sinks=True, param_dtype=jnp.bfloat16, in_features=D, rngs=nnx.Rngs(0)
    )
    for made in (params, nnx.to_pure_dict(nnx.state(twin, nnx.Param))):
        for part, value in ((made["query_norm"]["scale"], 1), (made["key_norm"]["scale"], 1), (made["sink"], 0)):
            assert part.dtype == jnp.bfloat16
            np.testing.assert_array_equal(part, jnp.full_like(part, value))


def test_half_precision_runs_through_norm_and_rope():
    for run in runs("SelfAttention", qk_norm=True, sinks=True, rope=YARN, dtype=jnp.bfloat16)[:2]:
        assert run(X, mask=MASK).dtype == jnp.bfloat16


@pytest.mark.mesh
def test_sinks_are_split_with_the_heads():
    P = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    options = dict(qk_norm=True, sinks=True, rope=YARN)
    layer, params, _ = both("SelfAttention", **options)
    split = in_linen.SelfAttention(**SIZES, **options, head_axis="model", partition_params=True)
    specs = nn.get_partition_spec(jax.eval_shape(split.init, jax.random.key(0), X))["params"]
    assert specs["sink"] == P("model") and specs["query_norm"]["scale"] == P()
    twin = in_nnx.SelfAttention(
        **SIZES, **options, head_axis="model", partition_params=True, in_features=D, rngs=nnx.Rngs(0)
    )
    assert nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(twin, nnx.Param)))["sink"] == P("model")
    placed = jax.device_put(params, jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs))
    with jax.set_mesh(mesh):
        got = jax.jit(lambda params, x: split.apply({"params": params}, x, mask=MASK))(placed, X)
    np.testing.assert_allclose(got, layer.apply({"params": params}, X, mask=MASK), rtol=1e-5, atol=1e-5)


@every_module
def test_what_rope_cannot_be_is_explained(name):
    pair = (
        "`rope` must be parameters as in `ls.rope.frequencies`, or the pair (inv_freq, attention_factor) that it "
        "returns, got"
    )
    known = "The `rope` of a module must be static: frequencies [D/2] and a factor, with known values. Pass traced"
    cases = [
        (PAIR[0], TypeError, f"{pair} ndarray."),
        ("yarn", TypeError, f"{pair} str."),
        ((np.ones((B, 2)), 1.0), ValueError, known),
        (
            (np.ones(4), 1.0),
            ValueError,
            "`inv_freq` has 4 frequencies, one per pair, but `x` has heads of 6 features.",
        ),
        (dict(rope_type="yarn", rope_theta=100.0), ValueError, "RoPE of type 'yarn' needs `original_max_position_emb"),
    ]
    for rope, error, text in cases:
        with pytest.raises(error, match=re.escape(text)):
            getattr(in_linen, name)(**SIZES, **OWN[name], rope=rope).init(jax.random.key(0), X)
        with pytest.raises(error, match=re.escape(text)):
            getattr(in_nnx, name)(**SIZES, **OWN[name], rope=rope, in_features=D, rngs=nnx.Rngs(0))(X)
    with pytest.raises(ValueError, match="must be static"):
        jax.jit(
            lambda freq: getattr(in_linen, name)(**SIZES, **OWN[name], rope=(freq, 1.0)).init(jax.random.key(0), X)
        )(PAIR[0])


@pytest.mark.parametrize("name", ["LongformerSelfAttention", "BigBirdSelfAttention"])
def test_positions_without_rope_mean_nothing_where_masks_go_by_slots(name):
    for run in runs(name)[:2]:
        with pytest.raises(ValueError, match="`positions` are used only with `rope`, which this module does not have"):
            run(X, positions=POSITIONS)
