"""Encoders, decoders and modules with sharded batches and kernels: sums over devices, and no gathers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan import models
from longspan.engines import ENGINES
from longspan.nn import linen
from longspan.nn import nnx as modules
from tests.engines import RUNNING
from tests.sharding.test_rows_and_heads import collectives

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SIZES = dict(vocab_size=12, hidden_size=16, num_attention_heads=4, num_hidden_layers=2, intermediate_size=32)
ENCODER, DECODER = dict(**SIZES, max_position_embeddings=64), dict(**SIZES, num_key_value_heads=2)
COLUMNS = ("query", "key", "value", "query_global", "key_global", "value_global", "gate", "up", "head")
B, T = 4, 21
rng = np.random.default_rng(0)
IDS = rng.integers(1, 12, (B, T)).astype(np.int32)
MASK = (np.arange(T)[None] < np.array([[21], [17], [20], [9]])).astype(np.int32)
INPUTS = dict(input_ids=IDS, attention_mask=MASK)
GLOBALS = dict(global_attention_mask=(rng.random((B, T)) < 0.1).astype(np.int32))


@pytest.fixture
def auto_takes(monkeypatch):
    """auto_takes(name): "auto" takes this engine, on CPUs too."""

    def only(name):
        for other in ENGINES.values():
            if other.name != name:
                monkeypatch.setattr(type(other), "unsupported", lambda self, request: "not here")
        jax.clear_caches()  # the choice of "auto" is not part of the key of JAX's program cache

    yield only
    jax.clear_caches()


def mesh_of(kind=AUTO, heads=2):
    return jax.make_mesh((2, heads), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices()[: 2 * heads])


def spec_of(path, x):
    """As in Megatron: kernels that produce heads, hidden units and logits are split by columns, others by rows."""
    *_, owner, leaf, _ = [None, *(getattr(key, "key", getattr(key, "name", None)) for key in path)]
    more = [None] * (x.ndim - (2 if leaf == "kernel" else 1))
    if owner in COLUMNS:
        return P(*more, None, "y") if leaf == "kernel" else P(*more, "y")
    return P(*more, "y", None) if owner in ("out", "down") and leaf == "kernel" else P()


def spec_of_joint_norms(path, x):
    """As `spec_of`; the norms of queries and keys over all heads are split like their columns."""
    owners = {getattr(key, "key", None) for key in path}
    return P(None, "y") if owners & {"query_norm", "key_norm"} else spec_of(path, x)


def placed(mesh, tree, spec):
    return jax.tree_util.tree_map_with_path(lambda p, x: jax.device_put(x, NamedSharding(mesh, spec(p, x))), tree)


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * max(1.0, float(np.abs(b).max(initial=0))))


MODELS = {
    "bert": lambda: models.Encoder(models.BertConfig(**ENCODER), rngs=nnx.Rngs(0)),
    "longformer": lambda: models.Encoder(models.LongformerConfig(**ENCODER, window=3), rngs=nnx.Rngs(0)),
    "bigbird": lambda: models.Encoder(
        models.BigBirdConfig(**ENCODER, block_size=2, num_random_blocks=1), rngs=nnx.Rngs(0)
    ),
    "modernbert": lambda: models.Encoder(models.ModernBertConfig(**ENCODER, local_attention=6), rngs=nnx.Rngs(0)),
    "llama": lambda: models.CausalLM(models.LlamaConfig(**DECODER), rngs=nnx.Rngs(0)),
    "olmo2": lambda: models.CausalLM(models.Olmo2Config(**DECODER), rngs=nnx.Rngs(0)),
}
# Each model, each engine and both kinds of axes, but not all combinations, which are slow to compile.
CHOSEN = [
    ("bert", EXPLICIT, "reference"),
    ("longformer", AUTO, "cpu"),
    ("bigbird", AUTO, "xla"),
    ("modernbert", EXPLICIT, "xla"),
    ("llama", EXPLICIT, "cpu"),
    ("olmo2", EXPLICIT, "xla"),
]
REST = [(m, kind, e) for m in MODELS for kind in (AUTO, EXPLICIT) for e in RUNNING if (m, kind, e) not in CHOSEN]


@pytest.mark.check
@pytest.mark.parametrize(
    "name, kind, engine", [*CHOSEN, *(pytest.param(*one, marks=pytest.mark.slow) for one in REST)], ids=str
)
def test_a_model_sums_over_devices_and_gathers_nothing(name, kind, engine, auto_takes):
    auto_takes(engine)
    mesh, (graph, state) = mesh_of(kind), nnx.split(MODELS[name]())
    inputs = INPUTS | (GLOBALS if name == "longformer" else {})

    def value(state, inputs):
        output = nnx.merge(graph, state)(**inputs)
        x = output.last_hidden_state if output.logits is None else output.logits
        return jnp.sum(jnp.where(inputs["attention_mask"][..., None] > 0, x, 0) ** 3), x

    step = jax.jit(jax.value_and_grad(value, has_aux=True))
    # A ModernBERT's queries, keys and values are one matrix, whose columns are not sharded by heads.
    of_state = {"modernbert": lambda *_: P(), "olmo2": spec_of_joint_norms}.get(name, spec_of)
    there = placed(mesh, state, of_state), placed(mesh, inputs, lambda *_: P("x"))
    program = step.lower(*there).compile()
    assert collectives(program) <= {"all-reduce"}
    ((total, x), grads), ((want, wanted), want_grads) = program(*there), step(state, inputs)
    there = P("x", None, "y") if name in ("llama", "olmo2") else P("x")
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, there), 3)
    assert_close((total, np.where(MASK[..., None], x, 0)), (want, np.where(MASK[..., None], wanted, 0)))
    assert_close(grads, want_grads)


def spec_of_experts(path, x):
    """Experts are split by their number, all other parameters as in `spec_of`."""
    owners = {getattr(key, "key", None) for key in path}
    return P(None, "y") if "experts" in owners else spec_of(path, x)


MIXTURES = {
    "qwen3_moe": lambda: models.Qwen3MoeConfig(
        **DECODER, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8, initializer_range=0.3
    ),
    "gpt_oss": lambda: models.GptOssConfig(
        **DECODER, num_local_experts=6, num_experts_per_tok=2, head_dim=4, sliding_window=5, initializer_range=0.3
    ),
}


@pytest.mark.check
@pytest.mark.parametrize(
    "name, kind, spec",
    [("qwen3_moe", EXPLICIT, spec_of), ("gpt_oss", AUTO, spec_of_experts)],
    ids=["hidden", "experts"],
)
def test_a_mixture_of_experts_on_devices_equals_one(name, kind, spec):
    """With the hidden units of experts or the experts themselves on several devices, and rows on others."""
    mesh, (graph, state) = mesh_of(kind), nnx.split(models.CausalLM(MIXTURES[name](), rngs=nnx.Rngs(0)))

    def value(state, inputs):
        logits = nnx.merge(graph, state)(**inputs).logits
        logits = jnp.where(inputs["attention_mask"][..., None] > 0, logits, 0)
        return jnp.sum(logits**3), logits

    step = jax.jit(jax.value_and_grad(value, has_aux=True))
    there = placed(mesh, state, spec), placed(mesh, INPUTS, lambda *_: P("x"))
    kernels = [x for path, x in jax.tree_util.tree_leaves_with_path(there[0]) if "down" in str(path) and x.ndim == 4]
    assert kernels and all(not x.sharding.is_fully_replicated for x in kernels)
    got, grads = step(*there)
    want, want_grads = step(state, INPUTS)
    assert_close(got, want)
    assert_close(grads, want_grads)


@pytest.mark.check
@pytest.mark.parametrize("kind", [pytest.param(AUTO, marks=pytest.mark.slow), EXPLICIT], ids=str)
def test_a_cached_decoder_gathers_nothing(kind):
    mesh = mesh_of(kind)
    model = models.CausalLM(models.MistralConfig(**DECODER, sliding_window=8), rngs=nnx.Rngs(0))
    (graph, state), cache = nnx.split(model), model.init_cache(B, 40)

    def spec(path, _):
        names = {getattr(key, "name", None) for key in path}
        return P(None, "x", None, "y") if "stacks" in names else P() if "tables" in names else P("x")

    def step(state, ids, cache):
        output = nnx.merge(graph, state)(ids, cache=cache)
        return output.logits, output.cache

    there = placed(mesh, state, spec_of), jax.device_put(IDS[:, :5], NamedSharding(mesh, P("x")))
    there = *there, placed(mesh, cache, spec)
    program = jax.jit(step).lower(*there).compile()
    assert collectives(program) <= {"all-reduce"}
    logits, after = program(*there)
    np.testing.assert_allclose(logits, jax.jit(step)(state, IDS[:, :5], cache)[0], atol=1e-5)
    for x in after.stacks[0]:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "x", None, "y")), 5)


def by_heads(path, x):
    """The specs of a module's parameters."""
    names = [key for key in (getattr(key, "key", getattr(key, "name", None)) for key in path) if key != "value"]
    owner, leaf = (None, *names)[-2:]
    if leaf == "sink" or owner == "out":
        return P("y") if leaf in ("sink", "kernel") else P()
    return P() if leaf == "scale" else P(None, "y") if leaf == "kernel" else P("y")


