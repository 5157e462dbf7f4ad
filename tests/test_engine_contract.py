"""The contract between `attention` and engines: backward passes with given lse, users' engines, derivatives."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan import checks
from longspan.attend import answer
from longspan.engines import ENGINES, Engine, Request, Result, choose, request
from longspan.testing import Shape, assert_matches_reference, make_qkv
from tests.engines import every_engine, every_sparse_engine
from tests.selection import one_in

SHAPE = Shape(B=2, T=7, S=23, N=6, K=3, H=5)
MASK = ls.Causal(9) & ls.Window(14, 20) | ls.Global((3,), rows=False)
rng = np.random.default_rng(0)

FEATURES = {
    "plain": {},
    "bias": dict(bias=jnp.asarray(rng.normal(size=(2, 1, 7, 23)), jnp.float32), soft_cap=2.5, scale=0.7),
    "biases by distance": dict(
        bias=(
            ls.alibi(jnp.asarray(rng.uniform(0.1, 0.5, 6), jnp.float32)),
            ls.relative_bias(jnp.asarray(rng.normal(size=(16, 6)), jnp.float32), max_distance=9),
        )
    ),
    "dropout": dict(dropout_rate=0.3, dropout_key=jax.random.key(1)),
    "sinks": dict(sinks=jnp.asarray(rng.normal(size=6), jnp.float32)),
}


def request_of(q, k, v, slots, *, bias=None, **features) -> Request:
    """A call with the keys of some slots only, as a ring over devices makes it."""
    return Request.of(
        q=q,
        k=k[:, slots],
        v=v[:, slots],
        mask=MASK,
        bias=bias[..., slots] if isinstance(bias, jax.Array) else bias,
        kv_positions=np.asarray(slots, np.int32),
        **features,
    )


def ready(engine: Engine, request: Request) -> tuple[Request, ls.BlockLayout]:
    """The arguments of an engine's forward and backward pass."""
    request = request.with_layout(*engine.tiles(request))
    return request, request.layout


@every_engine
@pytest.mark.parametrize("feature", one_in(5, FEATURES))
def test_backward_uses_the_given_lse_of_more_keys(engine, feature):
    """Gradients over parts of the keys, each with the lse and delta of all keys, add up to the whole gradient."""
    q, k, v = make_qkv(SHAPE, jnp.float32)
    features, chosen = FEATURES[feature], ENGINES[engine]
    weights = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (q.shape, q.shape[:3])]
    floats = dict(q=q, k=k, v=v, **{name: features[name] for name in ("bias", "sinks") if name in features})
    others = {name: value for name, value in features.items() if name not in floats}

    def loss(floats):
        out, lse = ls.attention(**floats, mask=MASK, engine="reference", return_lse=True, **others)
        return jnp.vdot(out, weights[0]) + jnp.vdot(lse, weights[1]), (out, lse)

    want, (out, lse) = jax.grad(loss, has_aux=True)(floats)
    delta = jnp.sum(out * weights[0], axis=-1) - weights[1]
    slots = [[0, 3, 1, 20, 2], [4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18, 19, 22, 21]]

    @partial(jax.jit, static_argnums=0)
    def part(kept, lse, delta, dout):
        request = request_of(q, k, v, list(kept), **{**features, "sinks": None})
        return chosen.backward(*ready(chosen, request), Result(None, lse, jnp.zeros_like(lse)), delta, dout)

    got = [part(tuple(kept), lse, delta, weights[0]) for kept in slots]
    dq = np.sum([np.asarray(g[0], np.float64) for g in got], axis=0)
    dk, dv = (np.zeros(k.shape), np.zeros(k.shape))
    for kept, (_, dk_part, dv_part, dbias) in zip(slots, got, strict=True):
        dk[:, kept], dv[:, kept] = np.asarray(dk_part), np.asarray(dv_part)
        if feature == "bias":
            np.testing.assert_allclose(np.asarray(dbias), np.asarray(want["bias"])[..., kept], rtol=0, atol=2e-5)
        elif feature != "biases by distance":
            assert dbias is None
    if feature == "biases by distance":  # every part contributes to the whole gradient, at its own distances
        summed = jax.tree.map(lambda *parts: sum(parts), *(dbias for *_, dbias in got))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), summed, want["bias"])
    for mine, name in ((dq, "q"), (dk, "k"), (dv, "v")):
        np.testing.assert_allclose(mine, np.asarray(want[name]), rtol=0, atol=5e-5, err_msg=name)


@every_engine
def test_run_returns_out_and_lse_and_merged_parts_are_the_whole(engine):
    q, k, v = make_qkv(SHAPE, jnp.float32)
    chosen, slots = ENGINES[engine], [list(range(0, 23, 2)), list(range(1, 23, 2))]
    requests = [request_of(q, k, v, kept) for kept in slots]
    parts = [chosen.run(*ready(chosen, request))[:2] for request in requests]
    whole = ls.attention(q, k, v, mask=MASK, engine="reference", return_lse=True)
    for got, want in zip(ls.merge(*zip(*parts, strict=True)), whole, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=1e-5)


