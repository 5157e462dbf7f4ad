"""`load`: reads a model from a checkpoint directory. One error lists everything that does not fit."""

import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from longspan.checks import FLOATS, check_choice
from longspan.hf.config import ConfigContent, config_of, read_content
from longspan.hf.mxfp4 import with_floats
from longspan.hf.names import Parameter, body_name, head_prefixes, heads_of_others, parameters, task_of
from longspan.hf.sizes import find_mismatches, refuse_large_heads, refuse_too_large
from longspan.hf.tensors import DTYPES, CheckpointTensors
from longspan.models import (
    CausalLM,
    Encoder,
    MaskedLM,
    Model,
    QuestionAnswering,
    SequenceClassifier,
    TokenClassifier,
)
from longspan.models.encoders.bigbird import RANDOM_BLOCKS
from longspan.models.family import Family, Task

logger = logging.getLogger("longspan.hf")


class LoadOptions(TypedDict, total=False):
    """The keyword arguments of `load` that do not change the type of its result."""

    dtype: Any
    param_dtype: Any
    config: Mapping[str, Any] | None
    random_blocks: str
    num_labels: int | None
    rngs: nnx.Rngs | None


Directory: TypeAlias = str | os.PathLike


@overload
def load(directory: Directory, *, task: Literal["encoder"], **options: Unpack[LoadOptions]) -> Encoder: ...
@overload
def load(directory: Directory, *, task: Literal["masked_lm"], **options: Unpack[LoadOptions]) -> MaskedLM: ...
@overload
def load(
    directory: Directory, *, task: Literal["sequence_classification"], **options: Unpack[LoadOptions]
) -> SequenceClassifier: ...
@overload
def load(
    directory: Directory, *, task: Literal["token_classification"], **options: Unpack[LoadOptions]
) -> TokenClassifier: ...
@overload
def load(
    directory: Directory, *, task: Literal["question_answering"], **options: Unpack[LoadOptions]
) -> QuestionAnswering: ...
@overload
def load(directory: Directory, *, task: Literal["causal_lm"], **options: Unpack[LoadOptions]) -> CausalLM: ...
@overload
def load(
    directory: Directory, *, task: str | None = ..., **options: Unpack[LoadOptions]
) -> Encoder | Model | CausalLM: ...


