"""Options that several commands have, and how they print."""

import json
from typing import Annotated, Any

import typer

LONGEST = 2**30 - 1  # positions are no larger
PLANNED = 2**24  # tokens up to which `explain`, `diff` and others plan tile by tile: under a minute, and a few GB
KEYS = "Number of keys; as many as queries by default."

Expression = Annotated[
    str,
    typer.Argument(
        metavar="EXPR",
        help="A mask as it prints itself, such as 'Causal() & Window(511, 0)'; bigbird(...) and longformer(...) too. "
        "Arrays are lists or files: 'Segments(\"ids.npy\")'.",
    ),
]
Queries = Annotated[
    int | None, typer.Option("-T", "--queries", min=0, max=LONGEST, help="Number of queries.", show_default=False)
]
Keys = Annotated[int | None, typer.Option("-S", "--keys", min=0, max=LONGEST, help=KEYS, show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def print_json(content: Any) -> None:
    """Content for programs."""
    print(json.dumps(content, indent=2, allow_nan=False))
