"""Trains a Longformer on documents whose class depends on both ends, with and without a global token.

A document starts with a paragraph on one of two topics and ends, thousands of tokens later, with one of two verdicts.
The text between them is random. The model classifies the document into the four combinations from its first token. With
windows alone, information from the end does not reach the first token within the model's layers, so the verdict is a
guess. If the first token is global, it attends to the whole document, and the model classifies all documents correctly.

    python examples/long_documents.py                        # 4096 tokens; four minutes on two cores
    python examples/long_documents.py --length 256 --window 4  # a toy
    python examples/long_documents.py --checkpoint DIR       # start from a BERT, RoBERTa or Longformer checkpoint
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from longspan import hf, models

FIRST, PAD, LAST = 0, 1, 2  # special tokens, as in RoBERTa
# Each topic and each verdict has four words, starting at these ids; the other words are OTHERS to VOCABULARY - 1.
OPENINGS, CLOSINGS, OTHERS, VOCABULARY = (3, 7), (11, 15), 19, 64


def make_documents(key, batch: int, length: int, paragraph: int):
    """Token ids [B, T] and labels [B]: 2 * topic of the first paragraph + verdict of the last one, equally often."""
    words, order = jax.random.split(key)
    labels = jax.random.permutation(order, jnp.arange(batch) % 4)
    ids = jax.random.randint(words, (batch, length), OTHERS, VOCABULARY)
    opening = jnp.asarray(OPENINGS)[labels // 2][:, None] + ids % 4
    closing = jnp.asarray(CLOSINGS)[labels % 2][:, None] + ids % 4
    position = jnp.arange(length)
    ids = jnp.where(position <= paragraph, opening, ids)
    ids = jnp.where(position >= length - 1 - paragraph, closing, ids)
    return ids.at[:, 0].set(FIRST).at[:, -1].set(LAST), labels


def make_model(checkpoint: str | None, length: int, window: int, seed: int) -> models.Encoder | models.Model:
    rngs = nnx.Rngs(seed)
    if checkpoint is not None:
        model = hf.load(checkpoint, task="sequence_classification", num_labels=4, rngs=rngs)
        assert isinstance(model, models.Model)  # an encoder with a task head
        if model.config.model_type in ("bert", "roberta"):
            model = hf.extend(model, max_positions=max(length, model.config.max_tokens), window=window)
        return model
    config = models.LongformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=64,
        max_position_embeddings=length + PAD + 1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
        num_labels=4,
        window=window,
    )
    return models.SequenceClassifier(config, rngs=rngs)


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Prints on stderr that the block compiles a program, and the seconds of the block."""
    start = time.monotonic()
    print(f"compiling {what} ...", file=sys.stderr, flush=True)
    yield
    print(f"compiled {what} and ran it once in {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


@cache  # the same object for both runs, so that they share a compiled step
def make_optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


@partial(nnx.jit, static_argnames="remat")
def train_step(model, optimizer, ids, labels, global_mask, *, remat: bool):
    def loss(model):
        logits = model(ids, global_attention_mask=global_mask, remat=remat).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return value


def count_right(run, ids, labels, global_mask):
    logits = run(ids, global_attention_mask=global_mask).logits
    return jnp.sum(jnp.argmax(logits, axis=-1) == labels)


def fit(
    *,
    with_global_token: bool,
    length: int = 4096,
    window: int = 32,
    steps: int = 100,
    batch: int = 16,
    learning_rate: float = 5e-3,
    checkpoint: str | None = None,
    seed: int = 0,
    report=print,
) -> models.Encoder | models.Model:
    """Trains a classifier. Calls `report` with the loss of every tenth step."""
    model = make_model(checkpoint, length, window, seed)
    optimizer = nnx.Optimizer(model, make_optimizer(learning_rate, steps), wrt=nnx.Param)
    documents = jax.jit(partial(make_documents, batch=batch, length=length, paragraph=length // 16))
    # Whether the first token is global is data, so both runs share one program.
    global_mask = jnp.zeros((batch, length), bool).at[:, 0].set(with_global_token)
    for step in range(steps):
        ids, labels = documents(jax.random.fold_in(jax.random.key(seed), step))
        with nullcontext() if step else compiling("the training step"):
            loss = jax.block_until_ready(train_step(model, optimizer, ids, labels, global_mask, remat=length > 8192))
        if step % 10 == 0 or step == steps - 1:
            report(f"  step {step:4d}  loss {loss:.3f}")
    return model


def accuracy(model, *, with_global_token: bool, length: int, batch: int, batches: int = 20) -> float:
    """The fraction of new documents that the model classifies correctly."""
    documents = jax.jit(partial(make_documents, batch=batch, length=length, paragraph=length // 16))
    global_mask = jnp.zeros((batch, length), bool).at[:, 0].set(with_global_token)
    run, right = models.compiled(model), 0
    for number in range(batches):
        ids, labels = documents(jax.random.key(10**6 + number))
        with nullcontext() if number else compiling("the classifier"):
            right += int(count_right(run, ids, labels, global_mask))
    return right / (batches * batch)


def train(*, with_global_token: bool, length: int = 4096, batch: int = 16, save: str | None = None, **options) -> float:
    """Trains a classifier, saves it if it has a global token, and returns its accuracy on new documents."""
    model = fit(with_global_token=with_global_token, length=length, batch=batch, **options)
    if save is not None and with_global_token:
        hf.save(model, save)
        print(f"  saved in {save}, for `hf.load` or Hugging Face's `from_pretrained`")
    return accuracy(model, with_global_token=with_global_token, length=length, batch=batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="tokens in a document")
    parser.add_argument("--window", type=int, default=32, help="keys on each side of a token")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--checkpoint", help="a directory to start from")
    parser.add_argument("--save", help="a directory to write the trained model to")
    options = vars(parser.parse_args())
    for with_global_token in (True, False):
        print("Windows and one global token" if with_global_token else "Windows alone")
        print(f"  accuracy {train(with_global_token=with_global_token, **options):.1%}")


if __name__ == "__main__":
    main()
