"""Ministral 3: a Mistral whose queries are multiplied by a factor that grows with their positions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from longspan.models.decoders.family import IGNORED_KEYS, DecoderFamily, QueryScaling, read_window
from longspan.models.decoders.llama import CAUSAL_LM
from longspan.models.decoders.mistral import IMAGE_PARTS, MistralConfig
from longspan.models.decoders.rope import ORIGINAL
from longspan.models.fields import is_count, is_number

BETA = "llama_4_scaling_beta"


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(MistralConfig):
    """A Ministral 3: after the rotation, queries are multiplied by 1 + β·ln(1 + ⌊position / length⌋).

    Fields have the names of `config.json`, explained in `LlamaConfig` and `MistralConfig`. The defaults are Hugging
    Face's, except for `num_key_value_heads`.

    Args:
        head_dim: the size of a head, independent of `hidden_size`.
        rope_parameters: the rotary parameters, as in `ls.rope.frequencies`. `llama_4_scaling_beta` is β, and
            `original_max_position_embeddings` is the length. By default YaRN with a factor of 16, β = 0.1 and a length
            of 16384.

    Example:
        >>> from longspan import models
        >>> models.Ministral3Config().query_scaling
        QueryScaling(beta=0.1, length=16384)
    """

    vocab_size: int = 131072
    num_hidden_layers: int = 34
    head_dim: int | None = 128
    max_position_embeddings: int = 262144
    rms_norm_eps: int | float = 1e-5
    sliding_window: int | None = None

    model_type: ClassVar[str] = "ministral3"

    def __post_init__(self):
        if self.rope_parameters is None:
            object.__setattr__(self, "rope_parameters", default_rope(self.max_position_embeddings))
        super().__post_init__()
        rope: Any = self.rope_parameters
        beta, length = rope.get(BETA), rope.get(ORIGINAL)
        if not is_number(beta) or beta < 0:
            raise ValueError(
                f"`rope_parameters` of a Ministral 3 must have `{BETA}`, a number that is at least 0, got "
                f"{beta!r:.200}. With 0, queries are not scaled by their positions."
            )
        if not is_count(length):
            raise ValueError(
                f"`rope_parameters` of a Ministral 3 must have `{ORIGINAL}`, an int that is at least 1, got "
                f"{length!r:.200}. The factor of the queries is computed with it."
            )

    @property
    def family(self) -> DecoderFamily:
        return MINISTRAL3

    @property
    def query_scaling(self) -> QueryScaling:
        return QueryScaling(float(self.rope_parameters[BETA]), int(self.rope_parameters[ORIGINAL]))


def default_rope(longest: Any) -> dict[str, Any]:
    """The rotary parameters if a file has none; its `rope_theta` is then ignored, as in Hugging Face."""
    yarn = dict(rope_type="yarn", rope_theta=1e6, factor=16.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0)
    return yarn | {"mscale_all_dim": 1.0, "max_position_embeddings": longest, ORIGINAL: 16384, BETA: 0.1}


def _read(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """As `read_window`. The original length is that of the config if the scaled frequencies do not have one."""
    read, longest = read_window(content, where), content.get("max_position_embeddings")
    if longest is None:
        longest = Ministral3Config.max_position_embeddings
    if content.get("rope_parameters") is None and not content.get("rope_scaling"):
        return read | dict(rope_parameters=default_rope(longest))
    rope = read["rope_parameters"]
    if rope["rope_type"] in ("llama3", "longrope", "yarn") and rope.get(ORIGINAL) is None:
        rope[ORIGINAL] = longest
    return read


MINISTRAL3 = DecoderFamily(
    config=Ministral3Config,
    name="Ministral3",
    tasks=(CAUSAL_LM,),
    other_prefixes=("language_model.model.", "model.language_model."),
    other_head_prefix="language_model.",
    inside={"mistral3": "text_config"},
    outside=IMAGE_PARTS,
    defaults=dict(num_key_value_heads=8),
    ignored_keys=IGNORED_KEYS,
    rope_keys=(BETA, "max_position_embeddings"),
    read=_read,
)
