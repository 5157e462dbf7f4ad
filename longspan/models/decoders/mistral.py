"""Mistral (arXiv:2310.06825): a Llama whose layers all see a window."""

from dataclasses import dataclass
from typing import ClassVar

from longspan.models.decoders.family import FULL, SLIDING, DecoderConfig, DecoderFamily, read_window
from longspan.models.decoders.llama import CAUSAL_LM


@dataclass(frozen=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """A Mistral: every layer sees the last `sliding_window` tokens.

    The names are those of `config.json`, explained in `LlamaConfig`; the defaults are Mistral-7B, but for
    `num_key_value_heads`.

    Args:
        sliding_window: the keys that a query sees, its own among them; None: all.

    Example:
        >>> from longspan import models
        >>> print(models.MistralConfig(sliding_window=3).mask("sliding_attention").show(4, 4))
        #...
        ##..
        ###.
        .###
    """

    intermediate_size: int = 14336
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096

    model_type: ClassVar[str] = "mistral"

    @property
    def family(self) -> DecoderFamily:
        return MISTRAL

    @property
    def kinds(self) -> tuple[str, ...]:
        return (FULL if self.sliding_window is None else SLIDING,) * self.num_hidden_layers


MISTRAL = DecoderFamily(
    config=MistralConfig,
    name="Mistral",
    tasks=(CAUSAL_LM,),
    defaults=dict(num_key_value_heads=8, sliding_window=4096),
    read=read_window,
)
