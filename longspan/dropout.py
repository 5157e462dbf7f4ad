"""Counter-based dropout: whether a weight is kept depends only on the key and on which weight it is.

The counter is (batch row, head, query position, key position), so every engine, tiling and sharding drops the same
weights. The hash is 32-bit multiplications, shifts and exclusive ors, so that it vectorises in C++ and on accelerators.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from longspan.array_types import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dropout:
    """What to drop: the rate, two random words from a key, and the numbers of the batch rows and heads."""

    array_axes: ClassVar = dict(rows="B", heads="N")

    key: Any = None  # a JAX random key, from which `drawn` takes the words
    words: Any = None  # uint32 [2]; None until then
    rows: Any = None  # int [B]: the number of each batch row
    heads: Any = None  # int [N]: the number of each head
    rate: float = field(default=0.0, metadata=dict(static=True))

    @property
    def threshold(self) -> int:
        """A weight is dropped if its hash lies below this."""
        return min(round(self.rate * 2**32), 2**32 - 1)

    def drawn(self, rows: Any, heads: Any) -> "Dropout":
        """The dropout of one call, of rows [B] and heads [N] of these numbers, or of so many, numbered from 0."""
        words = jax.random.bits(self.key, (2,), "uint32")
        rows, heads = (jnp.arange(n, dtype=np.int32) if isinstance(n, int) else n for n in (rows, heads))
        return Dropout(words=words, rows=rows, heads=heads, rate=self.rate)


def keep(dropout: Dropout, rows, heads, q_pos, kv_pos) -> Bool[Array, "..."]:
    """Whether each weight is kept. The counters are int arrays that broadcast against each other."""
    rows, heads, q_pos, kv_pos = (jnp.asarray(c).astype(np.uint32) for c in (rows, heads, q_pos, kv_pos))
    first, second = row_words(dropout, rows, heads, q_pos)
    return mix(mix(kv_pos ^ first) + second) >= np.uint32(dropout.threshold)


def row_words(dropout: Dropout, rows, heads, q_pos):
    """Two words for each (batch row, head, query): all of the hash that does not depend on the key's position."""
    return tuple(mix(mix(mix(word + rows) ^ heads) + q_pos) for word in (dropout.words[0], dropout.words[1]))


def mix(x):
    """A bijection of uint32 in which every input bit flips every output bit about half of the time."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