class FiveMethods(Engine):
    """A user's engine without shared code: dense, one loop per head, with a backward pass."""

    name = "five methods"

    def unsupported(self, request):
        return "it has no soft cap" if request.soft_cap is not None else None

    def tiles(self, request):
        return 16, 8

    def notes(self, request):
        return ("written in a test",)

    def run(self, request, layout):
        weights, lse = self._weights(request, layout)
        return jnp.einsum("bnts,bsnh->btnh", weights, self._repeated(request, request.v)), lse

    def backward(self, request, layout, result, delta, dout):
        weights, _ = self._weights(request, layout, result.lse + result.lse_residual)
        k, v = (self._repeated(request, x) for x in (request.k, request.v))
        dscores = weights * (jnp.einsum("btnh,bsnh->bnts", dout, v) - delta.swapaxes(1, 2)[..., None])
        groups = (*request.k.shape[:3], -1, request.k.shape[3])
        dv = jnp.einsum("bnts,btnh->bsnh", weights, dout).reshape(groups).sum(3)
        dk = jnp.einsum("bnts,btnh->bsnh", dscores * request.scale, request.q).reshape(groups).sum(3)
        return jnp.einsum("bnts,bsnh->btnh", dscores * request.scale, k), dk, dv, None

    def _weights(self, request, layout, lse=None):
        q_side, kv_side = layout.sides(batch=request.dims["B"], heads=request.dims["N"])
        allowed = layout.mask.allowed(q_side.slots(), kv_side.slots())
        scores = jnp.einsum("btnh,bsnh->bnts", request.q, self._repeated(request, request.k)) * request.scale
        scores = jnp.where(allowed, scores, -jnp.inf)
        if lse is None:
            lse = jax.nn.logsumexp(scores, axis=-1).swapaxes(1, 2)
        level = jnp.where(jnp.isfinite(lse), lse, 0).swapaxes(1, 2)[..., None]
        return jnp.exp(scores - level), lse

    def _repeated(self, request, x):
        return jnp.repeat(x, request.dims["N"] // request.dims["K"], axis=2)


class Delegating(Engine):
    """A user's engine that defines only the required names."""

    name = "delegating"

    def run(self, request, layout):
        return ENGINES["reference"].run(request, layout)


def test_a_users_engine_runs_and_is_differentiated_through_its_backward():
    q, k, v = make_qkv(SHAPE, jnp.float32)
    assert_matches_reference(FiveMethods(), q, k, v, MASK)


def test_explain_and_recipes_take_a_users_engine():
    q, k, v = make_qkv(Shape(B=1, T=16, S=16, N=2, K=2, H=4), jnp.float32)
    engine = FiveMethods()
    report = ls.explain(q, k, v, mask=ls.Causal(), engine=engine)
    assert (report.engine, report.q_tile, report.kv_tile, report.notes) == (
        "five methods",
        16,
        8,
        ("written in a test",),
    )
    kinds = jnp.array([[1] + [0] * 14 + [-1]])
    for run in (
        partial(ls.longformer_attention, q, k, v, q, k, v, window=2, token_kinds=kinds),
        partial(ls.longformer_attention, q, k, v, None, None, None, window=2),
    ):
        np.testing.assert_allclose(np.asarray(run(engine=engine)), np.asarray(run(engine="reference")), atol=1e-5)


def test_an_engine_with_only_run_works_and_names_what_it_lacks():
    q, k, v = make_qkv(SHAPE, jnp.float32)
    got, want = (ls.attention(q, k, v, mask=MASK, engine=e) for e in (Delegating(), "reference"))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    with pytest.raises(NotImplementedError, match="engine='delegating' has no backward pass"):
        jax.grad(lambda q: ls.attention(q, k, v, engine=Delegating()).sum())(q)


class Nameless(Engine):
    def run(self, request, layout):
        raise AssertionError


@dataclass
class Unhashable(Delegating):
    size: int = 3


def test_values_that_are_not_engines_are_refused(unchecked):
    q, k, v = make_qkv(SHAPE, jnp.float32)
    for wrong in (4, None, Delegating, object(), Nameless()):
        with pytest.raises(TypeError, match=r"`engine` must be one of 'auto', .* or a longspan.engines.Engine, got"):
            ls.attention(q, k, v, engine=wrong)
    with pytest.raises(TypeError, match="is not hashable, but `jit` needs hashable engines"):
        ls.attention(q, k, v, engine=Unhashable())
    with pytest.raises(NotImplementedError, match="engine='five methods' cannot run this: it has no soft cap"):
        ls.attention(q, k, v, engine=FiveMethods(), soft_cap=2.0)


@dataclass(frozen=True)
class Wrong(FiveMethods):
    """An engine that returns a wrong result."""

    part: str

    def run(self, request, layout):
        out, lse = super().run(request, layout)
        return (out[..., :-1] if self.part == "out" else out), lse

    def backward(self, *arguments):
        dq, dk, dv, dbias = super().backward(*arguments)
        return dq, (dk[:, :-1] if self.part == "dk" else dk), dv, dbias


def test_the_results_of_an_engine_are_checked():
    q, k, v = make_qkv(SHAPE, jnp.float32)
    with pytest.raises(ValueError, match=r"engine='five methods': run returned out \(2, 7, 6, 4\)"):
        ls.attention(q, k, v, engine=Wrong("out"))
    with pytest.raises(ValueError, match=r"backward returned dk of shape \(2, 22, 3, 5\), expected \(2, 23, 3, 5\)"):
        jax.grad(lambda k: ls.attention(q, k, v, engine=Wrong("dk")).sum())(k)
    bias = jnp.zeros((1, 1, 7, 23))
    with pytest.raises(ValueError, match=r"backward returned dbias of shape None, expected \(1, 1, 7, 23\)"):
        jax.grad(lambda bias: ls.attention(q, k, v, bias=bias, engine=Wrong("")).sum())(bias)
    with pytest.raises(ValueError, match=r"backward returned dbias None, expected the structure of Alibi\(slopes="):
        jax.grad(lambda bias: ls.attention(q, k, v, bias=bias, engine=Wrong("")).sum())(ls.alibi(jnp.ones(6)))


def test_an_engine_without_run_cannot_be_made():
    with pytest.raises(TypeError, match=r"abstract method '?run'?"):
        type("Idle", (Engine,), dict(name="idle"))()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    array_axes: ClassVar = {"weights": "BNTS"}
    weights: Any


class Saving(FiveMethods):
    """An engine whose backward pass uses residuals of its forward pass."""

    def forward(self, request, layout):
        weights, lse = self._weights(request, layout)
        out = jnp.einsum("bnts,bsnh->btnh", weights, self._repeated(request, request.v))
        return Result(out, lse, residuals=Weights(weights))

    def backward(self, request, layout, result, delta, dout):
        self.kept = result.residuals.weights, result.out.shape
        return super().backward(request, layout, result, delta, dout)


def test_a_backward_pass_receives_the_result_of_its_forward_pass():
    q, k, v = make_qkv(SHAPE, jnp.float32)
    engine = Saving()
    assert_matches_reference(engine, q, k, v, MASK)
    jax.grad(lambda q: ls.attention(q, k, v, mask=MASK, engine=engine).sum())(q)
    weights, shape = engine.kept
    assert weights.shape == (2, 6, 7, 23) and shape == (2, 7, 6, 5)


@every_sparse_engine
def test_second_derivatives_are_refused_by_name(engine):
    q, k, v = make_qkv(SHAPE, jnp.float32)
    with pytest.raises(NotImplementedError, match=rf"engine='{engine}' has no second derivatives.*engine='reference'"):
        jax.grad(lambda q: jax.grad(lambda q: ls.attention(q, k, v, engine=engine).sum())(q).sum())(q)


@every_engine
def test_a_call_is_checked_once_and_its_sides_are_made_once(engine, monkeypatch):
    calls = []
    for module, name in (
        (checks, "check_extents"), (request, "check_extents"), (ls.Mask, "_sides"), (request, "plan_checked_layout"),
    ):  # fmt: skip
        of = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x, of=of, name=name, **y: calls.append(name) or of(*x, **y))
    q, k, v = make_qkv(Shape(B=2, T=17, S=17, N=2, K=1, H=3), jnp.float32)
    ls.attention(q, k, v, mask=ls.Causal() & ls.Segments(np.zeros((2, 17), int)), engine=engine)
    assert sorted(calls) == ["check_extents", "plan_checked_layout"]


