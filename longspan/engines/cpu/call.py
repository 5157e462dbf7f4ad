"""The foreign calls of the native passes, and how `vmap` batches them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longspan.array_types import statistics_dtype
from longspan.engines.cpu import library
from longspan.engines.cpu.operands import KernelPlan
from longspan.engines.varying import vary, varying_axes

# The passes that compute the gradient of one operand, and its role.
GRADIENTS = {"bias_gradient": "bias", "table_gradient": "table"}
PAD_BYTES = 64  # the rows of the backward pass's scratch are padded to this: kPadBytes in native/problem.h


def call(kind: str, plan: KernelPlan, qkv, extras, operands, by_query=()):
    """A native pass that `vmap` batches. The kernel's operands: q, k, v, starts, stops, `by_query`, then all others.

    `by_query` is (lse, lse_residual, dout, delta) in the backward passes.
    """
    starts, stops, *rest = operands
    query, key, row = ("B", "", "n", ""), ("B", "", "k", ""), ("B", "", "n")
    axes = [query, key, key, *plan.axes[:2]]
    if by_query:
        axes += [row, row, query, row]
    axes += plan.axes[2:]
    batched = custom_vmap(partial(_call_kernel, kind, plan))
    batched.def_vmap(partial(_fold_into_batch, batched, kind, axes))
    everything = (*qkv, starts, stops, *by_query, *extras, *rest)
    return batched(*vary(everything, varying_axes(everything)))


# The names of a first axis over batch rows. "B": of size B. "b": of size B or 1. "l": of size B or 1, and of the same
# size in all tables of a layout.
BATCH = ("B", "b", "l")


def _fold_into_batch(call, kind: str, axes, size: int, batched, *operands):
    """The rule of `vmap`: the mapped axis becomes part of the batch.

    Passes that sum over the batch, and mapped operands without a batch axis, run in a loop instead.
    """
    foldable = all(names[0] in BATCH for names, is_batched in zip(axes, batched, strict=True) if is_batched)
    if kind in GRADIENTS or not foldable:
        out = _loop_over_batch(call, batched, operands)
        return out, jax.tree.map(lambda _: True, out)
    rows = operands[0].shape[1] if batched[0] else operands[0].shape[0]
    mapped_names = {names[0] for names, is_batched in zip(axes, batched, strict=True) if is_batched}

    def fold(x, is_batched, names):
        may_stay = names[0] == "b" or (names[0] == "l" and "l" not in mapped_names)
        if names[0] not in BATCH or (may_stay and not is_batched and x.shape[0] == 1):
            return x
        if not is_batched:
            x = x[None]
        return jnp.broadcast_to(x, (size, rows, *x.shape[2:])).reshape(size * rows, *x.shape[2:])

    out = call(*(fold(*each) for each in zip(operands, batched, axes, strict=True)))
    out = jax.tree.map(lambda x: x.reshape(size, rows, *x.shape[1:]), out)
    return out, jax.tree.map(lambda _: True, out)


def _loop_over_batch(call, batched, operands):
    """Calls the pass once for each element of the mapped axis."""
    mapped = [x for x, is_batched in zip(operands, batched, strict=True) if is_batched]

    def call_one(elements):
        elements = iter(elements)
        return call(*(next(elements) if b else x for x, b in zip(operands, batched, strict=True)))

    return jax.lax.map(call_one, mapped)


def call_layer(plan: KernelPlan, q, k, v, operands):
    """The forward pass for one layer of stacked keys and values; the plan has the layer's number as an operand."""
    return _call_kernel("forward", plan, q, k, v, *operands)


def _call_kernel(kind: str, plan: KernelPlan, *operands):
    """The foreign call, with results of the shapes that the operands imply."""
    q, k, v = operands[:3]
    (B, T, N, _), (S, K, Hv) = q.shape, v.shape[-3:]
    stats = statistics_dtype(q.dtype)
    result = partial(_result, jax.typeof(q))

    attributes = plan.attributes()
    if kind in ("forward", "wide_forward"):
        out = result((B, T, N, Hv), q.dtype if kind == "forward" else stats)
        row = result((B, T, N), stats)
        return library.call("longspan_forward", (out, row, row), operands, **attributes)
    if kind == "backward":
        unit = PAD_BYTES // np.dtype(stats).itemsize
        # Scratch memory for several chunks of queries, each of which sums its own dk and dv: see native/backward.h.
        rows = S + min(S, max(8192, S // 4))
        scratch = [result((B, K, rows, -(-x.shape[3] // unit) * unit), stats) for x in (k, v)]
        results = (*(result(x.shape, x.dtype) for x in (q, k, v)), *scratch)
        if plan.role("slopes") >= 0:
            results = (*results, result((B, T, N), stats))
        dq, dk, dv, _, _, *dslopes = library.call("longspan_backward", results, operands, **attributes)
        return dq, dk, dv, *dslopes
    shape = _gradient_shape(kind, plan, operands)
    chunks = 0
    if shape[2] == 1 and T > 1:
        chunks = min(8, -(-T // plan.q_tile))
    results = (result(shape, stats), result((chunks, *shape), stats))
    of_table = np.int64(kind == "table_gradient")
    return library.call("longspan_bias_gradient", results, operands, **attributes, of_table=of_table)[:1]


def _gradient_shape(kind: str, plan: KernelPlan, operands) -> tuple[int, ...]:
    """The shape of the gradient of a bias, as the kernel writes it: a table [N, X] as [1, N, 1, X]."""
    shape = operands[9 + plan.role(GRADIENTS[kind])].shape
    if kind == "bias_gradient":
        return shape
    return 1, shape[0], 1, shape[1]


def _result(like, shape, dtype) -> jax.ShapeDtypeStruct:
    """The type of a result; inside `shard_map` it varies along the same mesh axes as q."""
    if not like.manual_axis_type.varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = NamedSharding(like.sharding.mesh, P(*[None] * len(shape)))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=like.manual_axis_type)
