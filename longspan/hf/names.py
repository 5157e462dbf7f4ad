"""What Hugging Face calls our parameters, and what its files hold besides."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from flax import nnx

from longspan.models.families import FAMILIES
from longspan.models.family import Family, Names, Task, theirs

# Names that start like this belong to a head.
HEADS = tuple({name.partition(".")[0] + "." for f in FAMILIES for task in f.tasks for _, name in task.names})


class Parameter(NamedTuple):
    """A tensor of a file: its Hugging Face name (for the body's without prefix) and where it lives in our model."""

    name: str
    path: tuple
    layer: int | None  # its place on the first axis of a parameter that all layers share
    shape: tuple[int, ...]
    in_head: bool
    transposed: bool  # torch keeps a linear layer's weight as [outputs, inputs]


def task_of(model: Any) -> Task:
    """The task of its family that a model, or what it is made from, is for."""
    family: Family | None = getattr(getattr(model, "config", None), "family", None)
    for task in family.tasks if family else ():
        if isinstance(model, task.model):
            return task
    known = ", ".join(dict.fromkeys(task.model.__name__ for family in FAMILIES for task in family.tasks))
    raise TypeError(f"Expected one of longspan.models' {known}, got {type(model).__name__}.")


def parameters(model: Any) -> Iterator[Parameter]:
    """All tensors that a file of this model has, layer by layer."""
    family, task = model.config.family, task_of(model)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        (ours, layers), transposed = family.layers_of(model.config, path), path[-1] == "kernel"
        in_head = any(ours.startswith(start) for start, _ in task.names)
        shape = tuple(variable.shape) if layers is None else tuple(variable.shape)[1:]
        shape = shape[::-1] if transposed else shape
        name = file_name(ours, task.names) if in_head else body_name(ours.removeprefix("encoder."), family)
        for index, number in enumerate([None] if layers is None else layers):
            layer = None if layers is None else index
            yield Parameter(name.format(number), path, layer, shape, in_head, transposed)


def body_name(ours: str, family: Family) -> str:
    """The name of one of the body's parameters, without prefix; {} is the number of its layer."""
    return file_name(ours, family.names)


def prefix(model: Any) -> str:
    """What the body's names begin with in a file of this model."""
    return model.config.family.prefix if task_of(model).names else ""


def head_prefixes(model: Any) -> tuple[str, ...]:
    """What the names of this model's own head begin with."""
    return tuple({p.name.partition(".")[0] + "." for p in parameters(model) if p.in_head})


def file_name(ours: str, names: Names) -> str:
    """Hugging Face's name of one of our parameters."""
    return re.sub(r"(^|\.)(kernel|scale|embedding)$", r"\1weight", theirs(ours, names))
