"""The parts of a call's arrays that one visit of the `xla` engine reads and writes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import statistics_dtype
from longspan.biases import Bias
from longspan.dropout import Dropout
from longspan.layout import BlockLayout

ZERO = np.int32(0)  # indices share one dtype, also under x64


@dataclass(frozen=True)
class Plan:
    """The static part of a call."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int
    scale: float
    soft_cap: float | None
    width: int  # keys visited at once
    per_head: bool  # the layout differs between heads
    together: int = 1  # heads (see below) computed side by side

    @property
    def heads(self) -> int:
        """How many heads the loop goes through: key/value heads, or query heads if their layouts differ."""
        return self.N if self.per_head else self.K

    @property
    def group(self) -> int:
        """Query heads computed as one, on the same keys."""
        return self.N // self.heads

    def copies(self, layout: BlockLayout) -> bool:
        """Whether a head's keys and values are copied side by side: if its tiles read them all anyway."""
        return layout.q_tiles * self.width >= self.S


class Tensors(NamedTuple):
    """A call's arrays, long enough for every slice of a tile. Copied only where they must be padded."""

    q: Any  # [B, T', N, H]
    k: Any  # [B, S', K, H]
    v: Any  # [B, S', K, Hv]
    biases: tuple[Any, ...]  # what is summed: arrays [B or 1, N or 1, T' or 1, S' or 1], and `Bias`es
    layout: BlockLayout
    dropout: Dropout | None


class Run(NamedTuple):
    """One visit: a row (batch row, head, query tile) and the keys [first, stop) of [start, start + width)."""

    b: Any
    h: Any
    i: Any
    start: Any  # `first`, or less at the end of the keys, so that the run lies inside of them
    first: Any
    stop: Any
    width: int


def run_of(x: Tensors, row, first, stop, width: int) -> Run:
    """The visit of keys [first, stop), moved back where it would pass the end."""
    b, h, i = row
    return Run(b, h, i, jnp.minimum(first, np.int32(x.k.shape[1] - width)), first, stop, width)


def apart(plan: Plan, at: Run) -> list[Run]:
    """The visits of the heads that are computed side by side."""
    return [at._replace(h=at.h + n) for n in range(plan.together)]


def padded(plan: Plan, q, k, v, biases, layout: BlockLayout, dropout: Dropout | None) -> Tensors:
    """Pads queries to whole tiles, and keys to at least one visit."""
    more_k = max(plan.width, layout.kv_tile) - plan.S
    k, v = (_pad(a, more_k) for a in (k, v))
    more_q = layout.q_tiles * layout.q_tile - plan.T
    biases = tuple(
        term
        if isinstance(term, Bias)
        else _pad(_pad(term, more_q * (term.shape[2] > 1), axis=2), more_k * (term.shape[3] > 1), axis=3)
        for term in biases
    )
    return Tensors(pad_queries(plan, layout, q), k, v, biases, layout, dropout)


def pad_queries(plan: Plan, layout: BlockLayout, a):
    """An array [B, T, ...] of queries, padded to whole tiles."""
    return _pad(a, layout.q_tiles * layout.q_tile - plan.T)


def _pad(a, more: int, axis: int = 1):
    return a if more <= 0 else jnp.pad(a, [(0, more if i == axis else 0) for i in range(a.ndim)])


def each_head(plan: Plan, x: Tensors, place) -> list[Tensors]:
    """For each head of a step the same tensors with its keys and values alone, side by side, if they are copied."""
    if not plan.copies(x.layout):
        return [x]
    each = []
    for b, h, _ in rows_of(plan, place, ZERO):
        begin = key_place(plan, x.k, b, h, ZERO)
        k, v = (jax.lax.dynamic_slice(a, begin, (1, a.shape[1], 1, a.shape[3])) for a in (x.k, x.v))
        each.append(x._replace(k=k, v=v))
    return each


def places(plan: Plan):
    """The outer loop: batch rows, and the first of the heads that are computed side by side."""
    b, step = (a.reshape(-1) for a in jnp.indices((plan.B, plan.heads // plan.together), dtype=np.int32))
    return b, step * plan.together


def rows_of(plan: Plan, place, i):
    """What the heads of a place compute: their (batch row, head, query tile)."""
    b, h = place
    return [(b, h + n, i) for n in range(plan.together)]


def indices(n: int):
    """0, 1, ..., n - 1."""
    return jnp.arange(n, dtype=np.int32)


def query_heads(plan: Plan, h, count: int = 1):
    """The query heads of some heads, from h on."""
    return h * plan.group + indices(count * plan.group)


def _kv_head(plan: Plan, h):
    return h * plan.group // (plan.N // plan.K)


def key_place(plan: Plan, keys, b, h, start):
    """Where keys from `start` on begin, in an array [B, S', K, H] of all of them or [1, S', 1, H] of one head's."""
    return b if keys.shape[0] > 1 else ZERO, start, _kv_head(plan, h) if keys.shape[2] > 1 else ZERO, ZERO


def read_keys(plan: Plan, a, at: Run, allowed):
    """A visit's part of the keys or values; those that no query of the tile sees may hold anything, and become 0."""
    part = jax.lax.dynamic_slice(a, key_place(plan, a, at.b, at.h, at.start), (1, at.width, 1, a.shape[3]))[0, :, 0]
    seen = None if allowed is None else allowed.any(0).reshape(-1, 1)
    return where_allowed(seen, part.astype(statistics_dtype(a.dtype)), 0)


def scaled_queries(plan: Plan, x: Tensors, row):
    """A row's queries, wide and scaled."""
    q_tile = read_tile(plan, x, x.q, row)
    dtype = statistics_dtype(q_tile.dtype)
    return q_tile.astype(dtype) * np.asarray(plan.scale, dtype)


def read_tile(plan: Plan, x: Tensors, a, row):
    """A row's tile [group·tile, X] of an array [B, T', N, X]."""
    sizes = (1, x.layout.q_tile, plan.group, a.shape[-1])
    return jax.lax.dynamic_slice(a, _corner(plan, x, row), sizes)[0].swapaxes(0, 1).reshape(-1, a.shape[-1])


def write_tile(plan: Plan, x: Tensors, a, tile, row):
    """The array with a row's tile in its place."""
    tile = tile.reshape(plan.group, x.layout.q_tile, -1).swapaxes(0, 1)[None]
    return jax.lax.dynamic_update_slice(a, tile.astype(a.dtype), _corner(plan, x, row))


def _corner(plan: Plan, x: Tensors, row):
    b, h, i = row
    return b, i * x.layout.q_tile, h * plan.group, ZERO


def sides(plan: Plan, x: Tensors, at: Run, count: int = 1):
    """Both sides as rules see them, for the batch row and heads of a visit."""
    sides = x.layout.sides(batch=plan.B, heads=plan.N)
    here = dict(batch=at.b.reshape(1, 1, 1, 1), head=query_heads(plan, at.h, count).reshape(1, -1, 1, 1))
    return tuple(side.at(**here) for side in sides)


def table_of(table, b, h):
    """One batch row's and head's part of a layout's table."""
    table = jnp.asarray(table)
    return table[b if table.shape[0] > 1 else 0, h if table.shape[1] > 1 else 0]


def add_at(big, part, place):
    """The array with a part added in its place."""
    return jax.lax.dynamic_update_slice(big, jax.lax.dynamic_slice(big, place, part.shape) + part, place)


def where_allowed(condition, yes, no):
    """`jnp.where`, or just `yes` where everything is allowed."""
    return yes if condition is None else jnp.where(condition, yes, no)
