"""The documents of `longspan encode`: files or lines, read one by one, and grouped into parts of limited size."""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO, NamedTuple

PART_DOCUMENTS, PART_BYTES = 1024, 2**22  # a part ends with the document that reaches one of these sizes


class Document(NamedTuple):
    """A text, and its name in messages."""

    name: str
    text: str


class Part(NamedTuple):
    """Consecutive documents whose vectors are one file."""

    documents: list[Document]

    @property
    def digest(self) -> str:
        """A hash of the texts."""
        found = hashlib.sha256()
        for document in self.documents:
            found.update(hashlib.sha256(document.text.encode()).digest())
        return found.hexdigest()


def check_files(files: Sequence[Path]) -> None:
    """Raises an OSError for files that cannot be read, before anything is computed."""
    for path in files:
        if str(path) != "-" and not path.is_fifo():  # a pipe can be opened only once
            path.open("rb").close()


def parts_of(documents: Iterable[Document]) -> Iterator[Part]:
    """The documents in parts; the same documents always give the same parts."""
    waiting: list[Document] = []
    size = 0
    for document in documents:
        waiting.append(document)
        size += len(document.text.encode())
        if len(waiting) == PART_DOCUMENTS or size >= PART_BYTES:
            yield Part(waiting)
            waiting, size = [], 0
    if waiting:
        yield Part(waiting)


def read_documents(files: Sequence[Path], *, lines: bool) -> Iterator[Document]:
    """Each file as a document, or each of its lines that is not blank."""
    count = 0
    for path in files:
        for document in _lines(path) if lines else _whole(path):
            count += 1
            yield document
    if not count:
        raise ValueError("The files contain no document. Give files with text.")


def _whole(path: Path) -> Iterator[Document]:
    with _opened(path) as file:
        text = _decoded(path, file.read(), 0)
    if not text.strip():
        raise ValueError(f"{path} is empty, and an empty document has no vector. Leave the file out.")
    yield Document(str(path), text)


def _lines(path: Path) -> Iterator[Document]:
    """The lines, one at a time. A chunk up to a line feed may contain other line ends."""
    number = start = 0
    with _opened(path) as file:
        for raw in file:
            for line in _decoded(path, raw, start).splitlines():
                number += 1
                if line.strip():
                    yield Document(f"{path}, line {number},", line)
            start += len(raw)


def _opened(path: Path) -> AbstractContextManager[BinaryIO]:
    if str(path) != "-":
        return path.open("rb")
    if sys.stdin is None:  # it was closed before the process started
        raise ValueError("Standard input is closed, so `-` cannot be read. Name a file, or pipe text in.")
    return nullcontext(sys.stdin.buffer)


def _decoded(path: Path, raw: bytes, start: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text, at byte {start + error.start}.") from error
