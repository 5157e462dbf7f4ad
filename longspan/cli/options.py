"""Options that several commands share, and JSON output."""

import json
from typing import Annotated, Any

import typer

MAX_LENGTH = 2**30 - 1  # the largest position
MAX_PLANNED = 2**24  # the most tokens that `explain`, `diff` and others plan by tiles: under a minute, and some GB
KEYS = "Number of keys; by default the number of queries."

Expression = Annotated[
    str,
    typer.Argument(
        metavar="EXPR",
        help="A mask, written as its Python repr: 'Causal() & Window(511, 0)'. bigbird(...) and longformer(...) work "
        "too. An array is a list or a .npy file: 'Segments(\"ids.npy\")'.",
    ),
]
Queries = Annotated[
    int | None, typer.Option("-T", "--queries", min=0, max=MAX_LENGTH, help="Number of queries.", show_default=False)
]
Keys = Annotated[int | None, typer.Option("-S", "--keys", min=0, max=MAX_LENGTH, help=KEYS, show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def print_json(content: Any) -> None:
    """Prints a value as JSON; NaN and infinities are errors."""
    print(json.dumps(content, indent=2, allow_nan=False))
