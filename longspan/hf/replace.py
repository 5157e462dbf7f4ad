"""Files of a directory that change together or not at all."""

import os
import re
import shutil
import socket
import tempfile
import time
from pathlib import Path

DAY = 24 * 3600.0  # seconds; no save takes so long


def replace_all(where: Path, files: dict[str, bytes | None]) -> None:
    """All files take their names, or none does; those that are None go. What killed calls left behind goes too."""
    with tempfile.TemporaryDirectory(prefix=f".saving-{_us()}-", dir=where) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        old.mkdir()
        for name, content in files.items():
            if content is not None:
                _write(new / name, content)
        changed = [name for name, content in files.items() if not _is_so(where / name, content)]
        for name in changed:
            _keep(where / name, old / name)
        try:
            for name in changed:
                if files[name] is None:
                    (where / name).unlink()
                else:
                    os.replace(new / name, where / name)
        except BaseException:
            for name in changed:
                if (old / name).exists():
                    os.replace(old / name, where / name)
                else:
                    (where / name).unlink(missing_ok=True)
            raise
    # Only now: until every file is new, theirs may be the only good ones.
    for folder in where.glob(".saving-*"):
        if _is_stale(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _is_so(path: Path, content: bytes | None) -> bool:
    """Whether a file has this content already, or is not there."""
    if content is None:
        return not path.exists()
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


def _keep(path: Path, copy: Path) -> None:
    """A second name for a file, or a copy where file systems have no second names."""
    if not path.exists():
        return
    try:
        os.link(path, copy)
    except OSError:
        shutil.copyfile(path, copy)


def _us() -> str:
    """Which process of which machine: directories may be shared."""
    return f"{socket.gethostname()}-{os.getpid()}"


def _is_stale(folder: Path) -> bool:
    """Whether the process that made a folder is dead, as far as this machine can tell, or long past saving."""
    try:
        age = time.time() - folder.stat().st_mtime
    except FileNotFoundError:  # its owner finished just now
        return False
    maker = re.fullmatch(r"\.saving-(.+)-(\d+)-\w+", folder.name)
    if maker is not None and maker[1] == socket.gethostname() and not _is_alive(int(maker[2])):
        return True
    return age > DAY


def _is_alive(pid: int) -> bool:
    if os.name != "posix":  # elsewhere `os.kill` has no harmless signal
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or no number of a process
        return True
    return True
