"""`merge`: attention over disjoint sets of keys, joined to attention over all of them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Float

from longspan._types import Array, LogSumExp, Output, no_type_check, statistics_dtype


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
    levels = [jnp.asarray(lse).astype(dtype) for lse in lses]
    if sinks is not None:
        levels.append(jnp.broadcast_to(jnp.asarray(sinks).astype(dtype).reshape(1, 1, -1), levels[0].shape))
    most = jax.lax.stop_gradient(jnp.max(jnp.stack(levels), axis=0))
    most = jnp.where(jnp.isfinite(most), most, 0)
    # Not just exp(-inf - most) = 0: its derivative must be 0 too, where a query sees nothing at all.
    seen = [level != -jnp.inf for level in levels]  # NaN is seen: it must show
    powers = [
        jnp.where(some, jnp.exp(jnp.where(some, level, 0) - most), 0) for some, level in zip(seen, levels, strict=True)
    ]
    total = sum(powers[1:], powers[0])
    empty = total == 0
    lse = jnp.where(empty, -jnp.inf, most + jnp.log(jnp.where(empty, 1, total)))
    weights = [power / jnp.where(empty, 1, total) for power in powers]
    # A part that sees nothing has nothing to add, whatever it holds.
    parts = [
        jnp.where(some[..., None], out, 0).astype(dtype) * weight[..., None]
        for some, out, weight in zip(seen, outs, weights, strict=False)
    ]
    return sum(parts[1:], parts[0]).astype(outs[0].dtype), lse


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
