"""Phi-3 (arXiv:2404.14219): a Llama with fused matrices, and other rotary frequencies for long inputs (longrope)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from longspan.checks import check_choice
from longspan.models.decoders.family import FULL, SLIDING, DecoderConfig, DecoderFamily, read_window
from longspan.models.decoders.llama import CAUSAL_LM
from longspan.models.decoders.rope import ORIGINAL
from longspan.models.fields import check_counts


@dataclass(frozen=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """A Phi-3: one matrix for queries, keys and values, and one for the MLP's gate and up projections.

    Fields have the names of `config.json`, explained in `LlamaConfig`; the defaults are Phi-3-mini.

    Args:
        original_max_position_embeddings: the length beyond which "longrope" uses its long frequencies.
        sliding_window: the number of keys that a query attends to, its own included; None: all.

    Example:
        >>> from longspan import models
        >>> models.Phi3Config(sliding_window=2047, num_hidden_layers=2).kinds
        ('sliding_attention', 'sliding_attention')
    """

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 4096
    rms_norm_eps: int | float = 1e-5
    sliding_window: int | None = None

    model_type: ClassVar[str] = "phi3"

    def __post_init__(self):
        check_counts(self, ORIGINAL)
        super().__post_init__()
        check_choice("rope_type", self.rope_parameters.get("rope_type", "default"), ("default", "longrope"))

    @property
    def family(self) -> DecoderFamily:
        return PHI3

    @property
    def kinds(self) -> tuple[str, ...]:
        kind = FULL if self.sliding_window is None else SLIDING
        return (kind,) * self.num_hidden_layers

    def rope(self, kind: str) -> Mapping[str, Any]:
        return {**self.rope_parameters, ORIGINAL: self.original_max_position_embeddings}


def _read(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """As `read_window`; older files call longrope "su" or "yarn"."""
    read = read_window(content, where)
    rope = read["rope_parameters"]
    rope.setdefault("partial_rotary_factor", 1.0)
    if rope["rope_type"] in ("su", "yarn"):
        rope["rope_type"] = "longrope"
    return read


PHI3 = DecoderFamily(
    config=Phi3Config,
    name="Phi3",
    tasks=(CAUSAL_LM,),
    defaults={ORIGINAL: 4096},
    read=_read,
    partial_rotation=True,
    fused=True,
)
