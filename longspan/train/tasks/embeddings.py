"""Embeddings: texts that belong together get similar vectors; the other texts of a batch are the negatives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from longspan.models.encoders.tasks import mean_over_tokens
from longspan.train.tasks.task import TrainingTask

FIELDS = ("anchor", "positive", "negative")
SCALE = 20.0  # of cosines, as in sentence-transformers


def mean_vectors(model: Any, ids: Any, mask: Any, **options: Any) -> jax.Array:
    """The vector of each row of an encoder without a head: the mean over its tokens."""
    return mean_over_tokens(model(ids, mask, **options).last_hidden_state, mask)


@dataclass(frozen=True, kw_only=True)
class EmbeddingTraining(TrainingTask):
    """The training of an encoder on pairs of texts (anchor, positive) with in-batch negatives.

    loss = mean over anchors i of −log softmax(scale · cos(anchorᵢ, candidates))[positiveᵢ]. The candidates are all
    positives of the batch and, if the data have them, all of its negatives. As in sentence-transformers'
    MultipleNegativesRankingLoss, the loss is not symmetric: a positive is not asked for its anchor. Differs from it: a
    positive with the same tokens as the anchor's own is not a negative. With gradient accumulation each part of a batch
    has its own negatives, so prefer large batches.

    The metrics compare each anchor of a held-out batch with all of its positives: "eval_loss" and "recall_at_1", the
    share of anchors whose most similar text is their positive. One held-out batch of many rows gives a hard search; it
    is encoded `rows` rows at a time.

    Args:
        vectors: vectors(model, input_ids, attention_mask, **options) -> [B, size]; by default the mean over tokens.
        scale: the factor of cosines.
        rows: the number of rows of a held-out batch that are encoded at a time.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> from longspan.train import BucketedBatches
        >>> config = models.BertConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> encoder = models.Encoder(config, rngs=nnx.Rngs(0))
        >>> texts = dict(anchor=[[5, 6], [7]], positive=[[8], [9, 10]])
        >>> batches = BucketedBatches(texts, rows=2, length=8, drop_incomplete=True)
        >>> sorted(EmbeddingTraining().evaluate(encoder, batches(0)))
        ['eval_loss', 'recall_at_1']
    """

    vectors: Callable[..., jax.Array] = mean_vectors
    scale: float = SCALE
    rows: int = 32

    name: ClassVar[str] = "embeddings"

    def loss(self, model: Any, batch: Mapping[str, Any], key: Any) -> tuple[Any, Any]:
        keys = dict(zip(FIELDS, jax.random.split(key, len(FIELDS)), strict=True))
        unit = {
            name: self._unit(model, batch, name, deterministic=False, rngs=keys[name])
            for name in FIELDS
            if f"{name}_input_ids" in batch
        }
        candidates = [unit[name] for name in FIELDS[1:] if name in unit]
        scores = unit["anchor"] @ jnp.concatenate(candidates).T * np.float32(self.scale)
        scores = jnp.where(repeats(batch, scores.shape), -jnp.inf, scores)
        return own_loss(scores), np.float32(len(scores))

    def evaluate(self, model: Any, batch: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        unit = {name: self._unit_by_rows(model, batch, name) for name in ("anchor", "positive")}
        cosines = unit["anchor"] @ unit["positive"].T
        best, own = jnp.argmax(cosines, axis=1), jnp.arange(len(cosines))
        recall = jnp.mean((best == own).astype(np.float32))
        weight = np.float32(len(cosines))
        return dict(eval_loss=(own_loss(cosines * np.float32(self.scale)), weight), recall_at_1=(recall, weight))

    def _unit_by_rows(self, model: Any, batch: Mapping[str, Any], name: str) -> jax.Array:
        """The vectors of one field of a held-out batch, without dropout."""
        arrays = {key: jnp.asarray(x) for key, x in batch.items() if key.startswith(f"{name}_")}
        count = batch[f"{name}_input_ids"].shape[0]
        if count <= self.rows:
            return self._unit(model, arrays, name, deterministic=True)
        parts = -(-count // self.rows)
        padding = parts * self.rows - count
        split = {key: jnp.pad(x, ((0, padding), (0, 0))).reshape(parts, self.rows, -1) for key, x in arrays.items()}
        found = jax.lax.map(lambda part: self._unit(model, part, name, deterministic=True), split)
        return found.reshape(parts * self.rows, -1)[:count]

    def _unit(self, model: Any, batch: Mapping[str, Any], name: str, **options: Any) -> jax.Array:
        """The vectors of one field, of length 1, float32."""
        ids, mask = batch[f"{name}_input_ids"], batch[f"{name}_attention_mask"]
        found = self.vectors(model, ids, mask, **self.call_options, **options).astype(np.float32)
        return found / jnp.maximum(jnp.linalg.norm(found, axis=-1, keepdims=True), 1e-12)


def repeats(batch: Mapping[str, Any], shape: tuple[int, ...]) -> jax.Array:
    """Whether a candidate has the tokens of the anchor's own positive without being it, bool [B, candidates]."""
    ids = jnp.where(jnp.asarray(batch["positive_attention_mask"]) != 0, batch["positive_input_ids"], -1)
    same = jnp.all(ids[:, None] == ids[None], axis=-1) & ~jnp.eye(shape[0], dtype=bool)
    return jnp.pad(same, ((0, 0), (0, shape[1] - shape[0])))


def own_loss(scores: jax.Array) -> jax.Array:
    """The mean over rows i of −log softmax(scores[i])[i]."""
    own = jnp.arange(scores.shape[0])[:, None]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), own, axis=1))
