"""RoBERTa (arXiv:1907.11692): a BERT whose positions skip padding; XLM-RoBERTa and CamemBERT, the same models."""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp

from longspan.models.encoders.attention import FullAttention
from longspan.models.encoders.bert import BODY, ENCODER, QUESTION_ANSWERING, TOKEN_CLASSIFIER, BertConfig
from longspan.models.encoders.encoder import Embeddings, stack_layers
from longspan.models.encoders.family import EncoderFamily
from longspan.models.encoders.tasks import MaskedLM, SequenceClassifier
from longspan.models.family import Task
from longspan.models.fields import check_counts


@dataclass(frozen=True, kw_only=True)
class RobertaConfig(BertConfig):
    """A RoBERTa encoder: a BERT whose positions skip padding and start at `pad_token_id` + 1.

    Example:
        >>> from longspan import models
        >>> models.RobertaConfig(max_position_embeddings=514).max_tokens
        512
    """

    vocab_size: int = 50265
    max_position_embeddings: int = 514
    type_vocab_size: int = 1
    layer_norm_eps: int | float = 1e-5
    pad_token_id: int = 1

    model_type: ClassVar[str] = "roberta"

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, "pad_token_id", minimum=0)
        if self.max_tokens < 1:
            raise ValueError(
                f"max_position_embeddings={self.max_position_embeddings} leaves no position for a token: with "
                f"pad_token_id={self.pad_token_id} the first {self.first_position} positions are reserved for padding. "
                "Increase `max_position_embeddings`."
            )

    @property
    def family(self) -> EncoderFamily:
        return ROBERTA

    @property
    def first_position(self) -> int:
        return self.pad_token_id + 1


@dataclass(frozen=True, kw_only=True)
class XLMRobertaConfig(RobertaConfig):
    """An XLM-RoBERTa encoder (arXiv:1911.02116): a RoBERTa with another vocabulary. The defaults are xlm-roberta-base.

    Example:
        >>> from longspan import models
        >>> models.XLMRobertaConfig(max_position_embeddings=8194).max_tokens
        8192
    """

    vocab_size: int = 250002

    model_type: ClassVar[str] = "xlm-roberta"

    @property
    def family(self) -> EncoderFamily:
        return XLM_ROBERTA


@dataclass(frozen=True, kw_only=True)
class CamembertConfig(RobertaConfig):
    """A CamemBERT encoder (arXiv:1911.03894): a RoBERTa with another vocabulary. The defaults are camembert-base.

    Example:
        >>> from longspan import models
        >>> models.CamembertConfig().max_tokens
        512
    """

    vocab_size: int = 32005

    model_type: ClassVar[str] = "camembert"

    @property
    def family(self) -> EncoderFamily:
        return CAMEMBERT


class RobertaEmbeddings(Embeddings):
    """Embeddings whose padding has its own position, one before the first token's."""

    def positions(self, input_ids, length, segments):
        pad = self.config.pad_token_id
        if segments is not None:
            return jnp.where(segments < 0, jnp.int32(pad), super().positions(input_ids, length, segments))
        if input_ids is None:
            return super().positions(input_ids, length, segments)
        is_token = (jnp.asarray(input_ids, jnp.int32) != pad).astype(jnp.int32)
        return jnp.cumsum(is_token, axis=1, dtype=jnp.int32) * is_token + pad


MASKED_LM = Task(
    MaskedLM,
    names=(
        ("dense.", "lm_head.dense."),
        ("norm.", "lm_head.layer_norm."),
        ("bias", "lm_head.bias"),
        ("decoder.", "lm_head.decoder."),
    ),
    tied="lm_head.decoder.weight",
    twin_biases=("lm_head.bias", "lm_head.decoder.bias"),
)
SEQUENCE_CLASSIFIER = Task(
    SequenceClassifier, names=(("dense.", "classifier.dense."), ("classifier.", "classifier.out_proj."))
)

ROBERTA = EncoderFamily(
    config=RobertaConfig,
    name="Roberta",
    prefix="roberta.",
    names=BODY,
    tasks=(ENCODER, MASKED_LM, SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER, QUESTION_ANSWERING),
    defaults=dict(max_position_embeddings=512, type_vocab_size=2, layer_norm_eps=1e-12),
    extendable=True,
    embeddings=RobertaEmbeddings,
    attention=FullAttention,
    stack=stack_layers,
    # The masked-LM head has the exact GELU, whatever `hidden_act` is.
    lm_activation="gelu",
    separator=2,
)

# Classes of their own in Hugging Face, with RoBERTa's tensors and computation.
XLM_ROBERTA = replace(
    ROBERTA, config=XLMRobertaConfig, name="XLMRoberta", defaults=dict(ROBERTA.defaults, vocab_size=30522)
)
CAMEMBERT = replace(
    ROBERTA, config=CamembertConfig, name="Camembert", defaults=dict(ROBERTA.defaults, vocab_size=30522)
)
