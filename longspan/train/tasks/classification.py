"""Sequence classification: one label per document."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from longspan.train.data import IGNORED
from longspan.train.tasks.task import TrainingTask, count_targets, share_of_targets


class ClassificationTraining(TrainingTask):
    """The training of a `SequenceClassifier` on batches of `BucketedBatches` with labels.

    loss = mean over rows of −log softmax(logits)[label]. The metrics are "eval_loss" and "accuracy".

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> from longspan import models
        >>> from longspan.train import BucketedBatches
        >>> config = models.BertConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> model = models.SequenceClassifier(config, rngs=nnx.Rngs(0))
        >>> batches = BucketedBatches([[5, 6], [7]], rows=3, length=8, labels=dict(labels=np.array([0, 1])))
        >>> task = ClassificationTraining()
        >>> _, weight = task.loss(model, batches(0), jax.random.key(0))
        >>> float(weight), sorted(task.evaluate(model, batches(0)))
        (2.0, ['accuracy', 'eval_loss'])
    """

    name: ClassVar[str] = "sequence_classification"

    def loss(self, model: Any, batch: Mapping[str, Any], key: Any) -> tuple[Any, Any]:
        logits = self._logits(model, batch, deterministic=False, rngs=key)
        return mean_loss(logits, batch["labels"]), count_targets(batch["labels"])

    def evaluate(self, model: Any, batch: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        logits, labels = self._logits(model, batch, deterministic=True), jnp.asarray(batch["labels"])
        weight = count_targets(labels)
        accuracy = share_of_targets(jnp.argmax(logits, axis=-1) == labels, labels)
        return dict(eval_loss=(mean_loss(logits, labels), weight), accuracy=(accuracy, weight))

    def _logits(self, model: Any, batch: Mapping[str, Any], **options: Any) -> jax.Array:
        return model(batch["input_ids"], batch["attention_mask"], **self.call_options, **options).logits


def mean_loss(logits: jax.Array, labels: Any) -> jax.Array:
    """The mean cross-entropy of the rows whose label is not -100, float32."""
    scores = jax.nn.log_softmax(logits.astype(np.float32))
    counts = jnp.asarray(labels) != IGNORED
    each = -jnp.take_along_axis(scores, jnp.where(counts, labels, 0)[:, None], axis=1)[:, 0]
    return jnp.sum(jnp.where(counts, each, 0.0)) / jnp.maximum(count_targets(labels), 1.0)
