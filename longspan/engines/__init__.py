"""The implementations of attention. An `Engine` computes a `Request`, one checked call of `attention`.

`reference` is dense and defines the correct result, `xla` is block-sparse in plain JAX, `cpu` calls a native kernel,
`pallas_tpu` compiles kernels for TPUs. Engines never import each other. `gradient` differentiates all of them, and
`partition` splits them over devices.
`multiply` and `put` serve decoding: they read and write one layer of a stack of layers, in place where possible.

Example:
    >>> x = jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.float32)
    >>> request = ls.engines.Request.of(q=x, k=x, v=x, mask=ls.Causal())
    >>> engine, refused = ls.engines.choose("reference", request)
    >>> engine.name, refused
    ('reference', {})
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
from longspan.engines.pallas_tpu import PallasTpu as PallasTpu
from longspan.engines.reference import ENGINE as _REFERENCE
from longspan.engines.request import Request as Request
from longspan.engines.xla import ENGINE as _XLA

# engine="auto" tries them in this order, the fastest first, each on its own platform (`Engine.platform`).
# Measured by `python -m benchmarks crossover`: `cpu` is 1.1
# (one query, 32 keys; `Custom`) to 7 times as fast as `xla`, at every size and with every feature. The reference is
# faster only for the gradients of about 16 tokens, by 0.2 ms: too little to choose an engine that needs T×S memory.
ENGINES: dict[str, Engine] = {engine.name: engine for engine in (_CPU, PallasTpu(), _XLA, _REFERENCE)}

ABSENT = dict(
    tpu="engine='pallas_tpu' runs kernels on TPUs; engine='xla' runs plain JAX there",
    gpu="no engine has kernels for GPUs; engine='xla' runs plain JAX there",
    cuda="no engine has kernels for GPUs; engine='xla' runs plain JAX there",
)  # names of platforms, which users try as names of engines


def choose(engine: str | Engine, request: Request) -> tuple[Engine, dict[str, str]]:
    """The engine that runs a request, and the reason why each engine tried before it was not chosen.

    Args:
        engine: "auto", the name of an engine, or an instance of `Engine`.
        request: the call to run.

    Raises:
        NotImplementedError: if the named engine, or with "auto" every engine, cannot run the request.

    Example:
        >>> x = jax.ShapeDtypeStruct((2, 7, 6, 5), jnp.float32)
        >>> choose("xla", Request.of(q=x, k=x, v=x, mask=ls.Causal()))[0].name
        'xla'
    """
    if isinstance(engine, str):
        if engine in ABSENT:
            raise ValueError(f"engine={engine!r} is not the name of an engine: {ABSENT[engine]}.")
        check_choice("engine", engine, ("auto", *ENGINES))
        if engine == "auto":
            return _first(request)
        engine = ENGINES[engine]
    _check_engine(engine)
    reason = engine.unsupported(request)
    if reason:
        raise NotImplementedError(f"engine={engine.name!r} cannot run this: {reason}")
    return engine, {}


def tried(platform: str) -> tuple[str, ...]:
    """The names of the engines that engine="auto" tries on a platform, in order.

    Example:
        >>> tried("cpu"), tried("tpu")
        (('cpu', 'xla', 'reference'), ('cpu', 'pallas_tpu', 'xla', 'reference'))
    """
    return tuple(name for name, engine in ENGINES.items() if engine.platform in (None, platform))


def _first(request: Request) -> tuple[Engine, dict[str, str]]:
    refused: dict[str, str] = {}
    for name in tried(request.platform):
        reason = ENGINES[name].unsupported(request) or ENGINES[name].unproven(request)
        if reason is None:
            return ENGINES[name], refused
        refused[name] = reason
    raise NotImplementedError(f"No engine can run this: {refused}")


def _check_engine(engine: object) -> None:
    """Raises unless `engine` is an `Engine` with a name that hashes, as the static part of a program must."""
    if not isinstance(engine, Engine) or not isinstance(getattr(engine, "name", None), str):
        wanted = f"one of {', '.join(map(repr, ('auto', *ENGINES)))}, or a longspan.engines.Engine"
        raise TypeError(f"`engine` must be {wanted}, got {engine!r}.")
    try:
        hash(engine)
    except TypeError:
        raise TypeError(
            f"engine={engine!r} is not hashable, but `jit` needs hashable engines. Make its class a frozen dataclass, "
            "or remove `__eq__` from the class."
        ) from None


def reads_in_place(rows: int, dtype: Any, param_dtype: Any) -> bool:
    """Whether `multiply` reads matrices of dtype `param_dtype` in place, for this number of rows of `dtype`."""
    exact = jnp.dtype(dtype) in (jnp.dtype(param_dtype), jnp.dtype(jnp.float32))
    return jax.default_backend() == "cpu" and exact and _can_multiply(rows, dtype, param_dtype)


def multiply(x: jax.Array, matrices: Sequence[jax.Array], layer: Any = 0, *, by_outer: bool = False) -> list[jax.Array]:
    """[x @ matrix[layer] for matrix in matrices]. On a CPU, up to 64 rows are multiplied without copying a layer.

    Args:
        x: [..., inner].
        matrices: stacks [layers, inner, outer], or single matrices [inner, outer].
        layer: the index into each stack, static or traced.
        by_outer: whether the matrices are transposed, [layers, outer, inner].
    """
    rows = x.reshape(-1, x.shape[-1])
    if not all(reads_in_place(rows.shape[0], x.dtype, matrix.dtype) for matrix in matrices):
        selected = [matrix[layer] if matrix.ndim == 3 else matrix for matrix in matrices]
        if by_outer:
            selected = [matrix.T for matrix in selected]
        return [x @ matrix.astype(x.dtype) for matrix in selected]
    ys = _products(rows.astype(jnp.float32), matrices, layer, by_outer=by_outer)
    return [y.reshape(*x.shape[:-1], -1) for y in ys]


def put(stack: jax.Array, layer: Any, slots: jax.Array, new: jax.Array, *, heads_first: bool = False) -> jax.Array:
    """Returns the stack with stack[layer, b, slots[b, i]] = new[b, i]; slots out of range are skipped.

    Args:
        stack: [layers, B, slots, ...]; with `heads_first` [layers, B, K, slots, H].
        layer: the index into the stack, static or traced.
        slots: int32 [B, n]; within a row all slots differ.
        new: [B, n, ...], of the stack's dtype; with `heads_first` [B, n, K, H].
        heads_first: whether the stack's heads come before its slots: stack[layer, b, :, slots[b, i]] = new[b, i].
    """
    if jax.default_backend() == "cpu" and _library.missing() is None:
        return _put(stack, layer, slots, new, heads_first=heads_first)
    if heads_first:
        return _scatter_by_head(stack, layer, slots, new)
    # Negative slots must not count from the end: they are moved past it, where `mode="drop"` skips them.
    slots = jnp.where(slots < 0, stack.shape[2], slots)

    def write_row(row, row_slots, values):
        return row.at[layer, row_slots].set(values, mode="drop", unique_indices=True)

    return jax.vmap(write_row, (1, 0, 0), 1)(stack, slots, new)


def _scatter_by_head(stack: jax.Array, layer: Any, slots: jax.Array, new: jax.Array) -> jax.Array:
    """`put` with heads first, as one scatter that XLA does in place on TPUs.

    `vmap` would move rows and heads to the front of the stack, and a scatter of [K, H] at once needs slots before heads
    in memory. On TPUs, either copies the whole stack for each layer. Devices that split rows or heads send nothing.
    """
    indices = jnp.stack([jnp.full_like(slots, layer), slots], axis=-1)  # negative slots do not count from the end here
    indices = jnp.broadcast_to(indices[:, None], (*stack.shape[1:3], *indices.shape[1:]))  # [B, K, n, 2]
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(3,),
        inserted_window_dims=(0, 3),
        scatter_dims_to_operand_dims=(0, 3),
        operand_batching_dims=(1, 2),
        scatter_indices_batching_dims=(0, 1),
    )
    by_head = jnp.swapaxes(new, 1, 2)
    return jax.lax.scatter(stack, indices, by_head, numbers, unique_indices=True, mode="drop")
