"""Flax modules: linen and NNX agree with each other and with the functions, in values, dropout and sharding."""

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import longspan as ls
from longspan.nn import linen as in_linen
from longspan.nn import nnx as in_nnx

B, T, D, N, K, H, OUT = 2, 16, 10, 4, 2, 3, 7
X = jax.device_put(np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32))
KINDS = np.random.default_rng(1).choice([-1, 0, 0, 1], (B, T)).astype(np.int32)
RANDOM = np.random.default_rng(2).integers(0, 8, (N, 6, 1)).astype(np.int32)

# name -> (arguments of the module, arguments of a call)
MODULES = {
    "SelfAttention": ({}, dict(mask=ls.Causal() & ls.Window(4, 0))),
    "LongformerSelfAttention": (dict(window=2, dilation=(1, 2, 1, 2)), dict(token_kinds=KINDS)),
    "BigBirdSelfAttention": (dict(block_size=2, num_random_blocks=1), dict(token_mask=KINDS >= 0, rand_attn=RANDOM)),
}
SIZES = dict(num_heads=N, num_kv_heads=K, head_dim=H, out_features=OUT)
PARTITIONED = dict(head_axis="model", partition_params=True)
every_module = pytest.mark.parametrize("name", MODULES)


def both(name, **more):
    """The linen module and its parameters, and the NNX module with the same parameters."""
    own, _ = MODULES[name]
    bias = dict(bias_init=nn.initializers.normal(1.0))
    layer = getattr(in_linen, name)(**{**SIZES, **bias, **own, **more})
    params = layer.clone(dropout_rate=0.0).init(jax.random.key(3), X)["params"]
    twin = getattr(in_nnx, name)(**{**SIZES, **bias, **own, **more}, in_features=D, rngs=nnx.Rngs(4, dropout=5))
    state = nnx.state(twin, nnx.Param)
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(state)) == jax.tree.map(jnp.shape, params)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(twin, state)
    return layer, params, twin


def apply(layer, params, *args, **options):
    return layer.apply({"params": params}, *args, **options)


def by_hand(name, params, x=X):
    """The same with einsums around the function."""
    own, call = MODULES[name]

    def project(part):
        return jnp.einsum("btd,dnh->btnh", x, params[part]["kernel"]) + params[part]["bias"][None, None]

    qkv = [project(part) for part in ("query", "key", "value")]
    if name == "SelfAttention":
        out = ls.attention(*qkv, **call)
    elif name == "LongformerSelfAttention":
        other = [project(part + "_global") for part in ("query", "key", "value")]
        out = ls.longformer_attention(*qkv, *other, **own, **call)
    else:
        masks = dict(q_mask=call["token_mask"], kv_mask=call["token_mask"])
        out = ls.bigbird_attention(*qkv, block_size=2, rand_attn=RANDOM, **masks)
    return jnp.einsum("btnh,nhd->btd", out, params["out"]["kernel"]) + params["out"]["bias"][None, None]


