"""Engines against float64: outputs, lse and all gradients, with tolerances from the reference's own error."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import statistics_dtype
from longspan.attend import attention
from longspan.biases import combine_floats, partition_floats
from longspan.engines import Engine
from longspan.testing.truth import Truth, attention_in_float64

TIMES = 2  # how much further from float64 an engine may be than the reference: once for doing the same, once for luck
ROUNDING_UNITS = 8  # how many units in the last place an engine may be off where the reference happens to be exact


class Shape(NamedTuple):
    """The sizes of one call, one letter an axis."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int | None = None  # None: H

    def __str__(self) -> str:
        return "-".join(f"{axis}{size}" for axis, size in self._asdict().items() if size is not None)


def make_qkv(shape: Shape, dtype: Any, seed: int = 0):
    """Random q, k, v of a shape, spread enough that the softmax is far from uniform."""
    rng = np.random.default_rng(seed)
    B, T, S, N, K, H, Hv = shape
    sizes = ((B, T, N, H), (B, S, K, H), (B, S, K, H if Hv is None else Hv))
    # Rounded in NumPy, and as JAX does it, by way of float32: `jnp.asarray` would compile a program per shape.
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    return tuple(jnp.asarray(rng.normal(size=size, scale=1.5).astype(wide).astype(dtype), dtype) for size in sizes)


def assert_matches_reference(
    engine: str | Engine | Sequence[str | Engine],
    q,
    k,
    v,
    mask: Any = None,
    *,
    run: Callable | None = None,
    **features: Any,
) -> None:
    """Asserts that an engine is as close to float64 as the reference is, in outputs, lse and all gradients.

    The truth is computed in float64 by NumPy, and the reference runs in the dtype under test. The engine may be at most
    twice as far from float64 as the reference, plus a few rounding units.

    Args:
        engine: the engine under test by name, one of your own, or several.
        q: queries, as for `attention`.
        k: keys.
        v: values.
        mask: a mask, as for `attention`.
        run: a function with the signature of `attention` to test instead of `attention`.
        features: further arguments of `attention`: bias, sinks, scale, soft_cap, dropout, positions.
    """
    floats = {"q": q, "k": k, "v": v, **{n: features.pop(n) for n in ("bias", "sinks") if features.get(n) is not None}}
    floats, integers = partition_floats(floats)
    plain, tested = _with(attention, integers), _with(run or attention, integers)
    engines = list(engine) if isinstance(engine, Sequence) and not isinstance(engine, str) else [engine]
    # The reference's own error in float64 cannot be seen, so it is that of float32, scaled to float64's unit.
    narrow = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, floats)
    shrink = float(jnp.finfo(q.dtype).eps / jnp.finfo(narrow["q"].dtype).eps)

    @jax.jit  # one program: compiling is nearly all of it
    def everything(narrow, floats, mask):
        near = _values_and_gradients(plain, "reference", narrow, mask, features)
        return near, [_values_and_gradients(tested, e, floats, mask, features) for e in engines]

    near, got = jax.tree.map(_as_numpy, everything(narrow, floats, mask))
    exact, scales = _exact(floats, integers, mask, features)
    units = _units(floats)
    for part in exact:
        _assert_usable(part, near[part], exact[part])
    for name, results in zip(engines, got, strict=True):
        for part in exact:
            rounding = ROUNDING_UNITS * units[part] * scales[part]
            allowed = TIMES * shrink * _distance(near[part], exact[part]) + rounding
            _assert_close(f"{getattr(name, 'name', name)}: {part}", results[part], exact[part], allowed)


def _with(call: Callable, integers: dict[str, Any]) -> Callable:
    """A call of `attention` that takes its arrays of floats, and adds the other arrays of its operands."""

    def run(floats, **arguments):
        return call(**combine_floats(floats, integers), **arguments)

    return run


def _by_part(floats: dict[str, Any]) -> dict[str, Any]:
    """The arrays of some operands by the names of their gradients; a bias may have several."""
    parts = {}
    for name, tree in floats.items():
        leaves = jax.tree.leaves(tree)
        alone = len(leaves) == 1
        parts |= {f"d{name}" if alone else f"d{name}.{i}": leaf for i, leaf in enumerate(leaves)}
    return parts


def _values_and_gradients(call: Callable, engine, floats: dict[str, Any], mask, features) -> dict[str, jax.Array]:
    """Output, lse and the gradients of a random combination of both."""
    grads, (out, lse) = jax.grad(lambda x: _loss(call, engine, x, mask, features), has_aux=True)(floats)
    return {"out": out, "lse": lse, **_by_part(grads)}


def _loss(call: Callable, engine, floats: dict[str, Any], mask, features):
    weights = _cotangents(floats["q"], floats["v"])
    out, lse = call(floats, mask=mask, engine=engine, return_lse=True, **features)
    finite = jnp.where(jnp.isfinite(lse), lse, 0)
    return jnp.vdot(out.astype(lse.dtype), weights[0]) + jnp.vdot(finite, weights[1]), (out, lse)


