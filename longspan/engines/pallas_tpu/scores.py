"""What both passes compute for the pairs of one visit: products, scores, the bias and dropout."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longspan.dropout import mix
from longspan.engines.pallas_tpu.places import LANES
from longspan.engines.pallas_tpu.plan import TpuPlan

ROWS_BY_ROWS = (((1,), (1,)), ((), ()))  # a @ b.T
ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))  # a @ b
COLUMNS_BY_COLUMNS = (((0,), (0,)), ((), ()))  # a.T @ b


class Scores(NamedTuple):
    """Scores of a visit, and the derivative of the soft cap at each of them (None without a cap)."""

    values: Any
    slope: Any


def product(a: jax.Array, b: jax.Array, dims: Any) -> jax.Array:
    """A matrix product with float32 sums. float32 operands are multiplied in full precision."""
    precision = lax.Precision.HIGHEST if a.dtype == np.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=np.float32)


def scores_of(plan: TpuPlan, products: jax.Array, bias: Any) -> Scores:
    """The scores of products q·k: scaled, capped, with the bias added; logarithms of base `plan.log_base`."""
    slope = None
    if plan.soft_cap is None:
        scores = products * (plan.scale * plan.log_base)
    else:
        capped = jnp.tanh(products * (plan.scale / plan.soft_cap))
        scores, slope = capped * (plan.soft_cap * plan.log_base), 1 - capped * capped
    if bias is not None:
        scores = scores + bias
    return Scores(scores, slope)


def as_columns(column: jax.Array, count: int) -> jax.Array:
    """A column [rows, 128] of repeated numbers as [rows, count], without moving data across lanes."""
    if count <= LANES:
        return column[:, :count]
    if count % LANES == 0:
        return jnp.tile(column, (1, count // LANES))
    return jnp.broadcast_to(column[:, :1], (column.shape[0], count))


def kept(plan: TpuPlan, words: Any, kv_positions: Any) -> jax.Array:
    """Whether dropout keeps each weight, from the two words of each query; see `longspan.dropout.keep`."""
    first, second = words
    first, second = lax.bitcast_convert_type(first, np.uint32), lax.bitcast_convert_type(second, np.uint32)
    hashed = mix(mix(lax.bitcast_convert_type(kv_positions, np.uint32) ^ first) + second)
    return hashed >= np.uint32(min(round(plan.dropout_rate * 2**32), 2**32 - 1))


def drop(plan: TpuPlan, keep: Any, values: jax.Array) -> jax.Array:
    """Dropout of the weights of a visit, or of their gradients; without dropout `keep` is None."""
    if keep is None:
        return values
    return jnp.where(keep, values / (1 - plan.dropout_rate), 0.0)


def seen_rows(pairs: jax.Array) -> jax.Array:
    """Whether any pair of each row is allowed: bools [rows, 1]."""
    return jnp.max(pairs.astype(np.float32), axis=1, keepdims=True) > 0


def seen_columns(pairs: jax.Array) -> jax.Array:
    """Whether any pair of each column is allowed, as a column: bools [columns, 1]."""
    found = jnp.max(pairs.astype(np.float32), axis=0, keepdims=True)
    return jnp.broadcast_to(found, (LANES, found.shape[1])).T[:, :1] > 0


def only(seen: jax.Array, x: jax.Array) -> jax.Array:
    """The rows of x that are seen, and zeros for the others, which may hold NaN."""
    return jnp.where(seen, x.astype(np.float32), 0.0).astype(x.dtype)
