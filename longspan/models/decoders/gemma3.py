"""The text decoder of Gemma 3 (arXiv:2503.19786): five sliding layers, then a full one; each kind has its own rope."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from longspan.models.decoders.family import FULL, SLIDING, DecoderFamily, check_ropes, write_sizes
from longspan.models.decoders.gemma2 import NAMES, Gemma2Config, read_gemma
from longspan.models.decoders.llama import CAUSAL_LM
from longspan.models.decoders.rope import ROPE_KEYS, both_spellings, object_of, standard_rope
from longspan.models.fields import check_counts


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """The text decoder of a Gemma 3: every sixth layer has full attention; queries and keys are normalised.

    Fields have the names of `config.json`, explained in `LlamaConfig` and `Gemma2Config`.

    Args:
        sliding_window_pattern: the length of the pattern of layers, of which the last has full attention.
        layer_types: the kind of each layer; overrides `sliding_window_pattern`.
        rope_parameters: a set of rotary parameters for "full_attention" and one for "sliding_attention".
        attn_logit_softcapping: always None.

    Example:
        >>> from longspan import models
        >>> models.Gemma3Config(num_hidden_layers=14).kinds[:12].count("sliding_attention")
        10
    """

    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    sliding_window_pattern: int = 6
    attn_logit_softcapping: int | float | None = None
    final_logit_softcapping: int | float | None = None

    model_type: ClassVar[str] = "gemma3_text"

    def __post_init__(self):
        check_counts(self, "sliding_window_pattern")
        refuse_soft_cap(self.attn_logit_softcapping)
        rope: Any = self.rope_parameters
        if rope is None:
            rope = ropes({}, "config.json")
        check_ropes(rope, "a Gemma 3")
        object.__setattr__(self, "rope_parameters", rope)
        super().__post_init__()

    @property
    def family(self) -> DecoderFamily:
        return GEMMA3

    def default_kind(self, number: int) -> str:
        return kind_in_pattern(number, self.sliding_window_pattern)

    def rope(self, kind: str) -> Mapping[str, Any]:
        return self.rope_parameters[kind]


def refuse_soft_cap(cap: Any) -> None:
    """Raises if a Gemma 3 has a soft cap of the scores."""
    if cap is not None:
        raise ValueError(
            f"attn_logit_softcapping={cap!r:.200} is not supported: Gemma 3 has no soft cap of the scores, and Hugging "
            "Face ignores it. Set the key to None (null in config.json)."
        )


def kind_in_pattern(number: int, pattern: int) -> str:
    """The kind of a layer if the last of `pattern` layers has full attention."""
    return SLIDING if (number + 1) % pattern else FULL


def ropes(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`rope_parameters` by kind of layer. In the old spelling, `rope_scaling` applies to full layers only."""
    given = object_of(content, "rope_parameters", where)
    if given and not {FULL, SLIDING} & set(given):
        return given  # the config raises an error
    full = object_of(given, FULL, where, "rope_parameters.")
    full_name = f"rope_parameters.{FULL}"
    scaling = object_of(content, "rope_scaling", where)
    if scaling:
        full, full_name = {**full, **scaling}, "rope_scaling"
    sliding = object_of(given, SLIDING, where, "rope_parameters.")
    sliding_name = f"rope_parameters.{SLIDING}"
    bases = {key: content.get(key) for key in ("rope_theta", "rope_local_base_freq")}
    return {
        FULL: standard_rope(full, full_name, bases, where, theta=1e6),
        SLIDING: standard_rope(sliding, sliding_name, bases, where, theta_key="rope_local_base_freq", theta=1e4),
    }


def _read(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    return read_gemma(content, where) | dict(rope_parameters=ropes(content, where))


def write_gemma3(config: Any) -> dict[str, Any]:
    """The rotary parameters of both kinds, the activation and the head sizes."""
    full, sliding = both_spellings(config.rope(FULL)), both_spellings(config.rope(SLIDING))
    return full | dict(
        rope_parameters={FULL: full["rope_parameters"], SLIDING: sliding["rope_parameters"]},
        rope_local_base_freq=sliding["rope_theta"],
        hidden_activation=config.hidden_act,
        **write_sizes(config),
    )


GEMMA3 = DecoderFamily(
    config=Gemma3Config,
    name="Gemma3",
    tasks=(CAUSAL_LM,),
    other_prefixes=("language_model.model.", "model.language_model."),
    other_head_prefix="language_model.",
    inside={"gemma3": "text_config"},
    outside=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    names=NAMES,
    variant=("use_bidirectional_attention", False),
    defaults=dict(num_key_value_heads=4, sliding_window=4096),
    renamed_keys=(*ROPE_KEYS, "rope_local_base_freq", "hidden_activation"),
    read=_read,
    write=write_gemma3,
    norm_adds_one=True,
    norm_rounds_first=False,
    branch_norms=True,
    qk_norm=True,
    scaled_embeddings=True,
)
