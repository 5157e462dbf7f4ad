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

from longspan._types import Array

BATCH_AXES, HEAD_AXES = ("dp", "fsdp"), ("tp",)  # the mesh axes that split rows and heads, as `parallel.mesh` has them


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dropout:
    """What to drop: two random words from the key, the rate, and the counters of the batch rows and heads."""

    array_axes: ClassVar = dict(rows="B", heads="N")

    words: Any = None  # uint32 [2]; None while a call is only judged
    rows: Any = None  # int [B]: the number of each batch row
    heads: Any = None  # int [N]: the number of each head
    rate: float = field(default=0.0, metadata=dict(static=True))

    @property
    def threshold(self) -> int:
        """A weight is dropped if its hash lies below this."""
        return min(round(self.rate * 2**32), 2**32 - 1)


def make_dropout(key, rate: float, batch: Any, heads: Any) -> Dropout | None:
    """The dropout of one call of so many batch rows and heads, or of rows [B] and heads [N] of such numbers.

    None if nothing is dropped.
    """
    if rate == 0.0:
        return None
    words = jax.random.bits(key, (2,), "uint32")
    rows, heads = (jnp.arange(n, dtype=np.int32) if isinstance(n, int) else n for n in (batch, heads))
    return Dropout(words, rows, heads, rate)


def numbers_of(q) -> tuple[Any, Any]:
    """The numbers of a call's batch rows and heads: inside of a `shard_map` over axes of such names, in the whole."""
    return _numbers(q, q.shape[0], BATCH_AXES), _numbers(q, q.shape[2], HEAD_AXES)


def _numbers(q, size: int, names: tuple[str, ...]) -> Any:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    mine = tuple(name for name in names if name in manual and _differs(q, name))
    if not mine:
        return size
    return jax.lax.axis_index(mine).astype(np.int32) * np.int32(size) + jnp.arange(size, dtype=np.int32)


def _differs(x, axis: str) -> bool:
    """Whether an array is another on every device of a manual axis; where JAX keeps no track of it, taken to be."""
    tracked = axis in jax.typeof(jax.lax.axis_index(axis)).mat.varying
    return axis in jax.typeof(x).mat.varying or not tracked


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
