"""`TrainingTask`: what the four tasks have in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from longspan.train.data import IGNORED


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """The loss and the metrics of a task. `ls.train.fit` takes its methods `loss` and `evaluate`.

    Args:
        remat: whether the backward pass recomputes each layer instead of keeping its intermediate results.
        mesh: the mesh whose axis "sp" shards the sequence; None: every device has whole sequences.
    """

    remat: bool = False
    mesh: Any = None

    name: ClassVar[str]  # of the command's --task

    def loss(self, model: Any, batch: Mapping[str, Any], key: Any) -> tuple[Any, Any]:
        """The mean loss of a batch, and its weight: the number of targets. `key` is that of dropout."""
        raise NotImplementedError

    def evaluate(self, model: Any, batch: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """The metrics of a held-out batch without dropout, each with its weight; "eval_loss" is one of them."""
        raise NotImplementedError

    @property
    def call_options(self) -> dict[str, Any]:
        """The options of the model's calls."""
        return dict(remat=self.remat, mesh=self.mesh)


def count_targets(labels: Any) -> jax.Array:
    """The number of labels that count, float32."""
    return jnp.sum(jnp.asarray(labels) != IGNORED, dtype=np.int32).astype(np.float32)


def share_of_targets(right: jax.Array, labels: Any) -> jax.Array:
    """The share of the labels that count where `right` holds, float32."""
    counts = jnp.asarray(labels) != IGNORED
    found = jnp.sum(right & counts, dtype=np.int32).astype(np.float32)
    return found / jnp.maximum(count_targets(labels), 1.0)
