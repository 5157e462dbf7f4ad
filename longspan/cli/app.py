"""The commands in one application, and how they end: an error is one line, never a traceback."""

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from longspan.cli import INTERRUPTED
from longspan.cli.bench import bench
from longspan.cli.check import check
from longspan.cli.demo import demo
from longspan.cli.diff import diff
from longspan.cli.encode import encode
from longspan.cli.explain import explain
from longspan.cli.generate import generate
from longspan.cli.info import info
from longspan.cli.notices import say
from longspan.cli.show import show
from longspan.version import __version__

BAD_INPUT = 2
# What a user's input can lead to; anything else is a mistake of ours, and its traceback is worth having.
EXPECTED = (
    *(ArithmeticError, EOFError, ImportError, LookupError, MemoryError, NotImplementedError, OSError),
    *(RecursionError, TypeError, ValueError),
)

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)

app = typer.Typer(
    name="longspan",
    help="Long-context attention for JAX: draw masks, explain and time them, look into checkpoints and run them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=dict(help_option_names=["-h", "--help"]),
)
for _command in (info, demo, show, explain, diff, bench, check, encode, generate):
    app.command()(_command)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit
    return wanted


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str] | None) -> int:
    """The application with these arguments; the exit code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="longspan", standalone_mode=False)
        if sys.stdout is not None:  # None: it was closed before we began
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_gone()
    except typer.Exit as stopped:
        return stopped.exit_code
    except Exception as error:
        return _complain(error)


def _reader_gone() -> int:
    """As `head` leaves: what is still to be written, by Python's own flush at the end too, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1  # as typer ends where it is the one that notices


def _complain(error: Exception) -> int:
    """One line on stderr."""
    wrong_use = getattr(error, "format_message", None)  # of click, or of typer's own copy of it
    if wrong_use is None and not isinstance(error, EXPECTED) and not _is_out_of_memory(error):
        raise error
    if os.environ.get("LONGSPAN_TRACEBACK"):
        traceback.print_exception(error)
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "longspan"
    message = " ".join(str(wrong_use() if wrong_use else _said(error)).split())
    hint = f"{'' if message.endswith('.') else '.'} See `{where} --help`." if wrong_use else ""
    say(f"{where}: {message}{hint}")
    return BAD_INPUT


def _is_out_of_memory(error: Exception) -> bool:
    """Whether Python, NumPy or XLA could not allocate. XLA's error is known by its text: JAX may not be loaded."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def _said(error: Exception) -> str:
    if _is_out_of_memory(error):
        details = f" ({error})" if str(error) else ""
        return f"This does not fit into memory{details}. Give smaller sizes."
    if isinstance(error, RecursionError):
        return "The input is nested too deeply."
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in FULL:  # files that commands write are named
        return f"standard output: {error.strerror}"
    return str(error) or type(error).__name__
