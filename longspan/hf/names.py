"""Hugging Face's names for our parameters."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from flax import nnx

from longspan.models.families import FAMILIES
from longspan.models.family import Family, ParameterNames, Task, hugging_face_name


def heads_of(tasks: Iterable[Task]) -> tuple[str, ...]:
    """The names of these tasks' heads' tensors start with one of these."""
    return tuple({name.partition(".")[0] + "." for task in tasks for _, name in task.names})


HEADS = tuple({head for family in FAMILIES for head in heads_of(family.tasks)})  # of all families


def heads_of_others(family: Family, task: Task) -> tuple[str, ...]:
    """The names of tensors of other tasks' heads start with one of these."""
    others = tuple(other for other in family.tasks if other is not task)
    if not others:
        return ()
    if family.ignored_keys is None:
        return HEADS
    return heads_of(others)


class Parameter(NamedTuple):
    """A tensor of a file: its Hugging Face name, without the body's prefix, and its place in our model."""

    name: str
    path: tuple
    index: tuple[int, ...]  # of the layer and of the expert on the first axes of a stacked parameter
    shape: tuple[int, ...]
    in_head: bool
    transposed: bool  # torch stores the weight of a linear layer as [outputs, inputs]


def task_of(model: Any) -> Task:
    """The task record of a model."""
    family: Family | None = getattr(getattr(model, "config", None), "family", None)
    if family is not None:
        for task in family.tasks:
            if isinstance(model, task.model):
                return task
    names = ", ".join(dict.fromkeys(task.model.__name__ for family in FAMILIES for task in family.tasks))
    raise TypeError(f"Expected a model of longspan.models, one of {names}, got {type(model).__name__}.")


def parameters(model: Any) -> Iterator[Parameter]:
    """All tensors that a file of this model has, layer by layer."""
    family, task = model.config.family, task_of(model)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        ours, layers = family.layers_of(model.config, path)
        in_head = any(ours.startswith(prefix) for prefix, _ in task.names)
        if in_head:
            name = file_name(ours, task.names)
        else:
            name = body_name(ours.removeprefix("encoder."), family)
        for numbered, index in _numbered(name, layers, variable.shape):
            shape = tuple(variable.shape[len(index) :])
            # A kernel with another axis has all experts of a layer, which torch stores as [experts, inputs, outputs].
            transposed = path[-1] == "kernel" and len(shape) == 2
            if transposed:
                shape = shape[::-1]
            yield Parameter(numbered, path, index, shape, in_head, transposed)


def _numbered(name: str, layers: range | None, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name of each layer's tensor and its index; if the name has {expert}, of each expert's tensor."""
    if layers is None:
        yield name, ()
        return
    for index, number in enumerate(layers):
        if "{expert}" not in name:
            yield name.format(number), (index,)
            continue
        for expert in range(shape[1]):
            yield name.format(number, expert=expert), (index, expert)


def body_name(ours: str, family: Family) -> str:
    """The name of a body's parameter, without prefix; {} is the layer's number."""
    return file_name(ours, family.names)


def body_prefix(model: Any) -> str:
    """The prefix of the body's tensors in a file of this model."""
    if not task_of(model).names:
        return ""
    return model.config.family.prefix


def head_prefixes(model: Any) -> tuple[str, ...]:
    """The first parts of the names of this model's head."""
    return tuple({p.name.partition(".")[0] + "." for p in parameters(model) if p.in_head})


def file_name(ours: str, names: ParameterNames) -> str:
    """Hugging Face's name of one of our parameters."""
    return re.sub(r"(^|\.)(kernel|scale|embedding)$", r"\1weight", hugging_face_name(ours, names))
