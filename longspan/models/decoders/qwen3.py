"""Qwen3 (arXiv:2505.09388): a Qwen2 without biases and with normalised queries and keys."""

from dataclasses import dataclass
from typing import ClassVar

from longspan.models.decoders.family import DecoderFamily, read_window
from longspan.models.decoders.llama import CAUSAL_LM
from longspan.models.decoders.qwen2 import Qwen2Config
from longspan.models.fields import check_flags


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """A Qwen3: queries and keys are normalised per head before they are rotated.

    Fields have the names of `config.json`, explained in `LlamaConfig` and `Qwen2Config`.

    Args:
        head_dim: the size of a head, independent of `hidden_size`.
        attention_bias: whether the four projections of attention have biases.

    Example:
        >>> from longspan import models
        >>> models.Qwen3Config(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8).heads
        (16, 8, 128)
    """

    head_dim: int | None = 128
    attention_bias: bool = False

    model_type: ClassVar[str] = "qwen3"

    def __post_init__(self):
        super().__post_init__()
        check_flags(self, "attention_bias")

    @property
    def family(self) -> DecoderFamily:
        return QWEN3

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, False


QWEN3 = DecoderFamily(
    config=Qwen3Config,
    name="Qwen3",
    tasks=(CAUSAL_LM,),
    defaults=dict(num_key_value_heads=32, sliding_window=4096),
    read=read_window,
    qk_norm=True,
)
