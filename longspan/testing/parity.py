"""Compares engines with float64: outputs, lse and all gradients, with tolerances from the reference's own error."""

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

MAX_ERROR_RATIO = 2  # of an engine's error to the reference's error
ROUNDING_UNITS = 8  # units in the last place that are allowed in addition, where the reference happens to be exact


class Shape(NamedTuple):
    """The sizes of one call, one letter per axis."""

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
    """Random q, k and v of a shape, with a standard deviation of 1.5, so that the softmax is far from uniform."""
    rng = np.random.default_rng(seed)
    B, T, S, N, K, H, Hv = shape
    if Hv is None:
        Hv = H
    sizes = ((B, T, N, H), (B, S, K, H), (B, S, K, Hv))
    # Rounded in NumPy, by way of float32 as in JAX: `jnp.asarray` would compile a program per shape.
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    return tuple(jnp.asarray(rng.normal(size=size, scale=1.5).astype(wide).astype(dtype), dtype) for size in sizes)


class Compared(NamedTuple):
    """One result of an engine, the exact result, and the largest error that is allowed."""

    got: np.ndarray
    exact: np.ndarray
    allowed: float

    @property
    def error(self) -> float:
        """The largest error; NaN or inf if the result is not finite where the exact one is."""
        finite = np.isfinite(self.exact)
        return float(np.abs(self.got[finite] - self.exact[finite]).max(initial=0))

    def is_close(self) -> bool:
        """Whether the error is allowed, and infinities are where they should be."""
        infinite = ~np.isfinite(self.exact)
        return self.error <= self.allowed and np.array_equal(self.got[infinite], self.exact[infinite])


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

    NumPy computes the exact results in float64; the reference runs in the dtype under test. The engine's error may be
    at most twice the reference's error, plus 8 rounding units.

    Args:
        engine: the engine under test by name, an `Engine`, or several of them.
        q: queries, as for `attention`.
        k: keys.
        v: values.
        mask: a mask, as for `attention`.
        run: a function with the signature of `attention` to test instead of `attention`.
        features: further arguments of `attention`: bias, sinks, scale, soft_cap, dropout, positions.
    """
    engines = list(engine) if isinstance(engine, Sequence) and not isinstance(engine, str) else [engine]
    for name, results in zip(engines, compare(engines, q, k, v, mask, run=run, **features), strict=True):
        for part, compared in results.items():
            _assert_close(f"{getattr(name, 'name', name)}: {part}", compared)


def compare(
    engines: Sequence[str | Engine], q, k, v, mask: Any = None, *, run: Callable | None = None, **features: Any
) -> list[dict[str, Compared]]:
    """For each engine its outputs, lse and all gradients by name, with the exact results and the allowed errors."""
    operands = {"q": q, "k": k, "v": v}
    for name in ("bias", "sinks"):
        if features.get(name) is not None:
            operands[name] = features.pop(name)
    floats, integers = partition_floats(operands)
    reference, tested = _taking_floats(attention, integers), _taking_floats(run or attention, integers)
    # The reference's error in float64 cannot be measured, so its error in float32 is scaled to float64's rounding unit.
    narrow = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, floats)
    shrink = float(jnp.finfo(q.dtype).eps / jnp.finfo(narrow["q"].dtype).eps)

    @jax.jit  # one program, because compiling takes nearly all of the time
    def run_all(narrow, floats, mask):
        with jax.default_matmul_precision("highest"):  # accelerators would multiply float32 in fewer bits
            near = _values_and_gradients(reference, "reference", narrow, mask, features)
        return near, [_values_and_gradients(tested, e, floats, mask, features) for e in engines]

    near, got = jax.tree.map(_as_numpy, run_all(narrow, floats, mask))
    exact, scales = _exact(floats, integers, mask, features)
    units = _units(floats)
    allowed = {}
    for part in exact:
        _assert_usable(part, near[part], exact[part])
        error = Compared(near[part], exact[part], 0.0).error
        allowed[part] = MAX_ERROR_RATIO * shrink * error + ROUNDING_UNITS * units[part] * scales[part]
    return [{part: Compared(results[part], exact[part], allowed[part]) for part in exact} for results in got]


def _taking_floats(call: Callable, integers: dict[str, Any]) -> Callable:
    """`call` as a function of the float arrays of its operands; the integer arrays are fixed."""

    def call_with_floats(floats, **arguments):
        return call(**combine_floats(floats, integers), **arguments)

    return call_with_floats


def _by_part(floats: dict[str, Any]) -> dict[str, Any]:
    """The arrays of operands by the names of their gradients; a bias may have several arrays."""
    parts = {}
    for name, tree in floats.items():
        leaves = jax.tree.leaves(tree)
        if len(leaves) == 1:
            parts[f"d{name}"] = leaves[0]
        else:
            parts |= {f"d{name}.{i}": leaf for i, leaf in enumerate(leaves)}
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
    """The results in float64, and the scale of the terms that each result sums."""
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
    """Random weights of out and lse, rounded to float32 in every dtype, so that all dtypes have the same weights."""
    rng = np.random.default_rng(1)
    sizes = (*q.shape[:3], v.shape[3]), q.shape[:3]
    return tuple(rng.normal(size=size).astype(np.float32).astype(statistics_dtype(q.dtype)) for size in sizes)


def _as_numpy(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def _finite(x) -> np.ndarray:
    """An array in float64 with 0 for NaN and infinities, which tokens that no query attends to may hold."""
    return np.nan_to_num(_as_numpy(x), posinf=0, neginf=0)


def _units(floats: dict[str, Any]) -> dict[str, float]:
    """The rounding unit of each result's dtype."""
    dtype = floats["q"].dtype
    dtypes = dict(out=dtype, lse=statistics_dtype(dtype)) | {part: x.dtype for part, x in _by_part(floats).items()}
    return {part: float(jnp.finfo(of).eps) for part, of in dtypes.items()}


