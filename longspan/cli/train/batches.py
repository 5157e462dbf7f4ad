"""The batches of a run, and the arguments that follow from their number: rows, steps, learning rate, intervals."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longspan.cli.train.inputs import TrainInputs, settings_with
from longspan.cli.train.settings import TaskName, TrainSettings
from longspan.train.data import IGNORED, Batch, BucketedBatches, MaskedBatches, PackedBatches
from longspan.train.tokenizing import Examples

BATCH_TOKENS = 16384  # of a default batch
MOST_ROWS, LEAST_PAIRS = 32, 16  # of a default batch
EPOCHS, NEW_STEPS = 3, 1000  # of a run from a checkpoint, and of one that starts from nothing
EVALUATIONS, MOST_EVAL_BATCHES = 10, 64
NEW_RATE = 1e-3
LEARNING_RATES = {
    TaskName.sequence_classification: 3e-5,
    TaskName.masked_lm: 5e-5,
    TaskName.causal_lm: 2e-5,
    TaskName.embeddings: 2e-5,
}
MASK_NAMES = ("[MASK]", "<mask>", "<|mask|>")


class TrainBatches(NamedTuple):
    """The batches of a run.

    Attributes:
        settings: the arguments, all with values.
        batches: the batch of a step.
        held_out: for evaluations; () if nothing is held out.
    """

    settings: TrainSettings
    batches: Any
    held_out: tuple[Batch, ...]


def make_batches(inputs: TrainInputs) -> TrainBatches:
    """The batches of the examples, and the settings with values for everything that was left out."""
    settings = inputs.settings
    assert settings.length is not None and settings.task is not None
    rows = _rows(inputs)
    batches = _batches(inputs, inputs.examples, rows)
    held_out: tuple[Batch, ...] = ()
    if inputs.held_out is not None:
        held_out = _held_out(inputs, inputs.held_out, rows, settings.dp * settings.fsdp)
    _check_lengths(settings, batches, held_out)
    if settings.patience is not None and not held_out:
        raise ValueError(
            f"--patience {settings.patience} needs evaluations, but no example is held out. Give a larger --hold-out, "
            "or leave out --patience."
        )
    steps = settings.steps
    if steps is None:
        steps = NEW_STEPS if settings.model is None else EPOCHS * batches.steps_per_epoch
    if settings.warm_up is not None and settings.warm_up >= steps:
        raise ValueError(
            f"--warm-up {settings.warm_up:,} must be less than the {steps:,} steps of the run. Warm up for fewer."
        )
    rate = settings.learning_rate
    if rate is None:
        rate = NEW_RATE if settings.model is None else LEARNING_RATES[TaskName(settings.task)]
    eval_every = settings.eval_every or max(1, steps // EVALUATIONS)
    changes = dict(batch=rows, steps=steps, learning_rate=rate, eval_every=eval_every)
    changes |= dict(save_every=settings.save_every or eval_every)
    return TrainBatches(settings_with(settings, **changes), batches, held_out)


def _rows(inputs: TrainInputs) -> int:
    """The rows of a batch, which can be divided into parts and over devices."""
    settings = inputs.settings
    parts = settings.dp * settings.fsdp * settings.accumulate
    rows = settings.batch or _default_rows(inputs, parts)
    if rows % parts:
        raise ValueError(
            f"--batch {rows} cannot be divided into {settings.accumulate} parts (--accumulate) on "
            f"{settings.dp * settings.fsdp} devices (--dp, --fsdp). Give a multiple of {parts}."
        )
    if settings.task == TaskName.embeddings and rows > inputs.examples.count:
        raise ValueError(
            f"A batch of {rows:,} pairs is more than the {inputs.examples.count:,} pairs to train on. Give a smaller "
            "--batch, or more pairs."
        )
    return rows


def _default_rows(inputs: TrainInputs, parts: int) -> int:
    settings = inputs.settings
    assert settings.length is not None
    rows = max(1, min(MOST_ROWS, BATCH_TOKENS // settings.length))
    if settings.task == TaskName.embeddings:
        rows = max(rows, LEAST_PAIRS)
    if settings.task != TaskName.causal_lm:
        rows = min(rows, inputs.examples.count)
    return max(1, rows // parts) * parts


def _batches(inputs: TrainInputs, examples: Examples, rows: int) -> Any:
    settings = inputs.settings
    assert settings.length is not None
    options: dict[str, Any] = dict(rows=rows, length=settings.length, seed=settings.seed)
    if settings.task == TaskName.causal_lm:
        return PackedBatches(examples.texts["text"], **options)
    options["pad"] = max(inputs.start.config.pad_token_id, 0) if inputs.start.is_encoder else 0
    if settings.task == TaskName.embeddings:
        return BucketedBatches(examples.texts, drop_incomplete=True, **options)
    if settings.task == TaskName.sequence_classification:
        numbers = {name: number for number, name in enumerate(inputs.labels)}
        labels = np.array([numbers[str(label)] for label in examples.labels], np.int32)
        return BucketedBatches(examples.texts["text"], labels=dict(labels=labels), **options)
    special = special_tokens(inputs.start.tokenizer)
    return MaskedBatches(
        BucketedBatches(examples.texts["text"], **options),
        mask_token=mask_token(inputs.start.tokenizer, settings.model, special),
        vocab_size=inputs.start.tokenizer.get_vocab_size(),
        special_tokens=tuple(special.values()),
        seed=settings.seed,
    )


def _held_out(inputs: TrainInputs, examples: Examples, rows: int, devices: int) -> tuple[Batch, ...]:
    """The batches of an evaluation. Pairs are one batch, because every text is searched among all others."""
    task = inputs.settings.task
    if task == TaskName.causal_lm and examples.texts["text"].lengths.max() < 2:
        return ()
    if task != TaskName.embeddings:
        batches = _batches(inputs, examples, rows)
        chosen = (batches(step) for step in range(min(MOST_EVAL_BATCHES, batches.steps_per_epoch)))
        # A short text may have no masked token.
        return tuple(batch for batch in chosen if (batch["labels"] != IGNORED).any())
    whole = examples.count // devices * devices
    if not whole:
        return ()
    texts = {name: documents.select(range(whole)) for name, documents in examples.texts.items()}
    return (_batches(inputs, examples._replace(texts=texts, labels=examples.labels[:whole]), whole)(0),)


def _check_lengths(settings: TrainSettings, batches: Any, held_out: tuple[Batch, ...]) -> None:
    """Raises unless every row can be divided over the devices of --sp."""
    if isinstance(batches, MaskedBatches):
        batches = batches.batches
    assert settings.length is not None
    lengths = {settings.length}
    if isinstance(batches, BucketedBatches):
        lengths = {length for bucket in batches.buckets for length in bucket.lengths.values()}
    lengths |= {array.shape[1] for batch in held_out for array in batch.values() if array.ndim > 1}
    wrong = sorted(length for length in lengths if length % settings.sp)
    if wrong:
        raise ValueError(
            f"Rows of {wrong[0]:,} tokens cannot be divided over {settings.sp} devices (--sp). Short rows have 32, 64 "
            f"or another power of two of tokens, the longest have --length {settings.length:,}. Give another --sp or "
            "--length."
        )


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The special tokens of a tokenizer, by name."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if token.special}


def mask_token(tokenizer: Any, model: str | None, special: dict[str, int]) -> int:
    """The id of the mask token: the one that tokenizer_config.json names, otherwise one with a usual name."""
    names = list(MASK_NAMES)
    path = Path(model or "") / "tokenizer_config.json"
    if model is not None and path.is_file():
        try:
            named = json.loads(path.read_text("utf-8")).get("mask_token")
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not a JSON object. Download or save it again.") from error
        if isinstance(named, dict):
            named = named.get("content")
        names = [named, *names] if isinstance(named, str) else names
    for name in names:
        found = tokenizer.token_to_id(name)
        if found is not None:
            return found
    raise ValueError(
        f"The tokenizer of {model} has no mask token, only {', '.join(special) or 'no special token'}. A masked LM "
        "needs one. Give another --task, or name it as mask_token in tokenizer_config.json."
    )
