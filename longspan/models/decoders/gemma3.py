"""Gemma 3 (arXiv:2503.19786), its text: five local layers to a global one, each kind with a rope of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from longspan.models.decoders.family import FULL, SLIDING, DecoderConfig, DecoderFamily, write_sizes
from longspan.models.decoders.gemma2 import NAMES, Gemma2Config, read_gemma
from longspan.models.decoders.llama import CAUSAL_LM
from longspan.models.decoders.rope import BESIDE, both_spellings, object_of, standard_rope
from longspan.models.fields import check_counts


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """The decoder of a Gemma 3: every sixth layer is global, queries and keys are normalised.

    The names are those of `config.json`, explained in `LlamaConfig` and `Gemma2Config`.

    Args:
        sliding_window_pattern: of so many layers, the last one is global.
        layer_types: the kind of each layer, in place of that.
        rope_parameters: by kind of layer, "full_attention" and "sliding_attention".
        attn_logit_softcapping: None, always.

    Example:
        >>> from longspan import models
        >>> models.Gemma3Config(num_hidden_layers=14).runs[0].kinds.count("sliding_attention")
        5
    """

    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    sliding_window_pattern: int = 6
    attn_logit_softcapping: int | float | None = None
    final_logit_softcapping: int | float | None = None

    model_type: ClassVar[str] = "gemma3_text"

    def __post_init__(self):
        check_counts(self, "sliding_window_pattern")
        if self.attn_logit_softcapping is not None:
            raise ValueError(
                f"attn_logit_softcapping={self.attn_logit_softcapping}: Gemma 3 has no soft cap of scores, and Hugging "
                "Face's ignores it. Set it to None, or to null in config.json."
            )
        rope: Any = ropes({}, "config.json") if self.rope_parameters is None else self.rope_parameters
        if not isinstance(rope, Mapping) or not all(isinstance(rope.get(kind), Mapping) for kind in (FULL, SLIDING)):
            raise ValueError(
                f"`rope_parameters` of a Gemma 3 must have '{FULL}' and '{SLIDING}', a set of numbers for each, got "
                f"{rope!r:.200}."
            )
        object.__setattr__(self, "rope_parameters", rope)
        super().__post_init__()

    @property
    def family(self) -> DecoderFamily:
        return GEMMA3

    def default_kind(self, number: int) -> str:
        return SLIDING if (number + 1) % self.sliding_window_pattern else FULL

    def rope(self, kind: str) -> Mapping[str, Any]:
        return self.rope_parameters[kind]


def ropes(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`rope_parameters` by kind of layer; in the old spelling, `rope_scaling` is for global layers alone."""
    given, scaling = (object_of(content, key, where) for key in ("rope_parameters", "rope_scaling"))
    if given and not {FULL, SLIDING} & set(given):
        return given  # which the config refuses
    full, local = (object_of(given, kind, where, "rope_parameters.") for kind in (FULL, SLIDING))
    beside = {key: content.get(key) for key in ("rope_theta", "rope_local_base_freq")}
    name = "rope_scaling" if scaling else f"rope_parameters.{FULL}"
    return {
        FULL: standard_rope({**full, **scaling}, name, beside, where, theta=1e6),
        SLIDING: standard_rope(
            local, f"rope_parameters.{SLIDING}", beside, where, theta_key="rope_local_base_freq", theta=1e4
        ),
    }


def _read(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    return read_gemma(content, where) | dict(rope_parameters=ropes(content, where))


def _write(config: DecoderConfig) -> dict[str, Any]:
    both = {kind: both_spellings(config.rope(kind)) for kind in (FULL, SLIDING)}
    return both[FULL] | dict(
        rope_parameters={kind: spelled["rope_parameters"] for kind, spelled in both.items()},
        rope_local_base_freq=both[SLIDING]["rope_theta"],
        hidden_activation=config.hidden_act,
        **write_sizes(config),
    )


GEMMA3 = DecoderFamily(
    config=Gemma3Config,
    name="Gemma3",
    tasks=(CAUSAL_LM,),
    other_prefixes=("language_model.model.", "model.language_model."),
    inside={"gemma3": "text_config"},
    outside=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    names=NAMES,
    defaults=dict(num_key_value_heads=4, sliding_window=4096),
    spelled_otherwise=(*BESIDE, "rope_local_base_freq", "hidden_activation"),
    read=_read,
    write=_write,
    norm_adds_one=True,
    branch_norms=True,
    qk_norm=True,
    scaled_embeddings=True,
)
