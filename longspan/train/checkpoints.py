"""Checkpoints of a run: written by orbax in the background, with checksums, and complete once they have their name.

`checkpoints/STEP` appears by one rename after all its files are written. A process that is killed before leaves a
folder that starts with a dot, which the next run removes.
"""

import json
import logging
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from longspan.train.disk import disk_errors

CHECKPOINTS = "checkpoints"
SUMMARY = "longspan.json"  # arrays, checksums of the files and notes of a checkpoint
SAVING, OLD, DAMAGED = ".saving-", ".old-", ".damaged"
CHUNK = 1 << 20
MOST_LISTED = 12  # differences in an error


class Checkpoints:
    """The checkpoints of a run in one folder. With several processes, all of them make the same calls.

    Args:
        folder: has one folder per checkpoint, named by its step.
        keep: the number of newest checkpoints to keep. The best one is kept besides.
        saved: called as saved(step) in the process with rank 0 when a checkpoint is complete.
    """

    def __init__(self, folder: Path, keep: int = 3, saved: Callable[[int], None] = lambda step: None):
        import orbax.checkpoint as ocp

        # orbax takes absolute paths only.
        self.folder, self.keep, self.saved = folder.absolute(), keep, saved
        # Compression would take the processors from training, and parameters do not compress well.
        self._writer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
        logging.getLogger("absl").addFilter(_is_foreign)
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._show_error
        self._finisher = ThreadPoolExecutor(1, "longspan-checkpoint")
        self._finishing: Future | None = None
        self._failed = False

    def save(self, step: int, arrays: Mapping[str, jax.Array], notes: Mapping[str, Any]) -> None:
        """Starts to write a checkpoint; the arrays may change as soon as this returns.

        Waits for the checkpoint before, and raises its error.
        """
        import orbax.checkpoint as ocp

        self.wait()
        part = self.folder / f"{SAVING}{step}"
        with self._writing(part):
            if jax.process_index() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
            # orbax cannot write empty arrays, and they hold nothing.
            held = {name: x for name, x in arrays.items() if x.size}
            self._writer.save(part, args=ocp.args.PyTreeSave(held))
        summary = dict(step=step, arrays={name: _describe(x) for name, x in arrays.items()}, notes=dict(notes))
        self._finishing = self._finisher.submit(self._finish, part, summary)

    def wait(self) -> None:
        """Waits until the last checkpoint is complete. Raises its error, `DiskFull` if the disk is full."""
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            finishing.result()

    def close(self) -> None:
        """Waits, and frees threads. Errors were raised by `wait` or are dropped after another error."""
        self._finisher.shutdown()
        with suppress(Exception):
            self._writer.close()
        logging.getLogger("absl").removeFilter(_is_foreign)
        if sys.unraisablehook == self._show_error and not self._failed:
            sys.unraisablehook = self._hook

    @contextmanager
    def _writing(self, part: Path) -> Iterator[None]:
        try:
            with disk_errors(str(part)):
                yield
        except BaseException:
            self._failed = True
            raise

    def _show_error(self, unraisable: Any) -> None:
        """Replaces `sys.unraisablehook`: orbax's threads report to it each write that ends after another one failed."""
        if str(unraisable.exc_value) != "Event loop is closed":
            self._hook(unraisable)

    def _finish(self, part: Path, summary: dict[str, Any]) -> None:
        """In the background: waits for the files, adds their checksums and gives the folder its name."""
        try:
            with self._writing(part):
                self._writer.wait_until_finished()
                if jax.process_index() == 0:
                    _write_summary(part, summary)
                    final = self.folder / str(summary["step"])
                    _remove(final)
                    part.rename(final)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        if jax.process_index() == 0:
            self.prune(summary["notes"].get("best_step"))
            self.saved(summary["step"])

    def prune(self, best: int | None) -> None:
        """Removes all but the newest checkpoints and the best one."""
        for step in checkpoint_steps(self.folder)[self.keep :]:
            if step != best:
                _remove(self.folder / str(step))


