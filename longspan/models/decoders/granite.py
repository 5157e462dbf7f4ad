"""Granite: a Llama whose embeddings, scores, branches and logits are multiplied by numbers of the config."""

from dataclasses import dataclass
from typing import ClassVar

from longspan.models.decoders.family import IGNORED_KEYS, DecoderFamily, Multipliers
from longspan.models.decoders.llama import CAUSAL_LM, LlamaConfig
from longspan.models.fields import check_positives


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """A Granite: a Llama with four multipliers.

    Fields have the names of `config.json`, explained in `LlamaConfig`.

    Args:
        embedding_multiplier: the embeddings are multiplied by it.
        attention_multiplier: the factor of the scores. The default is 1, not 1 / √head_dim.
        residual_multiplier: the outputs of attention and MLP are multiplied by it before they are added.
        logits_scaling: the logits are divided by it.

    Example:
        >>> from longspan import models
        >>> models.GraniteConfig(attention_multiplier=0.015625, residual_multiplier=0.22).scale
        0.015625
    """

    embedding_multiplier: int | float = 1.0
    attention_multiplier: int | float = 1.0
    residual_multiplier: int | float = 1.0
    logits_scaling: int | float = 1.0

    model_type: ClassVar[str] = "granite"

    def __post_init__(self):
        super().__post_init__()
        check_positives(self, "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

    @property
    def family(self) -> DecoderFamily:
        return GRANITE

    @property
    def scale(self) -> float:
        return self.attention_multiplier

    @property
    def multipliers(self) -> Multipliers:
        return Multipliers(self.embedding_multiplier, self.residual_multiplier, self.logits_scaling)


GRANITE = DecoderFamily(config=GraniteConfig, name="Granite", tasks=(CAUSAL_LM,), ignored_keys=IGNORED_KEYS)
