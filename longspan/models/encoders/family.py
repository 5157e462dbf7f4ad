"""What all encoders are made of (`EncoderConfig`), and what tells their families apart (`EncoderFamily`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from longspan.checks import check_choice
from longspan.models.activations import ACTIVATIONS
from longspan.models.family import Family, Size
from longspan.models.fields import MOST, check_counts, check_flags, check_reals

# Metadata of a config's field that no `config.json` has, at least not under this name.
OURS = {"in_json": False}
NULL = {"null": True}  # of one for which a `config.json` may have null, which means the default


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The numbers of every encoder, under the names of `config.json`; the defaults are bert-base."""

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
    pad_token_id: int = field(default=0, metadata=NULL)
    classifier_dropout: int | float | None = None
    tie_word_embeddings: bool = True
    num_labels: int = field(default=2, metadata=OURS)
    extra: str = field(default="{}", metadata=OURS)

    model_type: ClassVar[str]

    def __post_init__(self):
        check_counts(self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        check_counts(self, "max_position_embeddings", "type_vocab_size", "num_labels")
        check_counts(self, "pad_token_id", least=-MOST)  # a BERT may have none, and says so with any other number
        check_reals(self, "layer_norm_eps", "initializer_range")
        check_reals(self, "hidden_dropout_prob", "attention_probs_dropout_prob", below=1.0)
        if self.classifier_dropout is not None:
            check_reals(self, "classifier_dropout", below=1.0)
        check_flags(self, "tie_word_embeddings")
        check_choice("hidden_act", self.hidden_act, tuple(sorted(ACTIVATIONS)))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}."
            )

    @property
    def family(self) -> "EncoderFamily":
        """The record of what tells its family from the others."""
        raise NotImplementedError

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def first_position(self) -> int:
        """The row of the position table that the first token takes."""
        return 0

    @property
    def max_tokens(self) -> int:
        """The longest input that has positions."""
        return self.max_position_embeddings - self.first_position

    def rule(self, layer: int) -> str:
        """The mask of a layer, as the command `longspan show` reads it."""
        return "Full()"

    @property
    def head_dropout(self) -> float:
        return self.hidden_dropout_prob if self.classifier_dropout is None else self.classifier_dropout


def refuse_decoders(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """No fields: every one of an encoder's is spelled as in `config.json`. Raises for what makes it no encoder."""
    for name in ("is_decoder", "add_cross_attention"):
        if raw.get(name):
            raise ValueError(
                f"{where} has {name}=true. Longspan has only encoders of this family: set it to false if it is one."
            )
    kind = raw.get("position_embedding_type")
    if kind not in (None, "absolute"):
        raise ValueError(f"{where} has position_embedding_type={kind!r}. Longspan knows 'absolute' only.")
    return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderFamily(Family):
    """A family of encoders: its own parts, and how its tasks differ from the others'."""

    word_embeddings: str = "embeddings.word_embeddings.weight"
    layers: str = "encoder.layer.{}."
    sizes: tuple[Size, ...] = (
        Size(("vocab_size",), "embeddings.word_embeddings.weight", 0),
        Size(("hidden_size",), "embeddings.word_embeddings.weight", 1),
        Size(("max_position_embeddings",), "embeddings.position_embeddings.weight", 0),
        Size(("type_vocab_size",), "embeddings.token_type_embeddings.weight", 0),
        Size(("intermediate_size",), "encoder.layer.0.intermediate.dense.weight", 0),
    )
    buffers: tuple[str, ...] = ("embeddings.position_ids", "embeddings.token_type_ids")
    read: Callable[[Mapping[str, Any], str], dict[str, Any]] = refuse_decoders

    embeddings: type[Any]  # an `Embeddings`
    attention: type[Any]  # a `FullAttention`
    lm_activation: str | None = None  # in the masked-LM head; None: the config's
    classifier_reads_pooler: bool = False  # for whole inputs: one layer behind the pooler, or two of its own
    classifier_activation: str | None = "tanh"  # between those two; None: the config's
    answers_have_layer: bool = False  # question answering has a feed-forward network before its outputs
    answers_follow_question: bool = False  # the question, with its separator, has token type 0 and holds no answer
    separator: int | None = None  # the token that ends a question, where a config does not say
