"""Fine-tunes an encoder on text files, one folder per label, and saves a checkpoint that PyTorch can load too.

`--model DIR --texts reviews --out DIR`: reviews/good/*.txt are the documents of one label. It is `longspan train` as a
script to change, see docs/training.md; a BERT or RoBERTa that is too short becomes a Longformer first.
"""

import argparse
from pathlib import Path

import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from longspan import hf, models, train


class Report(train.Progress):
    """Prints what is compiled, and every evaluation."""

    def compiled(self, what, seconds):
        self.note(f"compiled {what} in {seconds:.1f} s")

    def evaluation(self, record):
        print(
            f"step {record['step']}: loss {record['eval_loss']:.3f}, accuracy {record['accuracy']:.3f} on held-out data"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--model", "--texts", "--out"):
        parser.add_argument(name, type=Path, required=True)
    for name, value in (("--length", 4096), ("--rows", 4), ("--epochs", 3), ("--learning-rate", 3e-5)):
        parser.add_argument(name, type=type(value), default=value)
    options = parser.parse_args()
    examples = list(train.read_examples(options.texts))
    names = sorted({str(example.label) for example in examples})
    model = hf.load(options.model, task="sequence_classification", num_labels=len(names), rngs=nnx.Rngs(0))
    assert isinstance(model, models.Model)  # an encoder with a task head
    if model.config.model_type in ("bert", "roberta") and options.length > model.config.max_tokens:
        model = hf.extend(model, max_positions=options.length, window=256)  # makes it a Longformer
    length = min(options.length, model.config.max_tokens)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    tokenizer.no_padding()

    def batches_of(chosen):
        found = train.tokenized(tokenizer, chosen, length=length, too_long="truncate")
        labels = dict(labels=np.array([names.index(str(label)) for label in found.labels]))
        pad = max(model.config.pad_token_id, 0)
        return train.BucketedBatches(found.texts["text"], rows=options.rows, length=length, labels=labels, pad=pad)

    held_out, batches = batches_of(examples[::5]), batches_of([one for n, one in enumerate(examples) if n % 5])
    task = train.ClassificationTraining(remat=length > 2048)
    steps = options.epochs * batches.steps_per_epoch
    train.fit(
        model,
        batches,
        task.loss,
        train.adamw(options.learning_rate, steps),
        steps=steps,
        eval_batches=[held_out(step) for step in range(held_out.steps_per_epoch)],
        eval_every=batches.steps_per_epoch,
        evaluate=task.evaluate,
        progress=Report(),
    )
    hf.save(model, options.out, id2label=names)


if __name__ == "__main__":
    main()
