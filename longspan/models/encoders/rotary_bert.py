"""BERTs with rotary positions: NomicBERT (arXiv:2402.01613), GTE (arXiv:2407.19669), Jina v3 (arXiv:2409.10173)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from longspan.models.common_keys import COMMON_KEYS
from longspan.models.decoders.rope import both_spellings, object_of, override_rope, standard_rope
from longspan.models.encoders.bert import ENCODER, QUESTION_ANSWERING, TOKEN_CLASSIFIER
from longspan.models.encoders.bert import MASKED_LM as BERT_LM
from longspan.models.encoders.bert import SEQUENCE_CLASSIFIER as POOLED_CLASSIFIER
from longspan.models.encoders.family import NULLABLE, BertFields, check_is_encoder
from longspan.models.encoders.roberta import MASKED_LM as ROBERTA_LM
from longspan.models.encoders.roberta import SEQUENCE_CLASSIFIER as ROBERTA_CLASSIFIER
from longspan.models.encoders.rotary import RotaryAttention, RotaryEmbeddings, RotaryLayers
from longspan.models.encoders.rotary_config import DropoutRates, LayerBiases, RotaryConfig, RotaryFamily
from longspan.models.family import TensorSize
from longspan.models.fields import is_count

ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")


@dataclass(frozen=True, kw_only=True)
class RotaryBertConfig(BertFields, RotaryConfig):
    """The config fields of BERTs with rotary positions: post-norm, full attention, one set of frequencies."""

    theta: ClassVar[float]  # the base if a file has none

    @property
    def default_rope(self) -> Mapping[str, Any]:
        return dict(rope_type="default", rope_theta=self.theta)

    @property
    def activation(self) -> str:
        return self.hidden_act

    @property
    def dropout_rates(self) -> DropoutRates:
        rate = self.hidden_dropout_prob
        return DropoutRates(rate, self.attention_probs_dropout_prob, rate, 0.0, rate)


@dataclass(frozen=True, kw_only=True)
class NomicBertConfig(RotaryBertConfig):
    """A NomicBERT encoder: a BERT with rotary positions, a gated MLP and few biases.

    Fields have the names of `config.json`; the defaults are nomic-embed-text-v1.5 as Hugging Face has them.

    Args:
        rope_parameters: the rotary parameters, as in `ls.rope.frequencies`; by default the base 1000.
        extra: the other keys of a `config.json` as JSON text, which `hf.save` writes back.

    Example:
        >>> from longspan import models
        >>> models.NomicBertConfig().max_tokens
        2048
    """

    vocab_size: int = 30528
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    hidden_dropout_prob: int | float = 0.0
    attention_probs_dropout_prob: int | float = 0.0

    model_type: ClassVar[str] = "nomic_bert"
    theta: ClassVar[float] = 1000.0

    @property
    def family(self) -> RotaryFamily:
        return NOMIC_BERT


@dataclass(frozen=True, kw_only=True)
class GteConfig(RotaryBertConfig):
    """A GTE encoder: a BERT with rotary positions and a gated MLP.

    Fields have the names of `config.json`; the defaults are gte-multilingual-base as Hugging Face has them.

    Args:
        type_vocab_size: the number of token types; 0 if the model has no table of token types.
        rope_parameters: the rotary parameters, as in `ls.rope.frequencies`; by default the base 160000.
        extra: the other keys of a `config.json` as JSON text, which `hf.save` writes back.

    Example:
        >>> from longspan import models
        >>> models.GteConfig(type_vocab_size=0).token_types
        0
    """

    vocab_size: int = 250048
    max_position_embeddings: int = 8192
    type_vocab_size: int = 1
    attention_probs_dropout_prob: int | float = 0.0
    pad_token_id: int = field(default=1, metadata=NULLABLE)

    model_type: ClassVar[str] = "gte"
    theta: ClassVar[float] = 160000.0

    @property
    def family(self) -> RotaryFamily:
        return GTE

    @property
    def biases(self) -> LayerBiases:
        return LayerBiases(qkv=True, out=True, down=True)

    @property
    def dropout_rates(self) -> DropoutRates:
        return super().dropout_rates._replace(hidden=self.hidden_dropout_prob)


@dataclass(frozen=True, kw_only=True)
class JinaEmbeddingsV3Config(RotaryBertConfig):
    """A Jina v3 encoder: an XLM-RoBERTa with rotary positions.

    Fields have the names of `config.json`; the defaults are jina-embeddings-v3 as Hugging Face has them.

    Args:
        rope_parameters: the rotary parameters, as in `ls.rope.frequencies`; by default the base 20000.
        extra: the other keys of a `config.json` as JSON text, which `hf.save` writes back.

    Example:
        >>> from longspan import models
        >>> models.JinaEmbeddingsV3Config().head_dim
        64
    """

    vocab_size: int = 250002
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    max_position_embeddings: int = 8194
    type_vocab_size: int = 1
    layer_norm_eps: int | float = 1e-5
    pad_token_id: int = field(default=1, metadata=NULLABLE)

    model_type: ClassVar[str] = "jina_embeddings_v3"
    theta: ClassVar[float] = 20000.0

    @property
    def family(self) -> RotaryFamily:
        return JINA_V3

    @property
    def biases(self) -> LayerBiases:
        return LayerBiases(qkv=True, out=True, up=True, down=True)


def read_rotary(content: Mapping[str, Any], where: str, *, config: Any) -> dict[str, Any]:
    """Both spellings of one set of rotary parameters. Raises for heads of another size than hidden_size / heads."""
    check_is_encoder({**content, "position_embedding_type": _position_type(content)}, where)
    given, scaling = object_of(content, "rope_parameters", where), object_of(content, "rope_scaling", where)
    if given and scaling:
        raise ValueError(
            f"{where} has both rope_parameters and rope_scaling, two spellings of the same settings. Remove one."
        )
    name = "rope_scaling" if scaling else "rope_parameters"
    rope = standard_rope(scaling or given, name, content, where, theta=config.theta)
    size = content.get("hidden_size", config.hidden_size)
    heads = content.get("num_attention_heads", config.num_attention_heads)
    head_dim = content.get("head_dim")
    if head_dim is not None and is_count(size) and is_count(heads) and head_dim != size / heads:
        raise ValueError(
            f"{where} has head_dim={head_dim!r:.200}, but Longspan supports only hidden_size / num_attention_heads = "
            f"{size} / {heads} in this family. Correct it, or leave it out."
        )
    return dict(rope_parameters=rope)


def _position_type(content: Mapping[str, Any]) -> Any:
    """`position_embedding_type`; "rope" and "rotary" are what these families have, so they count as no value."""
    kind = content.get("position_embedding_type")
    return None if kind in ("rope", "rotary") else kind


def write_rotary(config: RotaryConfig) -> dict[str, Any]:
    """The rotary parameters as version 5 writes them, and the size of a head."""
    rope = both_spellings(config.rope_parameters)["rope_parameters"]
    return dict(rope_parameters=rope, head_dim=config.head_dim)


# Native names for keys of the original repository's config, which is based on GPT-2's.
NOMIC_SPELLINGS = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers", "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
    "attn_pdrop": "attention_probs_dropout_prob", "resid_pdrop": "hidden_dropout_prob", "rotary_emb_base": "rope_theta",
}  # fmt: skip
# Its other keys that change the outputs, with the only value that the layers here have.
NOMIC_VALUES = {
    "activation_function": "swiglu", "causal": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
    "parallel_block": False, "parallel_block_tied_norm": False, "prenorm": False, "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True,
    "use_rms_norm": False,
}  # fmt: skip
NOMIC_IGNORED = frozenset([
    "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "max_trained_positions", "pad_vocab_size_multiple",
    "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "use_flash_attn", "use_xentropy",
])  # fmt: skip


def _read_nomic(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Raises for variants of the original repository that the layers here do not have."""
    for key, value in NOMIC_VALUES.items():
        if key in content and content[key] != value:
            raise ValueError(
                f"{where} has {key}={content[key]!r:.200}, but Longspan supports only {value!r} in a nomic_bert. Load "
                "a checkpoint with that value."
            )
    rates = content.get("hidden_dropout_prob", 0.0), content.get("embd_pdrop")
    if rates[1] is not None and rates[0] != rates[1]:
        raise ValueError(
            f"{where} has embd_pdrop={rates[1]!r:.200}, which must be equal to the residual dropout rate (resid_pdrop "
            f"or hidden_dropout_prob), {rates[0]!r:.200}: Longspan uses one rate for both."
        )
    return read_rotary(content, where, config=NomicBertConfig)


