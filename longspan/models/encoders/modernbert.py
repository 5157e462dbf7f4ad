"""ModernBERT (arXiv:2412.13663): pre-norm, a gated MLP, and windows in two of three layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from longspan.checks import check_choice
from longspan.models.activations import ACTIVATIONS
from longspan.models.common_keys import COMMON_KEYS
from longspan.models.decoders.family import FULL, SLIDING, check_layer_types
from longspan.models.decoders.rope import both_spellings, object_of, override_rope, standard_rope
from longspan.models.encoders.bert import ENCODER
from longspan.models.encoders.family import NULLABLE, HeadTransform, check_is_encoder
from longspan.models.encoders.rotary import RotaryAttention, RotaryEmbeddings, RotaryLayers
from longspan.models.encoders.rotary_config import DropoutRates, LayerBiases, LocalLayers, RotaryFamily
from longspan.models.encoders.tasks import MaskedLM, QuestionAnswering, SequenceClassifier, TokenClassifier
from longspan.models.family import Task, TensorSize
from longspan.models.fields import MAX_INT32, check_counts, check_flags, check_reals, is_count

POOLINGS = {"cls": "first", "mean": "mean"}
BASES = {FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)}


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(LocalLayers):
    """A ModernBERT encoder: every third layer has full attention, the others a window; queries and keys are rotated.

    Fields have the names of `config.json`; the defaults are ModernBERT-base.

    Args:
        local_attention: twice the number of keys on each side of a query in sliding layers; 128 is `Window(64, 64)`.
        global_attn_every_n_layers: n, where one of n layers has full attention, starting with the first.
        layer_types: the kind of each layer; overrides `global_attn_every_n_layers`.
        rope_parameters: a set of rotary parameters for "full_attention" and one for "sliding_attention", as in
            `ls.rope.frequencies`; by default the bases 160000 and 10000.
        classifier_pooling: what a sequence classifier reads: the first token ("cls") or the mean over tokens ("mean").
        extra: the other keys of a `config.json` as JSON text, which `hf.save` writes back.

    Example:
        >>> from longspan import models
        >>> config = models.ModernBertConfig(num_hidden_layers=4)
        >>> [config.rule(layer) for layer in range(4)]
        ['Full()', 'Window(64, 64)', 'Window(64, 64)', 'Full()']
    """

    vocab_size: int = 50368
    num_hidden_layers: int = 22
    intermediate_size: int = 1152
    max_position_embeddings: int = 8192
    pad_token_id: int = field(default=50283, metadata=NULLABLE)
    hidden_activation: str = "gelu"
    norm_eps: int | float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    decoder_bias: bool = True
    local_attention: int = 128
    global_attn_every_n_layers: int = 3
    layer_types: Sequence[str] | None = None
    attention_dropout: int | float = 0.0
    embedding_dropout: int | float = 0.0
    mlp_dropout: int | float = 0.0
    classifier_pooling: str = "cls"
    classifier_activation: str = "gelu"
    classifier_bias: bool = False
    classifier_dropout: int | float = 0.0

    model_type: ClassVar[str] = "modernbert"

    def __post_init__(self):
        check_counts(self, "num_hidden_layers", "global_attn_every_n_layers")
        check_counts(self, "local_attention", minimum=0)
        check_layer_types(self)
        check_reals(self, "norm_eps")
        check_reals(self, "attention_dropout", "embedding_dropout", "mlp_dropout", "classifier_dropout", below=1.0)
        check_flags(self, "norm_bias", "attention_bias", "mlp_bias", "decoder_bias", "classifier_bias")
        for name in ("hidden_activation", "classifier_activation"):
            check_choice(name, getattr(self, name), tuple(sorted(ACTIVATIONS)))
        check_choice("classifier_pooling", self.classifier_pooling, tuple(POOLINGS))
        super().__post_init__()

    @property
    def family(self) -> RotaryFamily:
        return MODERNBERT

    @property
    def default_rope(self) -> Mapping[str, Any]:
        return _ropes({}, "config.json")

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return tuple(self.layer_types)
        return _pattern(self.num_hidden_layers, self.global_attn_every_n_layers)

    @property
    def sliding_radius(self) -> int:
        return self.local_attention // 2

    @property
    def layer_norm_eps(self) -> float:
        return self.norm_eps

    @property
    def layer_norm_bias(self) -> bool:
        return self.norm_bias

    @property
    def activation(self) -> str:
        return self.hidden_activation

    @property
    def biases(self) -> LayerBiases:
        return LayerBiases(self.attention_bias, self.attention_bias, self.mlp_bias, self.mlp_bias)

    @property
    def dropout_rates(self) -> DropoutRates:
        attention = self.attention_dropout
        return DropoutRates(self.embedding_dropout, attention, attention, self.mlp_dropout)

    @property
    def head_dropout(self) -> float:
        return self.classifier_dropout

    @property
    def lm_transform(self) -> HeadTransform:
        return HeadTransform(self.classifier_activation, self.classifier_bias, norm_bias=self.norm_bias)

    @property
    def lm_bias(self) -> bool:
        return self.decoder_bias

    @property
    def classifier_transform(self) -> HeadTransform:
        return self.lm_transform

    @property
    def token_transform(self) -> HeadTransform:
        return self.lm_transform

    @property
    def pooling(self) -> str:
        return POOLINGS[self.classifier_pooling]


def _pattern(layers: int, every: int) -> tuple[str, ...]:
    """The kinds of layers of which one in `every` has full attention."""
    return tuple(SLIDING if number % every else FULL for number in range(layers))


def _ropes(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`rope_parameters` by kind of layer. As in Hugging Face, `rope_scaling` applies to both kinds."""
    given, scaling = object_of(content, "rope_parameters", where), object_of(content, "rope_scaling", where)
    if given and scaling:
        raise ValueError(
            f"{where} has both rope_parameters and rope_scaling, two spellings of the same settings. Remove one."
        )
    if set(given) - set(BASES):
        raise ValueError(
            f"{where} has rope_parameters with the keys {', '.join(map(repr, given))}, but a modernbert has one set of "
            f"parameters for '{FULL}' and one for '{SLIDING}'."
        )
    if "type" in scaling and "rope_type" not in scaling:
        raise ValueError(
            f"{where} has rope_scaling.type={scaling['type']!r:.200}, which Hugging Face ignores in a modernbert. "
            "Rename the key to `rope_type`, or remove rope_scaling."
        )
    ropes, bases = {}, {key: content.get(key) for key, _ in BASES.values()}
    for kind, (key, theta) in BASES.items():
        parameters, name = object_of(given, kind, where, "rope_parameters."), f"rope_parameters.{kind}"
        if scaling:
            parameters, name = scaling, "rope_scaling"
        ropes[kind] = standard_rope(parameters, name, bases, where, theta_key=key, theta=theta)
    return ropes


