"""A small decoder on packed documents, for meshes and processes."""

from functools import cache, partial
from typing import Any

import jax
import numpy as np

import longspan as ls
from longspan import models, train
from tests.made import made

SIZES = dict(vocab_size=24, hidden_size=16, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2)
CONFIG = models.MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=12, initializer_range=0.3)
ROWS, LENGTH = 8, 32
OPTIMIZER = train.adamw(0.03, steps=40, warmup=4)


def model(**options: Any) -> models.CausalLM:
    return made(models.CausalLM, CONFIG, **options)


@cache
def packed() -> train.PackedBatches:
    rng = np.random.default_rng(0)
    return train.PackedBatches([rng.integers(1, 24, rng.integers(2, 30)) for _ in range(60)], rows=ROWS, length=LENGTH)


def batches(step: int) -> dict[str, np.ndarray]:
    return packed()(step)


def loss_on(mesh: Any = None, remat: bool = False) -> Any:
    """The mean loss over targets and their number, with the sequence sharded if the mesh says so."""
    if mesh is not None and mesh.shape["sp"] == 1:
        mesh = None
    return partial(_loss, mesh=mesh, remat=remat)


def _loss(model: models.CausalLM, batch: dict[str, jax.Array], key: Any, *, mesh: Any, remat: bool) -> Any:
    inputs = {name: batch[name] for name in ("input_ids", "segment_ids", "positions")}
    hidden = model(**inputs, logits=False, mesh=mesh, remat=remat).last_hidden_state
    targets = (batch["labels"] >= 0).sum()
    return ls.chunked_cross_entropy(hidden, model.head.kernel[...].T, batch["labels"]), targets
