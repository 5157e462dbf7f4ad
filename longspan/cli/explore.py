"""`longspan explore`: an interactive page of a mask, as one HTML file."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.expressions import parse
from longspan.cli.options import MAX_LENGTH, AsJson, Expression, Keys, Queries, print_json
from longspan.files import atomic_write, check_writable

START = b"<!doctype html>"  # of every page that the command writes


def explore(
    expression: Expression,
    html: Annotated[Path, typer.Option(help="Write the page to this file.", dir_okay=False)],
    queries: Queries = None,
    keys: Keys = None,
    other: Annotated[
        str | None,
        typer.Option("--diff", metavar="EXPR", help="A second mask: the page shows where the two differ."),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="The text of the tokens, one per line in a UTF-8 file; or JSON in a .json file: a list of strings, or "
            "a list of two such lists, for queries and for keys.",
            dir_okay=False,
            exists=True,
        ),
    ] = None,
    head: Annotated[
        int | None, typer.Option(min=0, max=MAX_LENGTH, help="Show this head; by default the first.")
    ] = None,
    batch: Annotated[int, typer.Option(min=0, max=MAX_LENGTH, help="Show this batch row.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write an interactive page of a mask: why a pair is allowed, tiles, cache, devices, differences."""
    _check_target(html)
    texts = None
    if tokens is not None:
        texts = read_tokens(tokens)
    if isinstance(texts, list) and queries is None:
        queries = len(texts)
    if isinstance(texts, tuple):
        queries = len(texts[0]) if queries is None else queries
        keys = len(texts[1]) if keys is None else keys
    mask, second = parse(expression, queries), None
    from longspan.render.notebook import lengths

    q_len, kv_len = lengths(mask, queries, keys)
    if other is not None:
        second = parse(other, q_len)
    page = mask.explore(q_len, kv_len, tokens=texts, other=second, batch=batch, head=head)
    with atomic_write(html) as new:
        new.write_text(page.html, "utf-8")
    if as_json:
        from longspan.cli.library import library

        version = library().__version__
        print_json(dict(mask=repr(mask), queries=q_len, keys=kv_len, files=[str(html)], longspan=version))
    else:
        print(f"wrote {html}; open it in a browser")


def _check_target(path: Path) -> None:
    """Raises an OSError if the page cannot be written, or would replace a file that is not a page."""
    check_writable(path)
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            start = file.read(len(START))
        if start.lower() != START:
            raise FileExistsError(f"{path} exists and is not an HTML page. Name another file.")


def read_tokens(path: Path) -> list[str] | tuple[list[str], list[str]]:
    """The texts in a file: a list, or a pair of lists for queries and keys."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text, at byte {error.start}.") from None
    if path.suffix != ".json":
        return text.removesuffix("\n").split("\n") if text else []
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    if _is_texts(found):
        return found
    if isinstance(found, list) and len(found) == 2 and all(map(_is_texts, found)):
        return found[0], found[1]
    raise ValueError(f"{path} must contain a list of strings, or a list of two such lists, for queries and for keys.")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
