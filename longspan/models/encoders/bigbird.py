"""BigBird (arXiv:2007.14062): each block attends to its neighbours, both end blocks and random blocks."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from longspan.checks import check_choice
from longspan.models.encoders.attention import EncoderTokens, FullAttention, LayerOptions
from longspan.models.encoders.bert import BODY, ENCODER, MASKED_LM, TOKEN_CLASSIFIER, BertConfig
from longspan.models.encoders.encoder import Embeddings, stack_layers
from longspan.models.encoders.family import NOT_IN_JSON, NULLABLE, EncoderFamily
from longspan.models.encoders.roberta import SEQUENCE_CLASSIFIER
from longspan.models.encoders.tasks import QuestionAnswering
from longspan.models.family import Task
from longspan.models.fields import check_counts, check_flags
from longspan.models.layers import dropout
from longspan.patterns import bigbird_attention, bigbird_random_blocks

ATTENTION_TYPES = ("block_sparse", "original_full")
RANDOM_BLOCKS = ("trained", "hf_eval")


@dataclass(frozen=True, kw_only=True)
class BigBirdConfig(BertConfig):
    """A BigBird encoder: each block attends to its neighbours, the first and last block, and some random ones.

    The defaults are bigbird-roberta-base, which is a BERT with RoBERTa's vocabulary.

    Args:
        attention_type: "block_sparse" or "original_full"; a call may override it.
        random_blocks: "trained" uses the random blocks that checkpoints were trained with; "hf_eval" makes every
            random block the first block, as Hugging Face does in eval mode.
        rescale_embeddings: whether word embeddings are multiplied by √hidden_size.
        use_bias: whether the query, key and value projections have biases.

    Example:
        >>> from longspan import models
        >>> models.BigBirdConfig().longest_full
        704
    """

    vocab_size: int = 50358
    hidden_act: str = "gelu_new"
    max_position_embeddings: int = 4096
    sep_token_id: int = field(default=66, metadata=NULLABLE)
    attention_type: str = "block_sparse"
    block_size: int = 64
    num_random_blocks: int = 3
    random_blocks: str = field(default="trained", metadata=NOT_IN_JSON)
    use_bias: bool = True
    rescale_embeddings: bool = False

    model_type: ClassVar[str] = "big_bird"

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, "block_size")
        check_counts(self, "sep_token_id", "num_random_blocks", minimum=0)
        check_flags(self, "use_bias", "rescale_embeddings")
        check_choice("attention_type", self.attention_type, ATTENTION_TYPES)
        check_choice("random_blocks", self.random_blocks, RANDOM_BLOCKS)

    @property
    def family(self) -> EncoderFamily:
        return BIG_BIRD

    def rule(self, layer: int) -> str:
        if self.attention_type == "original_full":
            return super().rule(layer)
        return f"bigbird(block_size={self.block_size}, num_random_blocks={self.num_random_blocks}, seed={layer})"

    @property
    def longest_full(self) -> int:
        """Inputs up to this length get full attention: block-sparse attention would skip few of their blocks."""
        return (5 + 2 * self.num_random_blocks) * self.block_size


class BigBirdEmbeddings(Embeddings):
    """Embeddings that may scale the words, and that normalise after dropout."""

    def scale(self, word):
        if not self.config.rescale_embeddings:
            return word
        return word * jnp.asarray(self.config.hidden_size**0.5, word.dtype)

    def finish(self, x, dropout_key):
        return self.norm(dropout(x, self.config.hidden_dropout_prob, dropout_key))


class BigBirdAttention(FullAttention):
    """Block-sparse attention: neighbours, both end blocks and random blocks. Short inputs get full attention."""

    packs = False

    def __init__(self, config: BigBirdConfig, *, dtype, param_dtype, rngs: nnx.Rngs):
        super().__init__(config, use_bias=config.use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def tokens(self, call):
        self.check_unused(global_attention_mask=call.global_attention_mask, segment_ids=call.segments)
        attention_type = call.attention_type
        if attention_type is None:
            attention_type = self.config.attention_type
        check_choice("attention_type", attention_type, ATTENTION_TYPES)
        full = attention_type == "original_full" or call.length <= self.config.longest_full
        return EncoderTokens(valid=call.valid, full=full)

    def fit(self, x, tokens):
        """The input padded to a whole number of blocks; no token attends to the padding."""
        B, T, _ = x.shape
        missing = -T % self.config.block_size
        if tokens.full or missing == 0:
            return x, tokens
        valid = tokens.valid
        if valid is None:
            valid = jnp.ones((B, T), bool)
        valid = jnp.pad(valid, ((0, 0), (0, missing)))
        return jnp.pad(x, ((0, 0), (0, missing), (0, 0))), replace(tokens, valid=valid)

    def layer_groups(self, length, tokens):
        if tokens.full:
            return super().layer_groups(length, tokens)
        return [(self.config.num_hidden_layers, LayerOptions(jnp.asarray(random_blocks(self.config, length))))]

    def attend(self, x, q, k, v, tokens, layer, dropout):
        if tokens.full:
            return super().attend(x, q, k, v, tokens, layer, dropout)
        options: dict[str, Any] = dict(q_mask=tokens.valid, kv_mask=tokens.valid, **tokens.sharding.options, **dropout)
        return bigbird_attention(q, k, v, block_size=self.config.block_size, rand_attn=layer.random_blocks, **options)


def random_blocks(config: BigBirdConfig, length: int) -> Int[np.ndarray, "L N rows r"]:
    """The random blocks of every layer, by the config's `random_blocks`."""
    layers, heads, r = config.num_hidden_layers, config.num_attention_heads, config.num_random_blocks
    if config.random_blocks == "hf_eval":
        return np.zeros((layers, heads, length // config.block_size - 2, r), np.int32)
    draw = functools.partial(
        bigbird_random_blocks,
        length,
        block_size=config.block_size,
        num_random_blocks=r,
        num_heads=heads,
        max_seq_len=config.max_position_embeddings,
    )
    return np.stack([np.asarray(draw(seed=layer), np.int32) for layer in range(layers)])


BIG_BIRD = EncoderFamily(
    config=BigBirdConfig,
    name="BigBird",
    prefix="bert.",
    names=(("pooler.", "pooler."), *BODY),
    tasks=(
        ENCODER,
        replace(MASKED_LM, optional_pooler=True),
        replace(SEQUENCE_CLASSIFIER, optional_pooler=True),
        replace(TOKEN_CLASSIFIER, optional_pooler=True),
        Task(
            QuestionAnswering,
            names=(
                ("outputs.", "qa_classifier.qa_outputs."),
                ("feed_forward.up.", "qa_classifier.intermediate.dense."),
                ("feed_forward.down.", "qa_classifier.output.dense."),
                ("feed_forward.norm.", "qa_classifier.output.LayerNorm."),
            ),
        ),
    ),
    unused=("cls.seq_relationship.",),
    embeddings=BigBirdEmbeddings,
    attention=BigBirdAttention,
    stack=stack_layers,
    classifier_activation=None,
    answers_have_layer=True,
    answers_follow_question=True,
)
