"""Head sizes, parameter partitioning, a norm and a dot product that the linen and the NNX modules share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longspan.array_types import statistics_dtype
from longspan.axes import on_auto_axes, spec_entries, unique_spec


class Heads(NamedTuple):
    """The numbers of query heads and of key/value heads, and the size of each head."""

    num: int
    num_kv: int
    size: int

    def of(self, name: str) -> tuple[int, int]:
        """The output shape (heads, size) of a projection, named `query`, `key`, `value` or e.g. `query_global`."""
        if name.startswith("query"):
            return self.num, self.size
        return self.num_kv, self.size


def resolve_heads(
    num_heads: int, num_kv_heads: int | None, head_dim: int | None, qkv_features: int | None, in_features: int
) -> Heads:
    """The heads of a module. Without `head_dim`, `qkv_features` or else `in_features` are divided among the heads."""
    num_kv = num_kv_heads
    if num_kv is None:
        num_kv = num_heads
    if num_heads < 1 or num_kv < 1 or num_heads % num_kv:
        raise ValueError(
            f"`num_heads` must be a multiple of `num_kv_heads`, got {num_heads} and {num_kv}. Change one of them."
        )
    if head_dim is not None:
        if qkv_features not in (None, num_heads * head_dim):
            raise ValueError(
                f"`qkv_features` must be num_heads · head_dim = {num_heads * head_dim}, got {qkv_features}. Give only "
                "one of `head_dim` and `qkv_features`."
            )
        return Heads(num_heads, num_kv, head_dim)
    name, features = "`qkv_features`", qkv_features
    if features is None:
        name, features = "The number of input features", in_features
    if features % num_heads:
        raise ValueError(
            f"{name} must be a multiple of num_heads={num_heads}, got {features}. Give `head_dim`, or change one of "
            "them."
        )
    return Heads(num_heads, num_kv, features // num_heads)


class Partitioning(NamedTuple):
    """The mesh axes that split a projection's kernel and bias, one entry per array axis (None: not split)."""

    kernel: tuple[str | None, ...]
    bias: tuple[str | None, ...]


def partitioning_of(name: str, head_axis: str, heads: Heads) -> Partitioning:
    """Splits the heads of a projection over a mesh axis; the output projection sums over its heads."""
    if name == "out":
        return Partitioning((head_axis, None, None), (None,))
    if heads.of(name)[0] == 1:  # a single head cannot be split: every device holds it
        return Partitioning((None, None, None), (None, None))
    return Partitioning((None, head_axis, None), (head_axis, None))


def check_partitioning(partition_params: bool, head_axis: str | None) -> str | None:
    """The mesh axis that splits the parameters' heads; None if the parameters have no partitioning metadata."""
    if not partition_params:
        return None
    if not isinstance(head_axis, str):
        raise ValueError(
            f"`head_axis` must be the name of one mesh axis, got {head_axis!r}: `partition_params=True` splits the "
            "parameters over this axis. Name the mesh axis that splits heads."
        )
    return head_axis


def rms_norm(
    x: jax.Array, scale: jax.Array, eps: float, *, dtype: Any = None, adds_one: bool = False, rounds_first: bool = False
) -> jax.Array:
    """Root mean square norm over the last axis, x / √(mean(x²) + eps) · scale: at least in float32, rounded once.

    Args:
        x: [..., D].
        scale: [D].
        eps: a small number, added to the mean square.
        dtype: dtype of the result; by default that of `x`.
        adds_one: whether to multiply by 1 + scale.
        rounds_first: whether to round the quotient to `dtype` before it is multiplied by the scale.
    """
    if dtype is None:
        dtype = x.dtype
    wide = statistics_dtype(x.dtype)
    y = x.astype(wide)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    if rounds_first:
        y, wide = y.astype(dtype), dtype
    scale = scale.reshape(*[1] * (x.ndim - 1), -1).astype(wide)
    if adds_one:
        scale = 1 + scale
    return (y * scale).astype(dtype)


def dot_general(x, kernel, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None):
    """`jax.lax.dot_general`, also for operands on explicit mesh axes, for which JAX would require `out_sharding`."""
    if out_sharding is not None:
        given: dict[str, Any] = dict(precision=precision, preferred_element_type=preferred_element_type)
        return jax.lax.dot_general(x, kernel, dimension_numbers, **given, out_sharding=out_sharding)
    static = dimension_numbers, precision, preferred_element_type
    return on_auto_axes(_product, _product_specs, static, (x, kernel))


def _product(dimension_numbers, precision, preferred_element_type, x, kernel):
    given: dict[str, Any] = dict(precision=precision, preferred_element_type=preferred_element_type)
    return jax.lax.dot_general(x, kernel, dimension_numbers, **given)


def _product_specs(dimension_numbers, precision, preferred_element_type, operands, product):
    """Axes that are not summed over stay split as they are in the operands: first those of x, then the kernel's."""
    sides = zip(operands, dimension_numbers[0], strict=True)
    return unique_spec(
        *(entry for side, summed in sides for axis, entry in enumerate(spec_entries(side)) if axis not in summed)
    )