def _names(prefix: str, embedding_norm: str, *layer: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """The names of a body's parameters in files of Hugging Face, which are those of the original repositories."""
    return (
        ("embeddings.word.", "embeddings.word_embeddings."),
        ("embeddings.token_type.", "embeddings.token_type_embeddings."),
        ("embeddings.norm.", embedding_norm),
        *((f"layers.{ours}", f"{prefix}{theirs}") for ours, theirs in layer),
        ("pooler.", "pooler.dense."),
    )


def _sizes(down: str) -> tuple[TensorSize, ...]:
    """The sizes that are compared with a file's tensors; `down` is the MLP's last matrix in the first layer."""
    return (
        TensorSize(("vocab_size",), "embeddings.word_embeddings.weight", 0),
        TensorSize(("hidden_size",), "embeddings.word_embeddings.weight", 1),
        TensorSize(("type_vocab_size",), "embeddings.token_type_embeddings.weight", 0),
        TensorSize(("intermediate_size",), down, 1),
    )


# What the records below share.
SHARED: dict[str, Any] = dict(
    word_embeddings="embeddings.word_embeddings.weight",
    renamed_keys=(*ROPE_KEYS, "head_dim"),
    write=write_rotary,
    override=partial(override_rope, old_spelling=("rope_theta", "rope_scaling")),
    embeddings=RotaryEmbeddings,
    attention=RotaryAttention,
    stack=RotaryLayers,
)
NORMS = (("attention_norm.", "norm1."), ("mlp_norm.", "norm2."))

NOMIC_BERT = RotaryFamily(
    config=NomicBertConfig,
    name="NomicBert",
    prefix="nomic_bert.",
    names=_names(
        "encoder.layers.{}.",
        "emb_ln.",
        *NORMS,
        ("attention.qkv.", "attn.Wqkv."),
        ("attention.out.", "attn.out_proj."),
        ("mlp.gate.", "mlp.fc12."),
        ("mlp.up.", "mlp.fc11."),
        ("mlp.down.", "mlp.fc2."),
    ),
    tasks=(
        ENCODER,
        replace(BERT_LM, names=tuple((o, t.replace("LayerNorm", "layer_norm")) for o, t in BERT_LM.names)),
        POOLED_CLASSIFIER,
        TOKEN_CLASSIFIER,
    ),
    layers="encoder.layers.{}.",
    sizes=_sizes("encoder.layers.0.mlp.fc2.weight"),
    other_spellings=NOMIC_SPELLINGS,
    ignored_keys=COMMON_KEYS | NOMIC_IGNORED | frozenset(NOMIC_VALUES) | {"embd_pdrop"},
    read=_read_nomic,
    default_pooler=False,
    classifier_reads_pooler=True,
    mlp="gated",
    **SHARED,
)

GTE = RotaryFamily(
    config=GteConfig,
    name="Gte",
    prefix="gte.",
    other_prefixes=("new.",),
    names=_names(
        "encoder.layer.{}.",
        "embeddings.LayerNorm.",
        ("attention_norm.", "attn_ln."),
        ("mlp_norm.", "mlp_ln."),
        ("attention.qkv.", "attention.qkv_proj."),
        ("attention.out.", "attention.o_proj."),
        ("mlp.gate_up.", "mlp.up_gate_proj."),
        ("mlp.down.", "mlp.down_proj."),
    ),
    tasks=(
        ENCODER,
        replace(
            BERT_LM,
            names=(
                ("dense.", "lm_head.dense."),
                ("norm.", "lm_head.norm."),
                ("bias", "lm_head.decoder.bias"),
                ("decoder.", "lm_head.decoder."),
            ),
            tied="lm_head.decoder.weight",
            twin_biases=None,
        ),
        POOLED_CLASSIFIER,
        TOKEN_CLASSIFIER,
    ),
    layers="encoder.layer.{}.",
    sizes=_sizes("encoder.layer.0.mlp.down_proj.weight"),
    ignored_keys=COMMON_KEYS,
    read=partial(read_rotary, config=GteConfig),
    min_token_types=0,
    default_pooler=False,
    classifier_reads_pooler=True,
    lm_activation="gelu",
    mlp="gate_last",
    **SHARED,
)

JINA_V3 = RotaryFamily(
    config=JinaEmbeddingsV3Config,
    name="JinaEmbeddingsV3",
    prefix="roberta.",
    names=_names(
        "encoder.layers.{}.",
        "emb_ln.",
        *NORMS,
        ("attention.qkv.", "mixer.Wqkv."),
        ("attention.out.", "mixer.out_proj."),
        ("mlp.up.", "mlp.fc1."),
        ("mlp.down.", "mlp.fc2."),
    ),
    tasks=(ENCODER, ROBERTA_LM, ROBERTA_CLASSIFIER, TOKEN_CLASSIFIER, QUESTION_ANSWERING),
    layers="encoder.layers.{}.",
    sizes=_sizes("encoder.layers.0.mlp.fc2.weight"),
    ignored_keys=COMMON_KEYS,
    read=partial(read_rotary, config=JinaEmbeddingsV3Config),
    lm_activation="gelu",
    mlp="plain",
    **SHARED,
)
