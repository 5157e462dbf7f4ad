"""The command `longspan`: one file per command, around masks written as text (`expressions`).

Commands import JAX and the rest of Longspan only when they run, so that help and completion respond at once. `bench`
measures with `timing`, and `demo` with `comparison`. `encode` reads `documents` and writes `parts`; `texts` decodes
what `generate` prints.
"""

import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from longspan.optional import needs

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments (by default those of the process) and returns the exit code.

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
    if arguments is None:  # this process runs nothing but the command
        from longspan.cli.library import repeat_dropped_interrupts

        _escape_unprintable()
        repeat_dropped_interrupts()
    from longspan.cli.app import run

    return run(arguments)


def _escape_unprintable() -> None:
    """Prints escapes for characters that the terminal's encoding lacks, and for file name bytes that are not UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def leave(code: int) -> NoReturn:
    """Ends the process."""
    # After an interruption Python would tear down objects that computations in other threads may still use. JAX would
    # let a process of `longspan train --processes` wait for the others, which a supervisor ends when this one is gone.
    if code == INTERRUPTED or (code and "LONGSPAN_WORKER_RANK" in os.environ):
        os._exit(code)
    sys.exit(code)
