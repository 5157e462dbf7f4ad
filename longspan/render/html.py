"""Pictures for notebooks and pages: HTML around SVG, without scripts or external files.

They have no background, text and lines have the page's text colour (`currentColor`), and shades are one colour with
different opacities. So they are readable on light and on dark pages.
"""

import html
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from longspan.layout import FULL, PARTIAL
from longspan.render.bands import Bands, colour
from longspan.render.picture import Picture, ticks
from longspan.render.tiles import TilePicture

SIDE = 320  # pixels along a picture's longer side
SMALL_SIDE = 192  # the same, if three or more are side by side
MIN_CELL, MAX_CELL = 3, 24  # pixels along a cell
BAND, GAP, TOP = 6, 3, 16  # pixels: a band of documents, the gap to the cells, the numbers above
BLUE, ORANGE = "#3b82f6", "#f59e0b"
SHADES = 6
MAX_LINED = 48  # tiles along a side, up to which lines are drawn between tiles
OPACITY = (0.0, *(0.3 + 0.5 * n / (SHADES - 1) for n in range(SHADES)), 1.0)
TEXT = 'font-family="system-ui, sans-serif" font-size="11" fill="currentColor" fill-opacity="0.85"'
STYLE = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5"
SIDES = "rows are queries, columns are keys"
CODE = "overflow-wrap:anywhere;background:none;color:inherit"


class Ink(NamedTuple):
    """The colour and opacity of the cells of one level, and their meaning for the legend."""

    colour: str
    opacity: float
    meaning: str = ""


NO_INK = Ink("none", 0)
INKS = {level: Ink(BLUE, opacity) for level, opacity in enumerate(OPACITY) if level}
KINDS = {PARTIAL: Ink(ORANGE, 0.85, "visited, partly allowed"), FULL: Ink(BLUE, 1.0, "visited, all allowed")}


def picture_html(picture: Picture, *, more: str = "") -> str:
    """A mask's picture with its rule and its caption, followed by the HTML `more`."""
    side = _side(len(picture.panels))
    figures = "".join(_figure(_name(p.head), _svg(picture, p.levels(SHADES), INKS, side)) for p in picture.panels)
    legend = SIDES
    if max(picture.q_cell, picture.kv_cell) > 1:
        legend = f"{_shades_legend()} {picture.q_cell:,} x {picture.kv_cell:,} pairs in each cell; {SIDES}"
    return page(
        line(f'<code style="{CODE}">{html.escape(picture.title)}</code>', bold=True),
        line(html.escape(picture.facts)),
        _side_by_side(figures),
        line(legend),
        more,
    )


def tiles_html(tiles: TilePicture) -> str:
    """A layout's tiles by kind."""
    side = _side(len(tiles.levels))
    figures = "".join(
        _figure(_name(head), _svg(tiles, levels, KINDS, side, lined=max(levels.shape) <= MAX_LINED))
        for head, levels in zip(tiles.heads, tiles.levels, strict=True)
    )
    legend = " ".join(f"{swatch(ink)} {ink.meaning}" for ink in KINDS.values())
    return page(
        line(f'<code style="{CODE}">{html.escape(tiles.title)}</code>', bold=True),
        line(html.escape(tiles.facts)),
        _side_by_side(figures),
        line(f"{legend} {swatch(NO_INK)} not visited; {SIDES}"),
    )


def table_html(rows: Sequence[tuple[str, str]], *, before: str = "") -> str:
    """A table of names and values."""
    cells = "".join(
        f'<tr><th style="text-align:left;padding:1px 12px 1px 0;font-weight:600;vertical-align:top;white-space:pre">'
        f'{html.escape(name)}</th><td style="text-align:left;overflow-wrap:anywhere">{html.escape(value)}</td></tr>'
        for name, value in rows
    )
    table = f'<table style="border-collapse:collapse;background:none;color:inherit">{cells}</table>'
    return f"{before}{table}"


def tile_bar(empty: int, partial: int, full: int) -> str:
    """One bar that shows the numbers of tiles by kind, with a legend."""
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
    key = f"{swatch(KINDS[FULL])} full tiles {swatch(KINDS[PARTIAL])} partial {swatch(NO_INK)} not visited"
    return f'<div style="margin:4px 0 8px">{svg}<div>{key}</div></div>'


