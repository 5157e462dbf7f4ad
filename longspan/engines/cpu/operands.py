"""A request in the form of the native kernel: a static plan, and the operands that it refers to by number."""

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from longspan.array_types import statistics_dtype
from longspan.engines.cpu.biases import KernelBiases
from longspan.engines.cpu.library import static_ints
from longspan.engines.cpu.program import encode, max_visits, supports, unsupported_rules
from longspan.engines.request import Request
from longspan.layout import BlockLayout


@dataclass(frozen=True)
class KernelPlan:
    """The static part of a native call."""

    scale: float
    soft_cap: float
    dropout_rate: float
    dropout_threshold: int
    q_tile: int
    kv_tile: int
    words: tuple[int, ...]  # the mask program, see `program`
    roles: tuple[int, ...]  # the number of the operand of each role, in the order of ROLES; -1: there is none
    axes: tuple[tuple[str, ...], ...]  # of starts and stops, then of all operands that have a number
    # Whether calls with few queries also compute whole tiles, not streams of keys: a gradient recomputes the scores and
    # needs them bit by bit equal.
    by_tiles: bool = False
    heads_first: bool = False  # whether keys and values are [B, K, S, H]

    def role(self, name: str) -> int:
        """The number of the operand with this role; -1: there is none."""
        return self.roles[ROLES.index(name)]

    def attributes(self) -> dict[str, Any]:
        """The attributes of a native call."""
        found: dict[str, Any] = dict(
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
        if self.heads_first:
            found["heads_first"] = np.int64(1)
        return found


# In the order of `enum Role` in native/program.h.
ROLES = (
    "bias", "sinks", "q_pos", "kv_pos", "columns", "column_count", "row_ids", "head_ids", "seed", "slopes", "table",
    "layer",
)  # fmt: skip


Operand: TypeAlias = tuple[str, Any, tuple[str, ...]]  # its role, the array, the names of its axes


def prepare(
    request: Request, layout: BlockLayout, biases: KernelBiases, layer: Any = None
) -> tuple[KernelPlan, tuple, tuple]:
    """(plan, floats, others): biases and sinks, if given; then starts, stops and all int operands.

    With a `layer`, keys and values will be stacks of layers; the request has the shapes of one layer.
    """
    B, N = request.dims["B"], request.dims["N"]
    layout, dropout = _broadcast_layout(layout, B, N), request.dropout
    floats = _float_operands(request, biases)
    roles: dict[str, int] = dict.fromkeys(ROLES, -1) | {name: i for i, (name, _, _) in enumerate(floats)}
    program = encode(layout, B, N, len(floats))
    for name, array, axes in _int_operands(request, layout, layer, program.needs_head_ids):
        if array is not None:
            dtype = np.uint32 if name == "seed" else np.int32
            roles[name] = program.add(jnp.asarray(array).astype(dtype), *axes)
    tables = [jnp.asarray(a).astype(np.int32) for a in (layout.starts, layout.stops)]
    plan = KernelPlan(
        scale=request.scale,
        soft_cap=request.soft_cap or 0.0,
        dropout_rate=0.0 if dropout is None else dropout.rate,
        dropout_threshold=0 if dropout is None else dropout.threshold,
        q_tile=layout.q_tile,
        kv_tile=layout.kv_tile,
        words=tuple(program.words),
        roles=tuple(roles.values()),
        axes=(*[("l", "n", "", "")] * 2, *(axes for _, _, axes in floats), *program.axes),
    )
    return plan, tuple(array for _, array, _ in floats), (*tables, *program.operands)


def _float_operands(request: Request, biases: KernelBiases) -> list[Operand]:
    sinks = request.sinks
    if sinks is not None:
        sinks = sinks.astype(statistics_dtype(request.q.dtype))
    operands: list[Operand] = [
        ("bias", biases.array, ("b", "n", "", "")),
        ("table", biases.table, ("n", "")),
        ("slopes", biases.slopes, ("n",)),
        ("sinks", sinks, ("n",)),
    ]
    return [operand for operand in operands if operand[1] is not None]


def _int_operands(request: Request, layout: BlockLayout, layer: Any, needs_head_ids: bool) -> list[Operand]:
    dropout = request.dropout
    operands: list[Operand] = [
        ("q_pos", layout.q_positions, ("b", "")),
        ("kv_pos", layout.kv_positions, ("b", "")),
        ("columns", layout.common, ("l", "n", "")),
        ("column_count", layout.common_count, ("l", "n")),
        ("layer", layer, ()),
    ]
    if dropout is not None:
        operands += [("row_ids", dropout.rows, ("B",)), ("seed", dropout.words, ("",))]
        operands.append(("head_ids", dropout.heads, ("n",)))
    elif needs_head_ids:
        numbers = np.arange(request.dims["N"]) if layout.heads is None else layout.heads
        operands.append(("head_ids", numbers, ("n",)))
    return operands


def dense_bit_bytes(request: Request) -> int:
    """The value of `bit_bytes` if every tile of every row and head were visited."""
    pairs = math.prod(request.dims[axis] for axis in "BNTS")
    return len(unsupported_rules(request.mask)) * pairs // 8


def bit_bytes(request: Request, q_tile: int, kv_tile: int) -> int:
    """The memory of the mask bits that JAX computes for the kernel, from shapes alone."""
    rules = unsupported_rules(request.mask)
    if not rules or 0 in request.dims.values():
        return 0
    dims = request.dims

    def shapes(request: Request) -> BlockLayout:
        return _broadcast_layout(request.plan_layout(q_tile, kv_tile), dims["B"], dims["N"])

    layout = jax.eval_shape(shapes, request)
    tile = layout.q_tile * -(-layout.kv_tile // 8)
    return len(rules) * math.prod(layout.starts.shape[:2]) * layout.q_tiles * max_visits(layout) * tile


def _broadcast_layout(layout: BlockLayout, batch: int, heads: int) -> BlockLayout:
    """The layout with tables of one size over rows and heads. Mask bits have that size too, since they follow tiles."""
    tables = [a for a in (layout.starts, layout.common) if a is not None]
    b = max(a.shape[0] for a in tables)
    n = max(a.shape[1] for a in tables)
    if not supports(layout.mask):
        q, kv = layout.sides(batch=batch, heads=heads)
        # The shapes of the rule's arrays are not enough: a user's rule may use the number of the row or head.
        shape = jax.eval_shape(lambda: layout.mask.allowed(q.slots(), kv.slots())).shape
        b, n = max(b, shape[0]), max(n, shape[1])
    broadcast = {}
    for name in ("starts", "stops", "common", "common_count"):
        table = getattr(layout, name)
        if table is not None and table.shape[:2] != (b, n):
            broadcast[name] = jnp.broadcast_to(table, (b, n, *table.shape[2:]))
    return replace(layout, **broadcast)