def _read(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Both spellings of the rotary parameters and of the window."""
    fields = check_is_encoder(content, where) | dict(rope_parameters=_ropes(content, where))
    if "sliding_window" in content:
        radius = content["sliding_window"]
        if not is_count(radius, 0) or not is_count(2 * radius, 0):
            raise ValueError(
                f"{where} has sliding_window={radius!r:.200}, which must be an int from 0 to {MAX_INT32 // 2}. It is "
                "the number of keys on each side of a query, half of `local_attention`."
            )
        fields["local_attention"] = 2 * radius
    return fields


def _write(config: ModernBertConfig) -> dict[str, Any]:
    ropes = {kind: both_spellings(config.rope(kind))["rope_parameters"] for kind in BASES}
    written: dict[str, Any] = {key: ropes[kind]["rope_theta"] for kind, (key, _) in BASES.items()}
    # Versions before 5 do not read `layer_types`.
    for every in range(1, config.num_hidden_layers + 1):
        if config.kinds == _pattern(config.num_hidden_layers, every):
            written["global_attn_every_n_layers"] = every
            break
    return written | dict(rope_parameters=ropes)


def _override(raw: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A file's content with some keys overridden. Keys of the other spelling that take precedence are removed."""
    raw = dict(raw)
    if "global_attn_every_n_layers" in overrides:
        raw.pop("layer_types", None)
    if "local_attention" in overrides:
        raw.pop("sliding_window", None)
    old = ("rope_scaling", *(key for key, _ in BASES.values()))
    return override_rope(raw, overrides, where, old_spelling=old)


NAMES = (
    ("embeddings.word.", "embeddings.tok_embeddings."),
    ("embeddings.norm.", "embeddings.norm."),
    ("layers.attention_norm.", "layers.{}.attn_norm."),
    ("layers.attention.qkv.", "layers.{}.attn.Wqkv."),
    ("layers.attention.out.", "layers.{}.attn.Wo."),
    ("layers.mlp_norm.", "layers.{}.mlp_norm."),
    ("layers.mlp.gate_up.", "layers.{}.mlp.Wi."),
    ("layers.mlp.down.", "layers.{}.mlp.Wo."),
    ("layers.norm.", "final_norm."),
)
HEAD = (("dense.", "head.dense."), ("norm.", "head.norm."))

MODERNBERT = RotaryFamily(
    config=ModernBertConfig,
    name="ModernBert",
    prefix="model.",
    names=NAMES,
    tasks=(
        replace(ENCODER, optional_pooler=False),
        Task(
            MaskedLM,
            names=(*HEAD, ("bias", "decoder.bias"), ("decoder.", "decoder.")),
            tied="decoder.weight",
        ),
        Task(SequenceClassifier, names=(*HEAD, ("classifier.", "classifier."))),
        Task(TokenClassifier, names=(*HEAD, ("classifier.", "classifier."))),
        Task(QuestionAnswering, names=(*HEAD, ("outputs.", "classifier."))),
    ),
    word_embeddings="embeddings.tok_embeddings.weight",
    layers="layers.{}.",
    sizes=(
        TensorSize(("vocab_size",), "embeddings.tok_embeddings.weight", 0),
        TensorSize(("hidden_size",), "embeddings.tok_embeddings.weight", 1),
        TensorSize(("intermediate_size",), "layers.0.mlp.Wo.weight", 1),
    ),
    buffers=("rotary_emb.inv_freq",),
    renamed_keys=("rope_parameters", "rope_scaling", "sliding_window", *(key for key, _ in BASES.values())),
    read=_read,
    write=_write,
    override=_override,
    # Hugging Face reads `norm_eps`, `hidden_activation` and the two bases instead of the first three.
    ignored_keys=COMMON_KEYS
    | {"layer_norm_eps", "hidden_act", "rope_theta", "initializer_cutoff_factor", "deterministic_flash_attn"}
    | {"reference_compile", "repad_logits_with_grad", "sparse_prediction", "sparse_pred_ignore_index"},
    embeddings=RotaryEmbeddings,
    attention=RotaryAttention,
    stack=RotaryLayers,
    has_pooler=False,
    pre_norm=True,
    first_norm=False,
)
