"""What a run is given, checked before anything is computed: the model's config, the tokenizer, and the tokenized data.

Nothing here uses a device, so a supervisor checks its input too before it starts processes.
"""

import hashlib
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from longspan.cli.notices import say
from longspan.cli.texts import stop_tokens, tokenizer_of
from longspan.cli.train.sentence import TextSettings, text_settings
from longspan.cli.train.settings import TaskName, TrainSettings
from longspan.hf.config import config_of, read_content, read_object
from longspan.models.encoders.family import EncoderConfig
from longspan.models.encoders.tasks import SequenceClassifier
from longspan.models.family import Task
from longspan.train.data import bucket_length
from longspan.train.new_model import NewModel
from longspan.train.sources import Example, Fields, read_examples, standard_library
from longspan.train.survey import Source, Survey, held_out_examples, part_of
from longspan.train.tokenizing import Examples, TooLong, tokenized

MOST_HELD_OUT = 512  # examples
MAX_PACKED = 1024  # the default length of packed rows
# The tasks as `hf.load` names the models that they train, for encoders and for decoders.
ENCODER_TASKS = {
    TaskName.sequence_classification: "sequence_classification",
    TaskName.masked_lm: "masked_lm",
    TaskName.embeddings: "encoder",
}
DECODER_TASKS = {TaskName.causal_lm: "causal_lm", TaskName.embeddings: "causal_lm"}


class StartingModel(NamedTuple):
    """The model that a run starts from, before its parameters are read or made.

    Attributes:
        where: the directory or file, for messages.
        config: of the model.
        tokenizer: of the library `tokenizers`.
        end: the token that ends a text, for decoders.
        label_names: the labels of the classification head that the checkpoint has; () if it has none.
        architectures: the names of the saved model classes.
        digest: of config and tokenizer.
        texts: the settings of a sentence-transformers directory, for embeddings.
    """

    where: str
    config: Any
    tokenizer: Any
    end: int | None
    label_names: tuple[str, ...]
    architectures: tuple[str, ...]
    digest: str
    texts: TextSettings = TextSettings()

    @property
    def is_encoder(self) -> bool:
        """Whether the model is an encoder."""
        return isinstance(self.config, EncoderConfig)

    @property
    def tasks(self) -> dict[TaskName, Task]:
        """The tasks that the model can be trained on."""
        of_model = {task.model.task: task for task in self.config.family.tasks}
        names = ENCODER_TASKS if self.is_encoder else DECODER_TASKS
        return {name: of_model[theirs] for name, theirs in names.items() if theirs in of_model}

    @property
    def max_tokens(self) -> int:
        """The longest input of the model."""
        if self.is_encoder:
            return self.config.max_tokens
        return self.config.longest or self.config.max_position_embeddings


class TrainInputs(NamedTuple):
    """The checked input of a run.

    Attributes:
        settings: the arguments, with values for the task and the length.
        start: the model that the run starts from.
        labels: the names of the labels, in their order.
        examples: for training.
        held_out: for evaluation.
        digests: for `run.json`.
    """

    settings: TrainSettings
    start: StartingModel
    labels: tuple[str, ...]
    examples: Examples
    held_out: Examples | None
    digests: dict[str, str]


def read_inputs(settings: TrainSettings) -> TrainInputs:
    """Reads and checks everything that the arguments name."""
    start = _new(settings) if settings.model is None else _checkpoint(Path(settings.model))
    pairs = settings.task == TaskName.embeddings
    if settings.task is None and settings.data is not None:
        pairs = _has_pairs(Path(settings.data))
    source = _source(settings, pairs)
    survey = Survey.of(source)
    settings = settings_with(settings, task=_task(settings, start, survey, pairs).value)
    if settings.task == TaskName.embeddings:
        source = partial(start.texts.with_prompt, source)
    labels: tuple[str, ...] = ()
    if settings.task == TaskName.sequence_classification:
        labels = _labels(survey, start, str(settings.data))
    examples, held_out = _tokenized(settings, start, survey, source)
    settings = settings_with(settings, length=_length(settings, start, examples, held_out))
    return TrainInputs(settings, start, labels, examples, held_out, dict(model=start.digest, data=survey.digest))


def settings_with(settings: TrainSettings, **changes: Any) -> TrainSettings:
    """The settings with other values."""
    return TrainSettings(**(vars(settings) | changes))


