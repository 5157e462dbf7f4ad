"""One native call, batched.

What JAX cannot know about a foreign call is said here: how `vmap` folds into the batch.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longspan.array_types import statistics_dtype
from longspan.engines.cpu import library
from longspan.engines.cpu.operands import Plan
from longspan.engines.varying import vary, varying_axes

# Passes of their own for the gradient of one operand, and which.
GRADIENTS = {"bias_gradient": "bias", "table_gradient": "table"}
PAD_BYTES = 64  # rows of the backward pass's scratch: kPadBytes in native/problem.h


def call(kind: str, plan: Plan, qkv, extras, operands, own=()):
    """A native pass, batched by the rule below. Operands: q, k, v, starts, stops, own, the rest."""
    starts, stops, *rest = operands
    query, key, row = ("B", "", "n", ""), ("B", "", "k", ""), ("B", "", "n")
    axes = (query, key, key, *plan.axes[:2], *((row, row, query, row) if own else ()), *plan.axes[2:])
    batched = custom_vmap(partial(_local, kind, plan))
    batched.def_vmap(partial(_fold, batched, kind, axes))
    everything = (*qkv, starts, stops, *own, *extras, *rest)
    return batched(*vary(everything, varying_axes(everything)))


# Names of a first axis over batch rows: of size B; of size B or 1; of size B or 1, but alike in all tables of a layout.
BATCH = ("B", "b", "l")


def _fold(call, kind: str, axes, size: int, batched, *operands):
    """vmap: the mapped axis becomes part of the batch. What has no batch axis, or is summed over it, runs in a loop."""
    foldable = all(names[0] in BATCH for names, is_batched in zip(axes, batched, strict=True) if is_batched)
    if kind in GRADIENTS or not foldable:
        moving = [x for x, b in zip(operands, batched, strict=True) if b]

        def one(moved):
            moved = iter(moved)
            return call(*(next(moved) if b else x for x, b in zip(operands, batched, strict=True)))

        out = jax.lax.map(one, moving)
        return out, jax.tree.map(lambda _: True, out)
    rows = operands[0].shape[1] if batched[0] else operands[0].shape[0]
    moved = {names[0] for names, is_batched in zip(axes, batched, strict=True) if is_batched}

    def fold(x, is_batched, names):
        may_stay = names[0] == "b" or (names[0] == "l" and "l" not in moved)
        if names[0] not in BATCH or (may_stay and not is_batched and x.shape[0] == 1):
            return x
        x = x if is_batched else x[None]
        return jnp.broadcast_to(x, (size, rows, *x.shape[2:])).reshape(size * rows, *x.shape[2:])

    out = call(*(fold(*each) for each in zip(operands, batched, axes, strict=True)))
    out = jax.tree.map(lambda x: x.reshape(size, rows, *x.shape[1:]), out)
    return out, jax.tree.map(lambda _: True, out)


def call_layer(plan: Plan, q, k, v, operands):
    """A forward pass with one layer of stacks of keys and values, which the plan names."""
    return _local("forward", plan, q, k, v, *operands)


def _local(kind: str, plan: Plan, *operands):
    """The native call itself, on the shapes it gets."""
    q, k, v = operands[:3]
    (B, T, N, _), (S, K, Hv) = q.shape, v.shape[-3:]
    stats = statistics_dtype(q.dtype)
    result = partial(_result, jax.typeof(q))

    target, attributes = f"longspan_{kind}", plan.attributes()
    if kind in ("forward", "wide_forward"):
        row = result((B, T, N), stats)
        results = (result((B, T, N, Hv), q.dtype if kind == "forward" else stats), row, row)
        return library.call("longspan_forward", results, operands, **attributes)
    if kind == "backward":
        unit = PAD_BYTES // np.dtype(stats).itemsize
        # Room for several chunks of queries to add up dk and dv on their own: see native/backward.h.
        rows = S + min(S, max(8192, S // 4))
        scratch = [result((B, K, rows, -(-x.shape[3] // unit) * unit), stats) for x in (k, v)]
        results = (*(result(x.shape, x.dtype) for x in (q, k, v)), *scratch)
        if plan.role("slopes") >= 0:
            results = (*results, result((B, T, N), stats))
        out = library.call(target, results, operands, **attributes)
        return (*out[:3], *out[5:])
    shape = _gradient_shape(kind, plan, operands)
    chunks = min(8, -(-T // plan.q_tile)) if shape[2] == 1 and T > 1 else 0
    results = (result(shape, stats), result((chunks, *shape), stats))
    of_table = np.int64(kind == "table_gradient")
    return library.call("longspan_bias_gradient", results, operands, **attributes, of_table=of_table)[:1]


def _gradient_shape(kind: str, plan: Plan, operands) -> tuple[int, ...]:
    """The shape of a bias's gradient, as the kernel writes it: a table [N, X] as [1, N, 1, X]."""
    shape = operands[9 + plan.role(GRADIENTS[kind])].shape
    return shape if kind == "bias_gradient" else (1, shape[0], 1, shape[1])


def _result(like, shape, dtype) -> jax.ShapeDtypeStruct:
    """What a call returns; inside shard_map it varies along the same mesh axes as q."""
    if not like.manual_axis_type.varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = NamedSharding(like.sharding.mesh, P(*[None] * len(shape)))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=like.manual_axis_type)
