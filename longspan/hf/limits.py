"""The maximum input length in a tokenizer's files: with an old limit, a tokenizer truncates long documents."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from longspan.hf.config import config_of, read_content

logger = logging.getLogger("longspan.hf")

# Of sentence-transformers: sentence_bert_config.json, sentence_roberta_config.json.
SENTENCE_CONFIGS = "sentence_*_config.json"


class TokenLimit(NamedTuple):
    """A maximum number of tokens in a JSON file."""

    key: str
    count: int
    write: Callable[[int], None]


def old_limit(model: Any, source: Path | None) -> int | None:
    """The maximum length of the checkpoint that a model was loaded from, if `extend` has increased it."""
    new = getattr(model.config, "max_tokens", None)
    if new is None or source is None:
        return None
    try:
        old = config_of(read_content(source)).max_tokens
    except (OSError, ValueError, AttributeError):  # the checkpoint is gone, or is of another kind
        return None
    if old >= new:
        return None
    return old


def with_new_limit(files: Mapping[str, bytes | None], new: int) -> dict[str, bytes | None]:
    """The files to write, with lower limits raised to the new one."""
    written = dict(files)
    for name, content in files.items():
        if content is None:
            continue
        parsed, low = _low_limits(name, content, new)
        for limit in low:
            limit.write(new)
            logger.info("%s: raised %s from %d to %d, the model's maximum length", name, limit.key, limit.count, new)
        if low:
            written[name] = (json.dumps(parsed, indent=2, ensure_ascii=False) + "\n").encode()
    return written


def files_with_limits(where: Path) -> dict[str, bytes | None]:
    """The files of a directory that may contain a maximum input length."""
    paths = [where / "tokenizer_config.json", where / "tokenizer.json", *sorted(where.glob(SENTENCE_CONFIGS))]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def warn_of_limits(where: Path, files: Mapping[str, bytes | None], new: int) -> None:
    """Warns of files that keep a limit below the model's."""
    low = [
        f"{where / name} has {limit.key}={limit.count}"
        for name, content in files.items()
        if content is not None
        for limit in _low_limits(name, content, new)[1]
    ]
    these, each = ("this limit", "it") if len(low) == 1 else ("these limits", "each limit")
    if low:
        warnings.warn(
            f"The model reads up to {new} tokens, but {' and '.join(low)}. Longer texts are truncated to {these}. To "
            f"use the model's full length, set {each} to {new}.",
            stacklevel=4,
        )


def _low_limits(name: str, content: bytes, new: int) -> tuple[Any, list[TokenLimit]]:
    """A file's parsed content, and its limits that are below the new one."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):  # a broken file is left as it is
        return None, []
    if not isinstance(parsed, dict):
        return parsed, []
    return parsed, [limit for limit in _limits(name, parsed) if limit.count < new]


def _limits(name: str, parsed: dict[str, Any]) -> Iterator[TokenLimit]:
    if name == "tokenizer_config.json":
        # `max_len` is the key of the oldest files; a tokenizer that truncates is saved with `max_length`.
        yield from _keys(parsed, "", ("model_max_length", "max_len", "max_length"))
    elif name == "tokenizer.json":
        truncation, padding = parsed.get("truncation"), parsed.get("padding")
        if isinstance(truncation, dict):
            yield from _keys(truncation, "truncation.", ("max_length",))
        if isinstance(padding, dict) and isinstance(padding.get("strategy"), dict):
            yield from _keys(padding["strategy"], "padding.strategy.", ("Fixed",))
    elif Path(name).match(SENTENCE_CONFIGS):
        yield from _keys(parsed, "", ("max_seq_length",))


def _keys(content: dict[str, Any], path: str, keys: tuple[str, ...]) -> Iterator[TokenLimit]:
    for key in keys:
        count = content.get(key)
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            yield TokenLimit(path + key, count, lambda new, key=key: content.__setitem__(key, new))
