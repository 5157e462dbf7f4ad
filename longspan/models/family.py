"""`Family`: the record of a model family, with its config, its tasks and Hugging Face's names for both."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

# Pairs of prefixes: of our name for a parameter, and of Hugging Face's, where {} is the layer's number and {expert} the
# expert's. The first pair that matches is used.
ParameterNames: TypeAlias = tuple[tuple[str, str], ...]


def hugging_face_name(ours: str, names: ParameterNames) -> str:
    """Hugging Face's name for a parameter; {} stands for the layer's number."""
    for our_prefix, their_prefix in names:
        if ours.startswith(our_prefix):
            return their_prefix + ours.removeprefix(our_prefix)
    raise AssertionError(f"no Hugging Face name for {ours}")


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a family, and how its checkpoints store it."""

    model: type[Any]  # its `task` is the name in `hf.load`; its `suffixes` end Hugging Face's class names
    names: ParameterNames = ()  # of the head's parameters; `Family.names` has the body's
    optional_pooler: bool = False  # whether the model has a pooler that a file may omit
    tied: str | None = None  # the tensor that equals the word embeddings unless a file has another one
    twin_biases: tuple[str, str] | None = None  # two names of one tensor; if a file has both, the second is used


class TensorSize(NamedTuple):
    """One axis of a body's tensor: its length is the product of some numbers in `config.json`."""

    keys: tuple[str, ...]
    tensor: str  # with {} for the layer's number: the tensor of the first layer that has one
    axis: int
    optional: bool = False  # whether a file may lack the tensor, because no layer uses these numbers


def _no_fields(*_: Any) -> dict[str, Any]:
    return {}


def _override(raw: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {**raw, **overrides}


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A model family: everything that `hf.load` and `hf.save` need for its checkpoints."""

    config: type[Any]
    name: str  # Hugging Face's class names start with it and end with a suffix of the task
    prefix: str  # of the body's tensors in a model with a head
    other_prefixes: tuple[str, ...] = ()  # of the body's tensors in files of larger models
    other_head_prefix: str = ""  # of the head's tensors there
    # The larger models that contain this one, by `model_type`: the key of this model's config in their `config.json`.
    # If that config has no `model_type`, it is of the first family that is listed with this larger model.
    inside: Mapping[str, str] = field(default_factory=dict)
    outside: tuple[str, ...] = ()  # prefixes of the larger models' other tensors
    names: ParameterNames  # of the body's parameters
    word_embeddings: str  # the tensor that a head may be tied to; its dtype is the file's
    tasks: tuple[Task, ...]  # the first is used if a config names none
    buffers: tuple[str, ...] = ()  # tables of constants that older versions saved with the parameters
    unused: tuple[str, ...] = ()  # prefixes of heads that no task has
    # Hugging Face's defaults for keys that a `config.json` omits, where they differ from the defaults of our config.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Keys of a `config.json` that our config does not have as fields. `read(content, where)` turns them into fields and
    # raises for values that the family does not support; `write(config)` turns fields into these keys.
    renamed_keys: tuple[str, ...] = ()
    # Keys of other repositories' `config.json` files, and the keys of Hugging Face that mean the same.
    other_spellings: Mapping[str, str] = field(default_factory=dict)
    # Keys of a `config.json` that change nothing here and that `save` writes back. Other unknown keys are errors. None:
    # every unknown key is written back.
    ignored_keys: frozenset[str] | None = None
    rope_keys: tuple[str, ...] = ()  # keys of rotary parameters that only this family reads
    read: Callable[[Mapping[str, Any], str], dict[str, Any]] = _no_fields
    write: Callable[[Any], dict[str, Any]] = _no_fields
    # override(content, overrides, where): a file's content with the keys that a caller of `hf.load` overrides.
    override: Callable[[Mapping[str, Any], Mapping[str, Any], str], dict[str, Any]] = _override
    # A flag of `config.json` and its value here, if another family has the same `model_type` and the other value.
    variant: tuple[str, bool] | None = None
    layers: str  # prefix of a layer's tensors, {} is the layer's number
    sizes: tuple[TensorSize, ...]  # compared with a file's tensors before a model is made from the config
    extendable: bool = False  # whether `hf.extend` can turn it into a Longformer
    float32_on_cpu: bool = False  # the default dtype on CPUs is float32; otherwise it is the file's

    @property
    def model_type(self) -> str:
        return self.config.model_type

    def describes(self, raw: Mapping[str, Any]) -> bool:
        """Whether a `config.json` is of this family."""
        if raw.get("model_type") != self.model_type:
            return False
        return self.variant is None or bool(raw.get(self.variant[0])) == self.variant[1]

    def layers_of(self, config: Any, path: tuple) -> tuple[str, range | None]:
        """Our name of a parameter, and the layer numbers along its first axis; None outside of layers."""
        layers = range(config.num_hidden_layers) if "layers" in path else None
        return ".".join(map(str, path)), layers
