"""`merge`: combines attention over disjoint sets of keys into attention over their union."""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from longspan.array_types import Array, LogSumExp, Output, no_type_check, statistics_dtype


class Result(NamedTuple):
    """The result of an engine's forward pass. Its backward pass receives it.

    Example:
        >>> from longspan.engines import Result
        >>> Result(out=jnp.zeros((1, 3, 2, 4)), lse=jnp.zeros((1, 3, 2))).lse_residual is None
        True
    """

    out: Any  # [B, T, N, Hv], in the dtype of q or wider
    lse: Any  # [B, T, N], float32 or 64
    lse_residual: Any = None  # [B, T, N]: the rounding error of lse, exact lse minus `lse`; None counts as 0
    residuals: Any = None  # further arrays for the backward pass of the same engine


@no_type_check
def merge(
    outs: Sequence[Float[Array, "B T N H"]],
    lses: Sequence[Float[Array, "B T N"]],
    *,
    sinks: Float[Array, "N"] | None = None,
) -> tuple[Output, LogSumExp]:
    """Combines attention over disjoint sets of keys into attention over their union: Σ exp(lseᵢ) outᵢ / Σ exp(lseᵢ).

    Call `attention(..., return_lse=True)` for each set of keys. The split and the order of the sets do not matter. A
    set may have no allowed key for some queries, or for all (lse = -inf there). `merge` is differentiable.

    Args:
        outs: outputs [B, T, N, H], one for each set of keys, computed *without* sinks.
        lses: their log-sum-exps [B, T, N], in the same order.
        sinks: one logit per head, [N], that takes part in the softmax over the union. Pass sinks only here, not in the
            calls of `attention`.

    Returns:
        (out, lse) as one call of `attention` would return them: out in the dtype of `outs`, lse in float32 (float64 for
        float64), with the sinks.

    Rows whose scores are all near -1e9, a common mask value, do not merge exactly: a float32 lse of that size has lost
    the logarithm of the sum.

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
    """Attention over the union of disjoint sets of keys; with `across`, also over the devices of a mesh axis.

    Where a part has no allowed key, its lse is -inf and its out is ignored. A part without `out` is a logit without a
    value, such as a sink. Differentiable, unless it is `across` devices.
    """
    max_lse = jax.lax.stop_gradient(reduce(jnp.maximum, [part.lse for part in parts]))
    if across is not None:
        max_lse = jax.lax.pmax(max_lse, across)
    max_lse = jnp.where(jnp.isfinite(max_lse), max_lse, 0)
    has_keys = [part.lse != -jnp.inf for part in parts]  # True for NaN, which must reach the result
    weights = [_weight(part, has, max_lse) for part, has in zip(parts, has_keys, strict=True)]
    valued = [each for each in zip(parts, has_keys, weights, strict=True) if each[0].out is not None]
    total = reduce(jnp.add, weights)
    out = reduce(jnp.add, [_weighted_values(*each) for each in valued])
    if across is not None:
        total, out = jax.lax.psum((total, out), across)
    result = normalised(max_lse, total, out)
    if len(valued) == len(parts):
        return result
    # Queries that see no key give zeros, also where the logit of a sink is infinite or NaN.
    has_value = reduce(jnp.logical_or, [has for _, has, _ in valued])
    out = jnp.where(has_value[..., None], result.out, 0)
    return result._replace(out=out, lse_residual=jnp.where(has_value, result.lse_residual, 0))


def normalised(max_score, total, out) -> Result:
    """The result from sums over keys: `total` [...] of exp(score - max_score), `out` [..., H] of these times values."""
    empty = total == 0
    total = jnp.where(empty, 1, total)
    log_total = jnp.log(total)
    lse = max_score + log_total
    # Where scores are near -1e9, a common mask value, the sum rounds the whole logarithm away.
    residual = jnp.where(empty, 0, log_total - (lse - max_score))
    return Result(out / total[..., None], jnp.where(empty, -jnp.inf, lse), residual)


def _weight(part: Result, has_keys, max_lse):
    """exp(lse - max_lse) of a part, 0 where it has no keys."""
    # Two `where`s, although exp(-inf - max_lse) is 0: its derivative must be 0 too where a query sees no key at all.
    exponent = jnp.where(has_keys, part.lse, 0) - max_lse
    if part.lse_residual is not None:
        exponent = exponent + part.lse_residual
    return jnp.where(has_keys, jnp.exp(exponent), 0)


def _weighted_values(part: Result, has_keys, weight):
    """The values of a part times its weight, 0 where it has no keys."""
    return jnp.where(has_keys[..., None], part.out, 0).astype(weight.dtype) * weight[..., None]


def _check_parts(outs: Sequence, lses: Sequence, sinks) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"`merge` needs as many `outs` as `lses`, at least one, got {len(outs)} and {len(lses)}. Pass the results "
            "of `attention(..., return_lse=True)` for each set of keys."
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
