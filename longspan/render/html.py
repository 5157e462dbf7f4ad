"""Pictures for notebooks and pages: HTML around SVG, without scripts and without anything from elsewhere.

Nothing is painted behind them, text and lines are in the page's own colour (`currentColor`), and shades are one colour
over the page: so they read on light pages and on dark ones.
"""

import html
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from longspan.layout import FULL, PARTIAL
from longspan.render.bands import Bands, colour
from longspan.render.picture import Picture, ticks
from longspan.render.tiles import TilePicture

SIDE = 320  # pixels along a picture's longer side
SMALL_SIDE = 192  # of several side by side
LEAST_CELL, MOST_CELL = 3, 24  # pixels along a cell
BAND, GAP, TOP = 6, 3, 16  # pixels: a band of documents, the space beside it, the numbers above
BLUE, ORANGE = "#3b82f6", "#f59e0b"
SHADES = 6
MOST_LINED = 48  # tiles along a side between which lines are drawn
OPACITY = (0.0, *(0.3 + 0.5 * n / (SHADES - 1) for n in range(SHADES)), 1.0)
TEXT = 'font-family="system-ui, sans-serif" font-size="11" fill="currentColor" fill-opacity="0.85"'
STYLE = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5"
SIDES = "rows are queries, columns are keys"
CODE = "overflow-wrap:anywhere;background:none;color:inherit"


class Ink(NamedTuple):
    """How cells of one number are painted."""

    colour: str
    opacity: float
    meaning: str = ""


NOTHING = Ink("none", 0)
INKS = {level: Ink(BLUE, opacity) for level, opacity in enumerate(OPACITY) if level}
KINDS = {PARTIAL: Ink(ORANGE, 0.85, "visited, partly allowed"), FULL: Ink(BLUE, 1.0, "visited, all allowed")}


def picture_html(picture: Picture, *, more: str = "") -> str:
    """A mask's picture with its rule and its caption; `more` comes after them."""
    side = SIDE if len(picture.panels) < 3 else SMALL_SIDE
    figures = "".join(_figure(_name(p.head), _svg(picture, p.levels(SHADES), INKS, side)) for p in picture.panels)
    in_blocks = max(picture.q_cell, picture.kv_cell) > 1
    key = f"{_scale_key()} {picture.q_cell:,} x {picture.kv_cell:,} pairs in each cell; " if in_blocks else ""
    return page(
        line(f'<code style="{CODE}">{html.escape(picture.title)}</code>', bold=True),
        line(html.escape(picture.facts)),
        _side_by_side(figures),
        line(key + SIDES),
        more,
    )


def tiles_html(tiles: TilePicture) -> str:
    """A layout's tiles by kind."""
    side = SIDE if len(tiles.levels) < 3 else SMALL_SIDE
    figures = "".join(
        _figure(_name(head), _svg(tiles, levels, KINDS, side, lined=max(levels.shape) <= MOST_LINED))
        for head, levels in zip(tiles.heads, tiles.levels, strict=True)
    )
    key = " ".join(f"{swatch(ink)} {ink.meaning}" for ink in KINDS.values())
    return page(
        line(f'<code style="{CODE}">{html.escape(tiles.title)}</code>', bold=True),
        line(html.escape(tiles.facts)),
        _side_by_side(figures),
        line(f"{key} {swatch(NOTHING)} not visited; {SIDES}"),
    )


def table_html(rows: Sequence[tuple[str, str]], *, before: str = "") -> str:
    """Names and values."""
    cells = "".join(
        f'<tr><th style="text-align:left;padding:1px 12px 1px 0;font-weight:600;vertical-align:top;white-space:pre">'
        f'{html.escape(name)}</th><td style="text-align:left;overflow-wrap:anywhere">{html.escape(value)}</td></tr>'
        for name, value in rows
    )
    table = f'<table style="border-collapse:collapse;background:none;color:inherit">{cells}</table>'
    return f"{before}{table}"


def tile_bar(empty: int, partial: int, full: int) -> str:
    """How many tiles are of which kind, as one bar, with what its colours mean."""
    whole, x, shapes = max(empty + partial + full, 1), 0.0, []
    for number, kind in ((full, FULL), (partial, PARTIAL)):
        width = SIDE * number / whole
        shapes.append(f'<rect x="{x:.2f}" width="{width:.2f}" height="12" {paint(KINDS[kind])}/>')
        x += width
    frame = f'<rect x="0.5" y="0.5" width="{SIDE - 1}" height="11" fill="none" stroke="currentColor"'
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIDE}" height="12" role="img" aria-label="tiles by kind">'
        f'{"".join(shapes)}{frame} stroke-opacity="0.5"/></svg>'
    )
    key = f"{swatch(KINDS[FULL])} full tiles {swatch(KINDS[PARTIAL])} partial {swatch(NOTHING)} not visited"
    return f'<div style="margin:4px 0 8px">{svg}<div>{key}</div></div>'


def document(body: str, title: str) -> str:
    """A file of its own, in the reader's light or dark."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="color-scheme" content="light dark"><title>{html.escape(title)}</title></head>\n'
        f'<body style="margin:24px;color:CanvasText;background:Canvas">\n{body}\n</body></html>\n'
    )


def page(*parts: str) -> str:
    """Parts as one block, as a notebook's cell shows it."""
    return f'<div class="longspan" style="{STYLE}">{"".join(parts)}</div>'