def load(
    directory: str | os.PathLike,
    *,
    dtype: Any = None,
    param_dtype: Any = None,
    config: Mapping[str, Any] | None = None,
    random_blocks: str = "trained",
    task: str | None = None,
    num_labels: int | None = None,
    rngs: nnx.Rngs | None = None,
) -> Encoder | Model | CausalLM:
    """Loads a model from a directory that Hugging Face's `save_pretrained` or `hf.save` wrote.

    The model must be of a family in `longspan.models`. Tensors that it does not use (tables of positions, another
    task's head, an unused pooler) are ignored, with a message of the logger "longspan.hf". Missing and unexpected
    tensors and wrong shapes raise one ValueError that lists all of them. Sizes in `config.json` are compared with the
    shapes of the tensors before a model is made. `model.source` is the directory, where `save` finds the tokenizer.

    Args:
        directory: the directory with `config.json` and `model.safetensors`, or its shards and their index.
        dtype: the dtype of the computation, as in Flax. By default the file's, but float32 for a decoder on a CPU,
            where 16-bit matrices are slower to read.
        param_dtype: the dtype of the parameters, as in Flax; by default `dtype`. `dtype="bfloat16",
            param_dtype="float32"` computes in bfloat16 and keeps parameters precise enough for an optimizer.
        config: keys of `config.json` to override, under Hugging Face's names, for example
            `dict(hidden_dropout_prob=0)`. They are checked like the file's, and `save` writes them.
        random_blocks: for a BigBird: "trained" uses the random blocks it was trained with. "hf_eval" makes every
            random block the first block, as Hugging Face does in eval mode.
        task: "encoder", "masked_lm", "sequence_classification", "token_classification" or "question_answering"; for a
            decoder "causal_lm". By default the one in the config's `architectures`. Static type checkers know the
            type of the result if it is given.
        num_labels: the number of labels of a classification head that the file does not have.
        rngs: random keys for the parameters of a new head, if the file has none for the `task`.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from longspan import hf, models
        >>> config = models.BertConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     hf.save(models.Encoder(config, rngs=nnx.Rngs(0)), directory)
        ...     model = hf.load(directory)
        ...     mixed = hf.load(directory, dtype="bfloat16", param_dtype="float32", config=dict(hidden_dropout_prob=0))
        >>> model(jnp.ones((1, 5), int)).pooler_output.shape
        (1, 6)
        >>> mixed(jnp.ones((1, 5), int)).pooler_output.dtype, mixed.pooler.kernel.dtype
        (dtype(bfloat16), dtype('float32'))
        >>> mixed.config.hidden_dropout_prob
        0.0
    """
    check_choice("random_blocks", random_blocks, RANDOM_BLOCKS)
    dtype, param_dtype = _float_dtype("dtype", dtype), _float_dtype("param_dtype", param_dtype)
    where = checked_directory(Path(directory))
    content = read_content(where, _checked_overrides(config))
    chosen = _task(content.family, task, content.architectures)
    with ExitStack() as stack:
        tensors = CheckpointTensors.open(where, stack)
        if content.is_mxfp4:
            tensors = with_floats(tensors)
        mismatches = find_mismatches(content, chosen, tensors, num_labels)
        refuse_too_large(content, mismatches, where)
        changes: dict[str, Any] = dict(random_blocks=random_blocks)
        if num_labels is not None:
            changes["num_labels"] = num_labels
        model_config = _untie_if_different(config_of(content, **changes), chosen, tensors)
        if dtype is None:
            dtype = _default_dtype(content.family, tensors)
        if param_dtype is None:
            param_dtype = dtype
        options = dict(_pooler_option(chosen, model_config, tensors), dtype=dtype, param_dtype=param_dtype)
        # Only shapes, until the file is known to fit. If it has all parameters, no other values are ever made.
        model = nnx.eval_shape(lambda: chosen.model(model_config, **options, rngs=nnx.Rngs(0)))
        report = _LoadReport(where, content, sizes=[mismatch.line for mismatch in mismatches])
        sources = _find_sources(model, tensors, report, new_head=rngs is not None)
        if rngs is not None:
            if num_labels is None:
                refuse_large_heads(content, report.new_parameters, tensors)
            _initialise(model, lambda rngs: chosen.model(model_config, **options, rngs=rngs), report.new, rngs)
        _fill(model, tensors, sources, param_dtype)
    model.set_attributes(source=str(where.resolve()))
    return model


