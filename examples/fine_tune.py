"""Fine-tunes an encoder on text files, one folder per label, and saves a checkpoint that PyTorch can load too.

`--model DIR --texts reviews --out DIR`: reviews/good/*.txt are the documents of one label. See docs/fine-tuning.md.
"""

import argparse
import sys
import time
from itertools import groupby
from pathlib import Path

import numpy as np
import optax
from flax import nnx
from rich.progress import track
from tokenizers import Tokenizer

from longspan import hf, models


def batches(documents, tokens: int, longest: int, pad: int, rng: np.random.Generator) -> list[tuple[np.ndarray, ...]]:
    """Batches (ids [B, T], mask [B, T], labels [B]) of similar lengths, in few shapes; empty rows have the label -1."""
    bucket = lambda one: min(longest, max(64, 1 << (len(one[0]) - 1).bit_length()))  # noqa: E731
    found, shuffled = [], [documents[i] for i in rng.permutation(len(documents))]
    for length, alike in groupby(sorted(shuffled, key=bucket), bucket):
        rows, left = max(1, tokens // length), list(alike)
        while left:
            ids, mask, labels = np.full((rows, length), pad), np.zeros((rows, length), bool), np.full(rows, -1)
            for row, (own, label) in enumerate(left[:rows]):
                ids[row, : len(own)], mask[row, : len(own)], labels[row] = own, True, label
            found, left = [*found, (ids, mask, labels)], left[rows:]
    return [found[i] for i in rng.permutation(len(found))]


def announced(what: str, call):
    """Wraps `call`, which compiles once per shape of `ids`, to print a line on stderr when it does."""
    shapes = set()

    def run(ids, *others):
        if ids.shape in shapes:
            return call(ids, *others)
        shapes.add(ids.shape)
        start = time.monotonic()
        print(f"compiling {what} for {ids.shape[0]} x {ids.shape[1]} tokens ...", file=sys.stderr, flush=True)
        result = call(ids, *others)
        print(f"compiled {what} and ran it once in {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        return result

    return run


@nnx.jit
def step(model, optimizer, rngs, ids, mask, labels):
    def loss(model, rngs):
        logits = model(ids, attention_mask=mask, rngs=rngs, remat=ids.shape[1] > 2048).logits
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels.clip(0))
        return each.mean(where=labels >= 0)

    value, gradients = nnx.value_and_grad(loss)(model, rngs)
    optimizer.update(model, gradients)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--model", "--texts", "--out"):
        parser.add_argument(name, type=Path, required=True)
    for name, value in (("--length", 4096), ("--batch-tokens", 8192), ("--epochs", 3), ("--learning-rate", 3e-5)):
        parser.add_argument(name, type=type(value), default=value)
    options, rng = parser.parse_args(), np.random.default_rng(0)
    names = sorted(path.name for path in options.texts.iterdir() if path.is_dir())
    model = hf.load(options.model, task="sequence_classification", num_labels=len(names), rngs=nnx.Rngs(0))
    assert isinstance(model, models.Model)  # an encoder with a task head
    if model.config.model_type in ("bert", "roberta") and options.length > model.config.max_tokens:
        model = hf.extend(model, max_positions=options.length, window=256)  # makes it a Longformer
    longest = min(options.length, model.config.max_tokens)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(longest)
    files = [(path, number) for number, name in enumerate(names) for path in (options.texts / name).glob("*.txt")]
    documents = [(tokenizer.encode(path.read_text("utf-8")).ids, number) for path, number in sorted(files)]
    test, train = documents[::5], [one for i, one in enumerate(documents) if i % 5]
    shape = (options.batch_tokens, longest, max(model.config.pad_token_id, 0), rng)
    steps = options.epochs * len(batches(train, *shape))
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, steps // 10, steps)
    optimizer, rngs = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param), nnx.Rngs(dropout=0)
    train_on = announced("the training step", lambda *one: float(step(model, optimizer, rngs, *one)))
    run = models.compiled(model)
    count_right = announced("the model", lambda x, m, y: int(np.sum(run(x, attention_mask=m).logits.argmax(-1) == y)))
    for epoch in range(1, options.epochs + 1):
        model.train()  # enables dropout
        losses = [train_on(*one) for one in track(batches(train, *shape), f"epoch {epoch}")]
        model.eval()
        right = sum(count_right(*one) for one in batches(test, *shape))
        print(f"epoch {epoch}: loss {np.mean(losses):.3f}, {right} of {len(test)} held-out documents correct")
        hf.save(model, options.out, id2label=names)


if __name__ == "__main__":
    main()
