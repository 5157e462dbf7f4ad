"""`RotaryConfig`: the config of encoders that rotate queries and keys. `RotaryFamily`: the differences between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from longspan.checks import check_choice
from longspan.masks import Full, Mask, Window
from longspan.models.decoders.family import FULL, SLIDING
from longspan.models.decoders.runs import LayerRun, layer_runs
from longspan.models.encoders.family import NOT_IN_JSON, EncoderConfig, EncoderFamily
from longspan.nn.rope import frozen
from longspan.rope import frequencies

ROPE_TYPES = ("default", "linear", "yarn")  # those that were compared with Hugging Face's encoders


class DropoutRates(NamedTuple):
    """The dropout rates of an encoder."""

    embedding: float = 0.0
    scores: float = 0.0
    attention: float = 0.0  # of the output of attention
    hidden: float = 0.0  # inside the MLP
    mlp: float = 0.0  # of the output of the MLP


class LayerBiases(NamedTuple):
    """The linear layers that have biases."""

    qkv: bool = False
    out: bool = False
    up: bool = False
    down: bool = False


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(EncoderConfig):
    """The config of an encoder without a table of positions: each kind of layer has a mask and rotary frequencies."""

    rope_parameters: Any = field(default=None, metadata=NOT_IN_JSON)

    def __post_init__(self):
        super().__post_init__()
        rope = self.rope_parameters
        if rope is None:
            rope = self.default_rope
        if not isinstance(rope, Mapping):
            raise ValueError(f"`rope_parameters` must be a mapping as in `ls.rope.frequencies`, got {rope!r:.200}.")
        object.__setattr__(self, "rope_parameters", frozen(rope))
        for kind in dict.fromkeys(self.kinds):
            self.mask(kind)
            self._check_rope(kind)

    def _check_rope(self, kind: str) -> None:
        rope = self.rope(kind)
        check_choice("rope_type", rope.get("rope_type", "default"), ROPE_TYPES)
        factor = rope.get("partial_rotary_factor")
        if factor not in (None, 1):
            raise ValueError(
                f"partial_rotary_factor={factor} is not supported: a {self.model_type} rotates all features of a head, "
                "and Hugging Face ignores the factor in some rope types. Leave it out."
            )
        self.frequencies(kind)

    @property
    def family(self) -> "RotaryFamily":
        """The record of the model family."""
        raise NotImplementedError

    @property
    def default_rope(self) -> Mapping[str, Any]:
        """The rotary parameters if none are given."""
        raise NotImplementedError

    @property
    def heads(self) -> tuple[int, int, int]:
        """The number of query heads, the number of key/value heads, and the head size."""
        return self.num_attention_heads, self.num_attention_heads, self.head_dim

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return self.heads[2] ** -0.5

    @property
    def activation(self) -> str:
        """The activation of the MLP."""
        raise NotImplementedError

    @property
    def biases(self) -> LayerBiases:
        return LayerBiases()

    @property
    def layer_norm_bias(self) -> bool:
        """Whether layer norms have biases."""
        return True

    @property
    def dropout_rates(self) -> DropoutRates:
        return DropoutRates()

    @property
    def max_dropout(self) -> float:
        return max(self.dropout_rates)

    @property
    def pooling(self) -> str:
        return "first"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return (FULL,) * self.num_hidden_layers

    @property
    def runs(self) -> tuple[LayerRun, ...]:
        """The layers by their repeating pattern. A first layer without a norm is a run of its own."""
        if self.family.first_norm:
            return layer_runs(self.kinds)
        rest = [run._replace(start=run.start + 1) for run in layer_runs(self.kinds[1:])]
        return (LayerRun(0, self.kinds[:1], 1), *rest)

    def window(self, kind: str) -> int | None:
        """The number of keys on each side of a query in a kind of layer; None: all keys."""
        return None

    def mask(self, kind: str) -> Mask:
        """The mask of a kind of layer."""
        window = self.window(kind)
        return Full() if window is None else Window(window, window)

    def rule(self, layer: int) -> str:
        window = self.window(self.kinds[layer])
        return "Full()" if window is None else f"Window({window}, {window})"

    def rope(self, kind: str) -> Mapping[str, Any]:
        """The rotary parameters of a kind of layer."""
        return self.rope_parameters

    def frequencies(self, kind: str) -> tuple[Any, float]:
        """The rotary frequencies and the attention factor of a kind of layer."""
        limit = self.max_position_embeddings
        return frequencies(self.rope(kind), self.heads[2], max_position_embeddings=limit)


@dataclass(frozen=True, kw_only=True)
class LocalLayers(RotaryConfig):
    """A rotary encoder with full and sliding layers, each kind with its own rotary parameters."""

    def __post_init__(self):
        rope: Any = self.rope_parameters
        if rope is not None and not (
            isinstance(rope, Mapping) and all(isinstance(rope.get(kind), Mapping) for kind in (FULL, SLIDING))
        ):
            raise ValueError(
                f"`rope_parameters` of a {self.model_type} must have the keys '{FULL}' and '{SLIDING}', each with a "
                f"set of rotary parameters, got {rope!r:.200}."
            )
        super().__post_init__()

    def rope(self, kind: str) -> Mapping[str, Any]:
        return self.rope_parameters[kind]

    def window(self, kind: str) -> int | None:
        if kind == FULL:
            return None
        if kind != SLIDING:
            raise ValueError(f"`layer_types` has {kind!r}, which is not one of '{FULL}' and '{SLIDING}'.")
        return self.sliding_radius

    @property
    def sliding_radius(self) -> int:
        """The number of keys on each side of a query in sliding layers."""
        raise NotImplementedError


def decoder_names(*layer: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """The names of a body's parameters in a family whose files are named like a decoder's, from those of a layer."""
    inside = tuple((f"layers.{ours}", f"layers.{{}}.{theirs}") for ours, theirs in layer)
    return (("embeddings.word.", "embed_tokens."), *inside, ("layers.norm.", "norm."))


@dataclass(frozen=True, kw_only=True, eq=False)
class RotaryFamily(EncoderFamily):
    """A family of encoders that rotate queries and keys: how its layers differ from the others'."""

    pre_norm: bool = False  # norms before attention and MLP; otherwise after the sums
    first_norm: bool = True  # whether the first layer has a norm before attention
    embedding_norm: bool = True
    rms_norms: bool = False  # root mean square norms instead of layer norms
    # As in `DecoderFamily`:
    norm_adds_one: bool = False
    norm_rounds_first: bool = True
    branch_norms: bool = False
    qk_norm: bool = False
    scaled_embeddings: bool = False
    fused: bool = True  # one matrix for queries, keys and values
    # "gate_first" and "gate_last": down(act(gate) · up), both by one matrix, in which the rows of the gate come first
    # or last. "gated": the same by two matrices. "plain": down(act(up)).
    mlp: str = "gate_first"

    def layers_of(self, config: Any, path: tuple) -> tuple[str, range | None]:
        """As in `Family`; layers are stacked by their place in a repeating pattern."""
        at = path.index("layers") if "layers" in path else None
        if at is None:
            return super().layers_of(config, path)
        if path[at + 1] != "stacks":
            return ".".join(map(str, path)), None
        stacks = [run.numbers(place) for run in config.runs for place in range(len(run.kinds))]
        return ".".join(map(str, (*path[: at + 1], *path[at + 3 :]))), stacks[path[at + 2]]
