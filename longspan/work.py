"""The work of one attention call: tiles and FLOPs of a planned layout."""

from typing import Any

import numpy as np

from longspan.layout import BlockLayout, Counts

FIELDS = ("tiles_total", "tiles_empty", "tiles_partial", "tiles_full", "useful_flops", "executed_flops")
PREFIXES = {1000: ("", "k", "M", "G", "T", "P"), 1024: ("", "Ki", "Mi", "Gi", "Ti", "Pi")}


def work(dims: dict[str, int], layout: BlockLayout | None, counts: Counts | None) -> dict[str, Any]:
    """The counted fields of an `Explanation`; None where they depend on data.

    Example:
        >>> from longspan.layout import count
        >>> layout = ls.Causal().layout(256, 256)
        >>> dims = dict(B=1, T=256, S=256, N=2, K=2, H=64, Hv=64)
        >>> work(dims, layout, count(layout))["executed_flops"] == 2 * (64 + 64) * 3 * 128 * 128 * 2
        True
    """
    if counts is None or layout is None:
        unknown = None
        if 0 in dims.values():
            unknown = 0
        return dict.fromkeys(FIELDS, unknown)
    q, _ = layout.sides(xp=np)
    planes = np.array(list(layout.planes()))[-1] + 1
    distinct = max(q.batch.size, planes[0]) * max(q.head.size, planes[1])  # pairs of batch row and head
    copies = dims["B"] * dims["N"] // max(int(distinct), 1)
    per_pair = 2 * (dims["H"] + dims["Hv"]) * copies
    computed = counts.partial + counts.full
    total = layout.q_tiles * layout.kv_tiles * int(distinct)
    return dict(
        tiles_total=total,
        tiles_empty=total - computed,
        tiles_partial=counts.partial,
        tiles_full=counts.full,
        useful_flops=per_pair * counts.pairs,
        executed_flops=per_pair * layout.q_tile * layout.kv_tile * computed,
        useful_is_estimate=counts.sampled is not None,
    )


def short(amount: int | float | None, unit: str, step: int) -> str:
    """A number with four significant digits and its unit; the prefixes are those of powers of `step`, 1000 or 1024.

    Example:
        >>> short(1_234_567, "FLOP", 1000), short(2048, "B", 1024), short(None, "B", 1024)
        ('1.235 MFLOP', '2 KiB', 'depends on data')
    """
    if amount is None:
        return "depends on data"
    value, prefixes = float(amount), PREFIXES[step]
    while value >= step and len(prefixes) > 1:
        value, prefixes = value / step, prefixes[1:]
    return f"{value:.4g} {prefixes[0]}{unit}"
