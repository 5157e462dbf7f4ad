"""SmolLM3: a Llama in which every fourth layer has no rotary positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from longspan.models.decoders.family import (
    FULL,
    IGNORED_KEYS,
    SLIDING,
    DecoderFamily,
    LayerKind,
    LayerTypes,
    read_rope,
)
from longspan.models.decoders.llama import CAUSAL_LM
from longspan.models.fields import check_counts, check_flags, is_count


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(LayerTypes):
    """A SmolLM3: a Llama in which some layers do not rotate queries and keys.

    Fields have the names of `config.json`, explained in `LlamaConfig`. The defaults are SmolLM3-3B, except for
    `num_key_value_heads`.

    Args:
        no_rope_layers: 1 for a layer that rotates queries and keys, 0 for a layer that does not; one entry per layer.
        no_rope_layer_interval: if `no_rope_layers` is None, the last of so many layers does not rotate.
        use_sliding_window: whether the layers that do not rotate are sliding. If False, `sliding_window` has no effect.
        sliding_window: the number of keys that a query of a sliding layer attends to, its own included.
        layer_types: the kind of attention of each layer; overrides the two fields above.

    Example:
        >>> from longspan import models
        >>> [kind.rotates for kind in models.SmolLM3Config(num_hidden_layers=5).layer_kinds]
        [True, True, True, False, True]
    """

    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    no_rope_layers: Sequence[int] | None = None
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: Sequence[str] | None = None

    model_type: ClassVar[str] = "smollm3"
    default_theta: ClassVar[float] = 2000000.0

    def __post_init__(self):
        check_flags(self, "attention_bias", "mlp_bias", "use_sliding_window")
        check_counts(self, "num_hidden_layers", "no_rope_layer_interval")
        self._check_no_rope_layers()
        super().__post_init__()

    def _check_no_rope_layers(self) -> None:
        given: Any = self.no_rope_layers
        if given is None:
            return
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        if not is_list or not all(is_count(value, 0) and value in (0, 1) for value in given):
            raise ValueError(f"`no_rope_layers` must be a list of 0 and 1, one for each layer, got {given!r:.200}.")
        if len(given) < self.num_hidden_layers:
            raise ValueError(
                f"`no_rope_layers` must have an entry for each of num_hidden_layers={self.num_hidden_layers} layers, "
                f"got {len(given)}."
            )
        object.__setattr__(self, "no_rope_layers", tuple(map(int, given)))

    @property
    def family(self) -> DecoderFamily:
        return SMOLLM3

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, self.mlp_bias

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        return tuple(LayerKind(kind, self.rotates(number)) for number, kind in enumerate(self.kinds))

    def default_kind(self, number: int) -> str:
        slides = self.use_sliding_window and self.sliding_window is not None and not self.rotates(number)
        return SLIDING if slides else FULL

    def rotates(self, number: int) -> bool:
        """Whether a layer rotates queries and keys."""
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[number])
        return (number + 1) % self.no_rope_layer_interval != 0


def _read(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    return read_rope(content, where, theta=SmolLM3Config.default_theta)


SMOLLM3 = DecoderFamily(
    config=SmolLM3Config,
    name="SmolLM3",
    tasks=(CAUSAL_LM,),
    defaults=dict(num_key_value_heads=4),
    ignored_keys=IGNORED_KEYS | {"max_window_layers"},
    read=_read,
)
