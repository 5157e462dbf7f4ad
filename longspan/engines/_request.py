"""What an engine is asked to do, by shapes alone, and the answer when there is nothing to do."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from longspan._types import statistics_dtype
from longspan.layout import BlockLayout
from longspan.masks import Mask


@dataclass(frozen=True)
class Request:
    """One call of `attention`, as engines judge it: shapes and dtypes, the mask, which features, where it runs."""

    q: Any  # anything with shape and dtype
    k: Any
    mask: Mask
    layout: BlockLayout | None  # planned by the caller; engines use their own tiles otherwise
    bias: Any
    sinks: Any
    dropout_rate: float
    platform: str

    @property
    def dims(self) -> dict[str, int]:
        (batch, q_len, heads, size), (_, kv_len, kv_heads, _) = self.q.shape, self.k.shape
        return dict(B=batch, T=q_len, S=kv_len, N=heads, K=kv_heads, H=size)


def without_pairs(q, sinks):
    """The result of a call without queries, keys or heads: zeros, and the sinks' logits as lse."""
    B, T, N, _ = q.shape
    dtype = statistics_dtype(q.dtype)
    sink = jnp.full((N,), -jnp.inf, dtype) if sinks is None else sinks.astype(dtype)
    return jnp.zeros_like(q), jnp.broadcast_to(sink.reshape(1, 1, N), (B, T, N))
