"""A request as the native kernel reads it: a static plan, and operands that roles and a mask's words name."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import statistics_dtype
from longspan.engines.cpu.biases import Biases
from longspan.engines.cpu.library import static_ints
from longspan.engines.cpu.program import encode, knows, most_visits, unknown
from longspan.engines.request import Request
from longspan.layout import BlockLayout


@dataclass(frozen=True)
class Plan:
    """The static part of a call."""

    scale: float
    soft_cap: float
    dropout_rate: float
    dropout_threshold: int
    q_tile: int
    kv_tile: int
    words: tuple[int, ...]
    roles: tuple[int, ...]  # which of the further operands is the bias, ..., in the order of ROLES
    axes: tuple[tuple[str, ...], ...]  # of starts, stops, biases, sinks (if given) and all further operands
    by_tiles: bool = False  # few queries do not stream either: the gradient needs scores of the same bits

    def role(self, name: str) -> int:
        """Which of the further operands has a role; -1: none."""
        return self.roles[ROLES.index(name)]

    def attributes(self) -> dict[str, Any]:
        """What every call passes along."""
        return dict(
            scale=np.float64(self.scale),
            soft_cap=np.float64(self.soft_cap),
            dropout_rate=np.float64(self.dropout_rate),
            dropout_threshold=np.int64(self.dropout_threshold),
            q_tile=np.int64(self.q_tile),
            kv_tile=np.int64(self.kv_tile),
            by_tiles=np.int64(self.by_tiles),
            roles=static_ints(self.roles),
            program=static_ints(self.words),
        )


# As `enum Role` in native/program.h.
ROLES = (
    "bias", "sinks", "q_pos", "kv_pos", "columns", "column_count", "row_ids", "head_ids", "seed", "slopes", "table",
    "layer",
)  # fmt: skip


def prepare(request: Request, layout: BlockLayout, biases: Biases, layer: Any = None) -> tuple[Plan, tuple, tuple]:
    """The plan of a call; the biases and sinks that are there; starts, stops, and what roles or words name.

    With a `layer`, keys and values will be stacks, of which the request has the shapes of one.
    """
    B, N = (request.dims[axis] for axis in "BN")
    layout, dropout = _broadcast_layout(layout, B, N), request.dropout
    sinks = None if request.sinks is None else request.sinks.astype(statistics_dtype(request.q.dtype))
    given: list[tuple[str, Any, tuple[str, ...]]] = [
        ("bias", biases.array, ("b", "n", "", "")),
        ("table", biases.table, ("n", "")),
        ("slopes", biases.slopes, ("n",)),
        ("sinks", sinks, ("n",)),
    ]
    given = [each for each in given if each[1] is not None]
    roles: dict[str, int] = dict.fromkeys(ROLES, -1) | {name: i for i, (name, _, _) in enumerate(given)}
    program = encode(layout, B, N, len(given))
    extras: list[tuple[str, Any, tuple[str, ...]]] = [
        ("q_pos", layout.q_positions, ("b", "")),
        ("kv_pos", layout.kv_positions, ("b", "")),
        ("columns", layout.common, ("l", "n", "")),
        ("column_count", layout.common_count, ("l", "n")),
        ("layer", layer, ()),
    ]
    if dropout is not None:
        extras += [("row_ids", dropout.rows, ("B",)), ("seed", dropout.words, ("",))]
    if dropout is not None or program.needs_head_ids:
        numbers = np.arange(N) if layout.heads is None else layout.heads
        extras.append(("head_ids", numbers if dropout is None else dropout.heads, ("n",)))
    for name, array, axes in extras:
        if array is not None:
            wanted = np.uint32 if name == "seed" else np.int32
            roles[name] = program.add(jnp.asarray(array).astype(wanted), *axes)
    tables = [jnp.asarray(a).astype(np.int32) for a in (layout.starts, layout.stops)]
    plan = Plan(
        scale=request.scale,
        soft_cap=request.soft_cap or 0.0,
        dropout_rate=0.0 if dropout is None else dropout.rate,
        dropout_threshold=0 if dropout is None else dropout.threshold,
        q_tile=layout.q_tile,
        kv_tile=layout.kv_tile,
        words=tuple(program.words),
        roles=tuple(roles.values()),
        axes=(*[("l", "n", "", "")] * 2, *(axes for _, _, axes in given), *program.axes),
    )
    return plan, tuple(array for _, array, _ in given), (*tables, *program.operands)


def dense_bit_bytes(request: Request) -> int:
    """What `bit_bytes` would be if every tile were visited, of every row and head."""
    pairs = math.prod(request.dims[axis] for axis in "BNTS")
    return len(unknown(request.mask)) * pairs // 8


def bit_bytes(request: Request, q_tile: int, kv_tile: int) -> int:
    """The memory of a request's bit tiles, by shapes alone: its arrays may be traced, or not there yet."""
    rules = unknown(request.mask)
    if not rules or 0 in request.dims.values():
        return 0
    dims = request.dims

    def shapes(request: Request) -> BlockLayout:
        return _broadcast_layout(request.plan_layout(q_tile, kv_tile), dims["B"], dims["N"])

    layout = jax.eval_shape(shapes, request)
    tile = layout.q_tile * -(-layout.kv_tile // 8)
    return len(rules) * math.prod(layout.starts.shape[:2]) * layout.q_tiles * most_visits(layout) * tile


def _broadcast_layout(layout: BlockLayout, batch: int, heads: int) -> BlockLayout:
    """The layout with all its tables of one size; bit tiles follow them, so by batch row where positions differ."""
    tables = [a for a in (layout.starts, layout.common) if a is not None]
    b, n = (max(a.shape[axis] for a in tables) for axis in (0, 1))
    if not knows(layout.mask):
        q, kv = layout.sides(batch=batch, heads=heads)
        # Asked of the rule, for its arrays do not tell: a user's may read the number of the row or head.
        told = jax.eval_shape(lambda: layout.mask.allowed(q.slots(), kv.slots())).shape
        b, n = max(b, told[0]), max(n, told[1])
    wide = {
        name: jnp.broadcast_to(table, (b, n, *table.shape[2:]))
        for name in ("starts", "stops", "common", "common_count")
        if (table := getattr(layout, name)) is not None and table.shape[:2] != (b, n)
    }
    return replace(layout, **wide) if wide else layout
