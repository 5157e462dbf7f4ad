"""`CheckpointTensors`: the tensors of a checkpoint's files, which are read one at a time."""

import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.hf.config import read_object
from longspan.hf.names import Parameter
from longspan.models.families import FAMILIES
from longspan.models.family import Task

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BODY_PREFIXES = sorted({prefix for family in FAMILIES for prefix in (family.prefix, *family.other_prefixes)})
HEAD_PREFIXES = sorted({"", *(family.other_head_prefix for family in FAMILIES)})
DTYPES = ("F64", "F32", "BF16", "F16")  # safetensors' names for the dtypes that parameters may have


@dataclass
class CheckpointTensors:
    """The tensors of all safetensors files of a checkpoint."""

    where: dict[str, Any]  # name -> the open file with the tensor
    old_names: dict[str, str]  # name -> the name in the file
    file_of: dict[str, str]  # name -> the name of that file
    unlisted: list[str]  # tensors of the files that the index does not list

    @classmethod
    def open(cls, directory: Path, stack: ExitStack) -> "CheckpointTensors":
        """The tensors of the single file, or those that the index lists, each from its listed file."""
        if (directory / WEIGHTS).is_file():
            file = open_safetensors(directory / WEIGHTS, stack)
            where, old = _renamed(directory / WEIGHTS, dict.fromkeys(file.keys(), file))
            return cls(where, old, dict.fromkeys(where, WEIGHTS), [])
        if not (directory / INDEX).is_file():
            _raise_no_weights(directory)
        listed = _weight_map(directory)
        files = {name: open_safetensors(directory / name, stack) for name in sorted(set(listed.values()))}
        names_in = {name: set(file.keys()) for name, file in files.items()}
        absent = [f"{tensor} ({name})" for tensor, name in listed.items() if tensor not in names_in[name]]
        if absent:
            raise ValueError(
                f"{directory / INDEX} lists tensors that their files do not contain: {', '.join(sorted(absent))}. "
                "Download or save the checkpoint again."
            )
        unlisted = sorted(f"{tensor} ({n})" for n in names_in for tensor in names_in[n] if listed.get(tensor) != n)
        tensors = {tensor: files[name] for tensor, name in listed.items()}
        where, old = _renamed(directory / INDEX, tensors)
        return cls(where, old, {name: listed[before] for name, before in old.items()}, unlisted)

    def find(self, p: Parameter, task: Task) -> str | None:
        """A parameter's name in the file; None if the file lacks it."""
        if not p.in_head:
            return self.find_in_body(p.name)
        names = [p.name]
        if task.twin_biases and p.name in task.twin_biases:
            # Hugging Face adds the decoder's bias, the second, to the logits. The first is the same tensor or unused.
            names = list(reversed(task.twin_biases))
        return next((found for found in map(self.find_in_head, names) if found is not None), None)

    def find_in_head(self, name: str) -> str | None:
        """The name in the file of a head's tensor, with or without a prefix; None if the file lacks it."""
        return next((prefix + name for prefix in HEAD_PREFIXES if prefix + name in self.where), None)

    def find_in_body(self, name: str) -> str | None:
        """The name in the file of a body's tensor, with or without a prefix; None if the file lacks it."""
        return next((n for n in [*(p + name for p in BODY_PREFIXES), name] if n in self.where), None)

    def without_prefix(self, name: str) -> str:
        """A name in the file without the prefix of a body."""
        longest_first = sorted(BODY_PREFIXES, key=len, reverse=True)
        return next((name.removeprefix(p) for p in longest_first if name.startswith(p)), name)

    @property
    def files(self) -> str:
        """The file that lists all tensors, for messages."""
        if set(self.file_of.values()) <= {WEIGHTS}:
            return WEIGHTS
        return INDEX

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype_name(self, name: str) -> str:
        """Safetensors' name of the dtype."""
        return self._slice(name).get_dtype()

    def read(self, name: str) -> np.ndarray:
        return self.where[name].get_tensor(self.old_names[name])

    def dtype_of(self, name: str):
        """The dtype of a body's tensor; float32 if it is missing or is not of floats."""
        found = self.find_in_body(name)
        if found is None or self.dtype_name(found) not in DTYPES:
            return jnp.dtype(jnp.float32)
        return jax.dtypes.canonicalize_dtype(self.read(found).dtype)

    def _slice(self, name: str) -> Any:
        return self.where[name].get_slice(self.old_names[name])


def open_safetensors(path: Path, stack: ExitStack) -> Any:
    """An open safetensors file, which `stack` closes."""
    from safetensors import SafetensorError, safe_open

    try:
        return stack.enter_context(safe_open(path, framework="np"))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error}). Download or save it again.") from error


def _renamed(path: Path, tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors under today's names, and the name of each in the file.

    The oldest checkpoints have TensorFlow's names for the parameters of layer norms.
    """
    where, old = {}, {}
    for name, file in tensors.items():
        new = re.sub(r"(LayerNorm|layer_norm)\.gamma$", r"\1.weight", name)
        new = re.sub(r"(LayerNorm|layer_norm)\.beta$", r"\1.bias", new)
        if new in where:
            raise ValueError(f"{path} has both {old[new]} and {name}, two names of one parameter. Remove one of them.")
        where[new], old[new] = file, name
    return where, old


def _weight_map(directory: Path) -> dict[str, str]:
    """The file of each tensor in the index. Raises unless all are existing files of this directory."""
    path = directory / INDEX
    listed = read_object(path).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(
            f"{path} must have a `weight_map`, an object that maps tensor names to file names, got {listed!r:.200}."
        )
    names = sorted(set(listed.values()))
    outside = [name for name in names if not _is_inside(name)]
    if outside:
        raise ValueError(
            f"{path} lists files outside of its directory: {', '.join(map(repr, outside))}. Longspan reads only files "
            "next to the index. Copy them there, and list them by their names."
        )
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{path} lists files that do not exist: {', '.join(absent)}. Download or save the checkpoint again."
        )
    return listed


def _is_inside(name: str) -> bool:
    """Whether a path stays inside the directory, on any system. Links may lead out, as in Hugging Face's cache."""
    return not any(
        path.is_absolute() or path.drive or path.root or ".." in path.parts
        for path in (PurePosixPath(name), PureWindowsPath(name))
    )


def _raise_no_weights(directory: Path) -> None:
    """Raises an error that lists the files of a directory without safetensors."""
    listing = sorted(p.name for p in directory.iterdir())
    pickles = [name for name in listing if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if pickles:
        raise ValueError(
            f"{directory} has {', '.join(pickles)}, a pickle. Longspan does not read pickles, because loading one can "
            f"run arbitrary code. Convert it once where torch is installed:\n{_CONVERT}"
        )
    raise FileNotFoundError(
        f"{directory} has neither {WEIGHTS} nor {INDEX}. It contains: {', '.join(listing) or 'nothing'}."
    )


_CONVERT = """\
import torch
from safetensors.torch import save_file

tensors = torch.load("pytorch_model.bin", map_location="cpu", weights_only=True)
tensors = {name: t.clone().contiguous() for name, t in tensors.items()}
save_file(tensors, "model.safetensors", metadata={"format": "pt"})"""
