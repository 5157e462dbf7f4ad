"""`load`: a checkpoint directory becomes a model, or one error that says everything that is wrong with it."""

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from longspan._checks import FLOATS, check_choice
from longspan.hf.config import read_config
from longspan.hf.names import HEADS, body_name, head_prefixes, parameters, task_of
from longspan.hf.tensors import KINDS, Tensors
from longspan.models import CausalLM, Encoder, Model
from longspan.models._family import Family, Task
from longspan.models.encoders.bigbird import RANDOM_BLOCKS

logger = logging.getLogger("longspan.hf")


def load(
    directory: str | os.PathLike,
    *,
    dtype=None,
    random_blocks: str = "trained",
    task: str | None = None,
    num_labels: int | None = None,
    rngs: nnx.Rngs | None = None,
) -> Encoder | Model | CausalLM:
    """The model in a directory that Hugging Face's `save_pretrained` or `save` wrote, of a family in `longspan.models`.

    What the file holds besides (tables of positions, another task's head, an unused pooler) is ignored, and the logger
    "longspan.hf" says so. Anything missing, unexpected or of the wrong shape is one ValueError that lists it all. The
    model remembers the directory (`model.source`), where `save` finds its tokenizer.

    Args:
        directory: with a `config.json`, and a `model.safetensors` or its shards and their index.
        dtype: of the parameters and of the computation; by default the one in the file, but
            float32 for a decoder on a CPU, where matrices of 16 bits are read more slowly.
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
        >>> model(jnp.ones((1, 5), int)).pooler_output.shape
        (1, 6)
    """
    check_choice("random_blocks", random_blocks, RANDOM_BLOCKS)
    if dtype is not None:
        check_choice("dtype", jnp.dtype(dtype).name, FLOATS)
    where = _directory(Path(directory))
    labels = {} if num_labels is None else dict(num_labels=num_labels)
    config, architectures = read_config(where, random_blocks=random_blocks, **labels)
    family = config.family
    chosen = _task(family, task, architectures)
    with ExitStack() as stack:
        tensors = Tensors.open(where, stack)
        _check_depth(config, tensors, where)
        config = _untie_if_different(config, chosen, tensors)
        dtype = _default_dtype(family, tensors) if dtype is None else jnp.dtype(dtype)
        options = dict(_pooler(chosen, config, tensors), dtype=dtype, param_dtype=dtype)
        # Without values until it is known to fit, and to the end if the file has all of them.
        model = nnx.eval_shape(lambda: chosen.model(config, **options, rngs=nnx.Rngs(0)))
        sources = _sources(model, tensors, where, new_head=rngs is not None)
        if rngs is not None:
            model = chosen.model(config, **options, rngs=rngs)
        _fill(model, tensors, sources, dtype)
    model.set_attributes(source=str(where.resolve()))
    return model


def _default_dtype(family: Family, tensors: Tensors) -> Any:
    if family.float32_on_cpu and jax.default_backend() == "cpu":
        return jnp.dtype(jnp.float32)
    return tensors.dtype_of(family.word_embeddings)


def _check_depth(config: Any, tensors: Tensors, where: Path) -> None:
    """Refuses more layers than there are tensors before anything is made for each of them."""
    if config.num_hidden_layers > len(tensors.where):
        raise ValueError(
            f"{where / 'config.json'} has num_hidden_layers={config.num_hidden_layers}, but there are only "
            f"{len(tensors.where)} tensors in {where}. Load the directory that belongs to this config.json."
        )


_Sources: TypeAlias = dict[tuple, list[tuple[str, bool]]]  # path -> the names of all layers, and whether transposed


def _sources(model: Any, tensors: Tensors, where: Path, *, new_head: bool) -> _Sources:
    """Where each parameter comes from, after a report of all that does not fit."""
    report, wanted, task = _Report(where), list(parameters(model)), task_of(model)
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
            report.ignored["no such head in the file, so it is new"].append(p.name)
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
    return jnp.array(np.stack(arrays) if arrays[0].ndim < ndim else arrays[0], dtype)


@dataclass
class _Report:
    """Everything that does not fit between a file and a model."""

    where: Path
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    no_floats: list[str] = field(default_factory=list)
    ignored: dict[str, list[str]] = field(default_factory=lambda: {k: [] for k in _IGNORED})

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
                ("Missing", self.missing),
                ("Unexpected", self.unexpected),
                ("Wrong shape", self.misshapen),
                ("Wrong dtype", self.no_floats),
            )
            if lines
        ]
        if problems:
            cure = "Load the directory that belongs to this config.json; for a new head pass `task` and `rngs`."
            raise ValueError(
                f"The tensors in {self.where} do not fit its config.json.\n" + "\n".join([*problems, cure])
            )
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
    "no such head in the file, so it is new": logging.WARNING,
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
