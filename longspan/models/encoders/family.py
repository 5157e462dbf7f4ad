"""`EncoderConfig`: the fields of every encoder's config. `EncoderFamily`: the differences between families."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from longspan.checks import check_choice
from longspan.models.activations import ACTIVATIONS
from longspan.models.family import Family, TensorSize
from longspan.models.fields import MAX_INT32, check_counts, check_flags, check_reals

# Metadata of a config field that `config.json` does not have under this name.
NOT_IN_JSON = {"in_json": False}
# Metadata of a config field for which `config.json` may have null, which means the default.
NULLABLE = {"null": True}


class HeadTransform(NamedTuple):
    """A layer of a head before its outputs: norm(activation(dense(x)))."""

    activation: str
    use_bias: bool = True
    has_norm: bool = True
    norm_bias: bool = True
    drops_input: bool = False  # whether dropout is also applied before the layer, not only after it


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The config fields that every encoder has, under the names of `config.json`; the defaults are bert-base."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    initializer_range: int | float = 0.02
    pad_token_id: int = field(default=0, metadata=NULLABLE)
    tie_word_embeddings: bool = True
    num_labels: int = field(default=2, metadata=NOT_IN_JSON)
    extra: str = field(default="{}", metadata=NOT_IN_JSON)

    model_type: ClassVar[str]

    def __post_init__(self):
        check_counts(self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        check_counts(self, "max_position_embeddings", "num_labels")
        check_counts(self, "pad_token_id", minimum=-MAX_INT32)  # a BERT without padding may have any number
        check_reals(self, "initializer_range")
        check_flags(self, "tie_word_embeddings")
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
    def max_tokens(self) -> int:
        """The maximum number of tokens of an input."""
        return self.max_position_embeddings

    @property
    def position_rows(self) -> int | None:
        """The rows of the table of positions; None if the model has no such table."""
        return None

    @property
    def token_types(self) -> int:
        """The rows of the table of token types; 0 if the model has no such table."""
        return 0

    def rule(self, layer: int) -> str:
        """The mask of a layer as an expression that the command `longspan show` accepts."""
        return "Full()"

    @property
    def max_dropout(self) -> float:
        """The greatest dropout rate of the encoder, without its head."""
        raise NotImplementedError

    @property
    def head_dropout(self) -> float:
        """The dropout rate before the outputs of a classification head."""
        raise NotImplementedError

    @property
    def max_head_dropout(self) -> float:
        """The greatest dropout rate of a head."""
        return self.head_dropout

    @property
    def lm_transform(self) -> HeadTransform | None:
        """The layer before the logits of a masked LM."""
        raise NotImplementedError

    @property
    def lm_bias(self) -> bool:
        """Whether the logits of a masked LM have a bias."""
        return True

    @property
    def classifier_transform(self) -> HeadTransform | None:
        """The layer between the pooled input and the outputs of a sequence classifier."""
        raise NotImplementedError

    @property
    def token_transform(self) -> HeadTransform | None:
        """The layer before the outputs of a token classifier, and before those for question answering."""
        return None

    @property
    def pooling(self) -> str:
        """How a sequence classifier makes one vector of a row.

        "slot_0": the first slot, also if it is padding; "first": the first token; "mean": the mean over tokens;
        "late": the mean over the logits of the tokens.
        """
        return "slot_0"


@dataclass(frozen=True, kw_only=True)
class BertFields(EncoderConfig):
    """The config fields of encoders that are named like BERT's."""

    hidden_act: str = "gelu"
    hidden_dropout_prob: int | float = 0.1
    attention_probs_dropout_prob: int | float = 0.1
    type_vocab_size: int = 2
    layer_norm_eps: int | float = 1e-12
    classifier_dropout: int | float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, "type_vocab_size", minimum=self.family.min_token_types)
        check_reals(self, "layer_norm_eps")
        check_reals(self, "hidden_dropout_prob", "attention_probs_dropout_prob", below=1.0)
        if self.classifier_dropout is not None:
            check_reals(self, "classifier_dropout", below=1.0)
        check_choice("hidden_act", self.hidden_act, tuple(sorted(ACTIVATIONS)))

    @property
    def token_types(self) -> int:
        return self.type_vocab_size

    @property
    def max_dropout(self) -> float:
        return max(self.hidden_dropout_prob, self.attention_probs_dropout_prob)

    @property
    def head_dropout(self) -> float:
        if self.classifier_dropout is None:
            return self.hidden_dropout_prob
        return self.classifier_dropout

    @property
    def max_head_dropout(self) -> float:
        return max(self.hidden_dropout_prob, self.head_dropout)

    @property
    def lm_transform(self) -> HeadTransform | None:
        return HeadTransform(self.family.lm_activation or self.hidden_act)

    @property
    def classifier_transform(self) -> HeadTransform | None:
        if self.family.classifier_reads_pooler:
            return None
        activation = self.family.classifier_activation or self.hidden_act
        return HeadTransform(activation, has_norm=False, drops_input=True)


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
    # stack(config, dtype=, param_dtype=, rngs=): all layers as one module. It has the attributes `attention` and `run`.
    stack: Callable[..., Any]
    min_token_types: int = 1  # the least `type_vocab_size`; 0 if models may have no table of token types
    has_pooler: bool = True  # whether models may have a pooler
    default_pooler: bool = True  # whether an encoder has one by default
    lm_activation: str | None = None  # in the masked-LM head; None: the config's
    classifier_reads_pooler: bool = False  # the sequence classifier is one layer after the pooler; otherwise two layers
    classifier_activation: str | None = "tanh"  # between those two layers; None: the config's
    answers_have_layer: bool = False  # the question-answering head starts with a feed-forward network
    answers_follow_question: bool = False  # the question and its separator have token type 0 and contain no answer
    separator: int | None = None  # the token that ends a question, if a config has none
