"""Ministral: a Mistral in which only some layers are sliding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from longspan.models.decoders.family import FULL, IGNORED_KEYS, SLIDING, DecoderFamily, LayerTypes, read_window
from longspan.models.decoders.llama import CAUSAL_LM


@dataclass(frozen=True, kw_only=True)
class MinistralConfig(LayerTypes):
    """A Ministral: a Mistral whose config lists the kind of each layer.

    Fields have the names of `config.json`, explained in `LlamaConfig`. The defaults are Hugging Face's, except for
    `num_key_value_heads`.

    Args:
        sliding_window: the number of keys that a query of a sliding layer attends to, its own included.
        layer_types: the kind of each layer; by default all are sliding if `sliding_window` is a number.

    Example:
        >>> from longspan import models
        >>> kinds = ("full_attention", "sliding_attention")
        >>> models.MinistralConfig(layer_types=kinds, num_hidden_layers=2, sliding_window=32768).mask(kinds[1])
        Causal() & Window(32767, 0)
    """

    intermediate_size: int = 14336
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096
    layer_types: Sequence[str] | None = None

    model_type: ClassVar[str] = "ministral"

    @property
    def family(self) -> DecoderFamily:
        return MINISTRAL

    def default_kind(self, number: int) -> str:
        return FULL if self.sliding_window is None else SLIDING


MINISTRAL = DecoderFamily(
    config=MinistralConfig,
    name="Ministral",
    tasks=(CAUSAL_LM,),
    defaults=dict(num_key_value_heads=8, sliding_window=4096),
    ignored_keys=IGNORED_KEYS,
    read=read_window,
)
