"""`TpuPlan`: the static part of one call of the Pallas kernels."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.engines.request import Request
from longspan.layout import BlockLayout

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453


@dataclass(frozen=True)
class TpuPlan:
    """The sizes and numbers of one call that the kernels are compiled for."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int
    heads: int  # of the grid: kv heads, or query heads where the mask, the layout or the bias differs between them
    q_tile: int
    kv_tile: int
    q_tiles: int
    kv_tiles: int
    scale: float
    soft_cap: float | None
    dropout_rate: float
    biased: bool
    out_dtype: Any
    interpret: Any

    @classmethod
    def of(cls, request: Request, arrays: Any, layout: BlockLayout, interpret: Any, out_dtype: Any) -> "TpuPlan":
        """The plan of a request whose q, k and v are those of `arrays`: under `vmap` these have more batch rows."""
        rate = 0.0
        if request.dropout is not None:
            rate = request.dropout.rate
        (B, T, N, H), (_, S, K, Hv) = arrays.q.shape, arrays.v.shape
        return cls(
            B=B,
            T=T,
            S=S,
            N=N,
            K=K,
            H=H,
            Hv=Hv,
            heads=N if distinguishes_heads(request, layout) else K,
            q_tile=layout.q_tile,
            kv_tile=layout.kv_tile,
            q_tiles=layout.q_tiles,
            kv_tiles=layout.kv_tiles,
            scale=request.scale,
            soft_cap=request.soft_cap,
            dropout_rate=rate,
            biased=request.bias is not None,
            out_dtype=np.dtype(out_dtype),
            interpret=interpret,
        )

    @property
    def group(self) -> int:
        """The number of query heads per head of the grid. They attend to the same keys in one visit."""
        return self.N // self.heads

    @property
    def rows(self) -> int:
        """The number of query rows in one visit."""
        return self.group * self.q_tile

    @property
    def log_base(self) -> float:
        """The factor from natural scores to the scores in the kernel.

        Without a bias these are logarithms to base 2, because `exp2` is one instruction. A bias may be as low as the
        lowest float, which must not be multiplied.
        """
        return 1.0 if self.biased else LOG2_E

    def exp(self, x: jax.Array) -> jax.Array:
        """The exponential that fits `log_base`."""
        return jnp.exp(x) if self.biased else jnp.exp2(x)

    def kv_head(self, head: Any) -> Any:
        """The kv head of a head of the grid."""
        if self.heads == self.K:
            return head
        return head // (self.heads // self.K)

    @property
    def first_max(self) -> float:
        """Where the running maximum starts: below every score. A bias may be as low as the lowest float."""
        return float(jnp.finfo(np.float32).min) if self.biased else -1e20

    @property
    def masked_score(self) -> float:
        """The score of masked pairs. It is finite, because (-inf) - (-inf) is NaN."""
        return float(jnp.finfo(np.float32).min) if self.biased else -1e30


def distinguishes_heads(request: Request, layout: BlockLayout) -> bool:
    """Whether query heads that share a key/value head may attend to different keys, or have different biases."""
    common = 1 if layout.common is None else layout.common.shape[1]
    return max(layout.starts.shape[1], layout.mask.heads, common) > 1 or request.bias is not None
