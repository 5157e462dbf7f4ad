"""The temporary memory of programs on one v5e: a million tokens, and decoding. `python -m benchmarks.tpu.memory`."""

import math
import os
import re
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.tpu.chips import ENVIRONMENT, compile_for, temporary_bytes

CHIP = "v5e"
MILLION = 2**20
MIB = 2**20
LISTED = 8  # buffers of each program
BYTES = dict(pred=1, s8=1, u8=1, s16=2, u16=2, bf16=2, f16=2, s32=4, u32=4, f32=4, s64=8, u64=8, f64=8)
# They have no buffer, or that of an operand.
NO_BUFFER = {"parameter", "bitcast", "tuple", "get-tuple-element", "constant", "copy-done", "async-done"}


class Program(NamedTuple):
    """A program, and the most temporary memory that it may need."""

    name: str
    goal: int  # MiB
    arguments: Callable[[], tuple]


class Buffer(NamedTuple):
    """The result of one operation of a compiled program."""

    bytes: int
    shape: str
    operation: str


class Usage(NamedTuple):
    """The temporary memory of a compiled program."""

    program: Program
    bytes: int
    buffers: list[Buffer]
    seconds: float  # of compilation
    error: str = ""  # why it does not compile

    def verdict(self) -> str:
        if self.error:
            return self.error
        if self.bytes <= self.program.goal * MIB:
            return "ok"
        return f"{self.bytes / MIB - self.program.goal:,.0f} MiB too many"


def _both_passes(mask):
    """A function of q, k, v and its arguments: 4 query heads and 2 key/value heads of 128, bfloat16."""
    import jax
    import jax.numpy as jnp

    import longspan as ls
    from longspan.engines.pallas_tpu import PallasTpu

    engine = PallasTpu(fused=True, chip=CHIP)

    def both(q, k, v, mask):
        return jax.vjp(lambda *x: ls.attention(*x, mask=mask, engine=engine), q, k, v)[1](q)

    q, k = (jax.ShapeDtypeStruct((1, MILLION, heads, 128), jnp.bfloat16) for heads in (4, 2))
    return both, q, k, k, mask


def _segments():
    import numpy as np

    import longspan as ls

    return _both_passes(ls.Causal() & ls.Segments(np.zeros((1, MILLION), np.int32)))


def _window():
    import longspan as ls

    return _both_passes(ls.Causal() & ls.Window(1023, 0) | ls.Global((0, 1, 2)))


def _decode():
    """One token of 4 sequences; the cache of one layer holds 32,768 keys, heads before slots."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import longspan as ls
    from longspan.engines import Request
    from longspan.engines.pallas_tpu import PallasTpu

    engine = PallasTpu(chip=CHIP)
    q = jax.ShapeDtypeStruct((4, 1, 32, 128), jnp.bfloat16)
    stack = jax.ShapeDtypeStruct((1, 4, 8, 32768, 128), jnp.bfloat16)
    layer_k = jax.ShapeDtypeStruct((4, 32768, 8, 128), jnp.bfloat16)

    def step(q, k, v, lengths, layer):
        request = Request.of(q=q, k=layer_k, v=layer_k, mask=ls.KvLengths(lengths))
        request = request.with_layout(*engine.tiles(request))
        result = engine.run_layer(request, request.layout, k, v, layer, heads_first=True)
        assert result is not None, "the engine does not read these stacks in place"
        return result[0]

    return step, q, stack, stack, np.zeros(4, np.int32), np.zeros((), np.int32)


PROGRAMS = (
    Program("1,048,576 tokens, causal and documents, both passes", 5 * 1024, _segments),
    Program("1,048,576 tokens, window 1024 and 3 global, both passes", 5 * 1024, _window),
    Program("decoding, 4 sequences, 32,768 keys", 32, _decode),
)


def buffers(text: str) -> list[Buffer]:
    """The results of the operations of a program's entry computation, the largest first."""
    entry = re.search(r"^ENTRY .*?^\}", text, re.MULTILINE | re.DOTALL)
    assert entry is not None
    found = []
    for line in entry[0].splitlines():
        operation = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\(", line)
        if operation is None or operation[3] in NO_BUFFER:
            continue
        parts = re.findall(r"(\w+)\[([\d,]*)\]", operation[2])
        sizes = [BYTES[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in parts if kind in BYTES]
        shape = ", ".join(f"{kind}[{dims}]" for kind, dims in parts)
        found.append(Buffer(sum(sizes), shape, operation[1]))
    return sorted(found, reverse=True)


def measure() -> list[Usage]:
    found = []
    for program in PROGRAMS:
        print(f"compiling {program.name}", flush=True)
        start = time.perf_counter()
        try:
            compiled = compile_for(CHIP, *program.arguments())
        except Exception as error:  # the other programs are worth measuring
            text = f"does not compile: {type(error).__name__}: {error}".replace("\n", " ")
            found.append(Usage(program, 0, [], time.perf_counter() - start, text[:300]))
            continue
        seconds = time.perf_counter() - start
        found.append(Usage(program, temporary_bytes(compiled), buffers(compiled.as_text())[:LISTED], seconds))
    return found


def rows(usages: list[Usage]) -> list[list[str]]:
    lines = [["program", "temporary, MiB", "goal", "", "compile time, s"]]
    for usage in usages:
        numbers = f"{usage.bytes / MIB:,.1f}", f"{usage.program.goal:,}"
        lines.append([usage.program.name, *numbers, usage.verdict(), f"{usage.seconds:.0f}"])
        lines += [[f"  {b.operation}: {b.shape}", f"{b.bytes / MIB:,.1f}", "", "", ""] for b in usage.buffers]
    return lines


def main() -> int:
    """Prints the table; the number of programs that exceed their goal."""
    os.environ.update(ENVIRONMENT)
    from benchmarks.measure import table

    found = measure()
    print(f"\nTemporary memory on one {CHIP}, and the largest results inside each program")
    print(table(rows(found)), flush=True)
    return sum(usage.verdict() != "ok" for usage in found)


if __name__ == "__main__":
    sys.exit(main())
