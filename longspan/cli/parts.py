"""`PartFolder`: the finished vectors of a run of `longspan encode`, which a later run can resume."""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longspan.cli.documents import Part
from longspan.files import atomic_write

PARTS, INDEX = ".parts", "index.json"
MODEL_FILES = ("*.json", "*.safetensors")  # in the directory and in the folders of its modules


class FinishedPart(NamedTuple):
    """An entry of `index.json`."""

    file: str
    documents: int
    tokens: int
    texts: str  # `Part.digest`


class PartFolder:
    """The folder OUT.parts: `NNNNN.npy` with the vectors of each finished part, and `index.json`, which lists them.

    Each file is written completely before `index.json` lists it. So a process may be killed at any time.

    Args:
        out: the file for all vectors.
        run: the model and the options that decide the vectors. A run with others cannot be resumed.
        resume: whether to keep the parts of an earlier run.
    """

    def __init__(self, out: Path, run: dict[str, Any], *, resume: bool):
        self.out, self.run, self.finished = out, run, []
        self.added = 0  # parts of this run
        self.folder, self.temporary = folder_of(out), out.exists() and not out.is_file()
        if self.temporary:  # OUT is a device or a pipe, next to which there is no place
            self.folder = Path(tempfile.mkdtemp())
        elif self.folder.exists():
            self._continue(resume)
        self.folder.mkdir(exist_ok=True)

    def skip(self, number: int, part: Part) -> bool:
        """Whether a part is finished. Raises if its documents had other texts then."""
        if number >= len(self.finished):
            return False
        if part.digest != self.finished[number].texts:
            raise ValueError(
                f"{self.folder} has the vectors of other texts: documents {self._before(number) + 1:,} to "
                f"{self._before(number) + len(part.documents):,} have changed since. Give the same documents, or "
                "delete the folder to start again."
            )
        return True

    def add(self, part: Part, vectors: np.ndarray, tokens: int) -> None:
        """Writes the vectors of the next part."""
        name = _name(len(self.finished))
        with atomic_write(self.folder / name) as new, new.open("wb") as file:
            np.save(file, vectors)
        self.finished.append(FinishedPart(name, len(part.documents), tokens, part.digest))
        self.added += 1
        content = dict(run=self.run, parts=[entry._asdict() for entry in self.finished])
        with atomic_write(self.folder / INDEX) as new:
            new.write_text(json.dumps(content, indent=1), "utf-8")

    def join(self, parts: int) -> tuple[int, int]:
        """Writes all vectors to OUT, one part in memory at a time, and returns their shape."""
        if parts != len(self.finished):
            raise ValueError(
                f"{self.folder} has the vectors of more documents than there are now. Give the same documents, or "
                "delete the folder to start again."
            )
        size = np.load(self.folder / self.finished[0].file, mmap_mode="r").shape[1]
        shape, row = (self._before(parts), size), 0
        with atomic_write(self.out) as new:
            joined = np.lib.format.open_memmap(new, mode="w+", dtype=np.float32, shape=shape)
            for entry in self.finished:
                joined[row : row + entry.documents] = np.load(self.folder / entry.file)
                row += entry.documents
            joined.flush()
        # Without the index, a folder of which only some files are deleted is not taken for an unfinished run.
        (self.folder / INDEX).unlink()
        shutil.rmtree(self.folder)
        return shape

    def discard_if_empty(self) -> None:
        """Removes the folder of a run that failed before its first part was finished."""
        if self.temporary or not self.finished:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def tokens(self) -> int:
        return sum(entry.tokens for entry in self.finished)

    def _before(self, number: int) -> int:
        """The number of documents in the parts before this one."""
        return sum(entry.documents for entry in self.finished[:number])

    def _continue(self, resume: bool) -> None:
        """Takes over the parts of an earlier run."""
        if not resume:
            raise ValueError(
                f"{self.folder} has the vectors of an unfinished run. Continue it with --resume, or delete the folder "
                "to start again."
            )
        path = self.folder / INDEX
        if not path.exists():
            return
        try:
            content = json.loads(path.read_text("utf-8"))
            before, finished = dict(content["run"]), [FinishedPart(**entry) for entry in content["parts"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{path} is not the index of an unfinished run. Delete the folder to start again."
            ) from error
        changed = [key for key in self.run if self.run[key] != before.get(key)]
        if changed:
            raise ValueError(
                f"{self.folder} was written with another {' and another '.join(changed)}, so its vectors do not belong "
                "to this run. Give the same model and options, or delete the folder to start again."
            )
        for number, entry in enumerate(finished):
            self._check_part(number, entry)
        self.finished = finished

    def _check_part(self, number: int, entry: FinishedPart) -> None:
        """Raises unless a part that the index lists has a whole file with a vector per document."""
        path = self.folder / _name(number)
        try:
            shape = np.load(path, mmap_mode="r").shape
        except (OSError, ValueError, EOFError):
            shape = None
        if entry.file != path.name or shape != (entry.documents, self.run["dimension"]):
            raise ValueError(
                f"{path} is not the file that {INDEX} lists, with the vectors of {entry.documents} documents. Delete "
                "the folder to start again."
            )


def _name(number: int) -> str:
    """The file of a part."""
    return f"{number:05}.npy"


def folder_of(out: Path) -> Path:
    """The folder for the parts of a file."""
    return out.with_name(out.name + PARTS)


def digest_of(model: Path) -> str:
    """A hash of a model's files: weights, configs and tokenizer, also those of its modules."""
    from longspan.hf.sentence_modules import listed_modules

    folders = {model, *(model / module.folder for module in listed_modules(model) or ())}
    paths = {path for folder in folders for pattern in MODEL_FILES for path in folder.glob(pattern) if path.is_file()}
    found = hashlib.sha256()
    for path in sorted(paths):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        found.update(str(path.relative_to(model)).encode() + b"\0" + content)
    return found.hexdigest()
