"""A small model with dropout, its batches and its loss: steps take milliseconds."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from longspan import train
from tests.made import made

ROWS, SIZE = 8, 5


class Small(nnx.Module):
    """Two layers with dropout between them."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(SIZE, config.width, rngs=rngs)
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.down = nnx.Linear(config.width, 1, rngs=rngs)
        self.deterministic = True
        self.rate = config.rate

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        x = nnx.gelu(self.up(x))
        if not self.deterministic and self.rate:
            keep = jax.random.bernoulli(key, 1 - self.rate, x.shape)
            x = jnp.where(keep, x / (1 - self.rate), jnp.zeros((), x.dtype))
        return self.down(x)

    def train(self, **_: Any) -> None:
        self.deterministic = False

    def eval(self, **_: Any) -> None:
        self.deterministic = True


class Config:
    initializer_range = 0.5

    def __init__(self, width: int = 7, rate: float = 0.25):
        self.width, self.rate = width, rate

    def __hash__(self) -> int:
        return hash((self.width, self.rate))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and vars(self) == vars(other)


def small(width: int = 7, rate: float = 0.25) -> Small:
    return made(Small, Config(width, rate))


def batches(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((3, step))
    x = rng.normal(size=(ROWS, SIZE)).astype(np.float32)
    return dict(x=x, y=np.sin(x.sum(axis=1, keepdims=True)), step=np.full(ROWS, step, np.int32))


def squares(model: Small, batch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
    return jnp.mean(jnp.square(model(batch["x"], key) - batch["y"]))


OPTIMIZER = train.adamw(0.05, steps=40, warmup=4)


def fitted(model: Small | None = None, **given: Any) -> tuple[Small, train.FitResult]:
    """A model after `fit` with the defaults of these tests."""
    model = model or small()
    arguments: dict[str, Any] = dict(steps=10, progress=Quiet()) | given
    loss, optimizer = arguments.pop("loss", squares), arguments.pop("optimizer", OPTIMIZER)
    return model, train.fit(model, arguments.pop("batches", batches), loss, optimizer, **arguments)


class Quiet(train.Progress):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        self.notes.append(line)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> dict[int, str]:
    """`loss_hex` by step, each of which occurs once."""
    found = [(line["step"], line["loss_hex"]) for line in metrics(out) if "loss_hex" in line]
    assert len(dict(found)) == len(found)
    return dict(found)


def parameters(model: nnx.Module) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
