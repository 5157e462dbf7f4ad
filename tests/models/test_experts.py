"""Mixtures of experts: routing and grouped products against plain NumPy, gradients, and what a decode step reads."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from longspan import models
from longspan.models.decoders import grouped
from longspan.models.decoders.experts import MixtureOfExperts
from longspan.models.decoders.grouped import block_size, grouped_products
from longspan.models.decoders.mixture import ClampedGate, Mixture, route
from tests.made import made

TINY: dict[str, Any] = dict(
    vocab_size=29, hidden_size=6, num_attention_heads=2, head_dim=4, num_hidden_layers=2, initializer_range=0.4
)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def counts(sizes):
    return jax.device_put(np.int32(sizes))


def by_group(x, matrix, sizes):
    """The product of each row with the matrix of its group, in float64."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    return np.einsum("pi,pio->po", x.astype(np.float64), matrix.astype(np.float64)[groups])


# Empty groups at the ends and between others; one group; all rows in one group; more rows than one block; one row.
SIZES = [(0, 3, 0, 1, 9), (7,), (0, 0, 300, 0), (130, 0, 151), (0, 1, 0)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("native", [False, True])
def test_rows_are_multiplied_with_the_matrix_of_their_group(sizes, native):
    rows, groups = sum(sizes), len(sizes)
    x, matrices = draw(rows, 5), [draw(3, groups, 5, width, seed=width) for width in (7, 11)]
    of_layer = jax.jit(lambda x, matrices, layer: grouped_products(x, matrices, counts(sizes), layer, native=native))
    for y, matrix in zip(of_layer(x, matrices, np.int32(2)), matrices, strict=True):
        np.testing.assert_allclose(y, by_group(x, matrix[2], sizes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
def test_gradients_of_grouped_products_are_those_of_ragged_dot(sizes):
    rows, groups = sum(sizes), len(sizes)
    x, matrices = draw(rows, 5), [draw(groups, 5, width, seed=width) for width in (7, 11)]
    stacks = [np.stack([draw(groups, 5, m.shape[2], seed=9), m]) for m in matrices]
    sizes = counts(sizes)

    def loss(products):
        return sum(jnp.sum(jnp.sin(y)) for y in products)

    @jax.jit
    def gradients(x, matrices, stacks):
        ragged = jax.grad(lambda x, ms: loss(jax.lax.ragged_dot(x, m, sizes) for m in ms), (0, 1))(x, matrices)
        own = jax.grad(lambda x, ms: loss(grouped_products(x, ms, sizes)), (0, 1))(x, matrices)
        of_layer = jax.grad(lambda x, ms: loss(grouped_products(x, ms, sizes, 1, native=True)), (0, 1))(x, stacks)
        return ragged, own, of_layer

    (dx, dm), own, (dx_layer, d_stacks) = gradients(x, matrices, stacks)
    for got, want in zip(jax.tree.leaves((own, dx_layer)), [dx, *dm, dx], strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * (1 + np.abs(want).max()))
    for got, want in zip(d_stacks, dm, strict=True):
        np.testing.assert_allclose(got[1], want, rtol=0, atol=1e-5 * (1 + np.abs(want).max()))
        assert not np.any(got[0])


def test_nan_in_a_row_reaches_neither_other_rows_nor_other_groups():
    x, matrix, sizes = draw(9, 5), draw(3, 5, 7), counts([4, 2, 3])
    x[4] = np.nan  # the first row of group 1, which the only block of group 0 reads too

    @jax.jit
    def run(x, matrix):
        y, pullback = jax.vjp(lambda x, m: grouped_products(x, [m], sizes)[0], x, matrix)
        return y, *pullback(jnp.ones_like(y))

    assert block_size(9, 3) > 4
    y, dx, dm = run(x, matrix)
    assert np.isnan(y[4]).all() and np.isfinite(np.delete(y, 4, 0)).all()
    assert np.isfinite(dx).all()
    assert np.isnan(dm[1]).all() and np.isfinite(np.delete(dm, 1, 0)).all()


def test_on_accelerators_many_rows_go_to_ragged_dot(monkeypatch):
    x, matrix, sizes = draw(11, 5), draw(2, 3, 5, 7), (4, 0, 7)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")

    def program(matrix, layer):
        run = lambda x, matrix: grouped_products(x, [matrix], counts(sizes), layer)[0]  # noqa: E731 - traced anew
        return str(jax.make_jaxpr(run)(x, matrix)), run

    assert "ragged_dot" in program(matrix[1], None)[0]
    assert "ragged_dot" not in program(matrix, 1)[0]
    monkeypatch.setattr(grouped, "FEW_ROWS", 3)
    text, run = program(matrix, 1)
    assert "ragged_dot" in text
    np.testing.assert_allclose(jax.jit(run)(x, matrix), by_group(x, matrix[1], sizes), rtol=1e-5, atol=1e-5)


def test_the_weights_of_experts_are_as_in_each_family():
    logits = np.array([[1.0, 3.0, 2.0, 0.5], [0.0, 0.0, 0.0, 0.0]], np.float32)
    whole = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    of_best = whole[:, [1, 2]] / whole[:, [1, 2]].sum(1, keepdims=True)
    options = dict(count=4, chosen=2, width=3)
    for mixture, weights in (
        (Mixture(**options, normalized=False), whole[:, [1, 2]]),
        (Mixture(**options, normalized=True), of_best),
        (Mixture(**options, normalized=True, clamped=ClampedGate(1.0, 1.0)), of_best),
    ):
        experts, got = jax.jit(route, static_argnums=0)(mixture, logits)
        assert experts.tolist() == [[1, 2], [0, 1]]  # equal ones by number
        np.testing.assert_allclose(got, weights, rtol=1e-6)
    for rounded, dtype in ((True, "bfloat16"), (False, "float32")):
        _, got = route(Mixture(**options, normalized=True, rounded=rounded), jnp.asarray(logits, jnp.bfloat16))
        assert got.dtype == dtype


CONFIGS = {
    "mixtral": lambda **sizes: models.MixtralConfig(
        **TINY, intermediate_size=5, num_local_experts=sizes["count"], num_experts_per_tok=sizes["chosen"]
    ),
    "qwen3_moe": lambda **sizes: models.Qwen3MoeConfig(
        **TINY, moe_intermediate_size=5, num_experts=sizes["count"], num_experts_per_tok=sizes["chosen"]
    ),
    "gpt_oss": lambda **sizes: models.GptOssConfig(
        **TINY, intermediate_size=5, num_local_experts=sizes["count"], num_experts_per_tok=sizes["chosen"],
        swiglu_limit=0.7,
    ),
}  # fmt: skip


def mixture_of(name, **sizes):
    """A mixture with random biases."""
    model = made(MixtureOfExperts, CONFIGS[name](**sizes), dtype=jnp.float32, param_dtype=jnp.float32)
    state = nnx.state(model)
    for number, (path, variable) in enumerate(nnx.to_flat_state(state)):
        if path[-1] == "bias":
            variable.set_value(jnp.asarray(0.5 * draw(*variable.shape, seed=number)))
    nnx.update(model, state)
    return model


def dense(model, x):
    """Every expert for every token, in float64, weighted by the probabilities of the chosen ones."""
    mixture, params = model.mixture, jax.tree.map(lambda p: np.asarray(p, np.float64), nnx.state(model))
    x = x.astype(np.float64)

    def apply(layer, x, subscripts="td,edf->tef"):
        y = np.einsum(subscripts, x, layer["kernel"].get_value())
        return y + layer["bias"].get_value() if "bias" in layer and layer["bias"] is not None else y

    logits = x @ params["router"]["kernel"].get_value()
    if mixture.clamped is not None:
        logits = logits + params["router"]["bias"].get_value()
    kept = np.argsort(-logits, axis=1, kind="stable")[:, : mixture.chosen]
    chosen = np.zeros_like(logits, bool)
    np.put_along_axis(chosen, kept, True, axis=1)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    total = np.where(chosen, weights, 0).sum(1, keepdims=True) if mixture.normalized else weights.sum(1, keepdims=True)
    weights = np.where(chosen, weights / total, 0)
    experts = params["experts"]
    if mixture.clamped is not None:
        gate_up = apply(experts["gate_up"], x)
        gate, up = np.minimum(gate_up[..., ::2], 0.7), np.clip(gate_up[..., 1::2], -0.7, 0.7)
        hidden = (up + 1) * gate / (1 + np.exp(-mixture.clamped.alpha * gate))
    else:
        gate, up = apply(experts["gate"], x), apply(experts["up"], x)
        hidden = gate / (1 + np.exp(-gate)) * up
    return np.einsum("ted,te->td", apply(experts["down"], hidden, "tef,efd->ted"), weights)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("sizes", "shape"),
    [(dict(count=5, chosen=2), (2, 13)), (dict(count=1, chosen=1), (3, 5)), (dict(count=4, chosen=4), (17, 1))],
    ids=["five experts", "one expert", "all experts"],
)
def test_a_mixture_is_the_weighted_sum_of_its_experts(name, sizes, shape):
    model, x = mixture_of(name, **sizes), draw(*shape, TINY["hidden_size"])
    got = np.asarray(nnx.jit(lambda model, x: model(x))(model, x))
    want = dense(model, x.reshape(-1, x.shape[-1])).reshape(x.shape)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_tokens_that_all_choose_the_same_experts_are_all_computed():
    model, x = mixture_of("qwen3_moe", count=7, chosen=2), draw(1, 1, 6).repeat(150, 1)
    x = x * np.linspace(1, 2, 150, dtype=np.float32)[None, :, None]
    got = np.asarray(nnx.jit(lambda model, x: model(x))(model, x))
    np.testing.assert_allclose(got[0], dense(model, x[0]), rtol=0, atol=1e-5 * np.abs(got).max())


def test_nan_in_a_padded_token_changes_no_other_token():
    model, x = mixture_of("mixtral", count=5, chosen=2), draw(2, 13, 6)
    run = nnx.jit(lambda model, x: model(x))
    want, x[1, 4] = np.asarray(run(model, x)), np.nan
    got, others = np.asarray(run(model, x)), np.ones((2, 13), bool)
    others[1, 4] = False
    np.testing.assert_allclose(got[others], want[others], rtol=0, atol=1e-6)
    assert np.isnan(got[1, 4]).all()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_gradients_equal_those_of_the_dense_sum(name):
    """Also under vmap, and with each layer computed again in the backward pass."""
    model, x = mixture_of(name, count=5, chosen=2), draw(3, 1, 7, 6)
    graph, state = nnx.split(model)

    def loss(state, x):
        return jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))

    def dense_loss(state, x):
        model = nnx.merge(graph, state)
        flat = x.reshape(-1, x.shape[-1])
        chosen, weights = route(model.mixture, model.router(flat))
        rows = jnp.arange(flat.shape[0])[:, None]
        full = jnp.zeros((flat.shape[0], model.mixture.count)).at[rows, chosen].set(weights)
        return jnp.sum(jnp.sin(jnp.einsum("te,ted->td", full, all_experts(model, flat))))

    @jax.jit
    def gradients(state, x):
        want = jax.vmap(jax.grad(dense_loss, (0, 1)), (None, 0))(state, x)
        one = jax.lax.map(lambda x: jax.grad(jax.checkpoint(loss), (0, 1))(state, x), x)
        return want, one, jax.vmap(jax.grad(loss, (0, 1)), (None, 0))(state, x)

    want, one, mapped = gradients(state, x)
    for got in (one, mapped):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * (1 + np.abs(b).max()))


