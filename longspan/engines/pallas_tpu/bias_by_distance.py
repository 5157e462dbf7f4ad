"""Biases that depend only on the head and the distance k - q (`Bias.by_distance`): slopes and tables.

A slope is a number of scalar memory. A table of distances is a row of vector memory, in which a kernel looks numbers up
128 at a time: the hardware gathers within the 128 lanes of a register.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from longspan.biases import Bias, Distances, combine_floats, partition_floats
from longspan.engines.door import ENTRIES, Answer
from longspan.engines.pallas_tpu.gradient_sums import GradientSum, SumByHead, total
from longspan.engines.pallas_tpu.operands import Operands
from longspan.engines.pallas_tpu.places import LANES
from longspan.engines.pallas_tpu.plan import TpuPlan
from longspan.layout import BlockLayout
from longspan.masks.sides import KEYS, QUERIES


@dataclass(frozen=True)
class DistanceTerm:
    """A bias as slopes [N], a table [N, 2·reach + 1], or both."""

    answers: Sequence[Answer]  # the positions of queries and keys that are not their indices
    places: tuple[int | None, int | None]
    name: str
    distances: Distances
    of_floats: Callable[[Any], Distances]  # from the float arrays of the bias
    floats: Any

    @classmethod
    def of(cls, bias: Bias, layout: BlockLayout, place: int, name: str) -> "DistanceTerm":
        """The term of a bias that defines `by_distance`."""
        floats, others = partition_floats(bias)

        def of_floats(floats: Any) -> Distances:
            found = combine_floats(floats, others).by_distance()
            return Distances(*(None if x is None else jnp.asarray(x).astype(np.float32) for x in found))

        answers, places = [], []
        for axis, positions in ((QUERIES, layout.q_positions), (KEYS, layout.kv_positions)):
            places.append(None)
            if positions is not None:
                places[-1] = place + len(answers)
                answers.append(Answer(ENTRIES, axis, jnp.asarray(positions)[:, None], False))
        return cls(answers, (places[0], places[1]), name, of_floats(floats), of_floats, floats)

    @property
    def reach(self) -> int:
        """The greatest distance with a number of its own in the table."""
        return self.distances.table.shape[1] // 2

    @property
    def width(self) -> int:
        """The size of the table, rounded up to whole registers."""
        return -(-self.distances.table.shape[1] // LANES) * LANES

    def add_to(self, operands: Operands) -> None:
        slopes, table = self.distances
        if slopes is not None:
            operands.refs.read(f"{self.name} slopes", slopes, pl.BlockSpec(memory_space=pltpu.SMEM))
        if table is not None:
            table = jnp.pad(table, ((0, 0), (0, self.width - table.shape[1])))[:, None]
            block = pl.BlockSpec((None, 1, self.width), lambda b, h, i: (h, 0, 0))
            operands.refs.read(f"{self.name} table", table, block)
            operands.refs.whole_registers = True  # a register is looked up at once

    def tile(self, walk: Any, j: Any, slot: Any) -> jax.Array:
        ahead, parts = self._ahead(walk, j, slot), []
        if self.distances.slopes is not None:
            parts.append(-walk.refs[f"{self.name} slopes"][walk.h] * jnp.abs(ahead).astype(np.float32))
        if self.distances.table is not None:
            parts.append(look_up(walk.refs[f"{self.name} table"], self._place(ahead)))
        return sum(parts[1:], start=parts[0])

    def sums(self) -> list[GradientSum]:
        found: list[GradientSum] = []
        if self.distances.slopes is not None:
            found.append(SumByHead(f"d{self.name} slopes", LANES))
        if self.distances.table is not None:
            found.append(SumByHead(f"d{self.name} table", self.width))
        return found

    def add_gradient(self, walk: Any, j: Any, slot: Any, dscores: jax.Array) -> None:
        ahead = self._ahead(walk, j, slot)
        ahead = jnp.broadcast_to(ahead, dscores.shape)
        sums = self.sums()
        if self.distances.slopes is not None:
            dslope = total(-dscores * jnp.abs(ahead).astype(np.float32))
            sums[0].add(walk, slot, jnp.broadcast_to(dslope, (1, LANES)))
        if self.distances.table is not None:
            self._add_to_table(walk, slot, sums[-1], self._place(ahead), dscores)

    def gradient(self, plan: TpuPlan, results: dict[str, Any]) -> Any:
        slopes, table = self.distances
        found = [each.result(plan, results).sum(0) for each in self.sums()]
        if slopes is not None:
            slopes = found[0][:, 0]
        if table is not None:
            table = found[-1][:, : table.shape[1]]
        return jax.vjp(self.of_floats, self.floats)[1](Distances(slopes, table))[0]

    def _ahead(self, walk: Any, j: Any, slot: Any) -> jax.Array:
        """The distance k - q of every pair of a visit."""
        q, kv = walk.slots(j)
        if self.places[0] is not None:
            q = walk.load(j, slot, self.places[0])
        if self.places[1] is not None:
            kv = walk.load(j, slot, self.places[1])
        return kv - q

    def _place(self, ahead: jax.Array) -> jax.Array:
        return jnp.clip(ahead, -self.reach, self.reach) + self.reach

    def _add_to_table(self, walk: Any, slot: Any, table: GradientSum, places: jax.Array, dscores: jax.Array) -> None:
        """Adds the sum over all pairs at each distance. A tile far from the diagonal has only one."""
        lanes = lax.broadcasted_iota(jnp.int32, (1, self.width), 1)

        def add(place: Any, _: None) -> None:
            found = total(jnp.where(places == place, dscores, 0.0))
            table.add(walk, slot, jnp.where(lanes == place, found, 0.0))

        lax.fori_loop(jnp.min(places), jnp.max(places) + 1, add, None)


def look_up(row: Any, places: jax.Array) -> jax.Array:
    """row[0, places], of a row [1, n·128] and places [rows, columns]."""
    columns = places.shape[1]
    if columns % LANES:  # only interpreted: a tile of a chip has whole registers
        return jnp.take(row[0], places)
    parts = [places[:, first : first + LANES] for first in range(0, columns, LANES)]
    return jnp.concatenate([_look_up_lanes(row, part) for part in parts], axis=1)


def _look_up_lanes(row: Any, places: jax.Array) -> jax.Array:
    found = jnp.zeros(places.shape, np.float32)
    take = partial(jnp.take_along_axis, axis=1, mode="promise_in_bounds")
    for first in range(0, row.shape[1], LANES):
        register = jnp.broadcast_to(row[:, first : first + LANES], places.shape)
        inside = (places >= first) & (places < first + LANES)
        found = jnp.where(inside, take(register, places & (LANES - 1)), found)
    return found
