"""The command `longspan`: one file per command, around masks written as text (`expressions`).

Commands import JAX and the rest of Longspan when they run, so that help and completion come at once. `bench` measures
with `timing`, `demo` with `race`; what reads and writes text shares `texts`; `modules` says what `encode` would ignore.
"""

import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from longspan.optional import needs

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default those of the process; the exit code.

    Example:
        >>> main(["show", "Causal()", "-T", "3"])
        #..
        ##.
        ###
        0
    """
    try:
        for module in ("typer", "rich"):
            needs("The command `longspan`", module, extra="cli")
    except ImportError as error:
        print(f"longspan: {error}", file=sys.stderr)
        return 1
    if arguments is None:  # the process is ours
        from longspan.cli.library import repeat_dropped_interrupts

        _print_anything()
        repeat_dropped_interrupts()
    from longspan.cli.app import run

    return run(arguments)


def _print_anything() -> None:
    """What a terminal's encoding lacks, and bytes of a file's name that are no text, are printed as escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def leave(code: int) -> NoReturn:
    """Ends the process."""
    if code == INTERRUPTED:
        # At once: computations may be running in other threads, and Python would take down under them what they use.
        os._exit(code)
    sys.exit(code)
