"""The bytes that a compiled program sends, from the collectives in its text, with loops counted by their trips.

Collectives are counted as ring algorithms. If the result has R bytes on g devices, a permute sends R bytes, an
all-gather and an all-to-all R·(g − 1)/g, an all-reduce 2·R·(g − 1)/g, a reduce-scatter R·(g − 1).
"""

import math
import re
from collections import Counter
from fractions import Fraction

SIZES = dict(pred=1, s8=1, u8=1, s16=2, u16=2, bf16=2, f16=2, s32=4, u32=4, f32=4, s64=8, u64=8, f64=8)
KINDS = ("collective-permute", "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-broadcast")


def sent(compiled, *, trips: int | None = None, branch: int | None = None) -> Counter:
    """The bytes that each device receives, by kind of collective, not rounded.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()`.
        trips: the number of iterations of loops of unknown length.
        branch: the branch of conditionals that is taken; by default the one that sends most.
    """
    bodies = _computations(compiled.as_text())
    entry = next(name for name, (is_entry, _) in bodies.items() if is_entry)
    return _count(bodies, entry, trips, branch)


def total(compiled, **how) -> int:
    """The bytes that each device receives."""
    return int(sum(sent(compiled, **how).values()))


def _computations(text: str) -> dict[str, tuple[bool, list[str]]]:
    found, name = {}, None
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.-]+) .*\{$", line)
        if head and not line.startswith(" "):
            name = head[2]
            found[name] = bool(head[1]), []
        elif name is not None:
            found[name][1].append(line)
    return found


def _count(bodies, name: str, trips: int | None, branch: int | None) -> Counter:
    counts: Counter = Counter()
    for line in bodies[name][1]:
        operation = re.match(r"^\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([\w-]+)\(", line)
        if operation is None:
            continue
        shape, kind = operation[1], operation[2].removesuffix("-start")
        if kind in KINDS:
            counts[kind] += _bytes(kind, _size(shape, operation[2].endswith("-start")), line)
        elif kind == "while":
            body = re.search(r"body=%?([\w.-]+)", line)[1]
            known = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', line)
            inside = _count(bodies, body, trips, branch)
            assert known or trips is not None or not inside, f"a loop of unknown length sends something: {line}"
            counts.update({k: n * (int(known[1]) if known else trips) for k, n in inside.items()})
        elif kind == "conditional":
            names = re.search(r"branch_computations=\{([^}]*)\}", line)
            names = (
                [n.strip().lstrip("%") for n in names[1].split(",")]
                if names
                else [re.search(rf"{side}_computation=%?([\w.-]+)", line)[1] for side in ("false", "true")]
            )
            names = names if branch is None else [names[branch]]
            found = [_count(bodies, n, trips, branch) for n in names]
            counts.update(max(found, key=lambda c: sum(c.values())))
        else:
            for callee in re.findall(r"(?:to_apply|calls)=%?([\w.-]+)", line):
                if kind in ("call", "fusion", "custom-call"):
                    counts.update(_count(bodies, callee, trips, branch))
    return counts


def _size(shape: str, is_start: bool) -> int:
    parts = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    # On TPUs, the start of an asynchronous collective has further results of type u32[].
    parts = [part for part in parts if part[0] in SIZES and not (is_start and part == ("u32", ""))]
    sizes = [SIZES[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in parts]
    return sum(sizes) // 2 if is_start else sum(sizes)  # a start lists operands and results


def _bytes(kind: str, result: int, line: str) -> Fraction | int:
    if kind == "collective-permute":
        return result
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if named:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        devices = math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    else:
        devices = len(listed[1].split(",")) if listed else int(iota[2])
    if kind == "all-reduce":
        return Fraction(2 * result * (devices - 1), devices)
    if kind == "reduce-scatter":
        return result * (devices - 1)
    return Fraction(result * (devices - 1), devices)
