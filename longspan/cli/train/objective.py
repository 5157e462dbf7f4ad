"""The model and the task of a run: read from a checkpoint, or made from a config."""

from pathlib import Path
from typing import Any

from flax import nnx

from longspan import hf
from longspan.cli.train.inputs import TrainInputs
from longspan.cli.train.settings import TaskName
from longspan.models import Embedder
from longspan.train.embedder_module import TrainableEmbedder, embedder_vectors, trained_embedder
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


def make_model(inputs: TrainInputs) -> tuple[Any, Embedder | None]:
    """The model before the first step, with float32 parameters; for embeddings also the embedder that contains it."""
    if inputs.settings.task != TaskName.embeddings:
        return _plain_model(inputs), None
    embedder = _embedder(inputs)
    return TrainableEmbedder(embedder, embedder.prompt()), embedder


def _embedder(inputs: TrainInputs) -> Embedder:
    """An embedder with the modules of the checkpoint's directory; without any, the mean over tokens."""
    settings = inputs.settings
    if settings.model is None:
        return Embedder(_plain_model(inputs), inputs.start.tokenizer)
    embedder = hf.load_embedder(settings.model, dtype="float32")
    if settings.dtype != "float32":
        options: dict[str, Any] = dict(dtype=settings.dtype, param_dtype="float32", task=embedder.model.task)
        embedder.model = hf.load(str(embedder.source), **options)
    return embedder


def _plain_model(inputs: TrainInputs) -> Any:
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
        options |= dict(rows=settings.batch, vectors=embedder_vectors)
    return TASKS[TaskName(settings.task)](**options)


def save_model(inputs: TrainInputs, model: Any, embedder: Embedder | None, directory: Path) -> None:
    """Writes the model for `hf.load` and Hugging Face: with its tokenizer, labels and generation config."""
    options: dict[str, Any] = {}
    if inputs.settings.new is not None:
        NewModel.of(inputs.settings.new).write_files(directory, inputs.start.max_tokens)
        options["tokenizer"] = directory
    if inputs.labels:
        options["id2label"] = list(inputs.labels)
    if embedder is not None:
        model = trained_embedder(model, embedder)
    hf.save(model, directory, **options)
