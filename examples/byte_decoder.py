"""A decoder of bytes with a mask of its own, trained for a minute on Python's standard library, that then goes on alone.

Every token sees a window and the first few tokens of its document. The same mask trains on packed documents and
allocates the caches: they hold the window and the pinned tokens, however long the answer gets.

    python examples/byte_decoder.py                        # a minute of training, then 2000 bytes
    python examples/byte_decoder.py --seconds 2 --width 32 --answer 50
"""

import argparse
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import longspan as ls
from longspan import models

ROWS, LENGTH, WINDOW, PINNED = 4, 1024, 128, 4


@dataclass(frozen=True, kw_only=True)
class Bytes(models.LlamaConfig):
    """A Llama that reads a window and the beginning of its document."""

    vocab_size: int = 256
    max_position_embeddings: int = 2**20

    def mask(self, kind):
        return ls.Causal() & (ls.Window(WINDOW - 1, 0) | ls.Prefix(PINNED))

    def packed_mask(self, kind, ids):
        return ls.Causal() & (ls.Window(WINDOW - 1, 0) & ls.Segments(ids) | ls.FirstOfSegment(ids, PINNED))


def batches(seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Bytes and the number of the document that each is of, [ROWS, LENGTH], forever."""
    files, rng = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), np.random.default_rng(seed)
    while True:
        ids, documents = np.zeros((2, ROWS, LENGTH), np.int32)
        for row in range(ROWS):
            at = 0
            while at < LENGTH:
                text = np.frombuffer(files[rng.integers(len(files))].read_bytes(), np.uint8)
                start = rng.integers(max(len(text) - 600, 1))
                piece = text[start : start + min(600, LENGTH - at)]
                ids[row, at : at + len(piece)], documents[row, at:] = piece, documents[row, at - 1] + 1
                at += max(len(piece), 1)
        yield ids, documents


def train(model: models.CausalLM, seconds: float, report=print) -> list[float]:
    """The loss of every step, in bits per byte."""
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, ids, documents):
        def loss(model):
            logits = model(ids, segment_ids=documents).logits[:, :-1]
            within = documents[:, 1:] == documents[:, :-1]  # the first byte of a document follows from nothing
            each = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
            return jnp.sum(each * within) / jnp.sum(within) / np.log(2)

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    losses, data = [], batches()
    losses.append(float(step(model, optimizer, *next(data))))  # compiles
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        losses.append(float(step(model, optimizer, *next(data))))
        if len(losses) % 10 == 0:
            report(f"\r{time.perf_counter() - start:4.0f} s, step {len(losses)}: {losses[-1]:.2f} bits per byte", end="")
    report()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of training")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--answer", type=int, default=2000, help="bytes to write afterwards")
    options = parser.parse_args()
    sizes = dict(hidden_size=options.width, intermediate_size=3 * options.width, num_hidden_layers=4)
    model = models.CausalLM(Bytes(**sizes, num_attention_heads=4, num_key_value_heads=2), rngs=nnx.Rngs(0))
    train(model, options.seconds)
    kept = [model.init_cache(1, length)[0].k.shape[1] for length in (1000, 1_000_000)]
    print(f"A layer keeps {kept[0]} keys for 1,000 tokens and {kept[1]} for 1,000,000.\n")
    prompt = b"def main(self):\n    "
    print(prompt.decode(), end="", flush=True)
    ls.generate(
        model, [list(prompt)], max_new_tokens=options.answer, temperature=0.7, key=jax.random.key(0),
        stream=lambda row, byte: print(chr(byte), end="", flush=True),
    )  # fmt: skip
    print()


if __name__ == "__main__":
    main()