def test_a_request_is_made_by_keyword_and_is_the_whole_call():
    q, k, v = make_qkv(SHAPE, jnp.float32)
    with pytest.raises(TypeError, match="positional"):
        Request.of(q, k, v)
    with pytest.raises(TypeError, match="positional"):
        Request(q, k, v, MASK)
    key, scale = jax.random.key(3), jnp.float32(0.7)
    request = Request.of(q=q, k=k, v=v, mask=MASK.layout(7, 23), scale=scale, dropout_rate=0.3, dropout_key=key)
    assert request.q_scale is scale and request.scale == 1.0 and request.dropout.key is key
    assert request.layout.mask == request.mask == MASK
    for name in ("reference", "xla"):
        got = answer(request, name)
        want = ls.attention(q, k, v, mask=MASK, scale=0.7, dropout_rate=0.3, dropout_key=key, return_lse=True)
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_request_has_the_properties_that_engines_use():
    q, k, v = make_qkv(SHAPE, jnp.float32)
    request = request_of(q, k, v, list(range(23)), **FEATURES["dropout"])
    assert request.has_positions and request.dropout.rate == 0.3 and request.v.shape == k.shape
    assert choose("auto", request)[0].name in ENGINES
    assert jax.tree.structure(request) == jax.tree.structure(jax.tree.map(lambda x: x, request))
