"""The files that `save` writes with weights and config: the tokenizer's, and the generation config."""

import os
import warnings
from pathlib import Path
from typing import Any

from longspan.hf.limits import files_with_limits, old_limit, warn_of_limits, with_new_limit

# A directory with one of these has a tokenizer.
VOCABULARIES = (
    "tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model",
)  # fmt: skip
TOKENIZER_FILES = (
    *VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip
GENERATION_CONFIG = "generation_config.json"


def files_to_write(model: Any, where: Path, tokenizer: str | os.PathLike | None) -> dict[str, bytes | None]:
    """The files to write with a model, by name; None: a file of another tokenizer, to remove.

    After `extend` the limits in the files are the new model's. Files that `save` does not own keep lower limits, with
    a warning.
    """
    source = _source(model)
    files = _tokenizer_files(model, source, where, tokenizer)
    max_tokens = getattr(model.config, "max_tokens", None)
    if max_tokens is None:
        return files
    if old_limit(model, source) is not None:
        others = {name: content for name, content in files_with_limits(where).items() if name not in files}
        if source is not None and where.resolve() == source.resolve():
            files |= others
        else:
            warn_of_limits(where, others, max_tokens)
        return with_new_limit(files, max_tokens)
    if source is None:  # the model was not loaded, so the length that its tokenizer is meant for is unknown
        warn_of_limits(where, files, max_tokens)
    return files


def _tokenizer_files(
    model: Any, source: Path | None, where: Path, tokenizer: str | os.PathLike | None
) -> dict[str, bytes | None]:
    files: dict[str, bytes | None] = {}
    if source is not None and (source / GENERATION_CONFIG).is_file() and not (where / GENERATION_CONFIG).exists():
        files[GENERATION_CONFIG] = (source / GENERATION_CONFIG).read_bytes()
    if tokenizer is not None:
        given = checked_tokenizer(Path(tokenizer))
        # All files of the old tokenizer go: a mixture of two would be a wrong one.
        return files | {name: None for name in TOKENIZER_FILES if (where / name).is_file()} | tokenizer_content(given)
    if has_tokenizer(where):
        return files
    if source is not None and has_tokenizer(source):
        return files | tokenizer_content(source)
    _warn_no_tokenizer(model)
    return files


def _source(model: Any) -> Path | None:
    """The directory that a model was loaded from, if it still exists."""
    source = getattr(model, "source", None)
    if source is None or not Path(source).is_dir():
        return None
    return Path(source)


def checked_tokenizer(directory: Path) -> Path:
    """The directory. Raises unless it has a tokenizer."""
    if not has_tokenizer(directory):
        raise FileNotFoundError(
            f"tokenizer={str(directory)!r} must be a directory with a tokenizer, one of {', '.join(VOCABULARIES)}. "
            "`tokenizer.save_pretrained(directory)` writes one."
        )
    return directory


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has the files of a tokenizer."""
    return any((directory / name).is_file() for name in VOCABULARIES)


def tokenizer_content(directory: Path) -> dict[str, bytes | None]:
    """The files of a directory's tokenizer, by name."""
    return {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).is_file()}


def _warn_no_tokenizer(model: Any) -> None:
    source = getattr(model, "source", None)
    reason = f"{source} has none"
    if source is None:
        reason = "the model was not loaded from a directory"
    warnings.warn(
        f"No tokenizer is saved: {reason}. `transformers` would silently create an empty one, and the model's results "
        "would be wrong. Pass `tokenizer=`, a directory with a tokenizer, or copy a tokenizer into the saved "
        "directory.",
        stacklevel=5,
    )
