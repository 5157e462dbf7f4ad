"""The longest input, as the files beside a model have it: a tokenizer with an old limit cuts documents."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from longspan.hf.config import config_of, read_content

logger = logging.getLogger("longspan.hf")

SENTENCES = (
    "sentence_*_config.json"  # of sentence-transformers: sentence_bert_config.json, sentence_roberta_config.json
)


class Limit(NamedTuple):
    """A number of tokens in a JSON file."""

    key: str
    count: int
    write: Callable[[int], None]


def old_limit(model: Any, source: Path | None) -> int | None:
    """The longest input of the checkpoint that a model was loaded from, if `extend` made the model of it longer."""
    new = getattr(model.config, "max_tokens", None)
    if new is None or source is None:
        return None
    try:
        old = config_of(read_content(source)).max_tokens
    except (OSError, ValueError, AttributeError):  # no checkpoint any more, or one of another kind
        return None
    return old if old < new else None


def with_new_limit(files: Mapping[str, bytes | None], new: int) -> dict[str, bytes | None]:
    """The files to write, where limits below the new one are the new one."""
    written = dict(files)
    for name, content in files.items():
        if content is None:
            continue
        parsed, low = _low_limits(name, content, new)
        for limit in low:
            limit.write(new)
            logger.info("%s: %s is %d, the longest input of the model; it was %d", name, limit.key, new, limit.count)
        if low:
            written[name] = (json.dumps(parsed, indent=2, ensure_ascii=False) + "\n").encode()
    return written


def files_with_limits(where: Path) -> dict[str, bytes | None]:
    """The files of a directory that may say how long an input is."""
    paths = [where / "tokenizer_config.json", where / "tokenizer.json", *sorted(where.glob(SENTENCES))]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def warn_of_limits(where: Path, files: Mapping[str, bytes | None], new: int) -> None:
    """Warns of files that stay as they are, with a limit below the model's."""
    low = [
        f"{where / name} has {limit.key}={limit.count}"
        for name, content in files.items()
        if content is not None
        for limit in _low_limits(name, content, new)[1]
    ]
    if low:
        warnings.warn(
            f"The model reads {new} tokens, but {' and '.join(low)}: longer texts would be cut there. Set it to {new} "
            "in the file, if that is not meant.",
            stacklevel=4,
        )


def _low_limits(name: str, content: bytes, new: int) -> tuple[Any, list[Limit]]:
    """A file's content, and its limits that are below the new one."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):  # not ours to repair
        return None, []
    found = _limits(name, parsed) if isinstance(parsed, dict) else ()
    return parsed, [limit for limit in found if limit.count < new]


def _limits(name: str, parsed: dict[str, Any]) -> Iterator[Limit]:
    if name == "tokenizer_config.json":
        # The second is the name in the oldest files, the third what a tokenizer that truncates was saved with.
        yield from _keys(parsed, "", ("model_max_length", "max_len", "max_length"))
    elif name == "tokenizer.json":
        truncation, padding = parsed.get("truncation"), parsed.get("padding")
        if isinstance(truncation, dict):
            yield from _keys(truncation, "truncation.", ("max_length",))
        if isinstance(padding, dict) and isinstance(padding.get("strategy"), dict):
            yield from _keys(padding["strategy"], "padding.strategy.", ("Fixed",))
    elif Path(name).match(SENTENCES):
        yield from _keys(parsed, "", ("max_seq_length",))


def _keys(content: dict[str, Any], path: str, keys: tuple[str, ...]) -> Iterator[Limit]:
    for key in keys:
        count = content.get(key)
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            yield Limit(path + key, count, lambda new, key=key: content.__setitem__(key, new))
