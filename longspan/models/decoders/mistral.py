"""Mistral (arXiv:2310.06825): a Llama with a sliding window in every layer."""

from dataclasses import dataclass
from typing import ClassVar

from longspan.models.decoders.family import FULL, SLIDING, DecoderConfig, DecoderFamily, read_window
from longspan.models.decoders.llama import CAUSAL_LM

# Prefixes of the tensors of a larger model that reads images.
IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


@dataclass(frozen=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """A Mistral: every query attends to the last `sliding_window` tokens.

    Fields have the names of `config.json`, explained in `LlamaConfig`. The defaults are Mistral-7B, except for
    `num_key_value_heads`.

    Args:
        sliding_window: the number of keys that a query attends to, its own included; None: all.

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
        kind = FULL if self.sliding_window is None else SLIDING
        return (kind,) * self.num_hidden_layers


MISTRAL = DecoderFamily(
    config=MistralConfig,
    name="Mistral",
    tasks=(CAUSAL_LM,),
    other_prefixes=("language_model.model.", "model.language_model."),
    other_head_prefix="language_model.",
    inside={"mistral3": "text_config"},
    outside=IMAGE_PARTS,
    defaults=dict(num_key_value_heads=8, sliding_window=4096),
    read=read_window,
)
