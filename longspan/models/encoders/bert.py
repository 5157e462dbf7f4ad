"""BERT (arXiv:1810.04805): full attention, positions counted from 0; the encoder that the other families grew from."""

from dataclasses import dataclass
from typing import ClassVar

from longspan.models.encoders.attention import FullAttention
from longspan.models.encoders.encoder import Embeddings, Encoder
from longspan.models.encoders.family import EncoderConfig, EncoderFamily
from longspan.models.encoders.tasks import MaskedLM, QuestionAnswering, SequenceClassifier, TokenClassifier
from longspan.models.family import Task


@dataclass(frozen=True, kw_only=True)
class BertConfig(EncoderConfig):
    """A BERT encoder: full attention, positions counted from 0.

    The names are those of `config.json`; the defaults are bert-base.

    Args:
        hidden_act: one of the names in `longspan.models.activations`.
        classifier_dropout: dropout before a classification head; None is `hidden_dropout_prob`.
        tie_word_embeddings: whether masked-LM logits use the word embeddings.
        extra: the rest of a `config.json` as JSON text, which `hf.save` writes back.

    Example:
        >>> from longspan import models
        >>> models.BertConfig(hidden_size=384, num_attention_heads=12).head_size
        32
    """

    model_type: ClassVar[str] = "bert"

    @property
    def family(self) -> EncoderFamily:
        return BERT


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
    classifier_reads_pooler=True,
)
