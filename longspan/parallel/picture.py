"""A plan drawn: which tokens each device holds, how much it computes, and what it receives from whom.

A kind of step that is not known here is shown by its letter and its rows, and by its own words above the devices.
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
    from longspan.parallel.plan import ParallelPlan, Step

NEITHER, SOME, ALL, QUERY, OWN = range(5)
INK = ".:+q#"
MEANING = {OWN: "holds", ALL: "receives", SOME: "receives some", QUERY: "a query that travels", NEITHER: "neither"}
PIECES = 3  # of a step that are written out for a device
WIDTH, LEAST = 120, 60  # characters after which a row is continued below, if its last column has so many
HTML_DEVICES = 16
INKS = {OWN: Ink(BLUE, 1.0), ALL: Ink(ORANGE, 0.85), QUERY: Ink("#10b981", 1.0)}
BAR, HIGH, THIN = 64, 12, 2  # pixels
CELL = "text-align:left;padding:1px 14px 1px 0;vertical-align:top"
FRAME = 'fill="none" stroke="currentColor" stroke-opacity="0.4"'


class Piece(NamedTuple):
    """Neighbouring tokens [start, stop) that a device receives."""

    kind: str
    steps: tuple[int, ...]  # that bring them
    start: int
    stop: int
    sources: tuple[int, ...]  # devices that they come from


class Untold(NamedTuple):
    """Rows of which it is not known before which tokens they are: the most that come, and of which devices, if told."""

    step: int
    rows: int
    sources: tuple[int, ...] = ()


class Seen(NamedTuple):
    """What a device holds and receives, forward."""

    device: int
    runs: tuple[tuple[int, int], ...]
    pieces: tuple[Piece, ...]
    others: tuple["Untold", ...]

    @property
    def own(self) -> str:
        runs = [run for run in self.runs if run[0] < run[1]]
        if len(runs) == 2 and runs[0][1] == runs[1][0]:
            runs = [(runs[0][0], runs[1][1])]
        return ", ".join(_tokens(*run) for run in runs) or "padding"

    def levels(self) -> Iterator[tuple[int, int, int]]:
        """Tokens [start, stop) and what they are to the device: what lies on top comes last."""
        for run in self.runs:
            yield *run, OWN
        for piece in sorted(self.pieces, key=lambda piece: piece.kind == "queries"):
            yield piece.start, piece.stop, QUERY if piece.kind == "queries" else ALL


def picture_text(plan: "ParallelPlan", max_cells: int, devices: int) -> str:
    """See `ParallelPlan.show`."""
    max_cells, devices = check_static_size("max_cells", max_cells, 1), check_static_size("devices", devices, 2)
    cell = max(1, -(-plan.length // max_cells))
    shown = _shown(plan, devices)
    strips = ["" if one is None else _strip(plan, one, cell) for one in shown]
    rows = [("device", "holds", "pairs", "load", numbers_above(plan.length, cell, count=4))]
    rows += [_left(plan, one, devices, strip) for one, strip in zip(shown, strips, strict=True)]
    right = [["receives"], *([] if one is None else [" ".join(w) for w in _received(plan, one)] for one in shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = []
    for row, received in zip(rows, right, strict=True):
        device, holds, *numbers, strip = row
        cells = [device.rjust(widths[0]), holds.ljust(widths[1])]
        cells += [number.rjust(width) for number, width in zip(numbers, widths[2:4], strict=True)]
        table += _folded("  ".join([*cells, strip.ljust(widths[4])]), received)
    ink = "".join(strips)
    marks = ", ".join(f"{INK[level]} {meaning}" for level, meaning in MEANING.items() if INK[level] in ink)
    legend = f"each {cell:,} tokens: {marks}" if cell > 1 else marks
    return "\n".join(text.rstrip() for text in (*_head(plan), *table, f"{legend}; {_about_pairs(plan)}"))


def picture_html(plan: "ParallelPlan") -> str:
    """What a notebook shows of a plan."""
    head, *facts = _head(plan)
    shown = _shown(plan, HTML_DEVICES)
    names = "".join(f'<th style="{CELL};font-weight:600">{name}</th>' for name in _COLUMNS)
    rows = "".join(f"<tr>{_cells(plan, one)}</tr>" for one in shown)
    used = {level for one in shown if one is not None for *_, level in one.levels()}
    key = " ".join(f"{swatch(ink)} {MEANING[level]}" for level, ink in INKS.items() if level in used)
    style = "border-collapse:collapse;background:none;color:inherit;margin:6px 0"
    return page(
        line(html.escape(head), bold=True),
        *(line(_lettered(fact.split("  ", 2)[1:])) for fact in facts),
        f'<table style="{style}"><tr>{names}</tr>{rows}</table>',
        line(f"{key}; {html.escape(_about_pairs(plan))}"),
    )


def seen(plan: "ParallelPlan", device: int) -> Seen:
    """What one device holds and receives."""
    found, others = [], []
    for number, step in enumerate(plan.steps):
        brought = _brought(plan, step, device)
        if brought is None:
            others += _untold(plan, number, device)
            continue
        found += [Piece(step.kind, (number,), start, stop, (source,)) for start, stop, source in brought]
        if step.kind in ("columns", "queries") and plan.by_flags[step.kind == "queries"]:
            others.append(Untold(number, plan.capacity))
    return Seen(device, tuple(_runs(plan, device)), tuple(_joined(found)), tuple(others))


def _brought(plan: "ParallelPlan", step: "Step", device: int) -> list[tuple[int, int, int]] | None:
    """Tokens [start, stop) and their owner that a step brings to a device; None: of a kind that does not tell."""
    if step.kind == "permute":
        source = device - step.shift
        if not 0 <= source < plan.shards:
            return []
        start = chunk_of(plan.order, plan.shards, source, step.run) * _size(plan) + step.start
        found = [(start, start + step.rows, source)]
    elif step.kind == "ring":
        # It is closed: the first device too receives from those before it, though it may not look at that.
        sources = [(device - d) % plan.shards for d in range(1, step.shift + 1)]
        sources += [(device + d) % plan.shards for d in range(1, step.after + 1)]
        found = [(*run, source) for source in sources for run in _runs(plan, source)]
    elif step.kind in ("columns", "queries"):
        found = _owned(plan, plan.columns if step.kind == "columns" else plan.queries, device)
    else:
        return None
    return [(start, min(stop, plan.length), source) for start, stop, source in found if start < min(stop, plan.length)]


def _untold(plan: "ParallelPlan", number: int, device: int) -> list[Untold]:
    """What a step brings of which each device finds out when it runs."""
    step = plan.steps[number]
    if step.exchange is None:
        return [Untold(number, step.rows)]
    shifts = {device - shift: blocks for shift, blocks in step.exchange.shifts}
    blocks = shifts or dict.fromkeys(range(plan.shards), step.exchange.blocks)
    sources = [source for source in sorted(blocks) if 0 <= source < plan.shards and source != device]
    rows = step.exchange.unit * sum(blocks[source] for source in sources)
    return [Untold(number, rows, tuple(sources))] if rows else []


def _owned(plan: "ParallelPlan", tokens: tuple[int, ...], device: int) -> list[tuple[int, int, int]]:
    """Tokens [start, stop) of other devices, and whose: neighbours together."""
    if not tokens:
        return []
    token = np.array(tokens, np.int64)
    owner, _ = owner_of(plan.order, plan.shards, token // _size(plan))
    first = np.flatnonzero((np.diff(token, prepend=-2) != 1) | (np.diff(owner, prepend=-1) != 0))
    last = np.append(first[1:], len(token)) - 1
    found = zip(token[first].tolist(), (token[last] + 1).tolist(), owner[first].tolist(), strict=True)
    return [piece for piece in found if piece[2] != device]


def _runs(plan: "ParallelPlan", device: int) -> list[tuple[int, int]]:
    """The tokens [start, stop) that a device holds."""
    size, end = _size(plan), plan.length
    starts = [chunk_of(plan.order, plan.shards, device, run) * size for run in range(runs_of(plan.order))]
    return [(min(start, end), min(start + size, end)) for start in starts]


def _size(plan: "ParallelPlan") -> int:
    return plan.rows // runs_of(plan.order)


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces of one kind that are neighbours as one, in the order of steps."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.kind, piece.start)):
        last = joined[-1] if joined else None
        if last is not None and last.kind == piece.kind and last.stop == piece.start:
            steps, sources = {*last.steps, *piece.steps}, {*last.sources, *piece.sources}
            joined[-1] = Piece(piece.kind, tuple(sorted(steps)), last.start, piece.stop, tuple(sorted(sources)))
        else:
            joined.append(piece)
    return sorted(joined, key=lambda piece: (piece.steps, piece.start))


def _shown(plan: "ParallelPlan", most: int) -> list[Seen | None]:
    """Devices from both ends; None: some are left out."""
    if plan.shards <= most:
        return [seen(plan, device) for device in range(plan.shards)]
    first = -(-most // 2)
    return [
        *(seen(plan, device) for device in range(first)),
        None,
        *(seen(plan, device) for device in range(plan.shards - most + first, plan.shards)),
    ]


def _head(plan: "ParallelPlan") -> list[str]:
    first, *others = plan._lines([f"{letter}  " for letter in ascii_letters])
    return [first.replace(plan.text, shortened(plan.text), 1), *others]


def _left(plan: "ParallelPlan", one: Seen | None, devices: int, strip: str) -> tuple[str, ...]:
    """What a row shows before what the device receives."""
    if one is None:
        return "...", f"{plan.shards - devices:,} more", "", "", ""
    return str(one.device), one.own, *_work(plan, one.device), strip


def _work(plan: "ParallelPlan", device: int) -> tuple[str, str]:
    """How many pairs a device computes, and how many that is to the mean."""
    if plan.pairs is None:
        return "?", "?"
    mean = sum(plan.pairs) / plan.shards
    return _short(plan.pairs[device]), f"{plan.pairs[device] / mean if mean else 1:.2f}"


def _received(plan: "ParallelPlan", one: Seen) -> list[tuple[str, ...]]:
    """What a device receives in words: the letters of steps, and what they bring."""
    said = []
    for steps, group in groupby(one.pieces, lambda piece: piece.steps):
        pieces = list(group)
        most = "at most " * (plan.data and pieces[0].kind == "ring")
        said.append((steps, most + _pieces(pieces)))
    for step, rows, sources in one.others:
        whose = f" of {_spans(sources)}" if sources else ""
        said.append(((step,), f"up to {rows:,} {_unit(plan.steps[step].kind)[rows > 1]}{whose}"))
    return [(_spans(steps, ascii_letters), words) for steps, words in sorted(said)] or [("nothing",)]


def _unit(kind: str) -> tuple[str, str]:
    """What a step of some kind brings: one, several."""
    return ("query", "queries") if kind == "queries" else ("row", "rows")


def _pieces(pieces: Sequence[Piece]) -> str:
    count, unit = sum(piece.stop - piece.start for piece in pieces), _unit(pieces[0].kind)
    if len(pieces) > PIECES:
        sources = sorted({source for piece in pieces for source in piece.sources})
        return f"{count:,} {unit[1]} of {_spans(sources)}"
    name = f"{unit[count > 1]} " * (pieces[0].kind == "queries")
    return name + ", ".join(f"{_tokens(piece.start, piece.stop)} of {_spans(piece.sources)}" for piece in pieces)


def _tokens(start: int, stop: int) -> str:
    return f"{start:,}" if stop == start + 1 else f"{start:,}-{stop - 1:,}"


def _spans(numbers: Sequence[int], names: Sequence[str] | None = None) -> str:
    """Numbers, or what they name, neighbours together, and no more than a few.

    Example:
        >>> _spans((0, 1, 2, 5)), _spans((0, 1), "abc"), _spans((1, 3, 5, 7, 9, 11))
        ('0-2, 5', 'a-b', '1, 3, 5 ...')
    """
    found = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        same = [str(number) if names is None else names[number] for _, number in group]
        found.append(same[0] if len(same) == 1 else f"{same[0]}-{same[-1]}")
    return ", ".join(found[:PIECES]) + " ..." * (len(found) > PIECES)


def _folded(left: str, words: Sequence[str]) -> list[str]:
    """A row whose last column goes on below where it would be too wide."""
    lines, at = [left + "  "], len(left) + 2
    width = max(WIDTH, at + LEAST)
    for number, word in enumerate(words):
        text = word + ";" * (number + 1 < len(words))
        if len(lines[-1]) > at and len(lines[-1]) + 1 + len(text) > width:
            lines.append(" " * at)
        lines[-1] += " " * (len(lines[-1]) > at) + text
    return lines


def _strip(plan: "ParallelPlan", one: Seen, cell: int) -> str:
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
        return "how many pairs a device computes depends on data"
    return f"pairs are of one head{', without global tokens' if plan.columns or plan.queries or plan.capacity else ''}"


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


_COLUMNS = ("device", "holds", "computes", "tokens", "receives")


def _cells(plan: "ParallelPlan", one: Seen | None) -> str:
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
    """Words after the letters of their steps, if they have some."""
    letters = "".join(f"<b>{html.escape(word)}</b> " for word in words[:-1])
    return letters + html.escape(words[-1])


def _bar(plan: "ParallelPlan", device: int) -> str:
    """How much a device computes beside the others."""
    if plan.pairs is None:
        return "depends on data"
    pairs, load = _work(plan, device)
    width = BAR * plan.pairs[device] / max(*plan.pairs, 1)
    filled = f'<rect width="{width:.2f}" height="{HIGH}" {paint(INKS[OWN])}/>'
    return f"{_framed(BAR, filled)} {pairs} pairs, load {load}"


def _drawn(plan: "ParallelPlan", one: Seen) -> str:
    """Tokens from left to right; never too thin to be seen."""
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
