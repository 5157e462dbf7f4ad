"""`PreparedRule`: a rule or a bias that reads whole arrays, split into what runs outside of a kernel and inside.

`slopes[h]` is computed outside, once for each batch row and head, and becomes a number of scalar memory. A kernel for
TPUs cannot read an array at a computed index.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from longspan.engines.door import NUMBER, PAIRS, SUMMARY, TABLE, Answer
from longspan.engines.pallas_tpu.hoist import SplitFunction
from longspan.engines.pallas_tpu.places import place_in
from longspan.engines.pallas_tpu.plan import TpuPlan
from longspan.engines.pallas_tpu.refs import KernelRefs
from longspan.layout import BlockLayout
from longspan.masks.sides import QUERIES

KNOWN = (TABLE, NUMBER)  # the kinds of answers that are known outside of a kernel


@dataclass(frozen=True)
class PreparedRule:
    """A function of the slots, or of the first slots of tiles, split for the kernels of one orientation."""

    name: str
    split: SplitFunction
    boundary: list[Any]  # the values that pass to the kernel: [B or 1, heads or 1, ...] each

    @classmethod
    def of(
        cls, name: str, evaluate: Callable, answers: Sequence[Answer], plan: TpuPlan, layout: BlockLayout, axis: int,
        *, of_tiles: bool = False,
    ) -> "PreparedRule":  # fmt: skip
        """Splits evaluate(load, batch row, head, queries, keys), which reads `answers`.

        Queries and keys are the indices of slots or, with `of_tiles`, the first slots of two tiles.
        """
        known = [answer for answer in answers if answer.kind in KNOWN]
        loaded = [answer for answer in answers if answer.kind not in KNOWN]

        def flat(batch: Any, head: Any, *more: Any) -> Any:
            given, (q, kv), loads = iter(more[: len(known)]), more[len(known) :][:2], iter(more[len(known) + 2 :])
            found = [next(given if answer.kind in KNOWN else loads) for answer in answers]
            return evaluate(lambda place: found[place], batch, head, q, kv)

        examples = [answer.array if answer.kind == TABLE else jnp.int32(0) for answer in known]
        sides = [_example_of_side(plan, axis, side, of_tiles) for side in range(2)]
        loads = [_example(plan, axis, answer) for answer in loaded]
        split = SplitFunction.of(flat, 2 + len(known), jnp.int32(0), jnp.int32(0), *examples, *sides, *loads)
        return cls(name, split, _boundary(split, known, plan, layout))

    def add_to(self, refs: KernelRefs) -> None:
        """Adds the boundary to the operands of a kernel."""
        refs.indexes_arrays |= self.split.indexes_arrays()
        for n, array in enumerate(self.boundary):
            refs.read(f"{self.name} value {n}", *_as_operand(array))

    def values(self, refs: dict[str, Any]) -> list[Any]:
        """The boundary, as a kernel reads it."""
        return [_value_in_kernel(refs[f"{self.name} value {n}"], x) for n, x in enumerate(self.boundary)]


def loaded_places(answers: Sequence[Answer]) -> list[int]:
    """The places of the answers that a kernel loads itself."""
    return [place for place, answer in enumerate(answers) if answer.kind not in KNOWN]


def _boundary(split: SplitFunction, known: list[Answer], plan: TpuPlan, layout: BlockLayout) -> list[Any]:
    rows, heads = jnp.arange(plan.B, dtype=np.int32), jnp.arange(plan.heads, dtype=np.int32)
    if layout.rows is not None:
        rows, heads = layout.rows[: plan.B], layout.heads[: plan.heads]
    arrays = []
    for answer in known:
        arrays.append(jnp.broadcast_to(answer.array, (plan.B,)) if answer.kind == NUMBER else answer.array)
    by_row = [0 if answer.kind == NUMBER else None for answer in known]
    by_head = jax.vmap(split.outside, (None, 0, *[None] * len(known)))
    found = []
    for value, array in zip(split.boundary, jax.vmap(by_head, (0, None, *by_row))(rows, heads, *arrays), strict=True):
        # An array that passes unchanged is the same for all rows and heads.
        found.append(array[:1, :1] if split.is_argument(value) and array.ndim > 2 else array)
    return found


def _example_of_side(plan: TpuPlan, axis: int, side: int, of_tiles: bool) -> jax.Array:
    if of_tiles:
        return jnp.int32(0)
    return jnp.zeros(_shape(plan, axis, QUERIES + side), np.int32)


def _shape(plan: TpuPlan, axis: int, side: int) -> tuple[int, int]:
    """The shape of numbers by slot of one side, in a kernel whose rows are tiles of `axis`."""
    size = plan.q_tile if side == QUERIES else plan.kv_tile
    return (size, 1) if side == axis else (1, size)


def _example(plan: TpuPlan, axis: int, answer: Answer) -> jax.Array:
    """A value like the one that a kernel loads."""
    dtype = np.float32 if jnp.issubdtype(answer.array.dtype, np.floating) else np.int32
    if answer.kind == SUMMARY:
        return jnp.int32(0)
    if answer.kind == PAIRS:
        return jnp.zeros((plan.q_tile, plan.kv_tile) if axis == QUERIES else (plan.kv_tile, plan.q_tile), dtype)
    return jnp.zeros(_shape(plan, axis, answer.axis), dtype)


def _as_operand(array: jax.Array) -> tuple[jax.Array, pl.BlockSpec]:
    """A value [B or 1, heads or 1, ...] as an operand: a scalar in scalar memory, an array in vector memory."""
    rows, heads, *shape = array.shape
    if array.dtype == bool:
        array = array.astype(np.int32)
    if not shape:
        block = pl.BlockSpec((1, 1, 1, 1), lambda b, h, i: (b, h, 0, 0), memory_space=pltpu.SMEM)
        return array[..., None, None], block
    if len(shape) == 1:
        array = array[:, :, None]
    zeros = (0,) * (array.ndim - 2)
    index = lambda b, h, i: (place_in(rows, b), place_in(heads, h), *zeros)  # noqa: E731
    return array, pl.BlockSpec((None, None, *array.shape[2:]), index)


def _value_in_kernel(ref: Any, of: jax.Array) -> Any:
    value = ref[0, 0, 0, 0] if of.ndim == 2 else ref[...].reshape(of.shape[2:])
    return value != 0 if of.dtype == bool else value
