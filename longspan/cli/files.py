"""Files that are written whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHORT = 40  # characters of a temporary name that come from the file's: file systems allow about 255


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A new file beside `path`, with the same ending, that takes its place if all goes well and else leaves no trace.

    An existing file keeps its permissions, and a link stays a link. A device or a pipe receives the bytes.

    Example:
        >>> from pathlib import Path
        >>> target = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with written(target) as new:
        ...     _ = new.write_text("whole")
        >>> target.read_text(), [path.name for path in target.parent.iterdir()]
        ('whole', ['a.txt'])
    """
    check_writable(path)
    if path.exists() and not path.is_file():
        with _copied_to(path) as new:
            yield new
        return
    target = path.resolve()
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{path.stem[:SHORT]}-", suffix=path.suffix[:SHORT])
    os.close(handle)
    new = Path(name)
    try:
        with _named(path):
            yield new
        # A temporary file is readable by its owner only.
        new.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def _copied_to(path: Path) -> Iterator[Path]:
    """A temporary file that is copied to a device or a pipe, which a rename would replace."""
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder) / f"new{path.suffix}"
        with _named(path):
            yield new
            with new.open("rb") as source, path.open("wb") as device:
                shutil.copyfileobj(source, device)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error while the file is written names it: a full disk is one without a name, or one of the temporary file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}.") from error


def check_writable(path: Path | None) -> None:
    """Raises unless a file can be written there: before the work for it is done."""
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory. Name a file.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a directory, so {path.name} cannot be written there.")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{path} is read-only. Change its permissions, or name another file.")
    if path.exists() and not path.is_file():
        return
    try:
        tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise PermissionError(f"{path} cannot be written: {error.strerror}.") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
