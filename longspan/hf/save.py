"""`save`: a model becomes a directory that Hugging Face's PyTorch classes load."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from longspan.hf.beside import files_beside
from longspan.hf.config import has_labels, to_json
from longspan.hf.names import parameters, prefix, task_of
from longspan.hf.replace import replace_all
from longspan.hf.tensors import INDEX, WEIGHTS
from longspan.models import CausalLM, Encoder, Model, QuestionAnswering


def save(
    model: Encoder | Model | CausalLM,
    directory: str | os.PathLike,
    *,
    tokenizer: str | os.PathLike | None = None,
    id2label: Mapping[int, str] | Sequence[str] | None = None,
) -> None:
    """Writes what `transformers` loads with `from_pretrained(directory)`: weights, config, and the tokenizer's files.

    A tokenizer that is there already stays, as all other files do; where there is none, the one of the directory that
    the model was loaded from (`model.source`) is copied, and its generation config; without any, a warning says so.

    All files are complete before one takes its name, and all old ones come back if that fails half-way, so a save that
    is interrupted leaves the last good one, also in the directory that the model was loaded from. (A process that is
    killed outright between two renames leaves new files beside old ones; the old ones of the new are then in a
    `.saving-` folder there, until the next save that succeeds.)

    Args:
        model: an `Encoder`, a model with a head, or a `CausalLM`.
        directory: is made if it is not there.
        tokenizer: a directory whose tokenizer to copy, in place of one that is there.
        id2label: the labels' names, in order or by number; by default those of the config that was loaded.

    Example:
        >>> import os, tempfile
        >>> from flax import nnx
        >>> from longspan import hf, models
        >>> config = models.BertConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     hf.save(models.Encoder(config, rngs=nnx.Rngs(0)), directory)
        ...     sorted(os.listdir(directory))
        ['config.json', 'model.safetensors']
    """
    from safetensors.numpy import save as to_bytes

    config, task = model.config, task_of(model)
    if isinstance(model, QuestionAnswering):  # its two outputs are labels to Hugging Face
        config = dataclasses.replace(config, num_labels=2)
    tensors = tensors_of(model)
    raw = to_json(config, config.family.name + task.model.suffixes[0])
    raw.pop("torch_dtype", None)
    raw["dtype"] = next(iter(tensors.values())).dtype.name
    if id2label is not None:
        if not has_labels(type(config)):
            raise ValueError(f"`id2label` names labels, which a {config.model_type} has none of. Leave it out.")
        raw |= _labels(id2label, config.num_labels)
    where = Path(directory)
    files = {
        WEIGHTS: to_bytes(tensors, metadata={"format": "pt"}),
        "config.json": (json.dumps(raw, indent=2, sort_keys=True) + "\n").encode(),
        # An older, sharded save: whoever prefers the index would still read that one.
        INDEX: None,
        **files_beside(model, where, tokenizer),
    }
    where.mkdir(parents=True, exist_ok=True)
    replace_all(where, files)


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """A model's parameters under Hugging Face's names, laid out as torch does."""
    state = {path: jax.device_get(v[...]) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    tensors = {}
    for p in parameters(model):
        value = state[p.path] if p.layer is None else state[p.path][p.layer]
        # Contiguous, because safetensors writes the memory behind an array, whatever its strides say.
        value = np.ascontiguousarray(value.T if p.transposed else value)
        tensors[p.name if p.in_head else prefix(model) + p.name] = value
    twins = task_of(model).twin_biases
    if twins and not model.config.tie_word_embeddings:
        tensors[twins[1]] = tensors[twins[0]].copy()
    return tensors


def _labels(id2label: Mapping[int, str] | Sequence[str], count: int) -> dict[str, Any]:
    """`id2label` and `label2id`, as a `config.json` has them."""
    named = dict(id2label if isinstance(id2label, Mapping) else enumerate(id2label))
    labels = {int(number): label for number, label in named.items()}
    if set(labels) != set(range(count)) or not all(isinstance(label, str) for label in labels.values()):
        raise ValueError(f"`id2label` must name the {count} labels, 0 to {count - 1}, with strings, got {id2label!r}.")
    if len(set(labels.values())) < count:
        raise ValueError(f"`id2label` must have {count} different names, got {id2label!r}.")
    ordered = sorted(labels.items())
    return dict(id2label={str(i): label for i, label in ordered}, label2id={label: i for i, label in ordered})
