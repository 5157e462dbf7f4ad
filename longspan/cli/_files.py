"""Files that are written whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A new file beside `path`, with the same ending, that takes its place if all goes well and else leaves no trace.

    Example:
        >>> from pathlib import Path
        >>> target = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with written(target) as new:
        ...     _ = new.write_text("whole")
        >>> target.read_text(), [path.name for path in target.parent.iterdir()]
        ('whole', ['a.txt'])
    """
    check_writable(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    new = Path(name)
    try:
        yield new
        new.chmod(0o666 & ~_umask())  # a temporary file is its owner's alone
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def check_writable(path: Path | None) -> None:
    """Raises unless a file can be written there: before the work for it is done."""
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory. Name a file.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a directory, so {path.name} cannot be written there.")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise PermissionError(f"{path} cannot be written: {error.strerror}.") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
