"""What an engine is asked to do, by shapes alone."""

from dataclasses import dataclass
from typing import Any

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
