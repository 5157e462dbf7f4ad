"""`save`: a model becomes a directory that Hugging Face's PyTorch classes load."""

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from longspan.hf.config import to_json
from longspan.hf.names import parameters, prefix, task_of
from longspan.hf.tensors import INDEX, WEIGHTS
from longspan.models import Encoder, Model, QuestionAnswering


def save(model: Encoder | Model, directory: str | os.PathLike) -> None:
    """Writes `config.json` and `model.safetensors`, which `transformers` loads with `from_pretrained(directory)`.

    Both files are complete before either takes its name, and both old ones come back if that fails half-way, so a save
    that is interrupted leaves the last good one; an unchanged config is left alone. (A process that is killed outright
    between the two renames leaves new weights beside the old config; old ones are then in a `.saving-` folder there.)
    Other files in the directory, such as a tokenizer's, stay.

    Args:
        model: an `Encoder` or a model with a head.
        directory: is made if it is not there.

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
    where = Path(directory)
    where.mkdir(parents=True, exist_ok=True)
    files = {
        WEIGHTS: to_bytes(tensors, metadata={"format": "pt"}),
        "config.json": (json.dumps(raw, indent=2, sort_keys=True) + "\n").encode(),
    }
    _replace_all(where, files)
    # An older, sharded save: whoever prefers the index would still read that one.
    (where / INDEX).unlink(missing_ok=True)


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


def _replace_all(where: Path, files: dict[str, bytes]) -> None:
    """All files take their names, or none does."""
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=where) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        old.mkdir()
        for name, content in files.items():
            with open(new / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        changed = [n for n in files if not _same_bytes(where / n, files[n])]
        for name in changed:
            _keep(where / name, old / name)
        try:
            for name in changed:
                os.replace(new / name, where / name)
        except BaseException:
            for name in changed:
                if (old / name).exists():
                    os.replace(old / name, where / name)
                else:
                    (where / name).unlink(missing_ok=True)
            raise


def _same_bytes(path: Path, content: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


def _keep(path: Path, copy: Path) -> None:
    """A second name for a file, or a copy where file systems have no second names."""
    if not path.exists():
        return
    try:
        os.link(path, copy)
    except OSError:
        shutil.copyfile(path, copy)
