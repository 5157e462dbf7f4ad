"""The derivative rule that all engines share: delta, the gradient of sinks, and the errors for other derivatives."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longspan.biases import combine_floats, partition_floats
from longspan.combine import Result
from longspan.engines.contract import Engine
from longspan.engines.partition import partition_backward, partition_forward
from longspan.engines.request import Request
from longspan.engines.varying import vary, varying_axes


class Passes(NamedTuple):
    """The functions that compute attention and its gradient."""

    name: str  # in error messages
    run: Callable[[Request], Any]  # (out, lse) or a `Result`, for calls that are not differentiated
    forward: Callable[[Request], Result]
    backward: Callable[[Request, Result, Any, Any], tuple[Any, ...]]  # with delta and dout, to (dq, dk, dv, dbias)


class Floats(NamedTuple):
    """The operands of a request that have gradients."""

    q: Any
    k: Any
    v: Any
    bias: Any
    sinks: Any


def attend(engine: Engine, request: Request) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of a request, differentiable once through the engine's backward pass."""
    if engine.differentiable:
        return Result(*engine.run(request, request.layout))[:2]  # type: ignore[arg-type]

    def run(request: Request, layout: Any) -> Any:
        # Only out and lse: XLA does not remove unused results of a partitioned call.
        return engine.run(request, layout)[:2]

    passes = Passes(
        f"engine={engine.name!r}",
        partial(partition_forward, run),
        partial(partition_forward, engine.forward),
        partial(partition_backward, engine.backward),
    )
    return differentiable(passes, request)


def differentiable(passes: Passes, request: Request) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of a request, differentiable once through the backward pass of `passes`."""
    # A bias may also hold integers, which have no gradient.
    bias, integers = partition_floats(request.bias)
    floats = Floats(request.q, request.k, request.v, bias, request.sinks)
    rest = replace(request, **dict.fromkeys(Floats._fields) | dict(bias=integers))
    # Outside custom_vjp: the transpose of `vary` sums the gradients of replicated operands over the mesh axes.
    floats = vary(floats, varying_axes(floats, rest))
    return _attend(passes, floats, rest)


@contextmanager
def forward_mode_refused(engine: Engine):
    """Replaces JAX's error about forward-mode derivatives by one that says what to do. `jit` raises JAX's own."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            f"engine={engine.name!r} has no forward-mode derivatives (jvp, jacfwd, linearize), only a backward pass. "
            "Use engine='reference', or differentiate in reverse (grad, vjp, jacrev)."
        ) from error


def _request_of(floats: Floats, rest: Request) -> Request:
    return replace(rest, **floats._asdict() | dict(bias=combine_floats(floats.bias, rest.bias)))


# `_attend_fwd` and `_attend_bwd` are the derivative rule of `_attend`. A second derivative would differentiate these
# two, and fail obscurely in the engine's loops or foreign calls. So the functions that they call have a derivative rule
# as well, `_second_derivative`, which raises an error that names the engine to use.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(passes: Passes, floats: Floats, rest: Request):
    result = _checked(passes, "run", passes.run(_request_of(floats, rest)), floats)
    return result.out.astype(floats.q.dtype), result.lse


def _attend_fwd(passes: Passes, floats: Floats, rest: Request):
    result: Result = _forward_once(passes, floats, rest)  # type: ignore[misc]
    return (result.out.astype(floats.q.dtype), result.lse), (floats, rest, result)


def _attend_bwd(passes: Passes, residuals, cotangents):
    return _backward_once(passes, *residuals, cotangents), None


_attend.defvjp(_attend_fwd, _attend_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward_once(passes: Passes, floats: Floats, rest: Request) -> Result:
    result = _checked(passes, "forward", passes.forward(_request_of(floats, rest)), floats)
    if result.lse_residual is None:
        result = result._replace(lse_residual=jnp.zeros_like(result.lse))
    return result


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward_once(passes: Passes, floats: Floats, rest: Request, result: Result, cotangents) -> Floats:
    out, lse, lse_residual, _ = result
    dout, dlse = cotangents
    finite = jnp.isfinite(lse)
    # d(score) = weight · (d(weight) - delta). A row without keys may receive NaN, for example from a loss of lse².
    delta = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), axis=-1) - dlse.astype(lse.dtype)
    delta = jnp.where(finite, delta, 0)
    gradients = passes.backward(_request_of(floats, rest), result, delta, dout.astype(floats.q.dtype))
    dq = _like(passes, "q", gradients[0], floats.q)
    dk = _like(passes, "k", gradients[1], floats.k)
    dv = _like(passes, "v", gradients[2], floats.v)
    dbias = _like_bias(passes, gradients[3], floats.bias)
    dsinks = None
    if floats.sinks is not None:
        sink = floats.sinks.astype(lse.dtype).reshape(1, 1, -1)
        weight = jnp.where(finite, jnp.exp(sink - jnp.where(finite, lse, 0) - lse_residual), 0)
        dsinks = -jnp.sum(weight * delta, axis=(0, 1)).astype(floats.sinks.dtype)
    return Floats(dq, dk, dv, dbias, dsinks)


def _checked(passes: Passes, name: str, result: Any, floats: Floats) -> Result:
    """The result of a pass. Raises if its shapes are wrong."""
    result = Result(*result)
    shape = (*floats.q.shape[:3], floats.v.shape[3])
    if result.out.shape != shape or result.lse.shape != shape[:3]:
        got = f"out {result.out.shape} and lse {result.lse.shape}"
        raise ValueError(f"{passes.name}: {name} returned {got}, expected {shape} and {shape[:3]}.")
    return result


def _like_bias(passes: Passes, gradient, bias):
    """The gradients of the float arrays of a bias, each in the dtype of its array."""
    try:
        places = jax.tree.map(lambda _, x: [x], bias, gradient, is_leaf=lambda x: x is None)
    except (ValueError, TypeError):
        raise ValueError(
            f"{passes.name}: backward returned dbias {gradient!r}, expected the structure of {bias!r}."
        ) from None
    return jax.tree.map(lambda of, x: _like(passes, "bias", x[0], of), bias, places, is_leaf=lambda x: x is None)


def _like(passes: Passes, name: str, gradient, operand):
    """A gradient in the dtype of its operand. Raises if the engine returned none, or one of another shape."""
    if operand is None:
        return None
    if getattr(gradient, "shape", None) != operand.shape:
        got = getattr(gradient, "shape", gradient)
        raise ValueError(
            f"{passes.name}: backward returned d{name} of shape {got}, expected "
            f"{operand.shape}. It must return (dq, dk, dv, dbias), each like its operand."
        )
    return gradient.astype(operand.dtype)


def _second_derivative(passes: Passes, *_):
    raise NotImplementedError(
        f"{passes.name} has no second derivatives: its backward pass cannot itself be differentiated. Use "
        "`ls.attention(..., engine='reference')` where you differentiate twice."
    )


_forward_once.defvjp(_second_derivative, _second_derivative)
_backward_once.defvjp(_second_derivative, _second_derivative)
