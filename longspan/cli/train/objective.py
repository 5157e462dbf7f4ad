"""The model and the task of a run: read from a checkpoint, or made from a config."""

from pathlib import Path
from typing import Any

from flax import nnx

from longspan import hf
from longspan.cli.train.inputs import TrainInputs
from longspan.cli.train.settings import TaskName
from longspan.train.new_model import NewModel
from longspan.train.tasks import (
    CausalLMTraining,
    ClassificationTraining,
    EmbeddingTraining,
    MaskedLMTraining,
    TrainingTask,
)

TASKS: dict[TaskName, type[TrainingTask]] = {
    TaskName.sequence_classification: ClassificationTraining,
    TaskName.masked_lm: MaskedLMTraining,
    TaskName.causal_lm: CausalLMTraining,
    TaskName.embeddings: EmbeddingTraining,
}


def make_model(inputs: TrainInputs) -> Any:
    """The model before the first step, with float32 parameters."""
    settings = inputs.settings
    task = inputs.start.tasks[TaskName(settings.task)]
    dtypes: dict[str, Any] = dict(dtype=settings.dtype, param_dtype="float32")
    if settings.new is not None:
        changes: dict[str, Any] = dict(num_labels=len(inputs.labels)) if inputs.labels else {}
        config = NewModel.of(settings.new, **changes).config
        # Jitted: one program instead of one for each parameter.
        return nnx.jit(lambda: task.model(config, rngs=nnx.Rngs(settings.seed), **dtypes))()
    assert settings.model is not None
    options: dict[str, Any] = dict(task=task.model.task, **dtypes)
    if not _has_head(inputs):
        options["rngs"] = nnx.Rngs(settings.seed)
    if inputs.labels and not inputs.start.label_names:
        options["num_labels"] = len(inputs.labels)
    return hf.load(settings.model, **options)


def _has_head(inputs: TrainInputs) -> bool:
    """Whether the checkpoint was saved with the head that the task trains, or the task needs none."""
    if inputs.settings.task == TaskName.sequence_classification:
        return bool(inputs.start.label_names)
    if inputs.settings.task == TaskName.masked_lm:
        suffixes = inputs.start.tasks[TaskName.masked_lm].model.suffixes
        return any(name.endswith(suffixes) for name in inputs.start.architectures)
    return True


def make_task(inputs: TrainInputs, mesh: Any) -> TrainingTask:
    """The loss and the metrics."""
    settings = inputs.settings
    options: dict[str, Any] = dict(remat=settings.remat, mesh=mesh if settings.sp > 1 else None)
    if settings.task == TaskName.embeddings:
        options["rows"] = settings.batch
    return TASKS[TaskName(settings.task)](**options)


def save_model(inputs: TrainInputs, model: Any, directory: Path) -> None:
    """Writes the model for `hf.load` and Hugging Face: with its tokenizer, labels and generation config."""
    if inputs.settings.new is not None:
        new = NewModel.of(inputs.settings.new)
        new.write_files(directory, inputs.start.max_tokens)
    options: dict[str, Any] = {}
    if inputs.labels:
        options["id2label"] = list(inputs.labels)
    hf.save(model, directory, **options)
