"""`replace_all`: replaces several files of a directory, all of them or none."""

import os
import re
import shutil
import socket
import tempfile
import time
from pathlib import Path

DAY = 24 * 3600.0  # seconds: every save has ended after a day


def replace_all(where: Path, files: dict[str, bytes | None]) -> None:
    """Writes the files and removes those that are None. If an operation fails, the old files are restored.

    Files may be in folders of the directory. The new files are first written to a scratch folder in the same directory,
    and the old ones get a second name there. Then each new file is renamed. At the end, scratch folders of processes
    that were killed are removed.
    """
    with tempfile.TemporaryDirectory(prefix=f".saving-{_this_process()}-", dir=where) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        for folder in {Path(name).parent for name in files}:
            for root in (new, old, where):
                (root / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if content is not None:
                _write(new / name, content)
        changed = [name for name, content in files.items() if not _is_unchanged(where / name, content)]
        for name in changed:
            _link(where / name, old / name)
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
    # Only after success: until then, the files in those folders may be the only good ones.
    for folder in where.glob(".saving-*"):
        if _is_stale(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _is_unchanged(path: Path, content: bytes | None) -> bool:
    """Whether a file already has this content; for None, whether it does not exist."""
    if content is None:
        return not path.exists()
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


def _link(path: Path, copy: Path) -> None:
    """Makes a hard link to a file, or a copy if the file system has no hard links."""
    if not path.exists():
        return
    try:
        os.link(path, copy)
    except OSError:
        shutil.copyfile(path, copy)


def _this_process() -> str:
    """The host and the process: directories may be shared by machines."""
    return f"{socket.gethostname()}-{os.getpid()}"


def _is_stale(folder: Path) -> bool:
    """Whether the process that made a folder is dead, if it ran on this host, or whether the folder is a day old."""
    try:
        age = time.time() - folder.stat().st_mtime
    except FileNotFoundError:  # its process has just removed it
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
    except (OSError, OverflowError):  # another user's process, or an invalid number
        return True
    return True
