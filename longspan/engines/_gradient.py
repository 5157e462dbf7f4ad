"""What differentiating any engine has in common: delta, the sinks' gradient, replicated operands, what is refused."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longspan.biases import apart, together
from longspan.engines._contract import Engine, Request, is_differentiable
from longspan.engines._partition import backward_apart, forward_apart
from longspan.engines._varying import vary, varying_axes
from longspan.layout import BlockLayout


class Floats(NamedTuple):
    """The operands of a request that have gradients."""

    q: Any
    k: Any
    v: Any
    bias: Any
    sinks: Any


def attend(engine: Engine, request: Request, layout: BlockLayout) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of a request, differentiable once through the engine's backward pass."""
    if is_differentiable(engine):
        return engine.run(request, layout)
    # A bias may hold integers too, which have no gradient.
    bias, integers = apart(request.bias)
    floats = Floats(request.q, request.k, request.v, bias, request.sinks)
    rest = replace(request, **dict.fromkeys(Floats._fields) | dict(bias=integers)), layout
    # Marked here, outside custom_vjp, so that gradients of replicated operands are summed over their axes.
    floats = vary(floats, varying_axes(floats, rest))
    return _attend(engine, floats, rest)


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


def _joined(floats: Floats, rest) -> tuple[Request, BlockLayout]:
    request, layout = rest
    return replace(request, **floats._asdict() | dict(bias=together(floats.bias, request.bias))), layout


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(engine: Engine, floats: Floats, rest):
    out, lse = forward_apart(engine.run, *_joined(floats, rest))
    shape = (*floats.q.shape[:3], floats.v.shape[3])
    if out.shape != shape or lse.shape != shape[:3]:
        got = f"out {out.shape} and lse {lse.shape}"
        raise ValueError(f"engine={engine.name!r}: run returned {got}, expected {shape} and {shape[:3]}.")
    return out.astype(floats.q.dtype), lse


def _attend_fwd(engine: Engine, floats: Floats, rest):
    out, lse, low = _forward_once(engine, floats, rest)  # type: ignore[misc]
    return (out.astype(floats.q.dtype), lse), (floats, rest, out, lse, low)


def _attend_bwd(engine: Engine, residuals, cotangents):
    return _backward_once(engine, *residuals, cotangents), None


_attend.defvjp(_attend_fwd, _attend_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward_once(engine: Engine, floats: Floats, rest):
    forward = getattr(engine, "forward", None)
    if forward is not None:
        return forward_apart(forward, *_joined(floats, rest))
    out, lse = forward_apart(engine.run, *_joined(floats, rest))
    return out, lse, jnp.zeros_like(lse)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward_once(engine: Engine, floats: Floats, rest, out, lse, low, cotangents) -> Floats:
    dout, dlse = cotangents
    finite = jnp.isfinite(lse)
    # What the gradient of every weight in a row is measured against. A row without keys may get NaN: from lse², say.
    delta = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), axis=-1) - dlse.astype(lse.dtype)
    delta = jnp.where(finite, delta, 0)
    request, layout = _joined(floats, rest)
    dout = dout.astype(floats.q.dtype)
    gradients = backward_apart(engine.backward, request, layout, lse, low, delta, dout)
    dq, dk, dv = (_like(engine, name, x, of) for name, x, of in zip("qkv", gradients[:3], floats[:3], strict=True))
    dbias = _like_bias(engine, gradients[3], floats.bias)
    dsinks = None
    if floats.sinks is not None:
        sink = floats.sinks.astype(lse.dtype).reshape(1, 1, -1)
        weight = jnp.where(finite, jnp.exp(sink - jnp.where(finite, lse, 0) - low), 0)
        dsinks = -jnp.sum(weight * delta, axis=(0, 1)).astype(floats.sinks.dtype)
    return Floats(dq, dk, dv, dbias, dsinks)


def _like_bias(engine: Engine, gradient, bias):
    """The gradients of a bias's floats, each like its own."""
    try:
        places = jax.tree.map(lambda _, x: [x], bias, gradient, is_leaf=lambda x: x is None)
    except (ValueError, TypeError):
        raise ValueError(
            f"engine={engine.name!r}: backward returned dbias {gradient!r}, expected the structure of {bias!r}."
        ) from None
    return jax.tree.map(lambda of, x: _like(engine, "bias", x[0], of), bias, places, is_leaf=lambda x: x is None)


def _like(engine: Engine, name: str, gradient, operand):
    """A gradient in its operand's dtype; of another shape, or missing, it is the engine's mistake."""
    if operand is None:
        return None
    if getattr(gradient, "shape", None) != operand.shape:
        got = getattr(gradient, "shape", gradient)
        raise ValueError(
            f"engine={engine.name!r}: backward returned d{name} of shape {got}, expected "
            f"{operand.shape}. It must return (dq, dk, dv, dbias), each like its operand."
        )
    return gradient.astype(operand.dtype)


def _second_derivative(engine: Engine, *_):
    raise NotImplementedError(
        f"engine={engine.name!r} has no second derivatives: its backward pass cannot itself be differentiated. "
        "Use engine='reference' where you differentiate twice."
    )


_forward_once.defvjp(_second_derivative, _second_derivative)
_backward_once.defvjp(_second_derivative, _second_derivative)