def _sink_scale(sinks: np.ndarray, truth: Truth, cotangents) -> float:
    """The scale of a sink's gradient: the root of the summed squares of its terms over queries and features.

    The terms cancel, but their rounding errors do not: they add up like a random walk.
    """
    weight = np.where(np.isfinite(truth.lse), np.exp(sinks.reshape(1, 1, -1) - truth.lse), 0)
    squares = np.square(cotangents[0] * truth.out).sum(-1) + np.square(cotangents[1])
    return float(np.sqrt((np.square(weight) * squares).sum((0, 1))).max(initial=0))


def _score_scales(floats, truth: Truth, cotangents, features) -> dict[str, float]:
    """The scales of the gradients of q and k: roots of summed squares of p * (dp - sum(dout * out)) * (k or q).

    Kernels that do not store the weights subtract two numbers that were rounded separately. The dense softmax subtracts
    the mean of the same dp. Where one weight is nearly 1, its errors cancel, and those of kernels do not.
    """
    (B, _, N, H), (S, K) = floats["q"].shape, floats["k"].shape[1:3]
    scale = features.get("scale") or H**-0.5
    q, k, v = _finite(floats["q"]), _finite(floats["k"]), _finite(floats["v"])
    k, v = np.repeat(k, N // K, axis=2), np.repeat(v, N // K, axis=2)
    dout, dlse = _as_numpy(cotangents[0]), _as_numpy(cotangents[1])
    dp = np.square(truth.kept) * np.einsum("btnh,bsnh->bnts", np.square(dout), np.square(v))
    delta = np.square(dout * truth.out).sum(-1) + np.square(dlse)
    squares = (dp + np.square(truth.whole) * delta.swapaxes(1, 2)[..., None]) * scale**2 * np.square(truth.slope)
    dq = np.einsum("bnts,bsnh->btnh", squares, np.square(k))
    dk = np.einsum("bnts,btnh->bsnh", squares, np.square(q)).reshape(B, S, K, N // K, H).sum(3)
    return {name: float(np.sqrt(x).max(initial=0)) for name, x in (("dq", dq), ("dk", dk))}


def _assert_usable(what: str, near: np.ndarray, exact: np.ndarray) -> None:
    """Asserts that the reference is finite: with NaN or an infinite tolerance every comparison would pass."""
    assert not np.isnan(exact).any(), f"{what}: the reference returns NaN. Does a query attend to a NaN?"
    finite = np.isfinite(exact)
    assert np.isfinite(near[finite]).all(), f"{what}: the reference overflows in the tested dtype, but not in float64"


def _assert_close(what: str, compared: Compared) -> None:
    got, exact, allowed = compared
    assert got.shape == exact.shape, f"{what}: shape {got.shape}, expected {exact.shape}"
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(got[~finite], exact[~finite], err_msg=what)
    assert np.all(np.isfinite(got[finite])), f"{what}: NaN or infinite where the exact result is finite"
    assert compared.error <= allowed, f"{what}: off by {compared.error:.3g}, allowed {allowed:.3g}"
