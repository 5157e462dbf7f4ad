"""A vocabulary of bytes, for models that start from nothing: 256 tokens and some special ones, for every text."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

BYTES = 256
END = "<|endoftext|>"
ENCODER_SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
# Keys of config.json with ids of special tokens, which must fit the vocabulary.
ENCODER_KEYS = {"pad_token_id": "[PAD]", "cls_token_id": "[CLS]", "bos_token_id": "[CLS]", "sep_token_id": "[SEP]"}
ENCODER_KEYS |= {"eos_token_id": "[SEP]", "mask_token_id": "[MASK]"}


class ByteVocabulary(NamedTuple):
    """Ids 0 to 255 are bytes, those after them special tokens.

    A decoder has one special token, the end of a text, if its vocabulary has room for it. An encoder has [PAD], [CLS],
    [SEP] and [MASK].
    """

    special: tuple[str, ...]

    @classmethod
    def of(cls, is_encoder: bool, vocab_size: int | None) -> "ByteVocabulary":
        """The vocabulary for a config with this `vocab_size`.

        Example:
            >>> [ByteVocabulary.of(False, None).size, ByteVocabulary.of(False, 256).size]
            [257, 256]
            >>> ByteVocabulary.of(True, 300).size
            260
        """
        found = cls(ENCODER_SPECIAL if is_encoder else (END,))
        if not is_encoder and vocab_size == BYTES:
            found = cls(())
        if vocab_size is not None and vocab_size < found.size:
            raise ValueError(
                f"The config has vocab_size={vocab_size}, but the vocabulary of bytes has {found.size} tokens: "
                f"{BYTES} bytes{''.join(f', {name}' for name in found.special)}. Set vocab_size to {found.size} or "
                "more, or leave it out."
            )
        return found

    @property
    def size(self) -> int:
        """The number of tokens."""
        return BYTES + len(self.special)

    def id_of(self, name: str) -> int:
        """The id of a special token."""
        return BYTES + self.special.index(name)

    def config_keys(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a config.json that the vocabulary decides: its size, if it is missing, and special tokens."""
        keys: dict[str, Any] = {} if raw.get("vocab_size") else dict(vocab_size=self.size)
        if END in self.special:
            return keys | dict(bos_token_id=self.id_of(END), eos_token_id=self.id_of(END))
        if self.special:
            return keys | {key: self.id_of(name) for key, name in ENCODER_KEYS.items()}
        return keys | dict(bos_token_id=None, eos_token_id=None)

    def tokenizer(self) -> Any:
        """The vocabulary as a tokenizer of the library `tokenizers`."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

        # As in GPT-2, each byte is written as a printable character.
        printable = _printable_bytes()
        found = Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(printable)}, []))
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        found.decoder = decoders.ByteLevel()
        found.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in self.special])
        if "[CLS]" in self.special:
            ends = [(name, self.id_of(name)) for name in ("[CLS]", "[SEP]")]
            found.post_processor = processors.TemplateProcessing(
                single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
            )
        return found

    def files(self, max_tokens: int) -> dict[str, bytes]:
        """The files of the tokenizer in a checkpoint's directory, by name."""
        settings: dict[str, Any] = dict(tokenizer_class="PreTrainedTokenizerFast", model_max_length=max_tokens)
        settings["clean_up_tokenization_spaces"] = False
        if END in self.special:
            settings |= dict(bos_token=END, eos_token=END)
        elif self.special:
            names = dict(zip(("pad_token", "cls_token", "sep_token", "mask_token"), self.special, strict=True))
            settings |= names
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        return {"tokenizer.json": self.tokenizer().to_str(pretty=True).encode(), "tokenizer_config.json": text.encode()}


def _printable_bytes() -> list[str]:
    """GPT-2's character for each byte: the byte's own character if it is printable, otherwise one from U+0100 on."""
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte) if byte in own else chr(next(others)) for byte in range(BYTES)]
