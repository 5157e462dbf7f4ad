"""`longspan show`: a mask drawn in characters, or into a file."""

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.expressions import parse
from longspan.cli.files import check_writable, written
from longspan.cli.library import library
from longspan.cli.options import LONGEST, AsJson, Expression, Keys, Queries, print_json

WIDEST = 64  # characters across where there is no terminal
MOST_TILES = 2**16  # along a side, in a picture


def show(
    expression: Expression,
    queries: Queries = None,
    keys: Keys = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture to this file.", dir_okay=False)] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file.", dir_okay=False)] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.", dir_okay=False)] = None,
    head: Annotated[int | None, typer.Option(min=0, max=LONGEST, help="One head; the first few by default.")] = None,
    batch: Annotated[int, typer.Option(min=0, max=LONGEST, help="Which batch row.")] = 0,
    tile: Annotated[
        int | None, typer.Option(min=1, max=LONGEST, help="Also draw tiles of this size (PNG and SVG).")
    ] = None,
    max_cells: Annotated[
        int | None, typer.Option(min=1, max=512, help="Width of the picture in characters.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a mask, in characters or into files."""
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
            with written(path) as new:
                figure.savefig(new, format=kind, dpi=150)
    if html is not None:
        page = document(mask_html(mask, q_len, kv_len, **which), repr(mask))
        with written(html) as new:
            new.write_text(page, "utf-8")
    files = [str(path) for path in (png, svg, html) if path is not None]
    if as_json:
        cells = max(1, -(-max(q_len, kv_len) // WIDEST))
        print_json(_facts(picture_of(mask, q_len, kv_len, cells=cells, **which), mask) | dict(files=files))
    elif files:
        print("wrote " + ", ".join(files))
    else:
        print(mask.show(q_len, kv_len, max_cells=_across() if max_cells is None else max_cells, **which))


def _check_tile(tile: int | None, q_len: int, kv_len: int) -> None:
    longest = max(q_len, kv_len)
    if tile is not None and -(-longest // tile) > MOST_TILES:
        raise ValueError(
            f"--tile: {longest:,} tokens in tiles of {tile:,} are {-(-longest // tile):,} tiles along a side, over "
            f"{MOST_TILES:,}. Give a tile of at least {-(-longest // MOST_TILES):,}."
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


def _across() -> int:
    """As wide as the terminal allows beside the numbers, and not too high for it to be seen as a whole."""
    if sys.stdout is None or not sys.stdout.isatty():
        return WIDEST
    size = shutil.get_terminal_size()
    return max(16, min(WIDEST, size.columns - 12))