def line(content: str, *, bold: bool = False) -> str:
    """A line of a page."""
    return f'<div style="font-weight:{600 if bold else 400}">{content}</div>'


def _figure(name: str, svg: str) -> str:
    return f"<div>{line(name) if name else ''}{svg}</div>"


def _name(head: int | None) -> str:
    return "" if head is None else f"head {head}"


def _side_by_side(figures: str) -> str:
    return f'<div style="display:flex;flex-wrap:wrap;gap:16px;margin:6px 0">{figures}</div>'


def _scale_key() -> str:
    swatches = "".join(swatch(ink, gap=0) for ink in INKS.values())
    return f"none {swatch(NOTHING, gap=0)}{swatches} all allowed;"


def swatch(ink: Ink, gap: int = 2) -> str:
    """A small square, as legends have them."""
    frame = 'stroke="currentColor" stroke-opacity="0.4"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="12" height="12" style="vertical-align:-1px;margin:0 {gap}px">'
        f'<rect x="0.5" y="0.5" width="11" height="11" {paint(ink)} {frame}/></svg>'
    )


def paint(ink: Ink) -> str:
    """The attributes of a shape."""
    return f'fill="{ink.colour}" fill-opacity="{ink.opacity:.3g}"'


def _svg(
    picture: Picture | TilePicture, levels: np.ndarray, inks: dict[int, Ink], side: int, *, lined: bool = False
) -> str:
    """Cells in their frame, token numbers at the left and on top, documents in between."""
    rows, columns = levels.shape
    size = min(MOST_CELL, max(LEAST_CELL, side // max(rows, columns, 1)))
    left = 7 * max([len(f"{at:,}") for at in ticks(picture.q_len, picture.q_cell)], default=0) + 8
    margin = (BAND + GAP) * (picture.bands is not None)
    x, y, width, height = left + margin, TOP + margin, columns * size, rows * size
    # The last cell of a ragged length is drawn whole.
    shapes = [*_cells(levels, size, inks), *(_lines(rows, columns, size) if lined else ())]
    frame = f'<rect x="0.5" y="0.5" width="{max(width - 1, 0)}" height="{max(height - 1, 0)}" fill="none"'
    inside = (
        f'<g transform="translate({x} {y})">{"".join(shapes)}{frame} stroke="currentColor" stroke-opacity="0.5"/></g>'
    )
    bands = "" if picture.bands is None else "".join(_bands(picture.bands, size, x, y))
    numbers = "".join(_numbers(picture, size, x, y))
    # Room for the last number above.
    box = x + width + 40, y + height + 4
    label = html.escape(f"{picture.title}: {picture.facts}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{box[0]}" height="{box[1]}" viewBox="0 0 {box[0]} {box[1]}" '
        f'role="img" aria-label="{label}" style="max-width:100%;height:auto">{inside}{bands}{numbers}</svg>'
    )


def _cells(levels: np.ndarray, size: int, inks: dict[int, Ink]) -> Iterator[str]:
    """One path per shade: runs of equal cells in a row."""
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(levels):
        ends = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)] if len(row) else [0]
        for start, stop in pairwise(ends):
            paths.setdefault(int(row[start]), []).append(f"M{start} {y}h{stop - start}v1H{start}z")
    for level, ink in inks.items():
        if level in paths:
            place = f'transform="scale({size})" shape-rendering="crispEdges"'
            yield f'<path {place} {paint(ink)} d="{"".join(paths[level])}"/>'


def _lines(rows: int, columns: int, size: int) -> Iterator[str]:
    across = "".join(f"M0 {n * size}H{columns * size}" for n in range(1, rows))
    down = "".join(f"M{n * size} 0V{rows * size}" for n in range(1, columns))
    yield f'<path d="{across}{down}" stroke="currentColor" stroke-opacity="0.25" stroke-width="1"/>'


def _bands(bands: Bands, size: int, x: int, y: int) -> Iterator[str]:
    """Documents along both edges."""
    for names, is_query in ((bands.q, True), (bands.kv, False)):
        at = 0
        for number, name in enumerate(names):
            if number + 1 < len(names) and names[number + 1] == name:
                continue
            place, long = at * size, (number + 1 - at) * size
            at = number + 1
            fill = colour(name)
            if fill is not None:
                box = (x - BAND - GAP, y + place, BAND, long) if is_query else (x + place, y - BAND - GAP, long, BAND)
                yield '<rect x="{}" y="{}" width="{}" height="{}" '.format(*box) + f'fill="{fill}"/>'


def _numbers(picture: Picture | TilePicture, size: int, x: int, y: int) -> Iterator[str]:
    margin = (BAND + GAP) * (picture.bands is not None)
    for at in ticks(picture.q_len, picture.q_cell):
        place = f'x="{x - margin - 5}" y="{y + at // picture.q_cell * size + 9}"'
        yield f'<text {place} text-anchor="end" {TEXT}>{at:,}</text>'
    for at in ticks(picture.kv_len, picture.kv_cell):
        yield f'<text x="{x + at // picture.kv_cell * size}" y="{y - margin - 5}" {TEXT}>{at:,}</text>'
