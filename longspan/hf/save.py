"""`save`: writes a model as a directory that Hugging Face's PyTorch classes load."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from longspan.hf.config import has_labels, to_json
from longspan.hf.embedder_files import module_files, tokenizer_files
from longspan.hf.names import body_prefix, parameters, task_of
from longspan.hf.replace import replace_all
from longspan.hf.tensors import INDEX, WEIGHTS
from longspan.hf.tokenizer_files import files_to_write
from longspan.models import CausalLM, Embedder, Encoder, Model, QuestionAnswering


def save(
    model: Encoder | Model | CausalLM | Embedder,
    directory: str | os.PathLike,
    *,
    tokenizer: str | os.PathLike | None = None,
    id2label: Mapping[int, str] | Sequence[str] | None = None,
) -> None:
    """Writes a checkpoint for `from_pretrained(directory)` of `transformers`: weights, config and tokenizer files.

    Of an `Embedder`, it writes a directory for sentence-transformers, with the files of its modules and its tokenizer.

    An existing tokenizer in the directory is kept, like all other files. If there is none, the tokenizer and the
    generation config are copied from the directory that the model was loaded from (`model.source`). If that has none
    either, `save` warns.

    All files are written completely before the first one is renamed, and a failure restores the old ones. So an
    interrupted save leaves the previous checkpoint, also in the directory that the model was loaded from. (A process
    that is killed between two renames leaves a mixture of new and old files. The old versions of the new files are
    then in a `.saving-` folder there, until the next successful save.)

    Args:
        model: an `Encoder`, a model with a head, a `CausalLM`, or an `Embedder`.
        directory: the directory to write to; it is created if necessary.
        tokenizer: a directory whose tokenizer is copied and replaces an existing one.
        id2label: the names of the labels, in order or by number; by default those of the loaded config.

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
    where = Path(directory)
    if isinstance(model, Embedder):
        files = _model_files(model.model, id2label)
        files |= tokenizer_files(model, where, tokenizer) | module_files(model)
    else:
        files = _model_files(model, id2label) | files_to_write(model, where, tokenizer)
    where.mkdir(parents=True, exist_ok=True)
    replace_all(where, files)


def _model_files(
    model: Encoder | Model | CausalLM, id2label: Mapping[int, str] | Sequence[str] | None
) -> dict[str, bytes | None]:
    """The weights and the config of a model; None: a file to remove."""
    from safetensors.numpy import save as to_bytes

    config, task = model.config, task_of(model)
    if isinstance(model, QuestionAnswering):  # in Hugging Face its two outputs are labels
        config = dataclasses.replace(config, num_labels=2)
    tensors = tensors_of(model)
    raw = to_json(config, config.family.name + task.model.suffixes[0])
    raw.pop("torch_dtype", None)
    raw["dtype"] = next(iter(tensors.values())).dtype.name
    if id2label is not None:
        if not has_labels(type(config)):
            raise ValueError(f"`id2label` was given, but a {config.model_type} has no labels. Leave `id2label` out.")
        raw |= _labels(id2label, config.num_labels)
    return {
        WEIGHTS: to_bytes(tensors, metadata={"format": "pt"}),
        "config.json": (json.dumps(raw, indent=2, sort_keys=True) + "\n").encode(),
        # The index of an older, sharded save is removed: some loaders would still prefer it.
        INDEX: None,
    }


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """A model's parameters under Hugging Face's names, in torch's layout."""
    state = {path: jax.device_get(v[...]) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    tensors, prefix = {}, body_prefix(model)
    for p in parameters(model):
        value = state[p.path][p.index]
        if p.transposed:
            value = value.T
        name = p.name if p.in_head else prefix + p.name
        # Contiguous, because safetensors writes the memory of an array without regard to its strides.
        tensors[name] = np.ascontiguousarray(value)
    twins = task_of(model).twin_biases
    if twins and not model.config.tie_word_embeddings:
        tensors[twins[1]] = tensors[twins[0]].copy()
    return tensors


def _labels(id2label: Mapping[int, str] | Sequence[str], count: int) -> dict[str, Any]:
    """`id2label` and `label2id`, as a `config.json` has them."""
    named = id2label if isinstance(id2label, Mapping) else dict(enumerate(id2label))
    labels = {int(number): label for number, label in named.items()}
    if set(labels) != set(range(count)) or not all(isinstance(label, str) for label in labels.values()):
        raise ValueError(
            f"`id2label` must have a string for each of the {count} labels, 0 to {count - 1}, got {id2label!r}."
        )
    if len(set(labels.values())) < count:
        raise ValueError(f"`id2label` must have {count} different names, got {id2label!r}.")
    ordered = sorted(labels.items())
    return dict(id2label={str(i): label for i, label in ordered}, label2id={label: i for i, label in ordered})