def document(body: str, title: str) -> str:
    """A complete HTML file, light or dark as the reader's browser is set."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="color-scheme" content="light dark"><title>{html.escape(title)}</title></head>\n'
        f'<body style="margin:24px;color:CanvasText;background:Canvas">\n{body}\n</body></html>\n'
    )


def page(*parts: str) -> str:
    """Parts as one block, for the output of a notebook cell."""
    return f'<div class="longspan" style="{STYLE}">{"".join(parts)}</div>'


def line(content: str, *, bold: bool = False) -> str:
    """A line of a page."""
    weight = 600 if bold else 400
    return f'<div style="font-weight:{weight}">{content}</div>'


def _figure(name: str, svg: str) -> str:
    if name:
        name = line(name)
    return f"<div>{name}{svg}</div>"


def _name(head: int | None) -> str:
    return "" if head is None else f"head {head}"


def _side(figures: int) -> int:
    """Pixels along each of several figures side by side."""
    return SIDE if figures < 3 else SMALL_SIDE


def _side_by_side(figures: str) -> str:
    return f'<div style="display:flex;flex-wrap:wrap;gap:16px;margin:6px 0">{figures}</div>'


def _shades_legend() -> str:
    swatches = "".join(swatch(ink, gap=0) for ink in INKS.values())
    return f"none {swatch(NO_INK, gap=0)}{swatches} all allowed;"


def swatch(ink: Ink, gap: int = 2) -> str:
    """A small square of a colour, for legends."""
    frame = 'stroke="currentColor" stroke-opacity="0.4"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="12" height="12" style="vertical-align:-1px;margin:0 {gap}px">'
        f'<rect x="0.5" y="0.5" width="11" height="11" {paint(ink)} {frame}/></svg>'
    )


def paint(ink: Ink) -> str:
    """The SVG attributes that fill a shape."""
    return f'fill="{ink.colour}" fill-opacity="{ink.opacity:.3g}"'


def _svg(
    picture: Picture | TilePicture, levels: np.ndarray, inks: dict[int, Ink], side: int, *, lined: bool = False
) -> str:
    """Cells in a frame, token numbers at the left and on top, segment ids in between."""
    rows, columns = levels.shape
    size = min(MAX_CELL, max(MIN_CELL, side // max(rows, columns, 1)))
    left = 7 * max([len(f"{at:,}") for at in ticks(picture.q_len, picture.q_cell)], default=0) + 8
    margin = (BAND + GAP) * (picture.bands is not None)
    x, y, width, height = left + margin, TOP + margin, columns * size, rows * size
    shapes = [*_cells(levels, size, inks)]  # the last cell of a side is drawn whole, even if it has fewer slots
    if lined:
        shapes.append(_lines(rows, columns, size))
    frame = f'<rect x="0.5" y="0.5" width="{max(width - 1, 0)}" height="{max(height - 1, 0)}" fill="none"'
    inside = (
        f'<g transform="translate({x} {y})">{"".join(shapes)}{frame} stroke="currentColor" stroke-opacity="0.5"/></g>'
    )
    bands = ""
    if picture.bands is not None:
        bands = "".join(_bands(picture.bands, size, x, y))
    numbers = "".join(_numbers(picture, size, x, y))
    box = x + width + 40, y + height + 4  # the last number on top may extend past the cells
    label = html.escape(f"{picture.title}: {picture.facts}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{box[0]}" height="{box[1]}" viewBox="0 0 {box[0]} {box[1]}" '
        f'role="img" aria-label="{label}" style="max-width:100%;height:auto">{inside}{bands}{numbers}</svg>'
    )


def _cells(levels: np.ndarray, size: int, inks: dict[int, Ink]) -> Iterator[str]:
    """One SVG path per shade, made of runs of equal cells in a row."""
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(levels):
        if not len(row):
            continue
        for start, stop in pairwise([0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]):
            paths.setdefault(int(row[start]), []).append(f"M{start} {y}h{stop - start}v1H{start}z")
    for level, ink in inks.items():
        if level in paths:
            place = f'transform="scale({size})" shape-rendering="crispEdges"'
            yield f'<path {place} {paint(ink)} d="{"".join(paths[level])}"/>'


def _lines(rows: int, columns: int, size: int) -> str:
    across = "".join(f"M0 {n * size}H{columns * size}" for n in range(1, rows))
    down = "".join(f"M{n * size} 0V{rows * size}" for n in range(1, columns))
    return f'<path d="{across}{down}" stroke="currentColor" stroke-opacity="0.25" stroke-width="1"/>'


def _bands(bands: Bands, size: int, x: int, y: int) -> Iterator[str]:
    """Segment ids as coloured bands, at the left for queries and on top for keys."""
    for start, stop, fill in _coloured_runs(bands.q):
        yield _rectangle(x - BAND - GAP, y + start * size, BAND, (stop - start) * size, fill)
    for start, stop, fill in _coloured_runs(bands.kv):
        yield _rectangle(x + start * size, y - BAND - GAP, (stop - start) * size, BAND, fill)


def _coloured_runs(ids: list[int | None]) -> Iterator[tuple[int, int, str]]:
    """(start, stop, colour) for each run of cells with equal ids; padding has no colour and is left out."""
    start = 0
    for cell_id, run in groupby(ids):
        stop = start + len(list(run))
        fill = colour(cell_id)
        if fill is not None:
            yield start, stop, fill
        start = stop


def _rectangle(x: int, y: int, width: int, height: int, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"/>'


def _numbers(picture: Picture | TilePicture, size: int, x: int, y: int) -> Iterator[str]:
    margin = (BAND + GAP) * (picture.bands is not None)
    for at in ticks(picture.q_len, picture.q_cell):
        place = f'x="{x - margin - 5}" y="{y + at // picture.q_cell * size + 9}"'
        yield f'<text {place} text-anchor="end" {TEXT}>{at:,}</text>'
    for at in ticks(picture.kv_len, picture.kv_cell):
        yield f'<text x="{x + at // picture.kv_cell * size}" y="{y - margin - 5}" {TEXT}>{at:,}</text>'