def _new(settings: TrainSettings) -> StartingModel:
    assert settings.new is not None
    new = NewModel.of(settings.new, "the config of --new")
    tokenizer = new.vocabulary.tokenizer()
    end = None
    if not isinstance(new.config, EncoderConfig) and new.vocabulary.special:
        end = new.vocabulary.id_of(new.vocabulary.special[0])
    digest = _digest([json.dumps(settings.new, sort_keys=True).encode(), tokenizer.to_str().encode()])
    return StartingModel("the config of --new", new.config, tokenizer, end, (), (), digest)


def _checkpoint(directory: Path) -> StartingModel:
    folder, texts = text_settings(directory)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json. Name the directory of a checkpoint.")
    content = read_content(folder)
    config = config_of(content)
    tokenizer = tokenizer_of(folder)
    end = None
    if not isinstance(config, EncoderConfig):
        end = next(iter(stop_tokens(folder) or []), None)
    digest = _digest([(folder / name).read_bytes() for name in ("config.json", "tokenizer.json")])
    if tokenizer.get_vocab_size(with_added_tokens=False) > config.vocab_size:
        largest = max(tokenizer.get_vocab(with_added_tokens=False).values())
        raise ValueError(
            f"The tokenizer has token {largest}, but the model has only {config.vocab_size} tokens. Give the "
            "tokenizer.json that belongs to the model."
        )
    labels: tuple[str, ...] = ()
    if any(name.endswith(SequenceClassifier.suffixes) for name in content.architectures):
        labels = _own_labels(read_object(folder / "config.json"), config.num_labels)
    return StartingModel(str(directory), config, tokenizer, end, labels, tuple(content.architectures), digest, texts)


def _own_labels(raw: dict[str, Any], count: int) -> tuple[str, ...]:
    named = raw.get("id2label") or {}
    return tuple(str(named.get(str(number), f"LABEL_{number}")) for number in range(count))


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _source(settings: TrainSettings, pairs: bool) -> Source:
    if settings.data is None:
        return standard_library
    fields = Fields(settings.text_field, settings.label_field)
    return partial(read_examples, settings.data, fields, pairs=pairs)


def _has_pairs(data: Path) -> bool:
    """Whether the first example is a line with an anchor and a positive."""
    try:
        next(iter(read_examples(data, pairs=True)))
    except ValueError:  # the reader of texts gives the error, if there is one
        return False
    return True


def _task(settings: TrainSettings, start: StartingModel, survey: Survey, pairs: bool) -> TaskName:
    """The chosen task, or the one that the data and the model decide."""
    if settings.task is not None:
        return _supported(TaskName(settings.task), start)
    if pairs:
        return _supported(TaskName.embeddings, start)
    if not start.is_encoder:
        return TaskName.causal_lm
    if survey.labels:
        return _supported(TaskName.sequence_classification, start)
    is_masked_lm = any(name.endswith(("ForMaskedLM", "ForPreTraining")) for name in start.architectures)
    if settings.model is None or is_masked_lm:
        return _supported(TaskName.masked_lm, start)
    raise ValueError(
        f"The task is not clear: {settings.data} has no labels and no pairs, and {start.where} is not a masked LM. "
        f"Give --task, one of {', '.join(start.tasks)}."
    )


def _supported(name: TaskName, start: StartingModel) -> TaskName:
    if name not in start.tasks:
        raise ValueError(
            f"--task {name} is not supported for a {start.config.model_type}. Its tasks are {', '.join(start.tasks)}."
        )
    return name


def _labels(survey: Survey, start: StartingModel, data: str) -> tuple[str, ...]:
    """The names of the labels, in the order of the checkpoint's head if it has one."""
    if survey.unlabelled is not None:
        raise ValueError(
            f"{survey.unlabelled} has no label. Put documents into subfolders with the names of their labels, or name "
            "the field of the label in JSON lines with --label-field."
        )
    if len(survey.labels) == 1:
        raise ValueError(
            f"All {survey.count:,} examples of {data} have the label {survey.labels[0]!r}, but a classifier needs two "
            "or more labels. Add examples with other labels."
        )
    own = start.label_names
    if not own or set(own) == set(survey.labels):
        return own or survey.labels
    if len(own) == len(survey.labels) and set(own) == {f"LABEL_{number}" for number in range(len(own))}:
        return survey.labels
    raise ValueError(
        f"{start.where} classifies into {', '.join(own[:10])}, but {data} has the labels "
        f"{', '.join(survey.labels[:10])}. Rename the labels, or start from a checkpoint without a classification head."
    )


