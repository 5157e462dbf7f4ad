"""What lies beside a model's weights and config, and belongs to it: its tokenizer and its generation settings."""

import os
import warnings
from pathlib import Path
from typing import Any

from longspan.hf.limits import files_with_limits, old_limit, warn_of_limits, with_new_limit

# A directory with one of these has a tokenizer; the others say how it is used.
VOCABULARIES = (
    "tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model",
)  # fmt: skip
TOKENIZER = (
    *VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip
GENERATION = "generation_config.json"


def files_beside(model: Any, where: Path, tokenizer: str | os.PathLike | None) -> dict[str, bytes | None]:
    """The content of the files to write beside a model; None for those to remove, of another tokenizer than its own.

    Where `extend` made a model that reads longer inputs, the files say so; those that others put there are reported.
    """
    source = _source(model)
    files, longest = _files(model, source, where, tokenizer), getattr(model.config, "max_tokens", None)
    if longest is None:
        return files
    if old_limit(model, source) is not None:
        there = {name: content for name, content in files_with_limits(where).items() if name not in files}
        if source is not None and where.resolve() == source.resolve():
            files |= there
        else:
            warn_of_limits(where, there, longest)
        return with_new_limit(files, longest)
    if source is None:  # made by hand: what its tokenizer is meant for is not known
        warn_of_limits(where, files, longest)
    return files


def _files(
    model: Any, source: Path | None, where: Path, tokenizer: str | os.PathLike | None
) -> dict[str, bytes | None]:
    files: dict[str, bytes | None] = {}
    if source is not None and (source / GENERATION).is_file() and not (where / GENERATION).exists():
        files[GENERATION] = (source / GENERATION).read_bytes()
    if tokenizer is not None:
        named = _named(Path(tokenizer))
        # Half of one and half of the other would be no tokenizer, or a wrong one.
        return files | {name: None for name in TOKENIZER if (where / name).is_file()} | _read(named)
    if _has_tokenizer(where):
        return files
    if source is not None and _has_tokenizer(source):
        return files | _read(source)
    _warn(model)
    return files


def _source(model: Any) -> Path | None:
    """The directory that a model was loaded from, if it is still there."""
    source = getattr(model, "source", None)
    return Path(source) if source is not None and Path(source).is_dir() else None


def _named(directory: Path) -> Path:
    if not _has_tokenizer(directory):
        raise FileNotFoundError(
            f"tokenizer={str(directory)!r} must be a directory with a tokenizer, one of {', '.join(VOCABULARIES)}. "
            "`tokenizer.save_pretrained(directory)` writes one."
        )
    return directory


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in VOCABULARIES)


def _read(directory: Path) -> dict[str, bytes | None]:
    return {name: (directory / name).read_bytes() for name in TOKENIZER if (directory / name).is_file()}


def _warn(model: Any) -> None:
    source = getattr(model, "source", None)
    origin = "the model was not loaded from a directory" if source is None else f"{source} has none"
    warnings.warn(
        f"No tokenizer is saved: {origin}. `transformers` would make an empty one in silence, and the model's answers "
        "would be garbage. Pass `tokenizer=`, a directory with one, or save one there yourself.",
        stacklevel=5,
    )
