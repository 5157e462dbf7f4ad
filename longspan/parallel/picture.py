"""Pictures of a plan: the tokens that each device holds, the pairs it computes, and the tokens it receives, by sender.

A transfer of an unknown kind is shown by its letter and its rows.
"""

import html
from collections.abc import Iterator, Sequence
from itertools import groupby
from string import ascii_letters
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from longspan.checks import check_static_size
from longspan.parallel.order import chunk_of, owner_of, runs_of
from longspan.render.html import BLUE, ORANGE, SIDE, Ink, line, page, paint, swatch
from longspan.render.picture import shortened
from longspan.render.text import numbers_above

if TYPE_CHECKING:
    from longspan.parallel.plan import ParallelPlan, Transfer

NEITHER, SOME, ALL, QUERY, OWN = range(5)
INK = ".:+q#"
MEANING = {
    OWN: "held",
    ALL: "received",
    SOME: "some received",
    QUERY: "received query",
    NEITHER: "neither held nor received",
}
MAX_SPANS = 3  # that are listed for one transfer and device
MAX_WIDTH, MIN_LAST_COLUMN = 120, 60  # characters: longer rows are continued below, but their last column has 60
HTML_DEVICES = 16
INKS = {OWN: Ink(BLUE, 1.0), ALL: Ink(ORANGE, 0.85), QUERY: Ink("#10b981", 1.0)}
BAR, HIGH, THIN = 64, 12, 2  # pixels
CELL = "text-align:left;padding:1px 14px 1px 0;vertical-align:top"
FRAME = 'fill="none" stroke="currentColor" stroke-opacity="0.4"'


class ReceivedSpan(NamedTuple):
    """Neighbouring tokens [start, stop) that a device receives."""

    kind: str
    steps: tuple[int, ...]  # the transfers that bring them
    start: int
    stop: int
    sources: tuple[int, ...]  # the devices that send them


class UnknownRows(NamedTuple):
    """Received rows whose tokens are known only at run time: their maximum number, and the devices that send them."""

    step: int
    rows: int
    sources: tuple[int, ...] = ()  # empty: any device


class DeviceTokens(NamedTuple):
    """The tokens that a device holds and receives in the forward pass."""

    device: int
    runs: tuple[tuple[int, int], ...]
    pieces: tuple[ReceivedSpan, ...]
    others: tuple[UnknownRows, ...]

    @property
    def own(self) -> str:
        runs = [run for run in self.runs if run[0] < run[1]]
        if len(runs) == 2 and runs[0][1] == runs[1][0]:
            runs = [(runs[0][0], runs[1][1])]
        return ", ".join(_tokens(*run) for run in runs) or "padding"

    def levels(self) -> Iterator[tuple[int, int, int]]:
        """Tokens [start, stop) and their level, in the order in which they are drawn over each other."""
        for run in self.runs:
            yield *run, OWN
        for piece in sorted(self.pieces, key=lambda piece: piece.kind == "queries"):
            yield piece.start, piece.stop, QUERY if piece.kind == "queries" else ALL


