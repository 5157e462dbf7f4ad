"""The JAX releases that the package was tested with, and the note that errors get under any other release."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

# JAX versions up to the second number. The whole suite passes with each; a weekly workflow runs it with the newest JAX.
TESTED = ("0.10",)


def untested(version: str) -> str | None:
    """Returns a sentence about an untested JAX version and what to do; None if the version was tested.

    Args:
        version: a version of JAX, such as `jax.__version__`.

    Example:
        >>> untested("0.10.2") is None
        True
        >>> print(untested("0.99.0"))
        longspan was tested with JAX 0.10, not with JAX 0.99.0. If something fails, try `pip install 'jax==0.10.*'`.
    """
    if ".".join(version.split(".")[:2]) in TESTED:
        return None
    return (
        f"longspan was tested with JAX {' and '.join(TESTED)}, not with JAX {version}. If something fails, try "
        f"`pip install 'jax=={TESTED[-1]}.*'`."
    )


def note_untested(error: BaseException) -> None:
    """Adds that sentence to an error as a note, if the installed JAX is untested."""
    note = untested(jax.__version__)
    if note is not None and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


@contextmanager
def untested_jax_noted() -> Iterator[None]:
    """Adds the note to errors that a changed JAX may cause: a missing name, a missing module, another signature."""
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        note_untested(error)
        raise
