"""The sizes in a `config.json` against the tensors of its files, before anything is made of either.

A config may say anything: 2·10⁹ layers, heads of 10⁹ features. Safetensors headers have the shapes of all tensors, so
that a wrong number is found without a value being read or an array being made.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from longspan.hf.config import Content, has_labels, number_of_labels
from longspan.hf.names import file_name
from longspan.hf.tensors import Tensors
from longspan.models.family import Size, Task
from longspan.models.fields import is_count


class Wrong(NamedTuple):
    """A size that is not the file's."""

    line: str  # what the config says, and what the file has
    too_large: bool  # whether nothing may be made of it


def wrong_sizes(content: Content, task: Task, tensors: Tensors, num_labels: int | None) -> list[Wrong]:
    """The sizes that are not those of the tensors; numbers that are no sizes are left to the config's own checks."""
    values = _numbers(content)
    found = [_layers(values, content, tensors)]
    longest = max((max(tensors.shape(name), default=0) for name in tensors.where), default=0)
    for size in content.family.sizes:
        found.append(_axis(size, tensors.find_in_body(size.tensor), values, tensors, longest))
    labels = _labels(content, task, tensors, num_labels)
    if labels is not None:
        size, counts = labels
        found.append(_axis(size, size.tensor, counts, tensors, longest))
    return [wrong for wrong in found if wrong is not None]


def refuse_too_large(content: Content, wrong: list[Wrong], where: Any) -> None:
    """Raises if a size is larger than anything in the files."""
    if any(one.too_large for one in wrong):
        lines = "\n  ".join(one.line for one in wrong)
        raise ValueError(
            f"{content.where} does not fit the tensors in {where}:\n  {lines}\n"
            "Load the directory that belongs to this config.json, or correct these numbers."
        )


def _numbers(content: Content) -> dict[str, int]:
    """The numbers of a content that are sizes, Hugging Face's defaults among them."""
    config = content.family.config
    defaults = {f.name: f.default for f in fields(config)}
    values = {**defaults, **{key: value for key, value in content.complete.items() if value is not None}}
    return {key: value for key, value in values.items() if is_count(value)}


def _layers(values: Mapping[str, int], content: Content, tensors: Tensors) -> Wrong | None:
    said, start = values.get("num_hidden_layers"), re.escape(content.family.layers).replace(r"\{\}", r"(\d+)")
    numbers = {match[1] for name in tensors.where for match in [re.match(start, tensors.without_prefix(name))] if match}
    if said is None or said == len(numbers):
        return None
    line = f"num_hidden_layers={said}, but {tensors.files} has the tensors of {len(numbers)} layers"
    return Wrong(line, too_large=said > len(tensors.where))


def _axis(size: Size, name: str | None, values: Mapping[str, int], tensors: Tensors, longest: int) -> Wrong | None:
    if not all(key in values for key in size.keys):
        return None
    said = " and ".join(f"{key}={values[key]}" for key in size.keys)
    length = math.prod(values[key] for key in size.keys)
    shape = () if name is None else tensors.shape(name)
    if name is None or size.axis >= len(shape):  # which is reported as missing, or as of the wrong shape
        line = f"{said}, but the longest axis of all tensors in {tensors.files} is {longest}"
        return Wrong(line, too_large=True) if length > longest else None
    if shape[size.axis] == length:
        return None
    product = "" if len(size.keys) == 1 else f", so axis {size.axis} of {name} must be {length}"
    line = f"{said}{product}, but {name} in {tensors.file_of[name]} is {list(shape)}"
    return Wrong(line, too_large=length > longest)


def _labels(content: Content, task: Task, tensors: Tensors, given: int | None) -> tuple[Size, dict[str, int]] | None:
    """The labels of a head that the file has: the tensor of its outputs, and their number."""
    if not has_labels(content.family.config) or not any(ours == "classifier." for ours, _ in task.names):
        return None
    name = file_name("classifier.kernel", task.names)
    count = number_of_labels(content.raw, content.where) if given is None else given
    if name not in tensors.where or not is_count(count):
        return None
    return Size(("num_labels",), name, 0), {"num_labels": count}


def refuse_large_heads(content: Content, new: int, tensors: Tensors) -> None:
    """Raises if a new head would have more parameters than the whole file, by the config's number of labels."""
    held = sum(math.prod(tensors.shape(name)) for name in tensors.where)
    if new > held:
        count = number_of_labels(content.raw, content.where)
        raise ValueError(
            f"{content.where} has num_labels={count}: the new head would have {new} parameters, and {tensors.files} "
            f"has {held}. Pass `num_labels=` to `hf.load`, or correct the number."
        )
