"""`EncoderConfig`: the fields of every encoder's config. `EncoderFamily`: the differences between families."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from longspan.checks import check_choice
from longspan.models.activations import ACTIVATIONS
from longspan.models.family import Family, TensorSize
from longspan.models.fields import MAX_INT32, check_counts, check_flags, check_reals

# Metadata of a config field that `config.json` does not have under this name.
NOT_IN_JSON = {"in_json": False}
# Metadata of a config field for which `config.json` may have null, which means the default.
NULLABLE = {"null": True}


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The config fields that every encoder has, under the names of `config.json`; the defaults are bert-base."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: int | float = 0.1
    attention_probs_dropout_prob: int | float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: int | float = 0.02
    layer_norm_eps: int | float = 1e-12
    pad_token_id: int = field(default=0, metadata=NULLABLE)
    classifier_dropout: int | float | None = None
    tie_word_embeddings: bool = True
    num_labels: int = field(default=2, metadata=NOT_IN_JSON)
    extra: str = field(default="{}", metadata=NOT_IN_JSON)

    model_type: ClassVar[str]

    def __post_init__(self):
        check_counts(self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        check_counts(self, "max_position_embeddings", "type_vocab_size", "num_labels")
        check_counts(self, "pad_token_id", minimum=-MAX_INT32)  # a BERT without padding may have any number
        check_reals(self, "layer_norm_eps", "initializer_range")
        check_reals(self, "hidden_dropout_prob", "attention_probs_dropout_prob", below=1.0)
        if self.classifier_dropout is not None:
            check_reals(self, "classifier_dropout", below=1.0)
        check_flags(self, "tie_word_embeddings")
        check_choice("hidden_act", self.hidden_act, tuple(sorted(ACTIVATIONS)))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}. "
                "Change one of them."
            )

    @property
    def family(self) -> "EncoderFamily":
        """The record of the model family."""
        raise NotImplementedError

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def first_position(self) -> int:
        """The first token's row of the position table."""
        return 0

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of an input."""
        return self.max_position_embeddings - self.first_position

    def rule(self, layer: int) -> str:
        """The mask of a layer as an expression that the command `longspan show` accepts."""
        return "Full()"

    @property
    def head_dropout(self) -> float:
        if self.classifier_dropout is None:
            return self.hidden_dropout_prob
        return self.classifier_dropout


def check_is_encoder(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The `read` of encoders: no fields, because all have the names of `config.json`. Raises for decoders."""
    for name in ("is_decoder", "add_cross_attention"):
        if raw.get(name):
            raise ValueError(
                f"{where} has {name}=true, but Longspan supports only the encoders of this family. Set the key to "
                "false if the checkpoint is an encoder."
            )
    kind = raw.get("position_embedding_type")
    if kind not in (None, "absolute"):
        raise ValueError(
            f"{where} has position_embedding_type={kind!r}, but Longspan supports only 'absolute'. Load a checkpoint "
            "with absolute positions."
        )
    return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderFamily(Family):
    """A family of encoders: its embeddings and attention, and the differences of its heads."""

    word_embeddings: str = "embeddings.word_embeddings.weight"
    layers: str = "encoder.layer.{}."
    sizes: tuple[TensorSize, ...] = (
        TensorSize(("vocab_size",), "embeddings.word_embeddings.weight", 0),
        TensorSize(("hidden_size",), "embeddings.word_embeddings.weight", 1),
        TensorSize(("max_position_embeddings",), "embeddings.position_embeddings.weight", 0),
        TensorSize(("type_vocab_size",), "embeddings.token_type_embeddings.weight", 0),
        TensorSize(("intermediate_size",), "encoder.layer.0.intermediate.dense.weight", 0),
    )
    buffers: tuple[str, ...] = ("embeddings.position_ids", "embeddings.token_type_ids")
    read: Callable[[Mapping[str, Any], str], dict[str, Any]] = check_is_encoder

    embeddings: type[Any]  # a subclass of `Embeddings`
    attention: type[Any]  # a subclass of `FullAttention`
    lm_activation: str | None = None  # in the masked-LM head; None: the config's
    classifier_reads_pooler: bool = False  # the sequence classifier is one layer after the pooler; otherwise two layers
    classifier_activation: str | None = "tanh"  # between those two layers; None: the config's
    answers_have_layer: bool = False  # the question-answering head starts with a feed-forward network
    answers_follow_question: bool = False  # the question and its separator have token type 0 and contain no answer
    separator: int | None = None  # the token that ends a question, if a config has none