def _exact(floats: dict[str, Any], integers, mask, features) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The results in float64, and the size of what each of them adds up."""
    cotangents = _cotangents(floats["q"], floats["v"])
    truth = attention_in_float64(combine_floats(floats, integers), mask, features, cotangents)
    exact = {"out": truth.out, "lse": truth.lse, **_by_part(truth.gradients)}
    scales = {part: float(np.abs(x[np.isfinite(x)]).max(initial=0)) for part, x in exact.items()}
    if truth.bias_sizes is not None:
        sizes = _by_part(dict(bias=truth.bias_sizes))
        scales |= {part: float(np.abs(x).max(initial=0)) for part, x in sizes.items()}
    if "sinks" in floats:
        scales["dsinks"] = _sink_scale(np.asarray(floats["sinks"], np.float64), truth, cotangents)
    return exact, scales | _score_scales(floats, truth, cotangents, features)


def _cotangents(q, v):
    """Weights of out and lse: float32's numbers in every dtype, so that passes in different ones have the same."""
    rng = np.random.default_rng(1)
    sizes = (*q.shape[:3], v.shape[3]), q.shape[:3]
    return tuple(rng.normal(size=size).astype(np.float32).astype(statistics_dtype(q.dtype)) for size in sizes)


def _as_numpy(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def _units(floats: dict[str, Any]) -> dict[str, float]:
    """The rounding unit of each result: its own dtype's."""
    dtype = floats["q"].dtype
    dtypes = dict(out=dtype, lse=statistics_dtype(dtype)) | {part: x.dtype for part, x in _by_part(floats).items()}
    return {part: float(jnp.finfo(of).eps) for part, of in dtypes.items()}


def _sink_scale(sinks: np.ndarray, truth: Truth, cotangents) -> float:
    """What a sink's gradient adds up over queries and head elements, as roots of summed squares.

    The terms cancel, their rounding errors do not: those add up as a random walk does.
    """
    weight = np.where(np.isfinite(truth.lse), np.exp(sinks.reshape(1, 1, -1) - truth.lse), 0)
    squares = np.square(cotangents[0] * truth.out).sum(-1) + np.square(cotangents[1])
    return float(np.sqrt((np.square(weight) * squares).sum((0, 1))).max(initial=0))


def _score_scales(floats, truth: Truth, cotangents, features) -> dict[str, float]:
    """What the gradients of q and k add up, as roots of summed squares: p * (dp - sum(dout * out)) * (k or q).

    Kernels that keep no weights take the difference between two numbers that were rounded apart. The dense softmax
    subtracts the mean of the very dp, so that where one weight is nearly 1 its errors cancel and theirs do not.
    """
    (B, _, N, H), (S, K) = floats["q"].shape, floats["k"].shape[1:3]
    scale = features.get("scale") or H**-0.5
    wide = (np.asarray(floats[name], np.float64) for name in "qkv")
    q, k, v = (np.nan_to_num(x, posinf=0, neginf=0) for x in wide)  # unseen places may hold anything
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    dout, dlse = (np.asarray(x, np.float64) for x in cotangents)
    dp = np.square(truth.kept) * np.einsum("btnh,bsnh->bnts", np.square(dout), np.square(v))
    delta = np.square(dout * truth.out).sum(-1) + np.square(dlse)
    squares = (dp + np.square(truth.whole) * delta.swapaxes(1, 2)[..., None]) * scale**2 * np.square(truth.slope)
    dq = np.einsum("bnts,bsnh->btnh", squares, np.square(k))
    dk = np.einsum("bnts,btnh->bsnh", squares, np.square(q)).reshape(B, S, K, N // K, H).sum(3)
    return {name: float(np.sqrt(x).max(initial=0)) for name, x in (("dq", dq), ("dk", dk))}


def _assert_usable(what: str, near: np.ndarray, exact: np.ndarray) -> None:
    """The reference can judge: compared with NaN, or with a tolerance that is not finite, everything would pass."""
    assert not np.isnan(exact).any(), f"{what}: the reference itself gives NaN. Is there one that a query sees?"
    finite = np.isfinite(exact)
    assert np.isfinite(near[finite]).all(), f"{what}: the reference overflows in the dtype under test, not in float64"


def _distance(near: np.ndarray, exact: np.ndarray) -> float:
    finite = np.isfinite(exact)
    return float(np.abs(near[finite] - exact[finite]).max(initial=0))


def _assert_close(what: str, got: np.ndarray, exact: np.ndarray, allowed: float) -> None:
    assert got.shape == exact.shape, f"{what}: shape {got.shape}, expected {exact.shape}"
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(got[~finite], exact[~finite], err_msg=what)
    assert np.all(np.isfinite(got[finite])), f"{what}: not finite where the reference is"
    error = np.abs(got[finite] - exact[finite]).max(initial=0)
    assert error <= allowed, f"{what}: off by {error:.3g}, allowed {allowed:.3g}"
