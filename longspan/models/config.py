"""What an encoder is made of: one frozen, hashable config a family, with Hugging Face's names for shared numbers."""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import Any, ClassVar, SupportsIndex

from longspan._checks import check_choice
from longspan.models.activations import ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class BertConfig:
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

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    classifier_dropout: float | None = None
    tie_word_embeddings: bool = True
    num_labels: int = 2
    extra: str = "{}"

    model_type: ClassVar[str] = "bert"

    def __post_init__(self):
        check_choice("hidden_act", self.hidden_act, tuple(sorted(ACTIVATIONS)))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}."
            )

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

    @property
    def head_dropout(self) -> float:
        return self.hidden_dropout_prob if self.classifier_dropout is None else self.classifier_dropout


@dataclass(frozen=True, kw_only=True)
class RobertaConfig(BertConfig):
    """A RoBERTa encoder: as BERT, but positions count the tokens that are not padding, from `pad_token_id` + 1.

    Example:
        >>> from longspan import models
        >>> models.RobertaConfig(max_position_embeddings=514).max_tokens
        512
    """

    vocab_size: int = 50265
    max_position_embeddings: int = 514
    type_vocab_size: int = 1
    layer_norm_eps: float = 1e-5
    pad_token_id: int = 1

    model_type: ClassVar[str] = "roberta"

    @property
    def first_position(self) -> int:
        return self.pad_token_id + 1


@dataclass(frozen=True, kw_only=True)
class LongformerConfig(RobertaConfig):
    """A Longformer encoder: windows, and global tokens with projections of their own; defaults are longformer-base.

    Args:
        window: keys seen on each side, one int or one a layer. Hugging Face's `attention_window` is twice that.
        sep_token_id: ends the question in `QuestionAnswering`, whose tokens are global by default.

    Example:
        >>> from longspan import models
        >>> models.LongformerConfig(num_hidden_layers=3, window=256).windows
        (256, 256, 256)
    """

    max_position_embeddings: int = 4098
    sep_token_id: int = 2
    window: SupportsIndex | Iterable[SupportsIndex] = 256

    model_type: ClassVar[str] = "longformer"

    def __post_init__(self):
        super().__post_init__()
        # Ints that hash, whatever kind of number or list they came as.
        window = tuple(map(index, self.window)) if isinstance(self.window, Iterable) else index(self.window)
        object.__setattr__(self, "window", window)
        if len(self.windows) != self.num_hidden_layers or min(self.windows, default=0) < 0:
            raise ValueError(
                f"`window` must be an int >= 0 or one for each of the {self.num_hidden_layers} layers, "
                f"got {self.window!r}."
            )

    @property
    def windows(self) -> tuple[int, ...]:
        window: Any = self.window
        return (window,) * self.num_hidden_layers if isinstance(window, int) else window


@dataclass(frozen=True, kw_only=True)
class BigBirdConfig(BertConfig):
    """A BigBird encoder: blocks that see their neighbours, the first and last block, and some random ones.

    The defaults are bigbird-roberta-base, which is a BERT in everything but its vocabulary.

    Args:
        attention_type: "block_sparse" or "original_full"; a call may choose differently.
        random_blocks: "trained" draws the random blocks that checkpoints were trained with; "hf_eval" makes every
            random block the first block, as Hugging Face does in eval mode.
        rescale_embeddings: whether word embeddings are multiplied by √hidden_size.
        use_bias: whether query, key and value have biases.

    Example:
        >>> from longspan import models
        >>> models.BigBirdConfig().longest_full
        704
    """

    vocab_size: int = 50358
    hidden_act: str = "gelu_new"
    max_position_embeddings: int = 4096
    sep_token_id: int = 66
    attention_type: str = "block_sparse"
    block_size: int = 64
    num_random_blocks: int = 3
    random_blocks: str = "trained"
    use_bias: bool = True
    rescale_embeddings: bool = False

    model_type: ClassVar[str] = "big_bird"

    def __post_init__(self):
        super().__post_init__()
        check_choice("attention_type", self.attention_type, ("block_sparse", "original_full"))
        check_choice("random_blocks", self.random_blocks, ("trained", "hf_eval"))

    @property
    def longest_full(self) -> int:
        """Inputs up to this length get full attention: their blocks would nearly all be seen anyway."""
        return (5 + 2 * self.num_random_blocks) * self.block_size


CONFIGS = {c.model_type: c for c in (BertConfig, RobertaConfig, LongformerConfig, BigBirdConfig)}
