"""Reading a checkpoint's `tokenizer.json`, with the special tokens and the maximum length of its other files."""

from pathlib import Path
from typing import Any, NamedTuple

from longspan.checks import check_choice
from longspan.hf.config import read_object
from longspan.models.fields import MAX_INT32
from longspan.optional import needs

CONFIG = "tokenizer_config.json"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Hugging Face's tokenizers of these names, and those of these model types, take three settings from `CONFIG`, whatever
# `tokenizer.json` says: their names in `CONFIG` and in a normalizer, and the values of absent ones.
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
BERT_TYPES = ("bert", "nomic_bert")
BERT_SETTINGS = (
    ("do_lower_case", "lowercase", True),
    ("tokenize_chinese_chars", "handle_chinese_chars", True),
    ("strip_accents", "strip_accents", None),
)


class TokenizerLimits(NamedTuple):
    """The truncation that a tokenizer's files ask for."""

    max_length: int | None
    side: str


def read_tokenizer(directory: Path) -> Any:
    """The tokenizer in a checkpoint's directory, without padding and truncation."""
    needs("Reading text", "tokenizers", extra="hf")
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} has no tokenizer.json. `tokenizer.save_pretrained(directory)` of a fast tokenizer writes one."
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def mark_special(tokenizer: Any, directory: Path) -> None:
    """Marks the tokens that the directory's files name as special, as Hugging Face does."""
    for file in ("special_tokens_map.json", CONFIG):
        content = _content(directory / file)
        for key in SPECIAL:
            token = content.get(key)
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str) and tokenizer.token_to_id(token) is not None:
                tokenizer.add_special_tokens([token])


def apply_settings(tokenizer: Any, directory: Path) -> None:
    """Applies the settings of `tokenizer_config.json` that replace those of `tokenizer.json` in Hugging Face."""
    from tokenizers import models, normalizers

    path = directory / CONFIG
    content = _content(path)
    if _flag(path, content, "split_special_tokens", False):
        raise ValueError(
            f"{path} has split_special_tokens=true, but Longspan always reads a special token in a text as one token. "
            "Set it to false."
        )
    name = content.get("tokenizer_class")
    is_bert = str(name).removesuffix("Fast") in BERT_CLASSES
    if name is None:
        is_bert = _content(directory / "config.json").get("model_type") in BERT_TYPES
    normalizer = tokenizer.normalizer
    if not (is_bert and isinstance(tokenizer.model, models.WordPiece)):
        return
    if isinstance(normalizer, normalizers.BertNormalizer):
        for key, ours, default in BERT_SETTINGS:
            setattr(normalizer, ours, _flag(path, content, key, default))
        tokenizer.normalizer = normalizer


def limits_of(tokenizer_json: Path) -> TokenizerLimits:
    """The maximum length and the side that is truncated, of the files next to a `tokenizer.json`."""
    path = tokenizer_json.parent / CONFIG
    content = _content(path)
    key = "max_len" if content.get("model_max_length") is None else "model_max_length"
    side = content.get("truncation_side")
    if side is None:
        saved = read_object(tokenizer_json).get("truncation")
        side = str(saved.get("direction", "right")).lower() if isinstance(saved, dict) else "right"
    check_choice(f"{path}: 'truncation_side'", side, ("right", "left"))
    return TokenizerLimits(length_in(path, content, key), side)


def length_in(path: Path, content: dict[str, Any], key: str) -> int | None:
    """The number of tokens under a key of a file; None if it sets no limit."""
    length = content.get(key)
    if length is None:
        return None
    is_whole = isinstance(length, float) and length.is_integer()  # such as 1e30, which means no limit
    if not (type(length) is int or is_whole) or length < 1:
        raise ValueError(f"{path}: {key!r} must be a number of tokens, at least 1, got {str(length)[:80]}.")
    if length > MAX_INT32:
        return None
    return int(length)


def _flag(path: Path, content: dict[str, Any], key: str, default: bool | None) -> bool | None:
    """A setting that is true or false, or null if that is the default."""
    value = content.get(key, default)
    if not (isinstance(value, bool) or value is default):
        raise ValueError(f"{path}: {key!r} must be true or false, got {str(value)[:80]}.")
    return value


def _content(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}
