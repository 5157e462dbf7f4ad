"""What a model family answers for itself: its config, its tasks, and what Hugging Face calls all of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

# What our name of a parameter begins with, and what Hugging Face's does, {} being the number of a layer. The first that
# fits counts.
Names: TypeAlias = tuple[tuple[str, str], ...]


def theirs(ours: str, names: Names) -> str:
    """Hugging Face's name for a parameter, with a {} for the number of its layer."""
    for start, other in names:
        if ours.startswith(start):
            return other + ours.removeprefix(start)
    raise AssertionError(f"no Hugging Face name for {ours}")


@dataclass(frozen=True, eq=False)
class Task:
    """One of a family's models, as its files hold it."""

    model: type[Any]  # whose `task` is its name in `hf.load`, and whose `suffixes` end Hugging Face's names for it
    names: Names = ()  # of the head's parameters; the body's are the family's
    optional_pooler: bool = False  # whether Hugging Face's model has a pooler that a file may leave out
    tied: str | None = None  # the tensor that is the word embeddings, unless a file says otherwise
    twin_biases: tuple[str, str] | None = None  # two names of one tensor; where files have both, the second counts


class Size(NamedTuple):
    """An axis of one of the body's tensors, whose length is the product of some numbers in `config.json`."""

    keys: tuple[str, ...]
    tensor: str
    axis: int


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


def _replaced(raw: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {**raw, **overrides}


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A family of models: what reading and writing its checkpoints takes."""

    config: type[Any]
    name: str  # of Hugging Face's classes: this, and a suffix of the task
    prefix: str  # of the body's tensors in a model with a head
    other_prefixes: tuple[str, ...] = ()  # that they have in files of larger models
    # The larger models that hold one of these, by their `model_type`: where in their `config.json` its config is.
    inside: Mapping[str, str] = field(default_factory=dict)
    outside: tuple[str, ...] = ()  # what the names of the larger models' other tensors begin with
    names: Names  # of the body's parameters
    word_embeddings: str  # the tensor that is tied to a head, and whose dtype is the file's
    tasks: tuple[Task, ...]  # the first is the one for a config that names none
    buffers: tuple[str, ...] = ()  # tables of constants that older versions saved with the parameters
    unused: tuple[str, ...] = ()  # what the names of heads that no task has begin with
    # Where a `config.json` leaves a number out, it means Hugging Face's default, which is not always the base model's.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Keys of a `config.json` that are no fields of ours; `read` makes fields of them, given the file's content (with
    # defaults) and its name, and raises for what the family cannot do; `write` makes them of a config.
    spelled_otherwise: tuple[str, ...] = ()
    read: Callable[[Mapping[str, Any], str], dict[str, Any]] = _nothing
    write: Callable[[Any], dict[str, Any]] = _nothing
    # A file's content with keys that a caller of `hf.load` overrides, the last argument being the name for messages.
    override: Callable[[Mapping[str, Any], Mapping[str, Any], str], dict[str, Any]] = _replaced
    layers: str  # what the names of a layer's tensors begin with, {} being its number
    sizes: tuple[Size, ...]  # what is compared with a file's tensors before anything is made of a config
    extendable: bool = False  # whether `hf.extend` makes a Longformer of it
    float32_on_cpu: bool = False  # whether that is its dtype there unless a caller names another; else the file's

    @property
    def model_type(self) -> str:
        return self.config.model_type

    def layers_of(self, config: Any, path: tuple) -> tuple[str, range | None]:
        """Our name of a parameter, and the numbers of the layers on its first axis; None if it is no layer's."""
        layers = range(config.num_hidden_layers) if "layers" in path else None
        return ".".join(map(str, path)), layers
