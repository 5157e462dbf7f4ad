"""`save`: a model becomes a directory that Hugging Face's PyTorch classes load."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from longspan.hf.config import to_json
from longspan.hf.load import INDEX, WEIGHTS
from longspan.hf.names import FAMILY, TASKS, parameters, prefix
from longspan.models import Encoder, MaskedLM, Model


def save(model: Encoder | Model, directory: str | os.PathLike) -> None:
    """Writes `config.json` and `model.safetensors`, which `transformers` loads with `from_pretrained(directory)`.

    Both files are complete before either takes its name, so a save that is interrupted leaves the last good one. Other
    files in the directory, such as a tokenizer's, stay.

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

    suffix = next(suffix for suffix, kind in TASKS.items() if kind is type(model))
    raw = to_json(model.config, FAMILY[model.config.model_type] + suffix)
    where = Path(directory)
    where.mkdir(parents=True, exist_ok=True)
    files = {
        WEIGHTS: to_bytes(tensors_of(model), metadata={"format": "pt"}),
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
    if isinstance(model, MaskedLM) and model.decoder is not None:
        bias = "cls.predictions.bias" if "cls.predictions.bias" in tensors else "lm_head.bias"
        tensors[bias.replace("bias", "decoder.bias")] = tensors[bias].copy()
    return tensors


def _replace_all(where: Path, files: dict[str, bytes]) -> None:
    written: list[tuple[str, Path]] = []
    try:
        for name, content in files.items():
            handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=where)
            written.append((temporary, where / name))
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
        while written:
            os.replace(*written[0])
            written.pop(0)
    finally:
        for temporary, _ in written:
            Path(temporary).unlink(missing_ok=True)
