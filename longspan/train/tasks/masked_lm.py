"""Masked language modelling: an encoder predicts the tokens that were replaced."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from longspan.cross_entropy import chunked_cross_entropy
from longspan.train.data import IGNORED
from longspan.train.tasks.task import TrainingTask, count_targets, share_of_targets


class MaskedLMTraining(TrainingTask):
    """The training of a `MaskedLM` on `MaskedBatches`. The [tokens, vocabulary] array of logits is never computed.

    loss = mean over targets of −log softmax(logits)[token]. The metrics are "eval_loss" and "accuracy", the share of
    targets whose token is the most likely one.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> from longspan.train import BucketedBatches, MaskedBatches
        >>> config = models.BertConfig(vocab_size=40, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> model = models.MaskedLM(config, rngs=nnx.Rngs(0))
        >>> rows = BucketedBatches([range(4, 30)], rows=1, length=32)
        >>> batches = MaskedBatches(rows, mask_token=3, vocab_size=40)
        >>> sorted(MaskedLMTraining().evaluate(model, batches(0)))
        ['accuracy', 'eval_loss']
    """

    name: ClassVar[str] = "masked_lm"

    def loss(self, model: Any, batch: Mapping[str, Any], key: Any) -> tuple[Any, Any]:
        hidden = self._hidden(model, batch, deterministic=False, rngs=key)
        loss = chunked_cross_entropy(*with_bias(model, hidden), batch["labels"], ignore_label=IGNORED)
        return loss, count_targets(batch["labels"])

    def evaluate(self, model: Any, batch: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        hidden, weights = with_bias(model, self._hidden(model, batch, deterministic=True))
        labels = jnp.asarray(batch["labels"])
        weight = count_targets(labels)
        loss = chunked_cross_entropy(hidden, weights, labels, ignore_label=IGNORED)
        # The logits of one row at a time.
        best = jax.lax.map(lambda row: jnp.argmax(row @ weights.T, axis=-1), hidden)
        return dict(eval_loss=(loss, weight), accuracy=(share_of_targets(best == labels, labels), weight))

    def _hidden(self, model: Any, batch: Mapping[str, Any], **options: Any) -> jax.Array:
        """The input of the output matrix: the model's call without its last product."""
        output = model.encoder(batch["input_ids"], batch["attention_mask"], **self.call_options, **options)
        return model.transformed(model.config.lm_transform, output.last_hidden_state)


def with_bias(model: Any, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Hidden states and output matrix [vocabulary, features]; the bias is one more feature, which is 1 everywhere."""
    if model.decoder is None:
        weights = model.encoder.embeddings.word.embedding[...]
    else:
        weights = model.decoder.kernel[...].T
    weights = weights.astype(hidden.dtype)
    if model.bias is None:
        return hidden, weights
    ones = jnp.ones((*hidden.shape[:-1], 1), hidden.dtype)
    bias = model.bias[...].astype(hidden.dtype)[:, None]
    return jnp.concatenate([hidden, ones], axis=-1), jnp.concatenate([weights, bias], axis=1)
