"""What differentiating any forward and backward pass has in common: delta, the sinks' gradient, what is refused."""

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
from longspan.engines.partition import backward_apart, forward_apart
from longspan.engines.request import Request
from longspan.engines.varying import vary, varying_axes


class Passes(NamedTuple):
    """The functions that compute attention and its gradient, and what messages call them."""

    name: str
    run: Callable[[Request], Any]  # (out, lse) or a `Result`, where nothing is differentiated
    forward: Callable[[Request], Result]
    backward: Callable[[Request, Result, Any, Any], tuple[Any, ...]]  # of delta and dout: (dq, dk, dv, dbias)


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
        # No more than is asked for: of a call that is split, XLA drops no results.
        return engine.run(request, layout)[:2]

    passes = Passes(
        f"engine={engine.name!r}",
        partial(forward_apart, run),
        partial(forward_apart, engine.forward),
        partial(backward_apart, engine.backward),
    )
    return differentiable(passes, request)


def differentiable(passes: Passes, request: Request) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of a request, whose gradient is that of the passes; it cannot be differentiated again."""
    # A bias may hold integers too, which have no gradient.
    bias, integers = partition_floats(request.bias)
    floats = Floats(request.q, request.k, request.v, bias, request.sinks)
    rest = replace(request, **dict.fromkeys(Floats._fields) | dict(bias=integers))
    # Marked here, outside custom_vjp, so that gradients of replicated operands are summed over their axes.
    floats = vary(floats, varying_axes(floats, rest))
    return _attend(passes, floats, rest)


@contextmanager
def forward_mode_refused(engine: Engine):
    """JAX's refusal of forward mode, where it comes through here, with what to do. Inside `jit` it comes later."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            f"engine={engine.name!r} has no forward-mode derivatives (jvp, jacfwd, linearize): it has a backward pass. "
            "Use engine='reference', or differentiate in reverse (grad, vjp, jacrev)."
        ) from error


def _joined(floats: Floats, rest: Request) -> Request:
    return replace(rest, **floats._asdict() | dict(bias=combine_floats(floats.bias, rest.bias)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(passes: Passes, floats: Floats, rest: Request):
    result = _checked(passes, "run", passes.run(_joined(floats, rest)), floats)
    return result.out.astype(floats.q.dtype), result.lse


def _attend_fwd(passes: Passes, floats: Floats, rest: Request):
    result: Result = _forward_once(passes, floats, rest)  # type: ignore[misc]
    return (result.out.astype(floats.q.dtype), result.lse), (floats, rest, result)


def _attend_bwd(passes: Passes, residuals, cotangents):
    return _backward_once(passes, *residuals, cotangents), None


_attend.defvjp(_attend_fwd, _attend_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward_once(passes: Passes, floats: Floats, rest: Request) -> Result:
    result = _checked(passes, "forward", passes.forward(_joined(floats, rest)), floats)
    return result._replace(lse_residual=jnp.zeros_like(result.lse)) if result.lse_residual is None else result


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward_once(passes: Passes, floats: Floats, rest: Request, result: Result, cotangents) -> Floats:
    (out, lse, low, _), (dout, dlse) = result, cotangents
    finite = jnp.isfinite(lse)
    # What the gradient of every weight in a row is measured against. A row without keys may get NaN: from lse², say.
    delta = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), axis=-1) - dlse.astype(lse.dtype)
    delta = jnp.where(finite, delta, 0)
    gradients = passes.backward(_joined(floats, rest), result, delta, dout.astype(floats.q.dtype))
    dq, dk, dv = (_like(passes, name, x, of) for name, x, of in zip("qkv", gradients[:3], floats[:3], strict=True))
    dbias = _like_bias(passes, gradients[3], floats.bias)
    dsinks = None
    if floats.sinks is not None:
        sink = floats.sinks.astype(lse.dtype).reshape(1, 1, -1)
        weight = jnp.where(finite, jnp.exp(sink - jnp.where(finite, lse, 0) - low), 0)
        dsinks = -jnp.sum(weight * delta, axis=(0, 1)).astype(floats.sinks.dtype)
    return Floats(dq, dk, dv, dbias, dsinks)


def _checked(passes: Passes, name: str, result: Any, floats: Floats) -> Result:
    """What a pass returned, if it has the right shapes."""
    result = Result(*result)
    shape = (*floats.q.shape[:3], floats.v.shape[3])
    if result.out.shape != shape or result.lse.shape != shape[:3]:
        got = f"out {result.out.shape} and lse {result.lse.shape}"
        raise ValueError(f"{passes.name}: {name} returned {got}, expected {shape} and {shape[:3]}.")
    return result


def _like_bias(passes: Passes, gradient, bias):
    """The gradients of a bias's floats, each like its own."""
    try:
        places = jax.tree.map(lambda _, x: [x], bias, gradient, is_leaf=lambda x: x is None)
    except (ValueError, TypeError):
        raise ValueError(
            f"{passes.name}: backward returned dbias {gradient!r}, expected the structure of {bias!r}."
        ) from None
    return jax.tree.map(lambda of, x: _like(passes, "bias", x[0], of), bias, places, is_leaf=lambda x: x is None)


def _like(passes: Passes, name: str, gradient, operand):
    """A gradient in its operand's dtype; of another shape, or missing, it is the engine's mistake."""
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
