"""Text in and out of models: the tokenizer of a checkpoint, and tokens that become text as they come."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspan.optional import needs

FEW = 16  # tokens
BROKEN = "\ufffd"  # what a decoder writes for bytes that are not yet a character


def tokenizer_of(directory: Path) -> Any:
    """The tokenizer in a checkpoint's directory."""
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
    # What they were saved with is for training; here long texts are refused, split or truncated by name.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_stdin() -> bytes:
    """Everything on standard input."""
    if sys.stdin is None:  # it was closed before we began
        raise ValueError("Standard input is closed, so `-` cannot be read. Name a file, or pipe text in.")
    return sys.stdin.buffer.read()


def stop_tokens(directory: Path) -> list[int] | None:
    """The ids that end a text, as a checkpoint's files say."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text("utf-8")).get("eos_token_id")
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not a JSON object. Download or save it again.") from error
        if found is not None:
            tokens = found if isinstance(found, list) else [found]
            if not all(type(token) is int for token in tokens):
                raise ValueError(f"{path}: 'eos_token_id' must be a token's number or a list, got {str(found)[:80]}.")
            return tokens
    return None


class Stream:
    """Tokens as text, piece by piece: each piece is complete characters, and all of them together the whole text.

    A character may be made of several tokens, and a decoder may treat the first token of a text differently. So a few
    tokens before the new ones are decoded with them, and what ends in the middle of a character waits.

    Args:
        tokenizer: with a `decode`.
        prompt: the tokens that the new ones go on from.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()):
        self.tokenizer, self.tokens = tokenizer, list(prompt[-FEW:])
        self.before, self.shown = 0, len(self.tokens)  # tokens[before:shown] are decoded again with what follows
        self.count = 0

    def push(self, token: int) -> str:
        """The text that a new token completes, which may be none."""
        self.tokens.append(token)
        self.count += 1
        text = self._text(self.before, len(self.tokens))
        # What is still broken after so many tokens is so for good.
        waits = text.endswith(BROKEN) and len(self.tokens) - self.shown < FEW
        return "" if waits else self._advance(text)

    def rest(self) -> str:
        """What still waits at the end, broken as it is."""
        return self._advance(self._text(self.before, len(self.tokens)))

    def _advance(self, text: str) -> str:
        old = self._text(self.before, self.shown)
        if len(text) <= len(old):
            return ""
        self.before, self.shown = self.shown, len(self.tokens)
        return text[len(old) :]

    def _text(self, start: int, stop: int) -> str:
        return self.tokenizer.decode(self.tokens[start:stop], skip_special_tokens=True)
