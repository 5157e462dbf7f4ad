"""`load`: a checkpoint directory becomes a model, or one error that says everything that is wrong with it."""

import logging
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from longspan.checks import FLOATS, check_choice
from longspan.hf.config import Content, config_of, read_content
from longspan.hf.names import HEADS, Parameter, body_name, head_prefixes, parameters, task_of
from longspan.hf.sizes import refuse_large_heads, refuse_too_large, wrong_sizes
from longspan.hf.tensors import KINDS, Tensors
from longspan.models import CausalLM, Encoder, Model
from longspan.models.encoders.bigbird import RANDOM_BLOCKS
from longspan.models.family import Family, Task

logger = logging.getLogger("longspan.hf")


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
    """The model in a directory that Hugging Face's `save_pretrained` or `save` wrote, of a family in `longspan.models`.

    What the file holds besides (tables of positions, another task's head, an unused pooler) is ignored, and the logger
    "longspan.hf" says so. Anything missing, unexpected or of the wrong shape is one ValueError that lists it all;
    sizes in `config.json` are compared with the tensors' shapes before anything is made of them. The model remembers
    the directory (`model.source`), where `save` finds its tokenizer.

    Args:
        directory: with a `config.json`, and a `model.safetensors` or its shards and their index.
        dtype: of the computation, as in Flax; by default the one in the file, but float32 for a decoder on a CPU, where
            matrices of 16 bits are read more slowly.
        param_dtype: of the parameters, as in Flax; by default `dtype`. `dtype="bfloat16", param_dtype="float32"`
            computes in bfloat16 and keeps parameters that an optimizer can add small steps to.
        config: keys of `config.json` to override, under Hugging Face's names, for example
            `dict(hidden_dropout_prob=0)`; they are checked like the file's, and `save` writes them.
        random_blocks: for a BigBird: "trained" attends to the random blocks it was trained with, "hf_eval" to none, as
            Hugging Face does in eval mode (every random block is then the first block).
        task: "encoder", "masked_lm", "sequence_classification", "token_classification" or "question_answering"; for a
            decoder "causal_lm"; by default the one in the config's `architectures`.
        num_labels: of a classification head that the file does not have.
        rngs: makes a new head, with random parameters, if the file has none for the `task`.

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
    dtype, param_dtype = _float("dtype", dtype), _float("param_dtype", param_dtype)
    where = _directory(Path(directory))
    content = read_content(where, _checked_overrides(config))
    chosen = _task(content.family, task, content.architectures)
    with ExitStack() as stack:
        tensors = Tensors.open(where, stack)
        wrong = wrong_sizes(content, chosen, tensors, num_labels)
        refuse_too_large(content, wrong, where)
        labels = {} if num_labels is None else dict(num_labels=num_labels)
        made = config_of(content, random_blocks=random_blocks, **labels)
        made = _untie_if_different(made, chosen, tensors)
        dtype = _default_dtype(content.family, tensors) if dtype is None else dtype
        param_dtype = dtype if param_dtype is None else param_dtype
        options = dict(_pooler(chosen, made, tensors), dtype=dtype, param_dtype=param_dtype)
        # Without values until it is known to fit, and to the end if the file has all of them.
        model = nnx.eval_shape(lambda: chosen.model(made, **options, rngs=nnx.Rngs(0)))
        report = _Report(where, content, sizes=[one.line for one in wrong])
        sources = _sources(model, tensors, report, new_head=rngs is not None)
        if rngs is not None:
            if num_labels is None:
                refuse_large_heads(content, report.parameters_of_new, tensors)
            model = chosen.model(made, **options, rngs=rngs)
        _fill(model, tensors, sources, param_dtype)
    model.set_attributes(source=str(where.resolve()))
    return model


def _float(name: str, dtype: Any) -> Any:
    """The dtype that an argument names, one of floats; None stays None."""
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
            f"got {config!r:.200}. The rest of the config comes from the directory."
        )
    return {} if config is None else config


def _default_dtype(family: Family, tensors: Tensors) -> Any:
    if family.float32_on_cpu and jax.default_backend() == "cpu":
        return jnp.dtype(jnp.float32)
    return tensors.dtype_of(family.word_embeddings)


_Sources: TypeAlias = dict[tuple, list[tuple[str, bool]]]  # path -> the names of all layers, and whether transposed


def _sources(model: Any, tensors: Tensors, report: "_Report", *, new_head: bool) -> _Sources:
    """Where each parameter comes from, after a report of all that does not fit."""
    wanted, task = list(parameters(model)), task_of(model)
    headless = all(tensors.find(p, task) is None for p in wanted if p.in_head)
    sources: _Sources = {}
    for p in wanted:
        name = tensors.find(p, task)
        if name is not None:
            sources.setdefault(p.path, []).append((name, p.transposed))
            if tensors.shape(name) != p.shape:
                report.misshapen.append(f"{name} is {list(tensors.shape(name))}, by the config {list(p.shape)}")
            if tensors.kind(name) not in KINDS:
                report.no_floats.append(f"{name} is {tensors.kind(name)}, not one of {', '.join(KINDS)}")
        elif (p.in_head or p.name.startswith("pooler.")) and headless and new_head:
            report.new.append(p)
        else:
            report.missing.append(f"{p.name} {list(p.shape)}")
    read = {name for source in sources.values() for name, _ in source}
    report.ignored["in a shard, but not listed there by the index"] = tensors.unlisted
    report.sort_out_unread(set(tensors.where) - read, model, () if headless else head_prefixes(model))
    report.raise_or_log()
    return sources


def _fill(model: Any, tensors: Tensors, sources: _Sources, dtype) -> None:
    state = nnx.state(model, nnx.Param)
    for path, variable in nnx.to_flat_state(state):
        if path in sources:
            variable.set_value(_stacked(tensors, sources[path], variable.ndim, dtype))
    nnx.update(model, state)


def _stacked(tensors: Tensors, source: list[tuple[str, bool]], ndim: int, dtype) -> jax.Array:
    """One tensor, or those of all layers along a new first axis."""
    arrays = [array.T if transposed else array for name, transposed in source for array in [tensors.read(name)]]
    # Always a copy: what safetensors gives may be the file itself, mapped, which is closed when `load` returns.
    array = np.stack(arrays) if arrays[0].ndim < ndim else np.array(arrays[0])
    return jnp.asarray(array, dtype)  # not `jnp.array`, which compiles a program per shape where dtypes are the same


@dataclass
class _Report:
    """Everything that does not fit between a file and a model."""

    where: Path
    content: Content
    sizes: list[str]
    new: list[Parameter] = field(default_factory=list)  # which the file has not, and which are made
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    no_floats: list[str] = field(default_factory=list)
    ignored: dict[str, list[str]] = field(default_factory=lambda: {k: [] for k in _IGNORED})

    @property
    def parameters_of_new(self) -> int:
        return sum(math.prod(p.shape) for p in self.new)

    def sort_out_unread(self, names: set[str], model: Any, own: tuple[str, ...]) -> None:
        family, task = model.config.family, task_of(model)
        tied = {task.tied, *(task.twin_biases or ())}
        for name in sorted(names):
            plain = name.removeprefix(family.prefix)
            if plain.endswith(family.buffers):
                self.ignored["tables of constants"].append(name)
            elif plain.startswith("pooler."):
                self.ignored["a pooler that this model does not use"].append(name)
            elif name in tied:
                self.ignored["tied to the word embeddings"].append(name)
            elif name.startswith(family.outside):
                self.ignored["of the larger model that this one is a part of"].append(name)
            elif name.startswith(family.unused) or (name.startswith(HEADS) and not name.startswith(own)):
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
                ("Wrong shape", self.misshapen),
                ("Wrong dtype", self.no_floats),
            )
            if lines
        ]
        if problems:
            cure = "Load the directory that belongs to this config.json; for a new head pass `task` and `rngs`."
            changed = self.content.where.removeprefix(str(self.where / "config.json"))  # by `config=`
            raise ValueError(
                f"The tensors in {self.where} do not fit its config.json{changed}.\n" + "\n".join([*problems, cure])
            )
        if self.new:
            names = ", ".join(p.name for p in self.new)
            logger.warning("%s: new, randomly initialised: %s", self.where, names)
        for why, names in self.ignored.items():
            if names:
                logger.log(_IGNORED[why], "%s: ignored %s (%s)", self.where, ", ".join(names), why)


# Why a tensor is left alone, and how loudly to say so.
_IGNORED = {
    "tables of constants": logging.INFO,
    "tied to the word embeddings": logging.INFO,
    "a pooler that this model does not use": logging.INFO,
    "of the larger model that this one is a part of": logging.INFO,
    "another task's head": logging.WARNING,
    "in a shard, but not listed there by the index": logging.WARNING,
}


def _pooler(task: Task, config: Any, tensors: Tensors) -> dict[str, Any]:
    """A pooler if the file has one that Hugging Face's model of this kind keeps."""
    if not task.optional_pooler:
        return {}
    has_one = tensors.find_in_body(body_name("pooler.kernel", config.family)) is not None
    if not has_one:
        logger.info("no pooler in the file: pooler_output will be None")
    return dict(pooler=has_one)


