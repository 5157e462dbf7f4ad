"""Texts and labels from files: a folder of text files, subfolders as labels, or JSON lines."""

import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

JSON_LINES = (".jsonl", ".ndjson")
UTF_8 = "utf-8-sig"  # without the byte order mark that programs on Windows write
PAIR_FIELDS = ("anchor", "positive", "negative")
# Folders of the standard library that are left out: tests, generated data, and packages that are installed there.
NO_SOURCES = frozenset(("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"))


class Example(NamedTuple):
    """The texts of one example, by field, and its label."""

    place: str  # the file, or the file and the line, for messages
    texts: dict[str, str]
    label: str | None = None


class Fields(NamedTuple):
    """The names of the fields of JSON lines."""

    text: str = "text"
    label: str = "label"


def read_examples(path: str | os.PathLike, fields: Fields = Fields(), *, pairs: bool = False) -> Iterator[Example]:  # noqa: B008
    """The examples of a folder or a file of JSON lines, in the order of their names, read one by one.

    In a folder every file is a document; hidden files are left out, and files of JSON lines are read by line. The label
    of a document is the name of the subfolder that it is in. A byte order mark at the start is not a part of the text.

    Args:
        path: a folder, or a file of JSON lines.
        fields: the names of the fields of JSON lines.
        pairs: whether each line has "anchor", "positive" and possibly "negative" instead of a text.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     (Path(folder) / "good").mkdir()
        ...     _ = (Path(folder) / "good" / "1.txt").write_text("I like it.")
        ...     _ = (Path(folder) / "rest.jsonl").write_text('{"text": "I do not.", "label": "bad"}')
        ...     [(example.texts["text"], example.label) for example in read_examples(folder)]
        [('I like it.', 'good'), ('I do not.', 'bad')]
    """
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"{root} does not exist. Give a folder of text files, or a file of JSON lines.")
    found = False
    for file in _files(root):
        if file.suffix.lower() in JSON_LINES or not root.is_dir():
            examples = _json_lines(file, fields, pairs)
        else:
            examples = iter([_text_file(file, root, pairs)])
        for example in examples:
            found = True
            yield example
    if not found:
        raise ValueError(f"{root} has no documents. Give a folder with text files, or a file with JSON lines.")


def standard_library() -> Iterator[Example]:
    """The sources of Python's standard library without its tests: text that is on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if not NO_SOURCES & set(file.relative_to(root).parts):
            yield Example(str(file), dict(text=file.read_text("utf-8", errors="replace")))


def _files(root: Path) -> list[Path]:
    if not root.is_dir():
        return [root]
    files = [path for path in root.rglob("*") if path.is_file()]
    return sorted(file for file in files if not any(part.startswith(".") for part in file.relative_to(root).parts))


def _text_file(file: Path, root: Path, pairs: bool) -> Example:
    if pairs:
        raise ValueError(
            f"{file} is a text file, but pairs are read from JSON lines: files that end in .jsonl, with an object "
            '{"anchor": ..., "positive": ...} per line.'
        )
    try:
        text = file.read_bytes().decode(UTF_8)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text, at byte {error.start}. Remove it from the folder.") from error
    parts = file.relative_to(root).parts
    label = None
    if len(parts) > 1:
        label = _unicode(parts[0], "label", str(file))  # a folder's name may be any bytes
    return Example(str(file), dict(text=text), label)


def _json_lines(file: Path, fields: Fields, pairs: bool) -> Iterator[Example]:
    with open(file, "rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if raw.strip():
                yield _example(_object(raw, f"{file}, line {number}"), fields, pairs, f"{file}, line {number}")


def _object(raw: bytes, place: str) -> dict[str, Any]:
    try:
        content = json.loads(raw.decode(UTF_8))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON ({error}). Each line must be one JSON object.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{place} must be a JSON object, got {str(content)[:80]!r}.")
    return content


def _example(content: dict[str, Any], fields: Fields, pairs: bool, place: str) -> Example:
    if pairs:
        names = {name: name for name in PAIR_FIELDS if name in content or name != "negative"}
    else:
        names = {"text": fields.text}
    texts = {name: _string(content, key, place) for name, key in names.items()}
    label = None
    if not pairs and fields.label in content:
        label = _label(content[fields.label], fields.label, place)
    return Example(place, texts, label)


def _string(content: dict[str, Any], key: str, place: str) -> str:
    if key not in content:
        hint = " Name the field of the text with --text-field."
        if key in PAIR_FIELDS:
            hint = ""
        raise ValueError(f"{place} has no field {key!r}, only {', '.join(map(repr, content)) or 'none'}.{hint}")
    if not isinstance(content[key], str):
        raise ValueError(f"{place}: {key!r} must be a string, got {str(content[key])[:80]!r}.")
    return _unicode(content[key], key, place)


def _label(value: Any, key: str, place: str) -> str:
    if not isinstance(value, str | int) or value == "":
        raise ValueError(f"{place}: {key!r} must be a string or an int, got {str(value)[:80]!r}.")
    return _unicode(str(value), key, place)


def _unicode(text: str, key: str, place: str) -> str:
    """The text. Raises for half of a surrogate pair, which JSON can hold, but no tokenizer and no file."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: {key!r} is not valid Unicode, at character {error.start}: {text[error.start]!r}. Write the "
            "character whole."
        ) from None
    return text
