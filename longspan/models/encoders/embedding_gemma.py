"""EmbeddingGemma (arXiv:2509.20354): the layers of Gemma 3 with attention in both directions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from longspan.checks import check_choice
from longspan.models.activations import ACTIVATIONS
from longspan.models.common_keys import COMMON_KEYS
from longspan.models.decoders.family import check_layer_types, check_supported
from longspan.models.decoders.gemma2 import FOUR_NORM_NAMES, read_activation
from longspan.models.decoders.gemma3 import GEMMA3, kind_in_pattern, refuse_soft_cap, ropes, write_gemma3
from longspan.models.decoders.rope import override_rope
from longspan.models.encoders.bert import ENCODER
from longspan.models.encoders.family import NOT_IN_JSON, NULLABLE, check_is_encoder
from longspan.models.encoders.rotary import RotaryAttention, RotaryEmbeddings, RotaryLayers
from longspan.models.encoders.rotary_config import (
    DropoutRates,
    LayerBiases,
    LocalLayers,
    RotaryFamily,
    decoder_names,
)
from longspan.models.fields import check_counts, check_flags, check_positives, check_reals

FLAG = "use_bidirectional_attention"  # in `config.json`: true for the encoder, false for Gemma 3, the decoder


@dataclass(frozen=True, kw_only=True)
class EmbeddingGemmaConfig(LocalLayers):
    """An EmbeddingGemma: a Gemma 3 whose tokens attend in both directions, in sliding layers within a window.

    Fields have the names of `config.json`; the defaults are those of Hugging Face's `Gemma3TextConfig`.

    Args:
        head_dim: the size of a head, independent of `hidden_size`.
        hidden_act: the activation, which `config.json` calls `hidden_activation`.
        query_pre_attn_scalar: scores are divided by its square root.
        sliding_window: twice the number of keys on each side of a query in sliding layers; 512 is `Window(256, 256)`.
            Versions of Hugging Face before a fix save W // 2 + 1 instead of the W that they have loaded, for example
            257. A loader, Hugging Face's included, halves that number again. Override it with the true W:
            `hf.load(directory, config=dict(sliding_window=512))`.
        sliding_window_pattern: the length of the pattern of layers, of which the last has full attention.
        layer_types: the kind of each layer; overrides `sliding_window_pattern`.
        rope_parameters: a set of rotary parameters for "full_attention" and one for "sliding_attention", as in
            `ls.rope.frequencies`; by default the bases 1000000 and 10000.
        attn_logit_softcapping: always None.
        extra: the other keys of a `config.json` as JSON text, which `hf.save` writes back.

    Example:
        >>> from longspan import models
        >>> config = models.EmbeddingGemmaConfig(num_hidden_layers=6, sliding_window=512)
        >>> config.rule(4), config.rule(5)
        ('Window(256, 256)', 'Full()')
    """

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int = 256
    hidden_act: str = field(default="gelu_pytorch_tanh", metadata=NOT_IN_JSON)
    max_position_embeddings: int = 131072
    rms_norm_eps: int | float = 1e-6
    attention_bias: bool = False
    attention_dropout: int | float = field(default=0.0, metadata=NULLABLE)
    query_pre_attn_scalar: int | float = 256
    sliding_window: int = 4096
    sliding_window_pattern: int = 6
    layer_types: Sequence[str] | None = None
    attn_logit_softcapping: int | float | None = None

    model_type: ClassVar[str] = "gemma3_text"

    def __post_init__(self):
        check_counts(self, "num_hidden_layers", "num_attention_heads", "head_dim", "sliding_window_pattern")
        check_counts(self, "sliding_window", minimum=0)
        if self.num_key_value_heads is not None:
            check_counts(self, "num_key_value_heads")
        check_layer_types(self)
        check_reals(self, "rms_norm_eps")
        check_reals(self, "attention_dropout", below=1.0)
        check_positives(self, "query_pre_attn_scalar")
        check_flags(self, "attention_bias")
        check_choice("hidden_act", self.hidden_act, tuple(sorted(ACTIVATIONS)))
        refuse_soft_cap(self.attn_logit_softcapping)
        heads, kv_heads, _ = self.heads
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}. Change one of them."
            )
        super().__post_init__()

    @property
    def family(self) -> RotaryFamily:
        return EMBEDDING_GEMMA

    @property
    def default_rope(self) -> Mapping[str, Any]:
        return ropes({}, "config.json")

    @property
    def heads(self) -> tuple[int, int, int]:
        kv_heads = self.num_key_value_heads
        if kv_heads is None:
            kv_heads = self.num_attention_heads
        return self.num_attention_heads, kv_heads, self.head_dim

    @property
    def scale(self) -> float:
        return self.query_pre_attn_scalar**-0.5

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return tuple(self.layer_types)
        return tuple(kind_in_pattern(number, self.sliding_window_pattern) for number in range(self.num_hidden_layers))

    @property
    def sliding_radius(self) -> int:
        return self.sliding_window // 2

    @property
    def activation(self) -> str:
        return self.hidden_act

    @property
    def biases(self) -> LayerBiases:
        return LayerBiases(self.attention_bias, self.attention_bias)

    @property
    def dropout_rates(self) -> DropoutRates:
        return DropoutRates(scores=self.attention_dropout)


def _read(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    check_is_encoder(content, where)
    check_supported(content, where)
    if content.get(FLAG) is not True:
        raise ValueError(
            f"{where} has {FLAG}={content.get(FLAG)!r:.200}, which must be true for an encoder. Load a decoder without "
            "overriding this key."
        )
    return dict(rope_parameters=ropes(content, where), hidden_act=read_activation(content, where))


def _write(config: EmbeddingGemmaConfig) -> dict[str, Any]:
    return write_gemma3(config) | {FLAG: True}


EMBEDDING_GEMMA = RotaryFamily(
    config=EmbeddingGemmaConfig,
    name="Gemma3Text",
    prefix=GEMMA3.prefix,
    names=decoder_names(*FOUR_NORM_NAMES),
    tasks=(replace(ENCODER, optional_pooler=False),),
    word_embeddings=GEMMA3.word_embeddings,
    layers=GEMMA3.layers,
    sizes=GEMMA3.sizes,
    buffers=GEMMA3.buffers,
    variant=(FLAG, True),
    defaults=GEMMA3.defaults,
    renamed_keys=(*GEMMA3.renamed_keys, FLAG),
    # Soft caps of logits change nothing in an encoder, and Hugging Face reads `layer_types` instead of its own copy of
    # the pattern.
    ignored_keys=COMMON_KEYS | {"_sliding_window_pattern", "cache_implementation", "final_logit_softcapping"},
    read=_read,
    write=_write,
    override=override_rope,
    embeddings=RotaryEmbeddings,
    attention=RotaryAttention,
    stack=RotaryLayers,
    has_pooler=False,
    pre_norm=True,
    embedding_norm=False,
    rms_norms=True,
    norm_adds_one=GEMMA3.norm_adds_one,
    norm_rounds_first=GEMMA3.norm_rounds_first,
    branch_norms=GEMMA3.branch_norms,
    qk_norm=GEMMA3.qk_norm,
    scaled_embeddings=GEMMA3.scaled_embeddings,
    fused=False,
    mlp="gated",
)
