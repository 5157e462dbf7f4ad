"""Compares the sizes in a `config.json` with the tensors of a checkpoint, before a model is made.

A config may contain any number: 2·10⁹ layers, heads of 10⁹ features. Safetensors headers have the shapes of all
tensors, so a wrong number is found without reading a value or allocating an array.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from longspan.hf.config import ConfigContent, has_labels, number_of_labels
from longspan.hf.names import file_name
from longspan.hf.tensors import CheckpointTensors
from longspan.models.family import Task, TensorSize
from longspan.models.fields import is_count


class SizeMismatch(NamedTuple):
    """A size in the config that differs from the tensors."""

    line: str  # the numbers in the config and in the file, for messages
    too_large: bool  # whether a model with this size must not be made: it is larger than anything in the files


def find_mismatches(
    content: ConfigContent, task: Task, tensors: CheckpointTensors, num_labels: int | None
) -> list[SizeMismatch]:
    """The sizes that differ from the tensors. Values that are not valid sizes are left to the config's checks."""
    values = _sizes_in_config(content)
    found = [_compare_layers(values, content, tensors)]
    longest = max((max(tensors.shape(name), default=0) for name in tensors.where), default=0)
    for size in content.family.sizes:
        name = _tensor_of(size, content, tensors)
        if name is not None or not size.optional:
            found.append(_compare_axis(size, name, values, tensors, longest))
    labels = _label_size(content, task, tensors, num_labels)
    if labels is not None:
        size, counts = labels
        found.append(_compare_axis(size, size.tensor, counts, tensors, longest))
    return [mismatch for mismatch in found if mismatch is not None]


def refuse_too_large(content: ConfigContent, mismatches: list[SizeMismatch], where: Any) -> None:
    """Raises if a size is larger than anything in the files."""
    if any(mismatch.too_large for mismatch in mismatches):
        lines = "\n  ".join(mismatch.line for mismatch in mismatches)
        raise ValueError(
            f"{content.where} does not fit the tensors in {where}:\n  {lines}\n"
            "Load the directory that belongs to this config.json, or correct these numbers."
        )


def _sizes_in_config(content: ConfigContent) -> dict[str, int]:
    """The values of a content that are valid sizes, including Hugging Face's defaults."""
    config = content.family.config
    defaults = {f.name: f.default for f in fields(config) if f.metadata.get("in_json", True)}
    values = {**defaults, **{key: value for key, value in content.complete.items() if value is not None}}
    return {key: value for key, value in values.items() if is_count(value)}


def _compare_layers(
    values: Mapping[str, int], content: ConfigContent, tensors: CheckpointTensors
) -> SizeMismatch | None:
    count, numbers = values.get("num_hidden_layers"), _layer_numbers(content, tensors)
    if count is None or count == len(numbers):
        return None
    line = f"num_hidden_layers={count}, but {tensors.files} has the tensors of {len(numbers)} layers"
    return SizeMismatch(line, too_large=count > len(tensors.where))


def _layer_numbers(content: ConfigContent, tensors: CheckpointTensors) -> set[str]:
    """The numbers of the layers that have tensors in the files."""
    layer_prefix = re.escape(content.family.layers).replace(r"\{\}", r"(\d+)")
    matches = [re.match(layer_prefix, tensors.without_prefix(name)) for name in tensors.where]
    return {match[1] for match in matches if match}


def _tensor_of(size: TensorSize, content: ConfigContent, tensors: CheckpointTensors) -> str | None:
    """The name in the file of the tensor to compare; None if the file lacks it."""
    if "{}" not in size.tensor:
        return tensors.find_in_body(size.tensor)
    numbers = sorted(_layer_numbers(content, tensors), key=lambda number: (len(number), number))
    names = (tensors.find_in_body(size.tensor.format(number)) for number in numbers)
    return next((name for name in names if name is not None), None)


def _compare_axis(
    size: TensorSize, name: str | None, values: Mapping[str, int], tensors: CheckpointTensors, longest: int
) -> SizeMismatch | None:
    if not all(key in values for key in size.keys):
        return None
    given = " and ".join(f"{key}={values[key]}" for key in size.keys)
    length = math.prod(values[key] for key in size.keys)
    shape = () if name is None else tensors.shape(name)
    if name is None or size.axis >= len(shape):  # reported elsewhere as missing, or as of the wrong shape
        if length <= longest:
            return None
        line = f"{given}, but the longest axis of all tensors in {tensors.files} is {longest}"
        return SizeMismatch(line, too_large=True)
    if shape[size.axis] == length:
        return None
    if len(size.keys) > 1:
        given += f", so axis {size.axis} of {name} must be {length}"
    line = f"{given}, but {name} in {tensors.file_of[name]} is {list(shape)}"
    return SizeMismatch(line, too_large=length > longest)


def _label_size(
    content: ConfigContent, task: Task, tensors: CheckpointTensors, num_labels: int | None
) -> tuple[TensorSize, dict[str, int]] | None:
    """The output axis of a classification head that the file has, and the number of labels."""
    if not has_labels(content.family.config) or not any(ours == "classifier." for ours, _ in task.names):
        return None
    name = file_name("classifier.kernel", task.names)
    count: Any = num_labels
    if count is None:
        count = number_of_labels(content.raw, content.where)
    if name not in tensors.where or not is_count(count):
        return None
    return TensorSize(("num_labels",), name, 0), dict(num_labels=count)


def refuse_large_heads(content: ConfigContent, new: int, tensors: CheckpointTensors) -> None:
    """Raises if a new head would have more parameters than the whole file, because of the config's labels."""
    in_file = sum(math.prod(tensors.shape(name)) for name in tensors.where)
    if new > in_file:
        count = number_of_labels(content.raw, content.where)
        raise ValueError(
            f"{content.where} has num_labels={count}. The new head would have {new} parameters, more than the "
            f"{in_file} of all tensors in {tensors.files}. Pass `num_labels=` to `hf.load`, or correct the number of "
            "labels in the config."
        )
