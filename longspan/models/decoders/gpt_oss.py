"""gpt-oss (arXiv:2508.10925): mixtures of experts with biases and a clamped gate, sink logits, alternating windows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from longspan.checks import check_choice
from longspan.models.decoders.family import (
    FULL,
    IGNORED_KEYS,
    LAYER_NAMES,
    PRE_NORM_NAMES,
    SLIDING,
    DecoderFamily,
    LayerKind,
    LayerTypes,
    check_quantization,
    decoder_sizes,
    names_of,
)
from longspan.models.decoders.llama import CAUSAL_LM
from longspan.models.decoders.mixture import ClampedGate, Mixture, check_mixture, read_same
from longspan.models.decoders.rope import ROPE_KEYS, object_of, one_rope
from longspan.models.family import TensorSize
from longspan.models.fields import check_flags, check_positives

YARN = MappingProxyType(
    dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
         original_max_position_embeddings=4096)
)  # fmt: skip
THETA = 150000.0


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(LayerTypes):
    """A gpt-oss: layers 0, 2, 4, … are sliding, and in every layer a router chooses the experts of a token.

    Fields have the names of `config.json`, explained in `LlamaConfig`. The defaults are gpt-oss-120b, except for
    `num_key_value_heads`.

    Args:
        intermediate_size: the hidden units of an expert.
        rope_parameters: the rotary parameters, as in `ls.rope.frequencies`; by default YaRN with the base 150000.
        sliding_window: the number of keys that a query of a sliding layer attends to, its own included.
        layer_types: the kind of each layer; by default they alternate, and the first one is sliding.
        num_local_experts: the number of experts of a layer.
        num_experts_per_tok: the number of experts that compute a token. Their weights are the softmax of their logits.
        swiglu_alpha: the factor inside the sigmoid of the gate.
        swiglu_limit: the upper limit of the gate, and the limit of the absolute values that it multiplies.

    Example:
        >>> from longspan import models
        >>> models.GptOssConfig(num_hidden_layers=3).kinds
        ('sliding_attention', 'full_attention', 'sliding_attention')
    """

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    head_dim: int | None = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: int | float = 1e-5
    attention_bias: bool = True
    sliding_window: int | None = 128
    layer_types: Sequence[str] | None = None
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: int | float = 1.702
    swiglu_limit: int | float = 7.0

    model_type: ClassVar[str] = "gpt_oss"
    default_theta: ClassVar[float] = THETA

    def __post_init__(self):
        if self.rope_parameters is None:
            object.__setattr__(self, "rope_parameters", {**YARN, "rope_theta": THETA})
        super().__post_init__()
        check_flags(self, "attention_bias")
        check_mixture(self, "num_local_experts", "intermediate_size")
        check_positives(self, "swiglu_alpha", "swiglu_limit")
        check_choice("hidden_act", self.hidden_act, ("silu",))  # the clamped gate has no other

    @property
    def family(self) -> DecoderFamily:
        return GPT_OSS

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, False

    def default_kind(self, number: int) -> str:
        return FULL if number % 2 else SLIDING

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        return tuple(LayerKind(kind, experts=True) for kind in self.kinds)

    @property
    def mixture(self) -> Mixture:
        clamped = ClampedGate(float(self.swiglu_alpha), float(self.swiglu_limit))
        chosen = self.num_experts_per_tok
        return Mixture(self.num_local_experts, chosen, self.intermediate_size, normalized=True, clamped=clamped)


def _read(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The rotary parameters, which are YaRN's without any in the file, and the window."""
    check_quantization(content, where, readable="mxfp4")
    read_same(content, ("num_experts_per_tok", "experts_per_token"), where)
    given = [object_of(content, key, where) for key in ("rope_scaling", "rope_parameters")]
    if not any(given):
        content = {**content, "rope_parameters": dict(YARN)}
    rope = one_rope(content, where, theta=THETA)
    return dict(rope_parameters=rope, sliding_window=content.get("sliding_window"))


NAMES = names_of(
    ("attention.sinks", "self_attn.sinks"),
    ("mlp.router.", "mlp.router."),
    ("mlp.experts.gate_up.kernel", "mlp.experts.gate_up_proj"),
    ("mlp.experts.gate_up.bias", "mlp.experts.gate_up_proj_bias"),
    ("mlp.experts.down.kernel", "mlp.experts.down_proj"),
    ("mlp.experts.down.bias", "mlp.experts.down_proj_bias"),
    *LAYER_NAMES,
    *PRE_NORM_NAMES,
)

GPT_OSS = DecoderFamily(
    config=GptOssConfig,
    name="GptOss",
    tasks=(CAUSAL_LM,),
    names=NAMES,
    sizes=decoder_sizes(
        TensorSize(("num_local_experts",), "layers.0.mlp.router.weight", 0),
        TensorSize(("intermediate_size",), "layers.0.mlp.experts.down_proj", 1),
    ),
    defaults=dict(num_key_value_heads=8, sliding_window=128),
    # The quantization is read and not written back: `save` writes floats.
    renamed_keys=(*ROPE_KEYS, "quantization_config"),
    ignored_keys=IGNORED_KEYS
    | {"experts_per_token", "initial_context_length", "output_router_logits", "router_aux_loss_coef"},
    read=_read,
    norm_rounds_first=False,
    sinks=True,
)
