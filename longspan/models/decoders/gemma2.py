"""Gemma 2 (arXiv:2408.00118): every second layer is sliding, soft caps, four norms per layer that scale by 1 + w."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from longspan.models.activations import ACTIVATIONS
from longspan.models.decoders.family import (
    FULL,
    LAYER_NAMES,
    NOT_IN_JSON,
    SLIDING,
    DecoderConfig,
    DecoderFamily,
    LayerTypes,
    names_of,
    read_window,
    write_rope,
)
from longspan.models.decoders.llama import CAUSAL_LM
from longspan.models.decoders.rope import ROPE_KEYS
from longspan.models.fields import check_flags, check_positives


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(LayerTypes):
    """A Gemma 2: layers 0, 2, 4, ... are sliding.

    Fields have the names of `config.json`, explained in `LlamaConfig`. The defaults are Gemma-2-2B, except for
    `num_key_value_heads`.

    Args:
        hidden_act: the activation, which `config.json` calls `hidden_activation`.
        query_pre_attn_scalar: scores are divided by its square root.
        sliding_window: the number of keys that a query of a sliding layer attends to, its own included.
        layer_types: the kind of each layer; by default they alternate, and the first one is sliding.
        attn_logit_softcapping: the soft cap of the scores, or None.
        final_logit_softcapping: the soft cap of the logits, or None.

    Example:
        >>> from longspan import models
        >>> models.Gemma2Config(num_hidden_layers=3).kinds
        ('sliding_attention', 'full_attention', 'sliding_attention')
    """

    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    head_dim: int | None = 256
    hidden_act: str = field(default="gelu_pytorch_tanh", metadata=NOT_IN_JSON)
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: int | float = 256
    sliding_window: int | None = 4096
    layer_types: Sequence[str] | None = None
    attn_logit_softcapping: int | float | None = 50.0
    final_logit_softcapping: int | float | None = 30.0

    model_type: ClassVar[str] = "gemma2"

    def __post_init__(self):
        super().__post_init__()
        check_flags(self, "attention_bias")
        check_positives(self, "query_pre_attn_scalar")
        check_positives(self, "attn_logit_softcapping", "final_logit_softcapping", optional=True)

    @property
    def family(self) -> DecoderFamily:
        return GEMMA2

    @property
    def scale(self) -> float:
        return self.query_pre_attn_scalar**-0.5

    @property
    def soft_cap(self) -> float | None:
        return self.attn_logit_softcapping

    @property
    def final_soft_cap(self) -> float | None:
        return self.final_logit_softcapping

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, False

    def default_kind(self, number: int) -> str:
        return FULL if number % 2 else SLIDING


def read_gemma(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`read_window`, the soft caps, for which null means none, and the activation."""
    if content.get("use_bidirectional_attention"):
        raise ValueError(
            f"{where} has use_bidirectional_attention=true, so it is an encoder. Longspan supports only the decoders "
            "of this family. Load a decoder."
        )
    read = read_window(content, where)
    read |= {name: content.get(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    return read | dict(hidden_act=read_activation(content, where))


def read_activation(content: Mapping[str, Any], where: str) -> str:
    """The activation; null means the default."""
    activation = content.get("hidden_activation")
    if activation is None:
        activation = "gelu_pytorch_tanh"
    if activation not in tuple(ACTIVATIONS):
        raise ValueError(
            f"{where} has hidden_activation={activation!r:.200}, not one of {', '.join(sorted(ACTIVATIONS))}."
        )
    return activation


def write_gemma(config: DecoderConfig) -> dict[str, Any]:
    """The rotary parameters, and the activation under Gemma's name."""
    return write_rope(config) | dict(hidden_activation=config.hidden_act)


FOUR_NORM_NAMES = (
    *LAYER_NAMES,
    ("attention_norm.", "input_layernorm."),
    ("attention_out_norm.", "post_attention_layernorm."),
    ("mlp_norm.", "pre_feedforward_layernorm."),
    ("mlp_out_norm.", "post_feedforward_layernorm."),
)
NAMES = names_of(*FOUR_NORM_NAMES)

GEMMA2 = DecoderFamily(
    config=Gemma2Config,
    name="Gemma2",
    tasks=(CAUSAL_LM,),
    names=NAMES,
    defaults=dict(
        num_key_value_heads=4, sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
    ),
    renamed_keys=(*ROPE_KEYS, "hidden_activation"),
    read=read_gemma,
    write=write_gemma,
    norm_adds_one=True,
    norm_rounds_first=False,
    branch_norms=True,
    scaled_embeddings=True,
)
