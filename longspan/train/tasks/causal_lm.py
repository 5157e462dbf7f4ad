"""Language modelling: a decoder predicts the next token of packed documents."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from longspan.cross_entropy import chunked_cross_entropy
from longspan.train.data import IGNORED
from longspan.train.tasks.task import TrainingTask, count_targets


class CausalLMTraining(TrainingTask):
    """The training of a `CausalLM` on `PackedBatches`. The [tokens, vocabulary] array of logits is never computed.

    loss = mean over tokens of −log softmax(logits)[next token], within each document. The metric is "eval_loss"; its
    exponential is the perplexity.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> from longspan.train import PackedBatches
        >>> config = models.LlamaConfig(vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> model = models.CausalLM(config, rngs=nnx.Rngs(0))
        >>> batches = PackedBatches([[5, 6, 7], [8, 9]], rows=1, length=6)
        >>> loss, weight = CausalLMTraining().evaluate(model, batches(0))["eval_loss"]
        >>> float(weight)
        3.0
    """

    name: ClassVar[str] = "causal_lm"

    def loss(self, model: Any, batch: Mapping[str, Any], key: Any) -> tuple[Any, Any]:
        options = dict(segment_ids=batch["segment_ids"], logits=False, **self.call_options)
        hidden = model(batch["input_ids"], **options).last_hidden_state
        config, labels = model.config, batch["labels"]
        of_logits = dict(scale=1 / config.multipliers.logits_divisor, soft_cap=config.final_soft_cap)
        weights = output_matrix(model, hidden.dtype)
        loss = chunked_cross_entropy(hidden, weights, labels, ignore_label=IGNORED, **of_logits)
        return loss, count_targets(labels)

    def evaluate(self, model: Any, batch: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        return dict(eval_loss=self.loss(model, batch, None))  # decoders have no dropout


def output_matrix(model: Any, dtype: Any) -> jax.Array:
    """The output matrix of a `CausalLM`, [vocabulary, features]."""
    if model.head is None:
        return model.embed.embedding[...].astype(dtype)
    return model.head.kernel[...].T.astype(dtype)
