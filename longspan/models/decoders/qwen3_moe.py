"""Qwen3-MoE (arXiv:2505.09388): a Qwen3 whose MLPs, or some of them, are mixtures of experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from longspan.models.decoders.family import (
    FULL,
    IGNORED_KEYS,
    LAYER_NAMES,
    NOT_IN_JSON,
    PRE_NORM_NAMES,
    SLIDING,
    DecoderConfig,
    DecoderFamily,
    LayerKind,
    check_quantization,
    decoder_sizes,
    names_of,
    write_rope,
)
from longspan.models.decoders.llama import CAUSAL_LM
from longspan.models.decoders.mixture import Mixture, check_mixture, read_same
from longspan.models.decoders.rope import ROPE_KEYS, one_rope
from longspan.models.family import TensorSize
from longspan.models.fields import check_counts, check_flags, is_count


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """A Qwen3-MoE: in most layers, a router chooses the experts that compute a token.

    Fields have the names of `config.json`, explained in `LlamaConfig`; the defaults are Hugging Face's, except for
    `num_key_value_heads`.

    Args:
        intermediate_size: the hidden units of the MLP in layers without experts.
        head_dim: the size of a head; by default hidden_size / num_attention_heads.
        attention_bias: whether the four projections of attention have biases.
        use_sliding_window: whether all layers are sliding. If False, `sliding_window` has no effect.
        sliding_window: the number of keys that a query of a sliding layer attends to, its own included.
        num_experts: the number of experts of a layer.
        num_experts_per_tok: the number of experts that compute a token.
        moe_intermediate_size: the hidden units of an expert.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        decoder_sparse_step: the layers step - 1, 2 · step - 1, … have experts.
        mlp_only_layers: the numbers of further layers without experts.

    Example:
        >>> from longspan import models
        >>> config = models.Qwen3MoeConfig(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=(3,))
        >>> [kind.experts for kind in config.layer_kinds]
        [False, True, False, False, False, True]
    """

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    num_experts: int = field(default=128, metadata=NOT_IN_JSON)
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: Sequence[int] | None = None

    model_type: ClassVar[str] = "qwen3_moe"

    def __post_init__(self):
        check_flags(self, "attention_bias", "use_sliding_window", "norm_topk_prob")
        check_counts(self, "decoder_sparse_step")
        only: Any = self.mlp_only_layers or ()
        if not isinstance(only, Sequence) or isinstance(only, str) or not all(is_count(number, 0) for number in only):
            raise ValueError(f"`mlp_only_layers` must be a list of the numbers of layers, got {only!r:.200}.")
        object.__setattr__(self, "mlp_only_layers", tuple(map(int, only)))
        super().__post_init__()
        check_mixture(self, "num_experts", "moe_intermediate_size")

    @property
    def family(self) -> DecoderFamily:
        return QWEN3_MOE

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, False

    @property
    def kinds(self) -> tuple[str, ...]:
        slides = self.use_sliding_window and self.sliding_window is not None
        return (SLIDING if slides else FULL,) * self.num_hidden_layers

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        return tuple(LayerKind(kind, experts=self.has_experts(number)) for number, kind in enumerate(self.kinds))

    def has_experts(self, number: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        only: Any = self.mlp_only_layers
        return (number + 1) % self.decoder_sparse_step == 0 and number not in only

    @property
    def mixture(self) -> Mixture:
        return Mixture(self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size, self.norm_topk_prob)


def _read(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The rotary parameters, the window and the number of experts, which version 5 calls `num_local_experts`."""
    check_quantization(content, where)
    read = dict(rope_parameters=one_rope(content, where), sliding_window=content.get("sliding_window"))
    count = read_same(content, COUNT_KEYS, where)
    if count is not None:
        read |= dict(num_experts=count)
    return read


def _write(config: Qwen3MoeConfig) -> dict[str, Any]:
    """The rotary parameters, and the number of experts for versions 4 and 5 of Hugging Face."""
    return write_rope(config) | dict.fromkeys(COUNT_KEYS, config.num_experts)


COUNT_KEYS = "num_experts", "num_local_experts"
NAMES = names_of(
    ("mlp.router.", "mlp.gate."),
    ("mlp.experts.gate.", "mlp.experts.{expert}.gate_proj."),
    ("mlp.experts.up.", "mlp.experts.{expert}.up_proj."),
    ("mlp.experts.down.", "mlp.experts.{expert}.down_proj."),
    *LAYER_NAMES,
    *PRE_NORM_NAMES,
)

QWEN3_MOE = DecoderFamily(
    config=Qwen3MoeConfig,
    name="Qwen3Moe",
    tasks=(CAUSAL_LM,),
    names=NAMES,
    sizes=decoder_sizes(
        *(TensorSize((key,), "layers.{}.mlp.gate.weight", 0) for key in COUNT_KEYS),
        TensorSize(("moe_intermediate_size",), "layers.{}.mlp.experts.0.gate_proj.weight", 0, optional=True),
        TensorSize(("intermediate_size",), "layers.{}.mlp.down_proj.weight", 1, optional=True),
    ),
    defaults=dict(num_key_value_heads=4, sliding_window=4096),
    renamed_keys=(*ROPE_KEYS, *COUNT_KEYS),
    ignored_keys=IGNORED_KEYS | {"max_window_layers", "output_router_logits", "router_aux_loss_coef"},
    read=_read,
    write=_write,
    qk_norm=True,
)
