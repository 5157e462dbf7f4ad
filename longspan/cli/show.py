"""`longspan show`: a picture of a mask, in characters or as a file."""

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.expressions import parse
from longspan.cli.library import library
from longspan.cli.options import MAX_LENGTH, AsJson, Expression, Keys, Queries, print_json
from longspan.files import atomic_write, check_writable

MAX_WIDTH = 64  # characters; the width if there is no terminal
MAX_TILES = 2**16  # tiles along a side of a picture


def show(
    expression: Expression,
    queries: Queries = None,
    keys: Keys = None,
    png: Annotated[Path | None, typer.Option(help="Write a PNG picture to this file.", dir_okay=False)] = None,
    svg: Annotated[Path | None, typer.Option(help="Write an SVG picture to this file.", dir_okay=False)] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page to this file.", dir_okay=False)] = None,
    head: Annotated[
        int | None, typer.Option(min=0, max=MAX_LENGTH, help="Draw this head; by default the first ones.")
    ] = None,
    batch: Annotated[int, typer.Option(min=0, max=MAX_LENGTH, help="Draw this batch row.")] = 0,
    tile: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_LENGTH, help="Also draw the borders of tiles of this size (PNG and SVG)."),
    ] = None,
    max_cells: Annotated[
        int | None, typer.Option(min=1, max=512, help="Width of the picture in characters.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a mask, in characters or as PNG, SVG or HTML files."""
    for path in (png, svg, html):
        check_writable(path)
    mask = parse(expression, queries)
    from longspan.render.html import document
    from longspan.render.notebook import lengths, mask_html
    from longspan.render.picture import picture_of

    q_len, kv_len = lengths(mask, queries, keys)
    _check_tile(tile, q_len, kv_len)
    which: dict[str, Any] = dict(batch=batch, head=head)
    for path, kind in ((png, "png"), (svg, "svg")):
        if path is not None:
            figure = mask.plot(q_len, kv_len, tile=tile, **which)
            with atomic_write(path) as new:
                figure.savefig(new, format=kind, dpi=150)
    if html is not None:
        page = document(mask_html(mask, q_len, kv_len, **which), repr(mask))
        with atomic_write(html) as new:
            new.write_text(page, "utf-8")
    files = [str(path) for path in (png, svg, html) if path is not None]
    if as_json:
        cells = max(1, -(-max(q_len, kv_len) // MAX_WIDTH))
        print_json(_facts(picture_of(mask, q_len, kv_len, cells=cells, **which), mask) | dict(files=files))
    elif files:
        print("wrote " + ", ".join(files))
    else:
        print(mask.show(q_len, kv_len, max_cells=max_cells or _default_width(), **which))


def _check_tile(tile: int | None, q_len: int, kv_len: int) -> None:
    longest = max(q_len, kv_len)
    if tile is not None and -(-longest // tile) > MAX_TILES:
        raise ValueError(
            f"--tile: {longest:,} tokens in tiles of {tile:,} are {-(-longest // tile):,} tiles along a side, more "
            f"than {MAX_TILES:,}. Give a tile of at least {-(-longest // MAX_TILES):,}."
        )


def _facts(picture: Any, mask: Any) -> dict[str, Any]:
    return dict(
        mask=repr(mask),
        queries=picture.q_len,
        keys=picture.kv_len,
        heads=picture.heads,
        heads_shown=len(picture.panels),
        allowed=picture.allowed,
        allowed_is_estimate=not picture.exact,
        visited_tiles=picture.visited,
        longspan=library().__version__,
    )


def _default_width() -> int:
    """The picture's width: that of the terminal without the numbers at the left, at most `MAX_WIDTH`."""
    if sys.stdout is None or not sys.stdout.isatty():
        return MAX_WIDTH
    size = shutil.get_terminal_size()
    return max(16, min(MAX_WIDTH, size.columns - 12))
