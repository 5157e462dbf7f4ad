"""A byte-level decoder with a custom mask: trains for a minute on Python's standard library, then generates text.

Every token attends to a window and to the first four tokens of its document. The same rule masks packed documents in
training and sizes the caches, which store the window and the pinned tokens for answers of any length.
"""

import argparse
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import longspan as ls
from longspan import models

ROWS, LENGTH, WINDOW, PINNED = 2, 512, 128, 4


@dataclass(frozen=True, kw_only=True)
class Bytes(models.LlamaConfig):
    """A Llama whose tokens attend to a window and to the beginning of their document."""

    vocab_size: int = 256
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    max_position_embeddings: int = 2**20
    initializer_range: float = 0.09

    def mask(self, kind):
        return ls.Causal() & (ls.Window(WINDOW - 1, 0) | ls.Prefix(PINNED))

    def packed_mask(self, kind, ids):
        return ls.Causal() & (ls.Window(WINDOW - 1, 0) & ls.Segments(ids) | ls.FirstOfSegment(ids, PINNED))


def batches(seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields batches without end: bytes and the segment id of each byte, both [ROWS, LENGTH]."""
    files, rng = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), np.random.default_rng(seed)
    while True:
        (ids, documents), at = np.zeros((2, ROWS * LENGTH), np.int32), 0
        while at < ids.size:
            text = np.frombuffer(files[rng.integers(len(files))].read_bytes(), np.uint8)
            piece = text[rng.integers(max(len(text) - 400, 1)) :][: min(400, ids.size - at)]
            ids[at : at + len(piece)], documents[at:] = piece, at
            at += len(piece)
        yield ids.reshape(ROWS, LENGTH), documents.reshape(ROWS, LENGTH)


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Prints on stderr that the block compiles a program, and the seconds of the block."""
    start = time.monotonic()
    print(f"compiling {what} ...", file=sys.stderr, flush=True)
    yield
    print(f"compiled {what} and ran it once in {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


def train(model: models.CausalLM, seconds: float, report=print) -> list[float]:
    """Trains the model and returns the loss of every step, in bits per byte."""
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, ids, documents):
        def loss(model):
            logits = model(ids, segment_ids=documents).logits[:, :-1]
            within = documents[:, 1:] == documents[:, :-1]  # the first byte of a document is not predicted
            each = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
            return jnp.mean(each, where=within) / np.float32(np.log(2))

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    data, start = batches(), time.perf_counter()
    with compiling("the training step"):
        losses = [float(step(model, optimizer, *next(data)))]
    while (now := time.perf_counter() - start) < seconds:
        losses.append(float(step(model, optimizer, *next(data))))
        if len(losses) % 20 == 0:
            report(f"\r{now:4.0f} s, step {len(losses)}: {np.mean(losses[-20:]):.2f} bits per byte", end="", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("--seconds", 60.0), ("--width", 128), ("--answer", 2000)):
        parser.add_argument(name, type=type(default), default=default)
    options = parser.parse_args()
    width = dict(hidden_size=options.width, intermediate_size=3 * options.width)
    model = models.CausalLM(Bytes(**width), rngs=nnx.Rngs(0))
    train(model, options.seconds)
    kept = [model.init_cache(1, length)[0].k.shape[1] for length in (1000, 1_000_000)]
    print(f"\nEach layer's cache stores {kept[0]} keys for 1,000 tokens and {kept[1]} for 1,000,000.\n")
    prompt = b"def main(self):\n    "
    draws = dict(max_length=len(prompt) + options.answer, temperature=0.7, key=jax.random.key(0))
    with compiling("the decoder"):
        ls.generate(model, [list(prompt)], max_new_tokens=min(2, options.answer), **draws)
    print(prompt.decode(), end="")
    print_byte = lambda row, byte: print(chr(byte), end="", flush=True)  # noqa: E731
    ls.generate(model, [list(prompt)], max_new_tokens=options.answer, stream=print_byte, **draws)
    print()


if __name__ == "__main__":
    main()