@every_module
def test_linen_and_nnx_agree_with_each_other_and_with_the_function(name):
    layer, params, twin = both(name)
    call, wanted = MODULES[name][1], by_hand(name, params)
    assert wanted.shape == (B, T, OUT)
    np.testing.assert_allclose(apply(layer, params, X, **call), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(twin(X, **call), wanted, rtol=1e-5, atol=1e-5)


@every_module
def test_parameter_trees_name_the_projections(name):
    _, params, _ = both(name)
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes["query"] == {"kernel": (D, N, H), "bias": (N, H)}
    assert shapes["key"] == shapes["value"] == {"kernel": (D, K, H), "bias": (K, H)}
    assert shapes["out"] == {"kernel": (N, H, OUT), "bias": (OUT,)}
    others = {f"{part}_global" for part in ("query", "key", "value")} if "Longformer" in name else set()
    assert set(shapes) == {"query", "key", "value", "out"} | others


@every_module
def test_gradients_agree(name):
    layer, params, twin = both(name)
    call = MODULES[name][1]
    mine = jax.grad(lambda params: (apply(layer, params, X, **call) ** 2).sum())(params)
    theirs = nnx.grad(lambda twin: (twin(X, **call) ** 2).sum())(twin)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(nnx.to_pure_dict(theirs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@every_module
def test_dtype_is_computed_in_and_param_dtype_is_kept(name):
    layer, params, twin = both(name, dtype=jnp.bfloat16, use_bias=False)
    call, wanted = MODULES[name][1], apply(both(name, use_bias=False)[0], params, X, **MODULES[name][1])
    for out in (apply(layer, params, X, **call), twin(X, **call)):
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(out, np.float32), wanted, atol=0.05 * np.abs(wanted).max())
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert "bias" not in params["query"]


@every_module
def test_modules_run_under_jit_with_their_masks_as_data(name):
    layer, params, twin = both(name)
    call = MODULES[name][1]
    wanted = apply(layer, params, X, **call)
    np.testing.assert_allclose(jax.jit(layer.apply)({"params": params}, X, **call), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(nnx.jit(lambda m, x, **c: m(x, **c))(twin, X, **call), wanted, rtol=1e-5, atol=1e-5)


@every_module
def test_dropout_of_rate_zero_equals_deterministic(name):
    layer, params, twin = both(name)
    dropping, _, dropping_twin = both(name, dropout_rate=0.4)
    call, rngs = MODULES[name][1], {"dropout": jax.random.key(0)}
    wanted = apply(layer, params, X, **call)
    np.testing.assert_array_equal(apply(layer, params, X, **call, deterministic=False, rngs=rngs), wanted)
    np.testing.assert_array_equal(apply(dropping, params, X, **call, deterministic=True), wanted)
    np.testing.assert_array_equal(twin(X, **call, deterministic=False), twin(X, **call))
    np.testing.assert_array_equal(dropping_twin(X, **call, deterministic=True), twin(X, **call))


@every_module
def test_dropout_keeps_the_mean_over_keys(name):
    dropping, params, twin = both(name, dropout_rate=0.3, deterministic=False)
    call, wanted = MODULES[name][1], apply(both(name)[0], params, X, **MODULES[name][1])
    keys = jax.random.split(jax.random.key(0), 400)
    draws = jax.jit(lambda keys: jax.lax.map(lambda k: apply(dropping, params, X, **call, rngs={"dropout": k}), keys))(
        keys
    )
    error = draws.std(0) / np.sqrt(len(keys)).astype(np.float32)
    assert error.max() > 0
    assert (np.abs(draws.mean(0) - wanted) < 6 * error + 1e-3).all()
    first, second = twin(X, **call), twin(X, **call)  # an NNX stream draws a new key at every call
    assert np.abs(first - second).max() > 0.01
    again = [twin(X, **call, rngs=nnx.Rngs(dropout=7)) for _ in range(2)]
    np.testing.assert_array_equal(*again)


@every_module
def test_a_missing_dropout_rng_raises_flax_s_own_error(name):
    dropping, params, twin = both(name, dropout_rate=0.3)
    call = MODULES[name][1]
    with pytest.raises(flax.errors.InvalidRngError, match='needs PRNG for "dropout"'):
        apply(dropping, params, X, **call, deterministic=False)
    with pytest.raises(AttributeError, match="No RngStream named 'dropout'"):
        getattr(in_nnx, name)(**SIZES, **MODULES[name][0], dropout_rate=0.3, in_features=D, rngs=nnx.Rngs(params=0))
    with pytest.raises(AttributeError, match="No RngStream named 'dropout'"):
        twin(X, **call, deterministic=False, rngs=nnx.Rngs(params=0))


@every_module
def test_not_saying_whether_to_drop_raises_flax_s_own_error(name):
    dropping, params, twin = both(name, dropout_rate=0.3)
    with pytest.raises(ValueError, match="deterministic"):
        apply(dropping, params, X, **MODULES[name][1])
    with pytest.raises(ValueError, match="No `deterministic` argument was provided"):
        twin(X, **MODULES[name][1])
    twin.eval()
    assert twin(X, **MODULES[name][1]).shape == (B, T, OUT)


@pytest.mark.mesh
@every_module
def test_partitioning_metadata_splits_heads_over_the_mesh(name):
    P = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    own, call = MODULES[name]
    layer, params, _ = both(name)
    wanted = apply(layer, params, X, **call)
    split = getattr(in_linen, name)(**SIZES, **own, **PARTITIONED)
    specs = nn.get_partition_spec(jax.eval_shape(split.init, jax.random.key(0), X))["params"]
    assert specs["query"] == specs["key"] == {"kernel": P(None, "model", None), "bias": P("model", None)}
    assert specs["out"] == {"kernel": P("model", None, None), "bias": P(None)}

    twin = getattr(in_nnx, name)(**SIZES, **own, **PARTITIONED, in_features=D, rngs=nnx.Rngs(0))
    assert jax.tree.leaves(nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(twin, nnx.Param)))) == jax.tree.leaves(
        specs
    )

    shardings = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs)
    placed = jax.device_put(params, shardings)
    x = jax.device_put(X, jax.sharding.NamedSharding(mesh, P(None, "data", None)))
    assert {s.data.shape for s in placed["query"]["kernel"].addressable_shards} == {(D, N // 2, H)}
    with jax.set_mesh(mesh):
        out = jax.jit(split.apply)({"params": placed}, x, **call)
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
        init = jax.jit(lambda key, x: nn.unbox(split.init(key, x))["params"], out_shardings=shardings)
        made = init(jax.random.key(0), x)
        twin = getattr(in_nnx, name)(**SIZES, **own, **PARTITIONED, in_features=D, rngs=nnx.Rngs(0))
        for kernel in (made["query"]["kernel"], twin.query.kernel[...]):
            assert {s.data.shape for s in kernel.addressable_shards} == {(D, N // 2, H)}
        out = nnx.jit(lambda m, x, **c: m(x, **c))(twin, x, **call)
        alone = apply(layer, nnx.to_pure_dict(nnx.state(twin, nnx.Param)), X, **call)
        np.testing.assert_allclose(out, alone, rtol=1e-5, atol=1e-5)


def test_a_single_key_head_is_not_split():
    layer = in_linen.SelfAttention(num_heads=4, num_kv_heads=1, head_dim=3, **PARTITIONED)
    specs = nn.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(0), X))["params"]
    assert specs["key"]["kernel"] == jax.sharding.PartitionSpec(None, None, None)
    assert specs["query"]["kernel"] == jax.sharding.PartitionSpec(None, "model", None)


def test_parameters_carry_no_metadata_unless_asked():
    layer = in_linen.SelfAttention(**SIZES, head_axis="model")
    assert not any(isinstance(x, nn.Partitioned) for x in jax.tree.leaves(layer.init(jax.random.key(0), X)))


@every_module
def test_partitioned_parameters_need_the_name_of_one_mesh_axis(name):
    options = dict(**SIZES, **MODULES[name][0], head_axis=None, partition_params=True)
    text = "`head_axis` must be the name of one mesh axis, got None"
    with pytest.raises(ValueError, match=text):
        getattr(in_linen, name)(**options).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=text):
        getattr(in_nnx, name)(**options, in_features=D, rngs=nnx.Rngs(0))


def test_longformer_without_kinds_has_but_does_not_use_its_global_projections():
    layer, params, twin = both("LongformerSelfAttention")
    local = {name: part for name, part in params.items() if not name.endswith("_global")}
    np.testing.assert_allclose(apply(layer, local, X), twin(X), rtol=1e-5, atol=1e-5)


def test_bigbird_draws_the_blocks_of_its_seed():
    layer, params, twin = both("BigBirdSelfAttention", block_size=1, seed=3)
    blocks = ls.bigbird_random_blocks(T, block_size=1, num_random_blocks=1, num_heads=N, seed=3)
    wanted = apply(layer, params, X, rand_attn=jnp.asarray(blocks))
    np.testing.assert_array_equal(apply(layer, params, X), wanted)
    np.testing.assert_allclose(twin(X), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (dict(num_heads=4, num_kv_heads=3), "`num_heads` must be a multiple of `num_kv_heads`, got 4 and 3."),
        (dict(num_heads=4), "The number of input features must be a multiple of num_heads=4, got 10. Give `head_dim`"),
        (dict(num_heads=4, qkv_features=11), "`qkv_features` must be a multiple of num_heads=4, got 11."),
        (dict(num_heads=4, head_dim=3, qkv_features=11), "`qkv_features` must be num_heads · head_dim = 12, got 11."),
    ],
)
def test_sizes_that_do_not_fit_are_explained(sizes, text):
    with pytest.raises(ValueError, match=text):
        in_linen.SelfAttention(**sizes).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=text):
        in_nnx.SelfAttention(**sizes, in_features=D, rngs=nnx.Rngs(0))


def test_self_attention_takes_the_positions_of_its_tokens():
    ids = np.repeat([[0, 1, 2], [5, 3, 3]], [7, 5, 4], axis=1)
    near = ls.Window(1, 0)
    layer, params, twin = both("SelfAttention")
    call = dict(mask=(near | ls.Prefix(2)) & ls.Segments(ids), positions=ls.positions_from_segments(ids))
    by_slot = dict(mask=(near | ls.FirstOfSegment(ids, 2)) & ls.Segments(ids))
    for run in (lambda **given: apply(layer, params, X, **given), lambda **given: twin(X, **given)):
        np.testing.assert_allclose(run(**call), run(**by_slot), rtol=1e-5, atol=1e-6)
        assert not np.allclose(run(**call), run(mask=call["mask"]), atol=1e-3)