def _float_dtype(name: str, dtype: Any) -> Any:
    """An argument as a dtype of floats; None stays None."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        raise ValueError(f"{name}={dtype!r} is not one of {', '.join(map(repr, FLOATS))}.") from None
    check_choice(name, found.name, FLOATS)
    return found


def _checked_overrides(config: Any) -> Mapping[str, Any]:
    if config is not None and not (isinstance(config, Mapping) and all(isinstance(key, str) for key in config)):
        raise TypeError(
            "`config` must be a dict of keys of config.json to override, for example `dict(hidden_dropout_prob=0)`, "
            f"got {config!r:.200}. The other keys are read from the directory."
        )
    return config or {}


def _default_dtype(family: Family, tensors: CheckpointTensors) -> Any:
    if family.float32_on_cpu and jax.default_backend() == "cpu":
        return jnp.dtype(jnp.float32)
    return tensors.dtype_of(family.word_embeddings)


_Sources: TypeAlias = dict[tuple, list[tuple[str, bool]]]  # path -> (tensor name, whether transposed) of each layer


def _find_sources(model: Any, tensors: CheckpointTensors, report: "_LoadReport", *, new_head: bool) -> _Sources:
    """The tensors of each parameter. Raises one error for everything that does not fit."""
    expected, task = list(parameters(model)), task_of(model)
    file_has_head = any(tensors.find(p, task) is not None for p in expected if p.in_head)
    sources: _Sources = {}
    for p in expected:
        name = tensors.find(p, task)
        if name is not None:
            sources.setdefault(p.path, []).append((name, p.transposed))
            if tensors.shape(name) != p.shape:
                shapes = f"{list(tensors.shape(name))}, but the config needs {list(p.shape)}"
                report.wrong_shapes.append(f"{name} is {shapes}")
            if tensors.dtype_name(name) not in DTYPES:
                report.wrong_dtypes.append(f"{name} is {tensors.dtype_name(name)}, not one of {', '.join(DTYPES)}")
        elif (p.in_head or p.name.startswith("pooler.")) and not file_has_head and new_head:
            report.new.append(p)
        else:
            report.missing.append(f"{p.name} {list(p.shape)}")
    used = {name for source in sources.values() for name, _ in source}
    report.ignored["the index does not list this tensor in this file"] = tensors.unlisted
    own_heads = head_prefixes(model) if file_has_head else ()
    report.classify_unused(set(tensors.where) - used, model, own_heads)
    report.raise_or_log()
    return sources


def _initialise(model: Any, make: Callable[[nnx.Rngs], Any], new: list[Parameter], rngs: nnx.Rngs) -> None:
    """Puts the initial values of new parameters into a model of shapes."""
    paths = {p.path for p in new}
    if not paths:
        return

    @nnx.jit
    def values(rngs: nnx.Rngs) -> list[Any]:
        state = nnx.to_flat_state(nnx.state(make(rngs), nnx.Param))
        # XLA drops the other parameters, which the file has.
        return [variable[...] for path, variable in state if path in paths]

    state = nnx.state(model, nnx.Param)
    variables = [variable for path, variable in nnx.to_flat_state(state) if path in paths]
    for variable, value in zip(variables, values(rngs), strict=True):
        variable.set_value(value)
    nnx.update(model, state)


def _fill(model: Any, tensors: CheckpointTensors, sources: _Sources, dtype) -> None:
    state = nnx.state(model, nnx.Param)
    for path, variable in nnx.to_flat_state(state):
        if path in sources:
            variable.set_value(_stacked(tensors, sources[path], tuple(variable.shape), dtype))
    nnx.update(model, state)


def _stacked(
    tensors: CheckpointTensors, source: list[tuple[str, bool]], shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """One tensor, or those of all layers, and of all experts of each layer, along new first axes."""
    arrays = []
    for name, transposed in source:
        array = tensors.read(name)
        arrays.append(array.T if transposed else array)
    # Always a copy: safetensors may return a view of the mapped file, which is closed when `load` returns.
    array = np.stack(arrays).reshape(shape) if arrays[0].ndim < len(shape) else np.array(arrays[0])
    return jnp.asarray(array, dtype)  # not `jnp.array`, which compiles a program per shape if the dtypes are the same


@dataclass
class _LoadReport:
    """The differences between a file and a model."""

    where: Path
    content: ConfigContent
    sizes: list[str]
    new: list[Parameter] = field(default_factory=list)  # parameters that the file lacks and that are initialised
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shapes: list[str] = field(default_factory=list)
    wrong_dtypes: list[str] = field(default_factory=list)
    ignored: dict[str, list[str]] = field(default_factory=lambda: {k: [] for k in _IGNORED})

    @property
    def new_parameters(self) -> int:
        """The number of parameters that are initialised."""
        return sum(math.prod(p.shape) for p in self.new)

    def classify_unused(self, names: set[str], model: Any, own_heads: tuple[str, ...]) -> None:
        """Adds each tensor that the model does not use to `ignored` or to `unexpected`."""
        family, task = model.config.family, task_of(model)
        tied = {task.tied, *(task.twin_biases or ())}
        heads = heads_of_others(family, task)
        for name in sorted(names):
            plain = name.removeprefix(family.prefix)
            if plain.endswith(family.buffers):
                self.ignored["tables of constants"].append(name)
            elif plain.startswith("pooler."):
                self.ignored["a pooler that this model does not use"].append(name)
            elif name.removeprefix(family.other_head_prefix) in tied:
                self.ignored["tied to the word embeddings"].append(name)
            elif name.startswith(family.outside):
                self.ignored["of the larger model that contains this one"].append(name)
            elif name.startswith(family.unused) or (name.startswith(heads) and not name.startswith(own_heads)):
                self.ignored["another task's head"].append(name)
            else:
                self.unexpected.append(name)

    def raise_or_log(self) -> None:
        problems = [
            f"{what} ({len(lines)}):\n  " + "\n  ".join(lines)
            for what, lines in (
                ("Wrong size in config.json", self.sizes),
                ("Missing", self.missing),
                ("Unexpected", self.unexpected),
                ("Wrong shape", self.wrong_shapes),
                ("Wrong dtype", self.wrong_dtypes),
            )
            if lines
        ]
        if problems:
            hint = "Load the directory that belongs to this config.json; for a new head pass `task` and `rngs`."
            overrides = self.content.where.removeprefix(str(self.where / "config.json"))  # " with config=..."
            raise ValueError(
                f"The tensors in {self.where} do not fit its config.json{overrides}.\n" + "\n".join([*problems, hint])
            )
        if self.new:
            names = ", ".join(p.name for p in self.new)
            logger.warning("%s: new, randomly initialised: %s", self.where, names)
        for reason, names in self.ignored.items():
            if names:
                logger.log(_IGNORED[reason], "%s: ignored %s (%s)", self.where, ", ".join(names), reason)


# The reasons for ignoring a tensor, and the level at which each is logged.
_IGNORED = {
    "tables of constants": logging.INFO,
    "tied to the word embeddings": logging.INFO,
    "a pooler that this model does not use": logging.INFO,
    "of the larger model that contains this one": logging.INFO,
    "another task's head": logging.WARNING,
    "the index does not list this tensor in this file": logging.WARNING,
}


def _pooler_option(task: Task, config: Any, tensors: CheckpointTensors) -> dict[str, Any]:
    """The `pooler` argument of models whose pooler is optional: whether the file has one."""
    if not task.optional_pooler:
        return {}
    has_pooler = tensors.find_in_body(body_name("pooler.kernel", config.family)) is not None
    if not has_pooler:
        logger.info("the file has no pooler: pooler_output will be None")
    return dict(pooler=has_pooler)


def _untie_if_different(config: Any, task: Task, tensors: CheckpointTensors) -> Any:
    """The config, with untied embeddings if the file has other weights for the head: Hugging Face uses those too."""
    if not config.tie_word_embeddings or task.tied is None:
        return config
    word, head = tensors.find_in_body(config.family.word_embeddings), tensors.find_in_head(task.tied)
    if word is None or head is None or np.array_equal(tensors.read(head), tensors.read(word)):
        return config
    return replace(config, tie_word_embeddings=False)


def _task(family: Family, name: str | None, architectures: list[str]) -> Task:
    """The task with this name, or the first one that an architecture's name ends with."""
    tasks = {task.model.task: task for task in family.tasks}
    if name is not None:
        check_choice("task", name, tuple(tasks))
        return tasks[name]
    suffixes = {suffix: task for task in family.tasks for suffix in task.model.suffixes}
    for architecture in architectures:
        for suffix, task in suffixes.items():
            if architecture.endswith(suffix):
                return task
    return family.tasks[0]


def checked_directory(path: Path, *, needs_config: bool = True) -> Path:
    """The path of a checkpoint. Raises unless it is a directory, and unless it has a config.json if it needs one."""
    if not path.is_dir():
        raise FileNotFoundError(
            f"{str(path)!r} is not a directory, and Longspan does not download. Fetch the checkpoint first, for "
            "example with `hf download <name> --local-dir <directory>`."
        )
    if needs_config and not (path / "config.json").is_file():
        listing = ", ".join(sorted(p.name for p in path.iterdir()))
        raise FileNotFoundError(f"{path} has no config.json. It contains: {listing or 'nothing'}.")
    return path
