"""Reads and writes the slices of a call's arrays that one visit of the `xla` engine uses."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import statistics_dtype
from longspan.biases import Bias
from longspan.dropout import Dropout
from longspan.layout import BlockLayout

ZERO = np.int32(0)  # all indices of a slice must have one dtype, also under x64


@dataclass(frozen=True)
class TilePlan:
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
    width: int  # keys per visit
    per_head: bool  # whether the layout differs between query heads
    heads_per_step: int = 1  # heads (see below) that one step of the outer loop computes

    @property
    def heads(self) -> int:
        """The number of heads that the outer loop runs over: kv heads, or query heads if their layouts differ."""
        return self.N if self.per_head else self.K

    @property
    def group(self) -> int:
        """The number of query heads per head of the outer loop; they attend to the same keys."""
        return self.N // self.heads

    def copies(self, layout: BlockLayout) -> bool:
        """Whether keys and values of a head are copied to be contiguous: if its tiles read as many keys anyway."""
        return layout.q_tiles * self.width >= self.S


class Tensors(NamedTuple):
    """The arrays of a call, padded so that every slice of a tile fits."""

    q: Any  # [B, T', N, H]
    k: Any  # [B, S', K, H]
    v: Any  # [B, S', K, Hv]
    biases: tuple[Any, ...]  # the terms of the bias: arrays [B or 1, N or 1, T' or 1, S' or 1], and `Bias`es
    layout: BlockLayout
    dropout: Dropout | None


class TileRun(NamedTuple):
    """One visit: a query tile, and a run of neighbouring keys [start, start + width) of which [first, stop) count."""

    b: Any  # batch row
    h: Any  # head of the outer loop
    i: Any  # query tile
    start: Any  # `first`, or less at the end of the keys, so that the run does not pass the end
    first: Any
    stop: Any
    width: int


def run_of(x: Tensors, row, first, stop, width: int) -> TileRun:
    """The visit of keys [first, stop), with its start moved back if the run would pass the end of the keys."""
    b, h, i = row
    return TileRun(b, h, i, jnp.minimum(first, np.int32(x.k.shape[1] - width)), first, stop, width)


def runs_of_heads(plan: TilePlan, at: TileRun) -> list[TileRun]:
    """The visit, for each head of a step."""
    return [at._replace(h=at.h + n) for n in range(plan.heads_per_step)]


def padded(plan: TilePlan, q, k, v, biases, layout: BlockLayout, dropout: Dropout | None) -> Tensors:
    """Pads queries to whole tiles, and keys to at least one visit."""
    more_k = max(plan.width, layout.kv_tile) - plan.S
    more_q = layout.q_tiles * layout.q_tile - plan.T

    def pad_bias(term):
        if isinstance(term, Bias):
            return term
        if term.shape[2] > 1:
            term = _pad(term, more_q, axis=2)
        if term.shape[3] > 1:
            term = _pad(term, more_k, axis=3)
        return term

    biases = tuple(pad_bias(term) for term in biases)
    return Tensors(pad_queries(plan, layout, q), _pad(k, more_k), _pad(v, more_k), biases, layout, dropout)


def pad_queries(plan: TilePlan, layout: BlockLayout, a):
    """An array [B, T, ...] of queries, padded to whole tiles."""
    return _pad(a, layout.q_tiles * layout.q_tile - plan.T)


def _pad(a, more: int, axis: int = 1):
    if more <= 0:
        return a
    widths = [(0, 0)] * a.ndim
    widths[axis] = (0, more)
    return jnp.pad(a, widths)


def each_head(plan: TilePlan, x: Tensors, step) -> list[Tensors]:
    """If keys and values are copied: for each head of a step, the tensors with contiguous keys and values of that head.

    Otherwise the tensors themselves, once.
    """
    if not plan.copies(x.layout):
        return [x]
    each = []
    for b, h, _ in rows_of(plan, step, ZERO):
        begin = key_index(plan, x.k, b, h, ZERO)
        k = jax.lax.dynamic_slice(x.k, begin, (1, x.k.shape[1], 1, x.k.shape[3]))
        v = jax.lax.dynamic_slice(x.v, begin, (1, x.v.shape[1], 1, x.v.shape[3]))
        each.append(x._replace(k=k, v=v))
    return each


def steps_of(plan: TilePlan):
    """The steps of the outer loop: the batch row and the first head of each."""
    rows, steps = jnp.indices((plan.B, plan.heads // plan.heads_per_step), dtype=np.int32)
    return rows.reshape(-1), steps.reshape(-1) * plan.heads_per_step


def rows_of(plan: TilePlan, step, i):
    """The (batch row, head, query tile) of each head of a step, for query tile `i`."""
    b, h = step
    return [(b, h + n, i) for n in range(plan.heads_per_step)]


def indices(n: int):
    """0, 1, ..., n - 1."""
    return jnp.arange(n, dtype=np.int32)


def query_heads(plan: TilePlan, h, count: int = 1):
    """The query heads of `count` heads of the outer loop, from h on."""
    return h * plan.group + indices(count * plan.group)


def _kv_head(plan: TilePlan, h):
    return h * plan.group // (plan.N // plan.K)


def key_index(plan: TilePlan, keys, b, h, start):
    """The index of the first key of a slice, in an array [B, S', K, H], or [1, S', 1, H] with the keys of one head."""
    batch_row = b if keys.shape[0] > 1 else ZERO
    kv_head = _kv_head(plan, h) if keys.shape[2] > 1 else ZERO
    return batch_row, start, kv_head, ZERO


def read_keys(plan: TilePlan, a, at: TileRun, allowed):
    """The keys or values of a visit; those that no query of the tile sees become 0, because they may hold NaN."""
    part = jax.lax.dynamic_slice(a, key_index(plan, a, at.b, at.h, at.start), (1, at.width, 1, a.shape[3]))[0, :, 0]
    part = part.astype(statistics_dtype(a.dtype))
    if allowed is None:
        return part
    return jnp.where(allowed.any(0).reshape(-1, 1), part, 0)


def scaled_queries(plan: TilePlan, x: Tensors, row):
    """The queries of a row, in the dtype of softmax statistics and scaled."""
    q_tile = read_tile(plan, x, x.q, row)
    dtype = statistics_dtype(q_tile.dtype)
    return q_tile.astype(dtype) * np.asarray(plan.scale, dtype)


def read_tile(plan: TilePlan, x: Tensors, a, row):
    """The tile [group·tile, X] of a row, from an array [B, T', N, X]."""
    sizes = (1, x.layout.q_tile, plan.group, a.shape[-1])
    return jax.lax.dynamic_slice(a, _corner(plan, x, row), sizes)[0].swapaxes(0, 1).reshape(-1, a.shape[-1])


def write_tile(plan: TilePlan, x: Tensors, a, tile, row):
    """The array with the tile of a row written."""
    tile = tile.reshape(plan.group, x.layout.q_tile, -1).swapaxes(0, 1)[None]
    return jax.lax.dynamic_update_slice(a, tile.astype(a.dtype), _corner(plan, x, row))


def _corner(plan: TilePlan, x: Tensors, row):
    b, h, i = row
    return b, i * x.layout.q_tile, h * plan.group, ZERO


def sides(plan: TilePlan, x: Tensors, at: TileRun, count: int = 1):
    """The query and key sides, as masks read them, for the batch row and `count` heads of a visit."""
    sides = x.layout.sides(batch=plan.B, heads=plan.N)
    here = dict(batch=at.b.reshape(1, 1, 1, 1), head=query_heads(plan, at.h, count).reshape(1, -1, 1, 1))
    return tuple(side.at(**here) for side in sides)


def table_of(table, b, h):
    """The entries of a layout's table for one batch row and head."""
    table = jnp.asarray(table)
    row = b if table.shape[0] > 1 else 0
    head = h if table.shape[1] > 1 else 0
    return table[row, head]


def add_at(array, part, index):
    """The array with `part` added from `index` on."""
    return jax.lax.dynamic_update_slice(array, jax.lax.dynamic_slice(array, index, part.shape) + part, index)


def where_allowed(allowed, yes, no):
    """`jnp.where`, or `yes` itself if every pair is allowed (None)."""
    if allowed is None:
        return yes
    return jnp.where(allowed, yes, no)