KINDS = rng.integers(-1, 2, (B, 20)).astype(np.int32)
GROUPED = dict(num_heads=4, num_kv_heads=2)
MODULES = {
    "SelfAttention": (dict(sinks=True, qk_norm=True), lambda kinds: dict(mask=ls.Causal() & ls.Window(5, 0))),
    "LongformerSelfAttention": (dict(window=3), lambda kinds: dict(token_kinds=kinds)),
    "BigBirdSelfAttention": (dict(block_size=2, num_random_blocks=1), lambda kinds: dict(token_mask=kinds >= 0)),
}


@pytest.mark.check
@pytest.mark.parametrize(
    "name, library, kind",
    [
        pytest.param(*one, marks=[] if one in (("SelfAttention", "nnx", EXPLICIT),) else pytest.mark.slow)
        for one in [
            (name, library, kind) for name in MODULES for library in ("nnx", "linen") for kind in (AUTO, EXPLICIT)
        ]
    ],
    ids=str,
)
def test_a_module_gathers_nothing(name, library, kind):
    mesh, (options, given) = mesh_of(kind), MODULES[name]
    x = jnp.asarray(rng.normal(size=(B, 20, 16)), jnp.float32)
    if library == "nnx":
        graph, state = nnx.split(getattr(modules, name)(**GROUPED, **options, in_features=16, rngs=nnx.Rngs(0)))
        call = lambda state, x, kinds: nnx.merge(graph, state)(x, **given(kinds))  # noqa: E731
    else:
        layer = getattr(linen, name)(**GROUPED, **options)
        state = layer.init(jax.random.key(0), x, **given(KINDS))
        call = lambda state, x, kinds: layer.apply(state, x, **given(kinds))  # noqa: E731
    step = jax.jit(jax.value_and_grad(lambda *operands: jnp.sum(call(*operands) ** 2)))
    rows = NamedSharding(mesh, P("x"))
    there = placed(mesh, state, by_heads), jax.device_put(x, rows), jax.device_put(KINDS, rows)
    program = step.lower(*there).compile()
    assert collectives(program) <= {"all-reduce"}
    assert_close(program(*there), step(state, x, KINDS))
