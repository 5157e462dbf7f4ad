"""A model that starts from nothing: a `config.json`, new parameters, and a vocabulary of bytes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from longspan.hf.config import from_json
from longspan.models.encoders.family import EncoderFamily
from longspan.models.families import FAMILIES
from longspan.train.byte_level import END, ByteVocabulary


class NewModel(NamedTuple):
    """The config of a new model and its vocabulary.

    Attributes:
        config: for example a `LlamaConfig`.
        vocabulary: of bytes, with the special tokens of an encoder or a decoder.
    """

    config: Any
    vocabulary: ByteVocabulary

    @classmethod
    def of(cls, raw: Mapping[str, Any], where: str = "config.json", **changes: Any) -> "NewModel":
        """The model for the content of a `config.json`. The vocabulary decides a missing `vocab_size`, and the tokens.

        Args:
            raw: the content.
            where: the file, for messages.
            changes: fields of the config to change, such as `num_labels`.

        Example:
            >>> new = NewModel.of(dict(model_type="llama", hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
            >>> new.config.vocab_size, new.vocabulary.special
            (257, ('<|endoftext|>',))
        """
        families = [family for family in FAMILIES if family.describes(raw)]
        is_encoder = bool(families) and isinstance(families[0], EncoderFamily)
        size = raw.get("vocab_size")
        if size is not None and type(size) is not int:
            raise ValueError(f"{where} has vocab_size={size!r:.80}, which must be an int. Leave it out.")
        vocabulary = ByteVocabulary.of(is_encoder, size)
        config = from_json({**raw, **vocabulary.config_keys(raw)}, where=where, **changes)
        return cls(config, vocabulary)

    def tokenizer_files(self, max_tokens: int) -> dict[str, bytes]:
        """The files of the tokenizer, and for a decoder its generation config, by name."""
        files = self.vocabulary.files(max_tokens)
        if END in self.vocabulary.special:
            end = self.vocabulary.id_of(END)
            text = json.dumps(dict(bos_token_id=end, eos_token_id=end), indent=2, sort_keys=True)
            files["generation_config.json"] = f"{text}\n".encode()
        return files

    def write_files(self, directory: Path, max_tokens: int) -> None:
        """Writes the tokenizer's files, which `hf.save` then keeps."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.tokenizer_files(max_tokens).items():
            (directory / name).write_bytes(content)