def picture_text(plan: "ParallelPlan", max_cells: int, devices: int) -> str:
    """See `ParallelPlan.show`."""
    max_cells, devices = check_static_size("max_cells", max_cells, 1), check_static_size("devices", devices, 2)
    cell = max(1, -(-plan.length // max_cells))
    rows = [("device", "holds", "pairs", "load", numbers_above(plan.length, cell, count=4))]
    received = [["receives tokens from devices"]]
    shown = _shown(plan, devices)
    for one in shown:
        if one is None:
            rows.append(("...", f"{plan.shards - devices:,} more", "", "", ""))
            received.append([])
        else:
            rows.append((str(one.device), one.own, *_work(plan, one.device), _strip(plan, one, cell)))
            received.append([" ".join(words) for words in _received(plan, one)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = []
    for row, texts in zip(rows, received, strict=True):
        device, holds, *numbers, strip = row
        cells = [device.rjust(widths[0]), holds.ljust(widths[1])]
        cells += [number.rjust(width) for number, width in zip(numbers, widths[2:4], strict=True)]
        table += _folded("  ".join([*cells, strip.ljust(widths[4])]), texts)
    ink = "".join(row[4] for row in rows[1:])
    meaning = _meaning(plan) | _undrawn(shown)
    legend = ", ".join(f"{INK[level]} {text}" for level, text in meaning.items() if INK[level] in ink)
    if cell > 1:
        legend = f"cells of {cell:,} tokens: {legend}"
    return "\n".join(text.rstrip() for text in (*_head(plan), *table, legend, _about_pairs(plan)))


def picture_html(plan: "ParallelPlan") -> str:
    """The picture of a plan in a notebook."""
    head, *facts = _head(plan)
    shown = _shown(plan, HTML_DEVICES)
    names = "".join(f'<th style="{CELL};font-weight:600">{name}</th>' for name in _COLUMNS)
    rows = "".join(f"<tr>{_cells(plan, one)}</tr>" for one in shown)
    used = {level for one in shown if one is not None for *_, level in one.levels()}
    meaning = _meaning(plan)
    key = " ".join(f"{swatch(ink)} {meaning[level]}" for level, ink in INKS.items() if level in used)
    style = "border-collapse:collapse;background:none;color:inherit;margin:6px 0"
    return page(
        line(html.escape(head), bold=True),
        *(line(_lettered(fact.split("  ", 2)[1:])) for fact in facts),
        f'<table style="{style}"><tr>{names}</tr>{rows}</table>',
        line(key),
        line(html.escape(_about_pairs(plan))),
    )


def device_tokens(plan: "ParallelPlan", device: int) -> DeviceTokens:
    """The tokens that one device holds and receives."""
    spans, others = [], []
    for number, step in enumerate(plan.steps):
        brought = _brought(plan, step, device)
        if brought is None:
            others += _unknown_rows(plan, number, device)
            continue
        spans += [ReceivedSpan(step.kind, (number,), start, stop, (source,)) for start, stop, source in brought]
        if step.kind in ("columns", "queries") and plan.by_flags[step.kind == "queries"]:
            others.append(UnknownRows(number, plan.capacity))
    return DeviceTokens(device, tuple(_runs(plan, device)), tuple(_joined(spans)), tuple(others))


def _brought(plan: "ParallelPlan", step: "Transfer", device: int) -> list[tuple[int, int, int]] | None:
    """Tokens [start, stop) that a transfer brings to a device, and their owner; None if they are not known."""
    if step.kind == "permute":
        source = device - step.shift
        if not 0 <= source < plan.shards:
            return []
        start = chunk_of(plan.order, plan.shards, source, step.run) * _size(plan) + step.start
        found = [(start, start + step.rows, source)]
    elif step.kind == "ring":
        # The ring is closed: the first device also receives from the last ones, even if the mask hides their keys.
        sources = [(device - d) % plan.shards for d in range(1, step.shift + 1)]
        sources += [(device + d) % plan.shards for d in range(1, step.after + 1)]
        found = [(*run, source) for source in sources for run in _runs(plan, source)]
    elif step.kind == "columns":
        found = _of_others(plan, plan.columns, device)
    elif step.kind == "queries":
        found = _of_others(plan, plan.queries, device)
    else:
        return None
    return [(start, min(stop, plan.length), source) for start, stop, source in found if start < min(stop, plan.length)]


def _unknown_rows(plan: "ParallelPlan", number: int, device: int) -> list[UnknownRows]:
    """The rows of a transfer whose tokens each device computes at run time."""
    step = plan.steps[number]
    if step.exchange is None:
        return [UnknownRows(number, step.rows)]
    blocks = {device - shift: count for shift, count in step.exchange.shifts}
    if not blocks:
        blocks = dict.fromkeys(range(plan.shards), step.exchange.blocks)
    sources = [source for source in sorted(blocks) if 0 <= source < plan.shards and source != device]
    rows = step.exchange.unit * sum(blocks[source] for source in sources)
    if not rows:
        return []
    return [UnknownRows(number, rows, tuple(sources))]


def _of_others(plan: "ParallelPlan", tokens: tuple[int, ...], device: int) -> list[tuple[int, int, int]]:
    """Spans [start, stop) of those of the tokens that other devices own, and the owner."""
    if not tokens:
        return []
    token = np.array(tokens, np.int64)
    owner, _ = owner_of(plan.order, plan.shards, token // _size(plan))
    first = np.flatnonzero((np.diff(token, prepend=-2) != 1) | (np.diff(owner, prepend=-1) != 0))
    last = np.append(first[1:], len(token)) - 1
    found = zip(token[first].tolist(), (token[last] + 1).tolist(), owner[first].tolist(), strict=True)
    return [span for span in found if span[2] != device]


def _runs(plan: "ParallelPlan", device: int) -> list[tuple[int, int]]:
    """The tokens [start, stop) that a device holds."""
    size, end = _size(plan), plan.length
    starts = [chunk_of(plan.order, plan.shards, device, run) * size for run in range(runs_of(plan.order))]
    return [(min(start, end), min(start + size, end)) for start in starts]


def _size(plan: "ParallelPlan") -> int:
    return plan.rows // runs_of(plan.order)


def _joined(spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
    """The spans in the order of transfers; neighbouring ones of the same kind are joined."""
    joined: list[ReceivedSpan] = []
    for span in sorted(spans, key=lambda span: (span.kind, span.start)):
        if joined and joined[-1].kind == span.kind and joined[-1].stop == span.start:
            last = joined[-1]
            steps = tuple(sorted({*last.steps, *span.steps}))
            sources = tuple(sorted({*last.sources, *span.sources}))
            joined[-1] = ReceivedSpan(span.kind, steps, last.start, span.stop, sources)
        else:
            joined.append(span)
    return sorted(joined, key=lambda span: (span.steps, span.start))


def _shown(plan: "ParallelPlan", max_devices: int) -> list[DeviceTokens | None]:
    """The first and the last devices; None in place of those that are left out."""
    if plan.shards <= max_devices:
        return [device_tokens(plan, device) for device in range(plan.shards)]
    first = -(-max_devices // 2)
    return [
        *(device_tokens(plan, device) for device in range(first)),
        None,
        *(device_tokens(plan, device) for device in range(plan.shards - max_devices + first, plan.shards)),
    ]


def _head(plan: "ParallelPlan") -> list[str]:
    first, *others = plan._lines([f"{letter}  " for letter in ascii_letters])
    return [first.replace(plan.text, shortened(plan.text), 1), *others]


def _meaning(plan: "ParallelPlan") -> dict[int, str]:
    """The legend of the characters and colours. A ring may send less than is drawn if the mask has arrays."""
    if not plan.data:
        return MEANING
    return {level: f"{text} in the worst case" if level in (ALL, SOME) else text for level, text in MEANING.items()}


def _undrawn(shown: Sequence[DeviceTokens | None]) -> dict[int, str]:
    """The legend of a cell that no device holds, if tokens that are known only at run time are not drawn."""
    letters = sorted({ascii_letters[rows.step] for one in shown if one is not None for rows in one.others})
    if not letters:
        return {}
    return {NEITHER: f"not held; tokens received by the transfers {', '.join(letters)} are not drawn"}


def _work(plan: "ParallelPlan", device: int) -> tuple[str, str]:
    """The pairs that a device computes, and their ratio to the mean."""
    if plan.pairs is None:
        return "?", "?"
    mean = sum(plan.pairs) / plan.shards
    load = 1.0
    if mean:
        load = plan.pairs[device] / mean
    return _short(plan.pairs[device]), f"{load:.2f}"


def _received(plan: "ParallelPlan", one: DeviceTokens) -> list[tuple[str, ...]]:
    """The tokens that a device receives, in words: (letters of transfers, tokens)."""
    texts = []
    for steps, group in groupby(one.pieces, lambda span: span.steps):
        spans = list(group)
        up_to = "up to all of " if plan.data and spans[0].kind == "ring" else ""
        texts.append((steps, up_to + _described(spans)))
    for step, rows, sources in one.others:
        senders = f" from {_numbers(sources)}" if sources else ""
        texts.append(((step,), f"up to {rows:,} {_unit(plan.steps[step].kind, rows)}{senders}"))
    if not texts:
        return [("nothing",)]
    return [(_numbers(steps, ascii_letters), words) for steps, words in sorted(texts)]


def _unit(kind: str, count: int) -> str:
    """The name of the things that a transfer brings."""
    if kind == "queries":
        return "query" if count == 1 else "queries"
    return "row" if count == 1 else "rows"


def _described(spans: Sequence[ReceivedSpan]) -> str:
    count, kind = sum(span.stop - span.start for span in spans), spans[0].kind
    if len(spans) > MAX_SPANS:
        sources = sorted({source for span in spans for source in span.sources})
        return f"{count:,} {_unit(kind, 2)} from {_numbers(sources)}"
    unit = f"{_unit(kind, count)} " if kind == "queries" else ""
    return unit + ", ".join(f"{_tokens(span.start, span.stop)} from {_numbers(span.sources)}" for span in spans)


def _tokens(start: int, stop: int) -> str:
    if stop == start + 1:
        return f"{start:,}"
    return f"{start:,}-{stop - 1:,}"


def _numbers(numbers: Sequence[int], names: Sequence[str] | None = None) -> str:
    """Numbers, or their names, as at most three ranges.

    Example:
        >>> _numbers((0, 1, 2, 5)), _numbers((0, 1), "abc"), _numbers((1, 3, 5, 7, 9, 11))
        ('0-2, 5', 'a-b', '1, 3, 5 ...')
    """
    found = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        same = [str(number) if names is None else names[number] for _, number in group]
        found.append(same[0] if len(same) == 1 else f"{same[0]}-{same[-1]}")
    return ", ".join(found[:MAX_SPANS]) + " ..." * (len(found) > MAX_SPANS)


def _folded(left: str, words: Sequence[str]) -> list[str]:
    """A row; its last column is continued on further lines if it is too wide."""
    lines, at = [left + "  "], len(left) + 2
    width = max(MAX_WIDTH, at + MIN_LAST_COLUMN)
    for number, word in enumerate(words):
        text = word + ";" * (number + 1 < len(words))
        if len(lines[-1]) > at and len(lines[-1]) + 1 + len(text) > width:
            lines.append(" " * at)
        lines[-1] += " " * (len(lines[-1]) > at) + text
    return lines


def _strip(plan: "ParallelPlan", one: DeviceTokens, cell: int) -> str:
    """Tokens from left to right, one character per cell."""
    first = cell * np.arange(-(-plan.length // cell))
    last = np.minimum(first + cell, plan.length)
    count = {level: np.zeros(len(first), np.int64) for level in (OWN, QUERY, ALL)}
    for start, stop, level in one.levels():
        count[level] += np.clip(np.minimum(stop, last) - np.maximum(start, first), 0, None)
    own, queries, received = count.values()
    levels = np.select([own > 0, queries > 0, received >= last - first, received > 0], [OWN, QUERY, ALL, SOME], NEITHER)
    return "".join(INK[level] for level in levels)


def _about_pairs(plan: "ParallelPlan") -> str:
    if plan.pairs is None:
        return "the pairs of a device depend on the mask's arrays"
    if plan.columns or plan.queries or plan.capacity:
        return "pairs are counted per head, without those of global tokens"
    return "pairs are counted per head"


def _short(number: int | float) -> str:
    """Three digits of a large number.

    Example:
        >>> _short(999), _short(16_800), _short(2**40)
        ('999', '16.8k', '1.1T')
    """
    for unit in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:,.0f}P"


_COLUMNS = ("device", "holds", "computes", "tokens", "receives tokens from devices")


def _cells(plan: "ParallelPlan", one: DeviceTokens | None) -> str:
    """A row of the table for pages."""
    if one is None:
        return f'<td style="{CELL}" colspan="{len(_COLUMNS)}">… {plan.shards - HTML_DEVICES:,} more</td>'
    texts = (str(one.device), one.own, _bar(plan, one.device), _drawn(plan, one))
    cells = "".join(f'<td style="{CELL};white-space:nowrap">{text}</td>' for text in texts)
    received = "; ".join(
        f'<span style="white-space:nowrap">{_lettered(words)}</span>' for words in _received(plan, one)
    )
    return f'{cells}<td style="{CELL}">{received}</td>'


def _lettered(words: Sequence[str]) -> str:
    """Words, after the bold letters of their transfers if there are any."""
    letters = "".join(f"<b>{html.escape(word)}</b> " for word in words[:-1])
    return letters + html.escape(words[-1])


def _bar(plan: "ParallelPlan", device: int) -> str:
    """A bar with the pairs of a device, relative to the busiest one."""
    if plan.pairs is None:
        return "depends on the mask's arrays"
    pairs, load = _work(plan, device)
    width = BAR * plan.pairs[device] / max(*plan.pairs, 1)
    filled = f'<rect width="{width:.2f}" height="{HIGH}" {paint(INKS[OWN])}/>'
    return f"{_framed(BAR, filled)} {pairs} pairs, load {load}"


def _drawn(plan: "ParallelPlan", one: DeviceTokens) -> str:
    """Tokens from left to right; narrow spans are widened to stay visible."""
    shapes = "".join(
        f'<rect x="{SIDE * start / plan.length:.2f}" width="{max(THIN, SIDE * (stop - start) / plan.length):.2f}" '
        f'height="{HIGH}" {paint(INKS[level])}/>'
        for start, stop, level in one.levels()
        if start < stop
    )
    return _framed(SIDE, shapes)


def _framed(width: int, shapes: str) -> str:
    frame = f'<rect x="0.5" y="0.5" width="{width - 1}" height="{HIGH - 1}" {FRAME}/>'
    place = f'width="{width}" height="{HIGH}" aria-hidden="true" style="vertical-align:-1px"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {place}>{shapes}{frame}</svg>'
