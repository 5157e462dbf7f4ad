"""The application of all commands, its exit codes, and its errors: one line each, without a traceback."""

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
from longspan.cli.explore import explore
from longspan.cli.generate import generate
from longspan.cli.info import info
from longspan.cli.notices import say
from longspan.cli.show import show
from longspan.cli.train import train
from longspan.version import __version__

BAD_INPUT = 2
# Errors that wrong input can cause. Any other error is a bug of Longspan, and keeps its traceback.
INPUT_ERRORS = (
    *(ArithmeticError, EOFError, ImportError, LookupError, MemoryError, NotImplementedError, OSError),
    *(RecursionError, TypeError, ValueError),
)

DISK_IS_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)

app = typer.Typer(
    name="longspan",
    help="Long-context attention for JAX: draw, explain, compare and time masks; inspect and run checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=dict(help_option_names=["-h", "--help"]),
)
for _command in (info, demo, show, explore, explain, diff, bench, check, encode, generate, train):
    app.command()(_command)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit
    return wanted


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str] | None) -> int:
    """Runs the application with these arguments and returns the exit code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="longspan", standalone_mode=False)
        if sys.stdout is not None:  # None: it was closed before the process started
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return _discard_output()
    except typer.Exit as stopped:
        return stopped.exit_code
    except Exception as error:
        return _report(error)


def _discard_output() -> int:
    """Discards further output, also that of Python's flush at exit: the reader of the pipe (`head`) has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1  # the code of typer, which catches the error first in some cases


def _report(error: Exception) -> int:
    """Prints an error as one line on stderr."""
    usage_message = getattr(error, "format_message", None)  # of click's usage errors, or of typer's copy of them
    if usage_message is None and not isinstance(error, INPUT_ERRORS) and not _is_out_of_memory(error):
        raise error
    if os.environ.get("LONGSPAN_TRACEBACK"):
        traceback.print_exception(error)
    context, command = getattr(error, "ctx", None), "longspan"
    if context is not None:
        command = context.command_path
    if usage_message is None:
        message = _message(error)
    else:
        message = f"{usage_message().rstrip().removesuffix('.')}. See `{command} --help`."
    say(f"{command}: {' '.join(message.split())}")
    return BAD_INPUT


def _is_out_of_memory(error: Exception) -> bool:
    """Whether Python, NumPy or XLA could not allocate. XLA's error is recognized by its text: JAX may not be loaded."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def _message(error: Exception) -> str:
    if _is_out_of_memory(error):
        details = f" ({error})" if str(error) else ""
        return f"There is not enough memory{details}. Give smaller sizes."
    if isinstance(error, RecursionError):
        return "The input is nested too deeply."
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in DISK_IS_FULL:  # errors of files have a file name
        return f"standard output: {error.strerror}"
    return str(error) or type(error).__name__
