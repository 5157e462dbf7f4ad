"""Ways to compute attention, under one contract: `Engine` answers a `Request`.

`reference` is dense and defines what is correct, `xla` is block-sparse in plain JAX, `cpu` a native kernel. Engines
never import each other; what differentiating them has in common is in `gradient`. What a decoder's step does besides,
with layers that are stacked, is here too: `multiply` and `put` read and write one layer where it lies, if possible.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from longspan.checks import check_choice
from longspan.combine import Result as Result
from longspan.engines.contract import Engine as Engine
from longspan.engines.cpu import ENGINE as _CPU
from longspan.engines.cpu import library as _library
from longspan.engines.cpu.product import can_multiply as _can_multiply
from longspan.engines.cpu.product import products as _products
from longspan.engines.cpu.put import put as _put
from longspan.engines.reference import ENGINE as _REFERENCE
from longspan.engines.request import Request as Request
from longspan.engines.xla import ENGINE as _XLA

# In the order in which "auto" tries them: the fastest first. `python -m benchmarks crossover` measures it: `cpu` was
# ahead of `xla` at every size and with every feature, by 1.1 (one query, 32 keys; `Custom`) to 7 times. Only the
# gradients of some 16 tokens come sooner from the reference: 0.2 ms do not pay for an engine that needs T×S memory.
ENGINES: dict[str, Engine] = {engine.name: engine for engine in (_CPU, _XLA, _REFERENCE)}


def choose(engine: str | Engine, request: Request) -> tuple[Engine, dict[str, str]]:
    """The engine that runs a request, and why each one tried before it was refused.

    Example:
        >>> x = jax.ShapeDtypeStruct((2, 7, 6, 5), jnp.float32)
        >>> choose("xla", Request.of(q=x, k=x, v=x, mask=ls.Causal()))[0].name
        'xla'
    """
    if isinstance(engine, str):
        check_choice("engine", engine, ("auto", *ENGINES))
        if engine == "auto":
            return _first(request)
        engine = ENGINES[engine]
    _check_engine(engine)
    reason = engine.unsupported(request)
    if reason:
        raise NotImplementedError(f"engine={engine.name!r} cannot run this: {reason}")
    return engine, {}


def _first(request: Request) -> tuple[Engine, dict[str, str]]:
    refused: dict[str, str] = {}
    for name, engine in ENGINES.items():
        reason = engine.unsupported(request)
        if reason is None:
            return engine, refused
        refused[name] = reason
    raise NotImplementedError(f"No engine can run this: {refused}")


def _check_engine(engine: object) -> None:
    """An instance of a subclass of `Engine` that can be part of a compiled program."""
    if not isinstance(engine, Engine) or not isinstance(getattr(engine, "name", None), str):
        wanted = f"one of {', '.join(map(repr, ('auto', *ENGINES)))}, or a longspan.engines.Engine"
        raise TypeError(f"`engine` must be {wanted}, got {engine!r}.")
    try:
        hash(engine)
    except TypeError:
        raise TypeError(
            f"engine={engine!r} does not hash, and an engine is part of what is compiled. Make it a frozen dataclass, "
            "or give it no `__eq__`."
        ) from None


def reads_in_place(rows: int, dtype: Any, param_dtype: Any) -> bool:
    """Whether `multiply` reads matrices of this dtype where they lie, for so many rows."""
    exact = jnp.dtype(dtype) in (jnp.dtype(param_dtype), jnp.dtype(jnp.float32))
    return jax.default_backend() == "cpu" and exact and _can_multiply(rows, dtype, param_dtype)


def multiply(x: jax.Array, matrices: Sequence[jax.Array], layer: Any = 0, *, by_outer: bool = False) -> list[jax.Array]:
    """[x @ matrix[layer] for matrix in matrices], for a few rows on a CPU without a copy of any layer.

    Args:
        x: [..., inner].
        matrices: stacks [layers, inner, outer], or single matrices [inner, outer].
        layer: which of each stack, an int or a traced one.
        by_outer: whether they are transposed, [layers, outer, inner].
    """
    rows = x.reshape(-1, x.shape[-1])
    if not all(reads_in_place(rows.shape[0], x.dtype, matrix.dtype) for matrix in matrices):
        ours = [matrix[layer] if matrix.ndim == 3 else matrix for matrix in matrices]
        return [x @ (matrix.T if by_outer else matrix).astype(x.dtype) for matrix in ours]
    ys = _products(rows.astype(jnp.float32), matrices, layer, by_outer=by_outer)
    return [y.reshape(*x.shape[:-1], -1) for y in ys]


def put(stack: jax.Array, layer: Any, slots: jax.Array, new: jax.Array) -> jax.Array:
    """The stack with stack[layer, b, slots[b, i]] = new[b, i]; slots that are not there take nothing.

    Args:
        stack: [layers, B, slots, ...].
        layer: which one, an int or a traced one.
        slots: int32 [B, n], different in each row.
        new: [B, n, ...], of the stack's dtype.
    """
    if jax.default_backend() == "cpu" and _library.missing() is None:
        return _put(stack, layer, slots, new)
    there = jnp.where(slots < 0, stack.shape[2], slots)

    def row(one, at, values):
        return one.at[layer, at].set(values, mode="drop", unique_indices=True)

    return jax.vmap(row, (1, 0, 0), 1)(stack, there, new)
