"""Counter-based dropout: the random key and the index of a weight decide whether the weight is kept.

The counter is (batch row, head, query position, key position), so every engine, tiling and sharding drops the same
weights. The hash uses only 32-bit multiplications, shifts and exclusive ors: it vectorises in C++ and on accelerators.
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
    """Dropout of one call: the rate, two random words from a key, and the indices of the batch rows and heads."""

    array_axes: ClassVar = dict(rows="B", heads="N")

    key: Any = None  # a JAX random key, from which `drawn` draws the words
    words: Any = None  # uint32 [2]; None before `drawn`
    rows: Any = None  # int [B]: the index of each batch row
    heads: Any = None  # int [N]: the index of each head
    rate: float = field(default=0.0, metadata=dict(static=True))

    @property
    def threshold(self) -> int:
        """Weights whose hash is below this number are dropped."""
        return min(round(self.rate * 2**32), 2**32 - 1)

    def drawn(self, rows: Any, heads: Any) -> "Dropout":
        """Draws the random words of one call.

        `rows` and `heads` are indices, int [B] and [N], or counts; counted rows and heads have the indices 0, 1, ….
        """
        words = jax.random.bits(self.key, (2,), "uint32")
        return Dropout(words=words, rows=_indices(rows), heads=_indices(heads), rate=self.rate)


def keep(dropout: Dropout, rows, heads, q_pos, kv_pos) -> Bool[Array, "..."]:
    """Whether each weight is kept. The counters are int arrays that broadcast against each other."""
    first, second = row_words(dropout, _unsigned(rows), _unsigned(heads), _unsigned(q_pos))
    return mix(mix(_unsigned(kv_pos) ^ first) + second) >= np.uint32(dropout.threshold)


def row_words(dropout: Dropout, rows, heads, q_pos):
    """Two words per (batch row, head, query): the part of the hash that is the same for every key."""
    return tuple(mix(mix(mix(word + rows) ^ heads) + q_pos) for word in (dropout.words[0], dropout.words[1]))


def mix(x):
    """A bijection of uint32 in which every input bit flips every output bit about half of the time."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _indices(given: Any) -> Any:
    if isinstance(given, int):
        return jnp.arange(given, dtype=np.int32)
    return given


def _unsigned(counter: Any) -> jax.Array:
    return jnp.asarray(counter).astype(np.uint32)
