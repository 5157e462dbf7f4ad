"""Writing files completely or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_STEM = 40  # characters that a temporary name takes from the file's name: file systems allow about 255 in total


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary file in the same directory that replaces `path` if the block succeeds, and is deleted otherwise.

    It has the same suffix. An existing file keeps its permissions, and a link stays a link. A device or a pipe receives
    the bytes.

    Example:
        >>> from pathlib import Path
        >>> target = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with atomic_write(target) as new:
        ...     _ = new.write_text("whole")
        >>> target.read_text(), [path.name for path in target.parent.iterdir()]
        ('whole', ['a.txt'])
    """
    check_writable(path)
    if path.exists() and not path.is_file():
        with _copy_to(path) as new:
            yield new
        return
    target = path.resolve()
    prefix, suffix = f".{path.stem[:MAX_STEM]}-", path.suffix[:MAX_STEM]
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=prefix, suffix=suffix)
    os.close(handle)
    new = Path(name)
    try:
        with _name_in_errors(path):
            yield new
        # Only the owner may read a temporary file, so the permissions are set here.
        mode = 0o666 & ~_umask()
        if target.exists():
            mode = target.stat().st_mode & 0o777
        new.chmod(mode)
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def _copy_to(path: Path) -> Iterator[Path]:
    """A temporary file whose bytes are copied to a device or a pipe, which a rename would replace."""
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder) / f"new{path.suffix}"
        with _name_in_errors(path):
            yield new
            with new.open("rb") as source, path.open("wb") as device:
                shutil.copyfileobj(source, device)


@contextmanager
def _name_in_errors(path: Path) -> Iterator[None]:
    """Adds the file's name to errors while it is written: those of a full disk have none, or the temporary one."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}.") from error


def check_writable(path: Path | None) -> None:
    """Raises an OSError if a file cannot be written there. Commands call it before they compute."""
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