def _untie_if_different(config: Any, task: Task, tensors: Tensors) -> Any:
    """If a file has decoder weights of their own, they count, whatever the config says: as in Hugging Face."""
    word = tensors.find_in_body(config.family.word_embeddings)
    if not config.tie_word_embeddings or task.tied is None or task.tied not in tensors.where or word is None:
        return config
    same = np.array_equal(tensors.read(task.tied), tensors.read(word))
    return config if same else replace(config, tie_word_embeddings=False)


def _task(family: Family, name: str | None, architectures: list[str]) -> Task:
    """The task with this name, or else the one that the config's architectures end like."""
    tasks = {task.model.task: task for task in family.tasks}
    if name is not None:
        check_choice("task", name, tuple(tasks))
        return tasks[name]
    suffixes = {suffix: task for task in family.tasks for suffix in task.model.suffixes}
    found = (task for end in architectures for suffix, task in suffixes.items() if end.endswith(suffix))
    return next(found, family.tasks[0])


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise FileNotFoundError(
            f"{str(path)!r} is not a directory. Longspan does not download: fetch the checkpoint first, for example "
            "with `hf download <name> --local-dir <directory>`."
        )
    if not (path / "config.json").is_file():
        listing = ", ".join(sorted(p.name for p in path.iterdir()))
        raise FileNotFoundError(f"{path} has no config.json. It has: {listing or 'nothing'}.")
    return path
