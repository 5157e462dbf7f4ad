"""What the files of a sentence-transformers directory say about texts: their limit, case and prompt."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from longspan.hf.sentence_modules import check_modules, listed_modules, sentence_settings, transformer_settings
from longspan.hf.tokenizer import limits_of
from longspan.train.sources import Example
from longspan.train.survey import Source


class TextSettings(NamedTuple):
    """The settings of texts; the defaults are those of a directory without `modules.json`."""

    max_tokens: int | None = None
    lower_case: bool = False
    prompt: str = ""

    def with_prompt(self, source: Source) -> Iterator[Example]:
        """The examples with the prompt before each text."""
        for example in source():
            yield example._replace(texts={name: self.prompt + text for name, text in example.texts.items()})

    def apply(self, tokenizer: Any) -> None:
        """Makes a tokenizer convert texts to lower case, if the settings say so."""
        if not self.lower_case:
            return
        from tokenizers.normalizers import Lowercase, Sequence

        before = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = Sequence([Lowercase(), *before])


def text_settings(directory: Path) -> tuple[Path, TextSettings]:
    """The folder of the Transformer, which is the directory itself in most cases, and the settings."""
    if not directory.is_dir():
        return directory, TextSettings()
    listed = listed_modules(directory)
    if not listed:
        return directory, TextSettings()
    check_modules(directory, listed)
    folder = directory / listed[0].folder
    text, sentence = transformer_settings(folder), sentence_settings(directory)
    longest = text.max_seq_length
    if longest is None and (folder / "tokenizer.json").is_file():
        longest = limits_of(folder / "tokenizer.json").max_length
    prompt = sentence.prompts.get(sentence.default_prompt_name or "", "")
    return folder, TextSettings(longest, text.lower_case, prompt)
