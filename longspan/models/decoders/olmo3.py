"""OLMo 3: an OLMo 2 with three sliding layers, then a full one; each kind has its own rope."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flax.core import unfreeze

from longspan.models.decoders.family import (
    FULL,
    IGNORED_KEYS,
    SLIDING,
    DecoderFamily,
    LayerTypes,
    check_ropes,
    check_supported,
    write_sizes,
)
from longspan.models.decoders.llama import CAUSAL_LM
from longspan.models.decoders.olmo2 import NAMES
from longspan.models.decoders.rope import object_of, standard_rope
from longspan.models.fields import check_flags

THETA = 500000.0


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(LayerTypes):
    """An OLMo 3: every fourth layer has full attention.

    Fields have the names of `config.json`, explained in `LlamaConfig` and `Olmo2Config`; the defaults are Hugging
    Face's.

    Args:
        sliding_window: the number of keys that a query of a sliding layer attends to, its own included.
        layer_types: the kind of each layer; by default every fourth has full attention.
        rope_parameters: a set of rotary parameters for "full_attention" and one for "sliding_attention". In the
            spelling of Hugging Face's version 4, `rope_theta` and `rope_scaling` apply to full layers only, as in its
            version 5: sliding layers have the base 500000.

    Example:
        >>> from longspan import models
        >>> models.Olmo3Config(num_hidden_layers=5).kinds.index("full_attention")
        3
    """

    vocab_size: int = 50304
    rms_norm_eps: int | float = 1e-5
    attention_bias: bool = False
    sliding_window: int | None = 4096
    layer_types: Sequence[str] | None = None

    model_type: ClassVar[str] = "olmo3"

    def __post_init__(self):
        if self.rope_parameters is None:
            object.__setattr__(self, "rope_parameters", ropes({}, "config.json"))
        check_ropes(self.rope_parameters, "an OLMo 3")
        check_flags(self, "attention_bias")
        super().__post_init__()

    @property
    def family(self) -> DecoderFamily:
        return OLMO3

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, False

    def default_kind(self, number: int) -> str:
        return SLIDING if (number + 1) % 4 else FULL

    def rope(self, kind: str) -> Mapping[str, Any]:
        return self.rope_parameters[kind]


def ropes(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`rope_parameters` by kind of layer. In the old spelling, the base and `rope_scaling` are those of full layers."""
    given, scaling = object_of(content, "rope_parameters", where), object_of(content, "rope_scaling", where)
    if given and not {FULL, SLIDING} & set(given):
        return given  # the config raises an error
    if "rope_type" not in scaling and scaling.get("type") is not None:
        raise ValueError(
            f"{where} has rope_scaling.type={scaling['type']!r:.200}. Hugging Face's version 4 reads it in an OLMo 3, "
            "and its version 5 does not. Call the key `rope_type`, or remove it."
        )
    full = {**object_of(given, FULL, where, "rope_parameters."), **scaling}
    full_name = "rope_scaling" if scaling else f"rope_parameters.{FULL}"
    sliding = object_of(given, SLIDING, where, "rope_parameters.")
    bases = dict(rope_theta=content.get("rope_theta"))
    return {
        FULL: standard_rope(full, full_name, bases, where, theta=THETA),
        SLIDING: standard_rope(sliding, f"rope_parameters.{SLIDING}", {}, where, theta=THETA),
    }


def _read(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    check_supported(content, where)
    return dict(rope_parameters=ropes(content, where), sliding_window=content.get("sliding_window"))


def _write(config: Any) -> dict[str, Any]:
    """The rotary parameters in the spelling of version 5: the older one has no base of sliding layers."""
    return dict(rope_parameters={kind: unfreeze(config.rope(kind)) for kind in (FULL, SLIDING)}, **write_sizes(config))


OLMO3 = DecoderFamily(
    config=Olmo3Config,
    name="Olmo3",
    tasks=(CAUSAL_LM,),
    names=NAMES,
    defaults=dict(sliding_window=4096),
    ignored_keys=IGNORED_KEYS,
    read=_read,
    write=_write,
    norm_rounds_first=False,
    input_norms=False,
    branch_norms=True,
    joint_qk_norm=True,
)
