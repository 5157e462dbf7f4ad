"""BERT (arXiv:1810.04805): full attention, positions from 0; the encoder that the other families are based on."""

from dataclasses import dataclass
from typing import ClassVar

from longspan.models.encoders.attention import FullAttention
from longspan.models.encoders.encoder import Embeddings, Encoder, stack_layers
from longspan.models.encoders.family import BertFields, EncoderFamily
from longspan.models.encoders.tasks import MaskedLM, QuestionAnswering, SequenceClassifier, TokenClassifier
from longspan.models.family import Task


@dataclass(frozen=True, kw_only=True)
class BertConfig(BertFields):
    """A BERT encoder: full attention, positions counted from 0.

    Fields have the names of `config.json`; the defaults are bert-base.

    Args:
        hidden_act: one of the names in `longspan.models.activations`.
        classifier_dropout: the dropout rate before a classification head; None: `hidden_dropout_prob`.
        tie_word_embeddings: whether masked-LM logits are computed with the word embeddings.
        extra: the other keys of a `config.json` as JSON text, which `hf.save` writes back.

    Example:
        >>> from longspan import models
        >>> models.BertConfig(hidden_size=384, num_attention_heads=12).head_dim
        32
    """

    model_type: ClassVar[str] = "bert"

    @property
    def family(self) -> EncoderFamily:
        return BERT

    @property
    def first_position(self) -> int:
        """The first token's row of the position table."""
        return 0

    @property
    def max_tokens(self) -> int:
        return self.max_position_embeddings - self.first_position

    @property
    def position_rows(self) -> int | None:
        return self.max_position_embeddings


BODY = (
    ("embeddings.word.", "embeddings.word_embeddings."),
    ("embeddings.position.", "embeddings.position_embeddings."),
    ("embeddings.token_type.", "embeddings.token_type_embeddings."),
    ("embeddings.norm.", "embeddings.LayerNorm."),
    ("layers.attention.", "encoder.layer.{}.attention.self."),
    ("layers.out.", "encoder.layer.{}.attention.output.dense."),
    ("layers.out_norm.", "encoder.layer.{}.attention.output.LayerNorm."),
    ("layers.feed_forward.up.", "encoder.layer.{}.intermediate.dense."),
    ("layers.feed_forward.down.", "encoder.layer.{}.output.dense."),
    ("layers.feed_forward.norm.", "encoder.layer.{}.output.LayerNorm."),
    ("pooler.", "pooler.dense."),
)

ENCODER = Task(Encoder, optional_pooler=True)
MASKED_LM = Task(
    MaskedLM,
    names=(
        ("dense.", "cls.predictions.transform.dense."),
        ("norm.", "cls.predictions.transform.LayerNorm."),
        ("bias", "cls.predictions.bias"),
        ("decoder.", "cls.predictions.decoder."),
    ),
    tied="cls.predictions.decoder.weight",
    twin_biases=("cls.predictions.bias", "cls.predictions.decoder.bias"),
)
SEQUENCE_CLASSIFIER = Task(SequenceClassifier, names=(("classifier.", "classifier."),))
TOKEN_CLASSIFIER = Task(TokenClassifier, names=(("classifier.", "classifier."),))
QUESTION_ANSWERING = Task(QuestionAnswering, names=(("outputs.", "qa_outputs."),))

BERT = EncoderFamily(
    config=BertConfig,
    name="Bert",
    prefix="bert.",
    names=BODY,
    tasks=(ENCODER, MASKED_LM, SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER, QUESTION_ANSWERING),
    unused=("cls.seq_relationship.",),
    extendable=True,
    embeddings=Embeddings,
    attention=FullAttention,
    stack=stack_layers,
    classifier_reads_pooler=True,
)