def all_experts(model, x):
    """The outputs of every expert for every token, [tokens, experts, D]."""
    experts, clamped = model.experts, model.mixture.clamped

    def apply(layer, x, subscripts="td,edf->tef"):
        y = jnp.einsum(subscripts, x, layer.kernel[...])
        return y if layer.bias is None else y + layer.bias[...][None]

    if clamped is None:
        hidden = jax.nn.silu(apply(experts.gate, x)) * apply(experts.up, x)
    else:
        gate_up = apply(experts.gate_up, x)
        hidden = clamped(gate_up[..., ::2], gate_up[..., 1::2])
    return apply(experts.down, hidden, "tef,efd->ted")


def decode_step(count, dtype="float32"):
    """A model, its cache, and the program of a step of one token."""
    config = models.Qwen3MoeConfig(
        **TINY | dict(num_hidden_layers=3), num_experts=count, num_experts_per_tok=2, moe_intermediate_size=5
    )
    model = made(models.CausalLM, config, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))
    graph, state = nnx.split(model)

    def step(state, ids, cache):
        output = nnx.merge(graph, state)(ids, cache=cache)
        return output.logits, output.cache

    return state, model.init_cache(1, 20), jax.jit(step)


def test_a_decode_step_copies_no_expert_out_of_the_stack():
    """The temporary memory does not depend on the number of experts, and no result is as large as those of a layer."""
    temporary = {}
    for count in (50, 1000):
        state, cache, step = decode_step(count)
        program: Any = step.lower(state, np.array([[3]]), cache).compile()
        temporary[count] = program.memory_analysis().temp_size_in_bytes
        moved = set()
        for line in program.as_text().splitlines():
            found = re.match(r"\s*(?:ROOT )?%?\S+ = \w+\[([\d,]+)\]\S* ([\w-]+)\(", line)
            if found and np.prod([int(n) for n in found[1].split(",")]) >= count * 6 * 5:
                moved.add(found[2])
        assert moved <= {"parameter", "get-tuple-element", "bitcast"}
    per_expert = (temporary[1000] - temporary[50]) / 950
    assert per_expert < 200, f"{per_expert} bytes, while an expert has 360"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_step_does_not_read_experts_that_were_not_chosen(dtype):
    """NaN in every expert that the step does not choose changes nothing."""
    state, cache, step = decode_step(9, dtype)
    want = np.asarray(step(state, np.array([[3]]), cache)[0], np.float32)
    flat = dict(nnx.to_flat_state(state))
    parts = {path[-2]: path for path in flat if "experts" in path}
    used = 0
    for layer in range(3):
        for expert in range(9):
            for path in parts.values():
                kept = flat[path].get_value()
                flat[path].set_value(kept.at[layer, expert].set(np.nan))
                changed = np.isnan(np.asarray(step(state, np.array([[3]]), cache)[0], np.float32)).any()
                flat[path].set_value(kept)
                if path[-2] == "down":
                    used += int(changed)
    assert np.isfinite(want).all() and used == 3 * 2
