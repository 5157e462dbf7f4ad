"""`KernelRefs`: the arrays and buffers of a kernel by name, and the call that passes them to Pallas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from longspan.engines.varying import vary, varying_axes

HBM = pl.BlockSpec(memory_space=pltpu.HBM)


@dataclass
class KernelRefs:
    """What a kernel reads, writes and keeps: each by a name, under which the kernel finds its ref."""

    arrays: dict[str, Any] = field(default_factory=dict)
    specs: dict[str, pl.BlockSpec] = field(default_factory=dict)
    results: dict[str, tuple[tuple[int, ...], Any, pl.BlockSpec]] = field(default_factory=dict)  # shape, dtype, spec
    scratch: dict[str, Any] = field(default_factory=dict)
    whole_registers: bool = False  # whether tiles of keys must fill the 128 lanes of registers
    indexes_arrays: bool = False  # whether a user's function reads arrays at computed indices in the kernel
    aliases: dict[str, str] = field(default_factory=dict)  # of arrays, to the results that reuse their memory

    def read(self, name: str, array: Any, spec: pl.BlockSpec = HBM) -> None:
        """Adds an operand."""
        self.arrays[name], self.specs[name] = array, spec

    def write(self, name: str, shape: Sequence[int], dtype: Any, spec: pl.BlockSpec, reuses: str | None = None) -> None:
        """Adds a result. `reuses` names an operand of the same shape and dtype, in whose memory it is written."""
        self.results[name] = tuple(shape), dtype, spec
        if reuses is not None:
            self.aliases[reuses] = name

    def keep(self, name: str, buffer: Any) -> None:
        """Adds a buffer that the kernel allocates. Its contents stay from one grid step to the next."""
        self.scratch[name] = buffer

    def call(
        self, kernel: Callable[[dict[str, Any]], None], name: str, grid: tuple[int, ...], interpret: Any,
        in_parallel: bool = True,
    ) -> dict[str, jax.Array]:  # fmt: skip
        """Runs kernel(refs by name) for the grid (batch rows, heads, rows of tiles), and returns the results by name.

        Steps along the last axis run in order on one core. Batch rows and heads may be split over the cores of a chip
        if they run `in_parallel`.
        """
        if isinstance(interpret, Measured):
            return interpret.add(name, self)
        varying = varying_axes(list(self.arrays.values()))
        names = [*self.arrays, *self.results, *self.scratch]
        places = {given: place for place, given in enumerate(self.arrays)}
        result_places = {given: place for place, given in enumerate(self.results)}
        order = "parallel" if in_parallel else "arbitrary"
        out = pl.pallas_call(
            lambda *refs: kernel(dict(zip(names, refs, strict=True))),
            grid=grid,
            in_specs=list(self.specs.values()),
            out_specs=[spec for _, _, spec in self.results.values()],
            out_shape=[_shape_struct(shape, dtype, varying) for shape, dtype, _ in self.results.values()],
            scratch_shapes=list(self.scratch.values()),
            input_output_aliases={places[given]: result_places[result] for given, result in self.aliases.items()},
            compiler_params=pltpu.CompilerParams(dimension_semantics=(order, order, "arbitrary")),
            interpret=interpret,
            name=name,
        )(*vary(list(self.arrays.values()), varying))
        return dict(zip(self.results, out, strict=True))


@dataclass(frozen=True)
class Measured:
    """Stands in for `interpret` where only the buffers of kernels are of interest (see `sizes`): no kernel runs."""

    note: Callable[[str, KernelRefs], None]

    def add(self, name: str, refs: KernelRefs) -> dict[str, jax.Array]:
        """Notes a kernel, and returns zeros for its results."""
        self.note(name, refs)
        return {given: jnp.zeros(shape, dtype) for given, (shape, dtype, _) in refs.results.items()}


def _shape_struct(shape: tuple[int, ...], dtype: Any, varying: frozenset[str]) -> jax.ShapeDtypeStruct:
    if not varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    kind = jax.sharding.ManualAxisType(varying=varying)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def vmem(shape: Sequence[int], dtype: Any = np.float32) -> Any:
    """A buffer in vector memory."""
    return pltpu.VMEM(tuple(shape), np.dtype(dtype))


def smem(shape: Sequence[int], dtype: Any = np.int32) -> Any:
    """A buffer in scalar memory."""
    return pltpu.SMEM(tuple(shape), np.dtype(dtype))
