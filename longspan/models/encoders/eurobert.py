"""EuroBERT (arXiv:2503.05500): Llama's layers with full attention in both directions."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from longspan.checks import check_choice
from longspan.models.activations import ACTIVATIONS
from longspan.models.common_keys import COMMON_KEYS
from longspan.models.decoders.family import LAYER_NAMES, PRE_NORM_NAMES, check_supported
from longspan.models.decoders.rope import override_rope
from longspan.models.encoders.bert import ENCODER, TOKEN_CLASSIFIER
from longspan.models.encoders.family import NULLABLE, HeadTransform
from longspan.models.encoders.rotary import RotaryAttention, RotaryEmbeddings, RotaryLayers
from longspan.models.encoders.rotary_bert import ROPE_KEYS, read_rotary, write_rotary
from longspan.models.encoders.rotary_config import (
    DropoutRates,
    LayerBiases,
    RotaryConfig,
    RotaryFamily,
    decoder_names,
)
from longspan.models.encoders.tasks import MaskedLM, SequenceClassifier
from longspan.models.family import Task, TensorSize
from longspan.models.fields import check_counts, check_flags, check_reals

POOLINGS = {"bos": "first", "mean": "mean", "late": "late"}


@dataclass(frozen=True, kw_only=True)
class EuroBertConfig(RotaryConfig):
    """A EuroBERT encoder: Llama's layers with full attention, and grouped key/value heads.

    Fields have the names of `config.json`; the defaults are EuroBERT-210m, except for the base of the rotations.

    Args:
        num_key_value_heads: the number of key/value heads; by default `num_attention_heads`.
        rope_parameters: the rotary parameters, as in `ls.rope.frequencies`; by default the base 10000.
        classifier_pooling: what a sequence classifier reads: the first token ("bos"), the mean over the tokens
            ("mean"), or each token, with the mean over their logits ("late").
        extra: the other keys of a `config.json` as JSON text, which `hf.save` writes back.

    Example:
        >>> from longspan import models
        >>> models.EuroBertConfig(num_key_value_heads=4).heads
        (12, 4, 64)
    """

    vocab_size: int = 128256
    max_position_embeddings: int = 8192
    pad_token_id: int = field(default=128001, metadata=NULLABLE)
    tie_word_embeddings: bool = False
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: int | float = 1e-5
    attention_bias: bool = False
    attention_dropout: int | float = 0.0
    mlp_bias: bool = False
    classifier_pooling: str = "late"

    model_type: ClassVar[str] = "eurobert"
    theta: ClassVar[float] = 10000.0

    def __post_init__(self):
        if self.num_key_value_heads is not None:
            check_counts(self, "num_key_value_heads")
        check_reals(self, "rms_norm_eps")
        check_reals(self, "attention_dropout", below=1.0)
        check_flags(self, "attention_bias", "mlp_bias")
        check_choice("hidden_act", self.hidden_act, tuple(sorted(ACTIVATIONS)))
        check_choice("classifier_pooling", self.classifier_pooling, tuple(POOLINGS))
        super().__post_init__()
        heads, kv_heads, _ = self.heads
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}. Change one of them."
            )

    @property
    def family(self) -> RotaryFamily:
        return EUROBERT

    @property
    def default_rope(self) -> Mapping[str, Any]:
        return dict(rope_type="default", rope_theta=self.theta)

    @property
    def heads(self) -> tuple[int, int, int]:
        kv_heads = self.num_key_value_heads
        if kv_heads is None:
            kv_heads = self.num_attention_heads
        return self.num_attention_heads, kv_heads, self.head_dim

    @property
    def activation(self) -> str:
        return self.hidden_act

    @property
    def biases(self) -> LayerBiases:
        return LayerBiases(self.attention_bias, self.attention_bias, self.mlp_bias, self.mlp_bias)

    @property
    def dropout_rates(self) -> DropoutRates:
        return DropoutRates(scores=self.attention_dropout)

    @property
    def head_dropout(self) -> float:
        return 0.0

    @property
    def lm_transform(self) -> None:
        return None

    @property
    def lm_bias(self) -> bool:
        return self.mlp_bias

    @property
    def classifier_transform(self) -> HeadTransform:
        return HeadTransform("gelu", has_norm=False)

    @property
    def pooling(self) -> str:
        return POOLINGS[self.classifier_pooling]


def _read(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Raises if the original repository's `clf_pooling` differs from `classifier_pooling`, which Hugging Face reads."""
    check_supported(content, where)
    original, native = content.get("clf_pooling"), content.get("classifier_pooling", EuroBertConfig.classifier_pooling)
    if original is not None and original != native:
        raise ValueError(
            f"{where} has clf_pooling={original!r:.200}, but Hugging Face reads classifier_pooling={native!r:.200}. "
            "Set `classifier_pooling` to the one that the classifier was trained with, and remove clf_pooling."
        )
    return read_rotary(content, where, config=EuroBertConfig)


def _write(config: EuroBertConfig) -> dict[str, Any]:
    return write_rotary(config) | dict(num_key_value_heads=config.heads[1])


EUROBERT = RotaryFamily(
    config=EuroBertConfig,
    name="EuroBert",
    prefix="model.",
    names=decoder_names(*LAYER_NAMES, *PRE_NORM_NAMES),
    tasks=(
        replace(ENCODER, optional_pooler=False),
        Task(MaskedLM, names=(("decoder.", "lm_head."), ("bias", "lm_head.bias")), tied="lm_head.weight"),
        Task(SequenceClassifier, names=(("dense.", "dense."), ("classifier.", "classifier."))),
        TOKEN_CLASSIFIER,
    ),
    word_embeddings="embed_tokens.weight",
    layers="layers.{}.",
    sizes=(
        TensorSize(("vocab_size",), "embed_tokens.weight", 0),
        TensorSize(("hidden_size",), "embed_tokens.weight", 1),
        TensorSize(("intermediate_size",), "layers.0.mlp.down_proj.weight", 1),
    ),
    buffers=("rotary_emb.inv_freq",),
    renamed_keys=(*ROPE_KEYS, "head_dim"),
    ignored_keys=COMMON_KEYS | {"bos_token", "clf_pooling", "eos_token", "mask_token", "pad_token", "pretraining_tp"},
    read=_read,
    write=_write,
    override=partial(override_rope, old_spelling=("rope_theta", "rope_scaling")),
    embeddings=RotaryEmbeddings,
    attention=RotaryAttention,
    stack=RotaryLayers,
    has_pooler=False,
    pre_norm=True,
    embedding_norm=False,
    rms_norms=True,
    fused=False,
    mlp="gated",
)
