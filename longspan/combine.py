"""`merge`: attention over disjoint sets of keys, joined to attention over all of them."""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from longspan.array_types import Array, LogSumExp, Output, no_type_check, statistics_dtype


class Result(NamedTuple):
    """Attention over some keys: what a forward pass gives, and what its backward pass gets.

    Example:
        >>> from longspan.engines import Result
        >>> Result(out=jnp.zeros((1, 3, 2, 4)), lse=jnp.zeros((1, 3, 2))).lse_residual is None
        True
    """

    out: Any  # [B, T, N, Hv], in the dtype of q or wider
    lse: Any  # [B, T, N], float32 or 64
    lse_residual: Any = None  # [B, T, N]: what lse lost by rounding; None: not known, taken for 0
    residuals: Any = None  # arrays that an engine's own backward pass reads besides


@no_type_check
def merge(
    outs: Sequence[Float[Array, "B T N H"]],
    lses: Sequence[Float[Array, "B T N"]],
    *,
    sinks: Float[Array, "N"] | None = None,
) -> tuple[Output, LogSumExp]:
    """Attention over the union of disjoint sets of keys, from the results over each: Σ exp(lseᵢ) outᵢ / Σ exp(lseᵢ).

    What `attention(..., return_lse=True)` gives for parts of the keys becomes what it gives for all of them, in any
    split and any order; a part may be empty, for some queries or for all (lse = -inf there). It is differentiable.

    Args:
        outs: outputs [B, T, N, H], one for each set of keys, computed *without* sinks.
        lses: their log-sum-exps [B, T, N], in the same order.
        sinks: one logit per head, [N], that takes part in the softmax of the whole: given here once instead of in every
            part.

    Returns:
        (out, lse) as of one call: out in the dtype of `outs`, lse in float32 (float64 for float64), the sink included.

    A float32 lse near -1e9, as people mask with, holds nothing of the logarithm of the sum: rows whose every score is
    that low do not merge exactly.

    Example:
        >>> q, k, v = ls.testing.make_qkv(ls.testing.Shape(B=1, T=3, S=8, N=2, K=1, H=4), jnp.float32)
        >>> parts = [ls.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 5), slice(5, 8))]
        >>> out, lse = merge(*zip(*parts))
        >>> whole = ls.attention(q, k, v)
        >>> np.allclose(out, whole, atol=1e-6)
        True
    """
    outs, lses = tuple(outs), tuple(lses)
    _check_parts(outs, lses, sinks)
    dtype = statistics_dtype(outs[0].dtype)
    parts = [Result(out, jnp.asarray(lse).astype(dtype)) for out, lse in zip(outs, lses, strict=True)]
    if sinks is not None:
        logits = jnp.asarray(sinks).astype(dtype).reshape(1, 1, -1)
        parts.append(Result(None, jnp.broadcast_to(logits, parts[0].lse.shape)))
    out, lse, *_ = combine(parts)
    return out.astype(outs[0].dtype), lse


def combine(parts: Sequence[Result], *, across: str | None = None) -> Result:
    """Attention over the union of disjoint sets of keys: of some parts, or of those of all devices of a mesh axis.

    A part may be empty, for some queries or for all: then its lse is -inf, and its out may hold anything. A part
    without `out` is a logit that has no value, such as a sink. It is differentiable, if it is not `across` devices.
    """
    most = jax.lax.stop_gradient(reduce(jnp.maximum, [part.lse for part in parts]))
    most = most if across is None else jax.lax.pmax(most, across)
    most = jnp.where(jnp.isfinite(most), most, 0)
    seen = [part.lse != -jnp.inf for part in parts]  # NaN is seen: it must show
    weights = [_weight(part, some, most) for part, some in zip(parts, seen, strict=True)]
    valued = [each for each in zip(parts, seen, weights, strict=True) if each[0].out is not None]
    total = reduce(jnp.add, weights)
    out = reduce(jnp.add, [_weighted(*each) for each in valued])
    if across is not None:
        total, out = jax.lax.psum((total, out), across)
    result = normalised(most, total, out)
    if len(valued) == len(parts):
        return result
    # Queries that see no key have no value either, be a sink's logit what it may: infinite, or NaN.
    some = reduce(jnp.logical_or, [some for _, some, _ in valued])
    out, residual = jnp.where(some[..., None], result.out, 0), jnp.where(some, result.lse_residual, 0)
    return result._replace(out=out, lse_residual=residual)


def normalised(most, total, out) -> Result:
    """The result of sums over keys: `total` [...] of exp(score - most), `out` [..., H] of that times the values."""
    empty = total == 0
    total = jnp.where(empty, 1, total)
    log_total = jnp.log(total)
    lse = most + log_total
    # Where scores are -1e9, as people mask with, rounding takes the whole logarithm.
    residual = jnp.where(empty, 0, log_total - (lse - most))
    return Result(out / total[..., None], jnp.where(empty, -jnp.inf, lse), residual)


def _weight(part: Result, some, most):
    """exp(lse - most) of a part, 0 where it is empty."""
    # Not just exp(-inf - most) = 0: its derivative must be 0 too, where a query sees nothing at all.
    level = jnp.where(some, part.lse, 0) - most
    return jnp.where(some, jnp.exp(level if part.lse_residual is None else level + part.lse_residual), 0)


def _weighted(part: Result, some, weight):
    """A part's values times its weight; where it is empty, there is nothing to add, whatever it holds."""
    return jnp.where(some[..., None], part.out, 0).astype(weight.dtype) * weight[..., None]


def _check_parts(outs: Sequence, lses: Sequence, sinks) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"`merge` needs as many `outs` as `lses`, at least one, got {len(outs)} and {len(lses)}. Pass what "
            "`attention(..., return_lse=True)` gave for each set of keys."
        )
    for name, arrays, rank in (("outs", outs, 4), ("lses", lses, 3)):
        shapes = [tuple(getattr(a, "shape", ())) for a in arrays]
        if len(set(shapes)) > 1 or len(shapes[0]) != rank or shapes[0][:3] != tuple(outs[0].shape[:3]):
            axes = "[B, T, N, H]" if rank == 4 else f"[B, T, N] = {list(outs[0].shape[:3])}"
            raise ValueError(f"`{name}` must all have one shape {axes}, got {', '.join(map(str, shapes))}.")
        if len({a.dtype for a in arrays}) > 1 or not jnp.issubdtype(arrays[0].dtype, jnp.floating):
            raise TypeError(f"`{name}` must all have one float dtype, got {', '.join(str(a.dtype) for a in arrays)}.")
    heads = outs[0].shape[2]
    floats = sinks is None or jnp.issubdtype(getattr(sinks, "dtype", int), jnp.floating)
    if sinks is not None and (tuple(getattr(sinks, "shape", ())) != (heads,) or not floats):
        raise ValueError(f"`sinks` must be one float logit per query head, shape [{heads}], got {sinks!r}.")