def _too_long(settings: TrainSettings) -> TooLong:
    """What happens to a text that is too long. Without labels and pairs, its parts are as good as the whole."""
    if settings.split and settings.truncate:
        raise ValueError("--split and --truncate were both given, but they exclude each other. Give one of them.")
    if settings.truncate:
        return "truncate"
    if settings.task == TaskName.causal_lm:
        return "pieces"
    if settings.split and settings.task == TaskName.embeddings:
        raise ValueError(
            "--split was given, but the parts of an anchor do not belong to the parts of its positive. Give --truncate."
        )
    if settings.split or settings.task == TaskName.masked_lm:
        return "split"
    return "error"


def _tokenized(
    settings: TrainSettings, start: StartingModel, survey: Survey, source: Source
) -> tuple[Examples, Examples | None]:
    """The tokens of the examples for training, and of those that are held out."""
    limit = start.max_tokens
    if settings.task == TaskName.embeddings:
        limit = min(limit, start.texts.max_tokens or limit)
        start.texts.apply(start.tokenizer)
    if settings.length is not None and settings.length > limit:
        raise ValueError(
            f"--length {settings.length:,} is more than the {limit:,} tokens that {start.where} takes. Give at most "
            f"{limit:,}. In Python, `hf.extend` gives a BERT or RoBERTa more positions."
        )
    longest = settings.length or limit
    if settings.length is None and settings.task == TaskName.causal_lm:
        longest = min(limit, MAX_PACKED)
    end = start.end if settings.task == TaskName.causal_lm else None
    options: dict[str, Any] = dict(length=longest, too_long=_too_long(settings), end=end)
    kept_out = held_out_examples(survey.count, settings.hold_out, MOST_HELD_OUT, settings.seed)

    def read(inside: bool) -> Examples:
        chosen: Iterable[Example] = part_of(source, kept_out, inside=inside)
        return tokenized(start.tokenizer, chosen, **options)

    examples = read(False)
    if not examples.count:
        raise ValueError(
            f"No example of {settings.data} that is not held out has a token. Give more text, or --hold-out 0."
        )
    _check_ids(examples, start)
    if not kept_out:
        return examples, None
    held_out = read(True)
    _check_ids(held_out, start)
    if not held_out.count:
        return examples._replace(empty=examples.empty + held_out.empty), None
    return examples, held_out


def _check_ids(examples: Examples, start: StartingModel) -> None:
    largest = max((int(documents.tokens.max(initial=0)) for documents in examples.texts.values()), default=0)
    if largest >= start.config.vocab_size:
        raise ValueError(
            f"The tokenizer gives token {largest}, but the model has only {start.config.vocab_size} tokens. Give the "
            "tokenizer.json that belongs to the model."
        )


def _length(settings: TrainSettings, start: StartingModel, examples: Examples, held_out: Examples | None) -> int:
    """The longest row: that of --length, or the shortest bucket for all examples."""
    if settings.length is not None:
        return settings.length
    if settings.task == TaskName.causal_lm:
        return min(start.max_tokens, MAX_PACKED)
    parts = [examples] if held_out is None else [examples, held_out]
    longest = max(int(documents.lengths.max()) for part in parts for documents in part.texts.values())
    return bucket_length(longest, start.max_tokens)


def tell_changes(inputs: TrainInputs, evaluated: bool) -> None:
    """Prints what was left out of the data, or changed, and if the model is not evaluated."""
    parts = [part for part in (inputs.examples, inputs.held_out) if part is not None]
    empty, long = sum(part.empty for part in parts), sum(part.long for part in parts)
    if empty:
        say(f"longspan: examples without a token: {empty:,}. They are left out.")
    if long:
        done = "truncated" if inputs.settings.truncate else "split"
        say(f"longspan: examples of more than {inputs.settings.length:,} tokens: {long:,}. They are {done}.")
    if not evaluated:
        say("longspan: no example is held out, so the model is not evaluated.")
