"""Text in and out of models: a checkpoint's tokenizer, and the decoding of generated tokens one by one."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspan.cli.library import library

CONTEXT = 16  # tokens of the prompt that are decoded with the answer, and the most that wait for a whole character
INCOMPLETE = "\ufffd"  # the replacement character, which a tokenizer returns for an incomplete character


def tokenizer_of(directory: Path) -> Any:
    """The tokenizer in a checkpoint's directory. The command's options apply to long texts, not its own settings."""
    library()
    from longspan.hf.tokenizer import apply_settings, read_tokenizer

    tokenizer = read_tokenizer(directory)
    apply_settings(tokenizer, directory)
    return tokenizer


def read_stdin() -> bytes:
    """Everything on standard input."""
    if sys.stdin is None:  # it was closed before the process started
        raise ValueError("Standard input is closed, so `-` cannot be read. Name a file, or pipe text in.")
    return sys.stdin.buffer.read()


def stop_tokens(directory: Path) -> list[int] | None:
    """The ids of a checkpoint's end-of-text tokens; None if its files name none."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text("utf-8")).get("eos_token_id")
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not a JSON object. Download or save it again.") from error
        if found is not None:
            if not isinstance(found, list):
                found = [found]
            if not all(type(token) is int for token in found):
                raise ValueError(f"{path}: 'eos_token_id' must be a token id or a list of them, got {str(found)[:80]}.")
            return found
    return None


class TextStream:
    """Decodes tokens one by one into pieces of text. Pieces have whole characters; joined, they are the whole text.

    A character may consist of several tokens, and a tokenizer may decode the first token of a text differently. So each
    token is decoded together with some tokens before it, and text that ends within a character waits for more tokens.

    Args:
        tokenizer: an object with a method `decode`.
        prompt: the tokens before the new ones.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()):
        self.tokenizer, self.tokens = tokenizer, list(prompt[-CONTEXT:])
        # tokens[:shown] have been returned as text; tokens[before:shown] are decoded again with the new ones.
        self.before, self.shown = 0, len(self.tokens)
        self.count = 0

    def push(self, token: int) -> str:
        """The text that a new token completes; it may be empty."""
        self.tokens.append(token)
        self.count += 1
        text = self._text(self.before, len(self.tokens))
        # A character that is incomplete after `CONTEXT` tokens stays incomplete, and is returned as it is.
        if text.endswith(INCOMPLETE) and len(self.tokens) - self.shown < CONTEXT:
            return ""
        return self._advance(text)

    def rest(self) -> str:
        """The text that still waits at the end, with its incomplete character."""
        return self._advance(self._text(self.before, len(self.tokens)))

    def _advance(self, text: str) -> str:
        old = self._text(self.before, self.shown)
        if len(text) <= len(old):
            return ""
        self.before, self.shown = self.shown, len(self.tokens)
        return text[len(old) :]

    def _text(self, start: int, stop: int) -> str:
        return self.tokenizer.decode(self.tokens[start:stop], skip_special_tokens=True)
