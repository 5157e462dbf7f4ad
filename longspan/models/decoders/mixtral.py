"""Mixtral (arXiv:2401.04088): a Mistral whose MLPs are mixtures of experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from longspan.models.decoders.family import (
    FULL,
    IGNORED_KEYS,
    LAYER_NAMES,
    PRE_NORM_NAMES,
    SLIDING,
    DecoderConfig,
    DecoderFamily,
    LayerKind,
    check_quantization,
    decoder_sizes,
    names_of,
)
from longspan.models.decoders.llama import CAUSAL_LM
from longspan.models.decoders.mixture import Mixture, check_mixture
from longspan.models.decoders.rope import one_rope
from longspan.models.family import TensorSize
from longspan.models.fields import check_reals


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    """A Mixtral: in every layer, a router chooses the experts that compute a token.

    Fields have the names of `config.json`, explained in `LlamaConfig`. The defaults are Mixtral-8x7B, except for
    `num_key_value_heads`.

    Args:
        intermediate_size: the hidden units of an expert.
        sliding_window: the number of keys that a query attends to, its own included; None: all.
        num_local_experts: the number of experts of a layer.
        num_experts_per_tok: the number of experts that compute a token. Their weights are divided by their sum.
        router_jitter_noise: must be 0: Longspan does not multiply the inputs of routers by noise in training.

    Example:
        >>> from longspan import models
        >>> models.MixtralConfig(num_hidden_layers=2).layer_kinds[1].experts
        True
    """

    intermediate_size: int = 14336
    max_position_embeddings: int = 131072
    rms_norm_eps: int | float = 1e-5
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    router_jitter_noise: int | float = 0.0

    model_type: ClassVar[str] = "mixtral"
    default_theta: ClassVar[float] = 1000000.0

    def __post_init__(self):
        super().__post_init__()
        check_mixture(self, "num_local_experts", "intermediate_size")
        check_reals(self, "router_jitter_noise")
        if self.router_jitter_noise:
            raise ValueError(
                f"router_jitter_noise={self.router_jitter_noise} is not supported. The noise changes only training. "
                "Set router_jitter_noise to 0."
            )

    @property
    def family(self) -> DecoderFamily:
        return MIXTRAL

    @property
    def kinds(self) -> tuple[str, ...]:
        kind = FULL if self.sliding_window is None else SLIDING
        return (kind,) * self.num_hidden_layers

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        return tuple(LayerKind(kind, experts=True) for kind in self.kinds)

    @property
    def mixture(self) -> Mixture:
        chosen = self.num_experts_per_tok
        return Mixture(self.num_local_experts, chosen, self.intermediate_size, normalized=True, rounded=False)


def _read(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    check_quantization(content, where)
    rope = one_rope(content, where, theta=MixtralConfig.default_theta)
    return dict(rope_parameters=rope, sliding_window=content.get("sliding_window"))


NAMES = names_of(
    ("mlp.router.", "block_sparse_moe.gate."),
    ("mlp.experts.gate.", "block_sparse_moe.experts.{expert}.w1."),
    ("mlp.experts.up.", "block_sparse_moe.experts.{expert}.w3."),
    ("mlp.experts.down.", "block_sparse_moe.experts.{expert}.w2."),
    *LAYER_NAMES,
    *PRE_NORM_NAMES,
)

MIXTRAL = DecoderFamily(
    config=MixtralConfig,
    name="Mixtral",
    tasks=(CAUSAL_LM,),
    names=NAMES,
    sizes=decoder_sizes(
        TensorSize(("num_local_experts",), "layers.0.block_sparse_moe.gate.weight", 0),
        TensorSize(("intermediate_size",), "layers.0.block_sparse_moe.experts.0.w1.weight", 0),
    ),
    defaults=dict(num_key_value_heads=8),
    ignored_keys=IGNORED_KEYS | {"output_router_logits", "router_aux_loss_coef"},
    read=_read,
)