def _is_foreign(record: logging.LogRecord) -> bool:
    """Drops what orbax logs about errors of its threads, with tracebacks: `Checkpoints.wait` raises them."""
    return "orbax" not in record.pathname


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, the newest first.

    Example:
        >>> from pathlib import Path
        >>> checkpoint_steps(Path("no-such-folder"))
        []
    """
    if not folder.is_dir():
        return []
    return sorted((int(path.name) for path in folder.iterdir() if re.fullmatch(r"\d+", path.name)), reverse=True)


def clean(folder: Path) -> None:
    """Removes what killed processes left."""
    for path in folder.glob(".*"):
        if path.name.startswith((SAVING, OLD)):
            shutil.rmtree(path, ignore_errors=True)


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files; None if all of them are as they were written."""
    try:
        summary = json.loads((path / SUMMARY).read_text("utf-8"))
        files = dict(summary["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{SUMMARY} cannot be read ({type(error).__name__})"
    for name, checksum in files.items():
        try:
            found = _checksum(path / name)
        except OSError as error:
            return f"{name} cannot be read ({type(error).__name__})"
        if found != checksum:
            return f"{name} differs from what was written"
    return None


def set_aside(folder: Path, step: int) -> None:
    """Renames a damaged checkpoint, so that it is never taken for one."""
    target = folder / f"{step}{DAMAGED}"
    shutil.rmtree(target, ignore_errors=True)
    (folder / str(step)).rename(target)


def restore_arrays(path: Path, like: Mapping[str, Any], *, partial: bool = False) -> dict[str, jax.Array]:
    """The arrays of a checkpoint, with the shapes, dtypes and shardings of `like`.

    Args:
        path: the folder of the checkpoint.
        like: arrays or `jax.ShapeDtypeStruct`s with shardings, by name.
        partial: whether the checkpoint may have further arrays.
    """
    import orbax.checkpoint as ocp

    _check_arrays(path, like, partial=partial)
    held = {name: x for name, x in like.items() if x.size}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), held)
    arguments = ocp.checkpoint_utils.construct_restore_args(abstract)
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    found = reader.restore(
        path.absolute(), args=ocp.args.PyTreeRestore(abstract, restore_args=arguments, partial_restore=partial)
    )
    reader.close()
    return dict(found) | {name: x for name, x in like.items() if not x.size}


def notes_of(path: Path) -> dict[str, Any]:
    """The notes that were saved with a checkpoint."""
    return json.loads((path / SUMMARY).read_text("utf-8"))["notes"]


def _check_arrays(path: Path, like: Mapping[str, Any], *, partial: bool) -> None:
    """Raises an error that lists what differs. orbax would convert dtypes without a word."""
    saved = json.loads((path / SUMMARY).read_text("utf-8"))["arrays"]
    wanted = {name: _describe(x) for name, x in like.items()}
    different = [
        f"{name} is {_words(saved[name])} in the checkpoint and {_words(wanted[name])} in this run"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    different += [f"{name} is missing in the checkpoint" for name in wanted if name not in saved]
    if not partial:
        different += [f"{name} is in the checkpoint only" for name in saved if name not in wanted]
    if different:
        more = len(different) - MOST_LISTED
        listed = "; ".join(different[:MOST_LISTED]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(
            f"The checkpoint {path} is of another model, dtype or optimizer: {listed}. Resume with the model and the "
            "optimizer that the run started with."
        )


def _describe(x: Any) -> list[Any]:
    return [list(x.shape), np.dtype(x.dtype).name]


def _words(described: list[Any]) -> str:
    shape, dtype = described
    return f"{dtype}{shape}"


def _write_summary(part: Path, summary: dict[str, Any]) -> None:
    # The files themselves are not forced to the disk: after a power failure, those that were lost fail their checksums.
    names = sorted(str(path.relative_to(part)) for path in part.rglob("*") if path.is_file())
    summary = summary | dict(files={name: _checksum(part / name) for name in names})
    with (part / SUMMARY).open("w", encoding="utf-8") as file:
        json.dump(summary, file)
        file.flush()
        os.fsync(file.fileno())


def _checksum(path: Path) -> list[int]:
    """Size and CRC-32 of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def _remove(path: Path) -> None:
    """Removes a checkpoint. Renamed first: a process that is killed in between leaves no half of a checkpoint."""
    if path.exists():
        old = path.with_name(f"{OLD}{path.name}")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        shutil.rmtree(old, ignore_errors=True)
