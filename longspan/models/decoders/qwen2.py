"""Qwen2 (arXiv:2407.10671): a Llama with biases of queries, keys and values; its last layers may be sliding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from longspan.models.decoders.family import FULL, SLIDING, DecoderFamily, LayerTypes, read_window
from longspan.models.decoders.llama import CAUSAL_LM
from longspan.models.fields import check_counts, check_flags


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(LayerTypes):
    """A Qwen2: the projections of queries, keys and values have biases.

    Fields have the names of `config.json`, explained in `LlamaConfig`.

    Args:
        use_sliding_window: whether any layer is sliding. If False, `sliding_window` has no effect.
        sliding_window: the number of keys that a query of a sliding layer attends to, its own included.
        max_window_layers: the number of the first layer that is sliding.
        layer_types: the kind of each layer; overrides the three fields above.

    Example:
        >>> from longspan import models
        >>> models.Qwen2Config(use_sliding_window=True, max_window_layers=2, num_hidden_layers=3).kinds
        ('full_attention', 'full_attention', 'sliding_attention')
    """

    vocab_size: int = 151936
    intermediate_size: int = 22016
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: Sequence[str] | None = None

    model_type: ClassVar[str] = "qwen2"

    def __post_init__(self):
        check_flags(self, "use_sliding_window")
        check_counts(self, "max_window_layers", minimum=0)
        super().__post_init__()

    @property
    def family(self) -> DecoderFamily:
        return QWEN2

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return True, False, False

    def default_kind(self, number: int) -> str:
        slides = self.use_sliding_window and self.sliding_window is not None and number >= self.max_window_layers
        return SLIDING if slides else FULL


QWEN2 = DecoderFamily(
    config=Qwen2Config,
    name="Qwen2",
    tasks=(CAUSAL_LM,),
    defaults=dict(num_key_value_heads=32, sliding_window=4096),
    read=read_window,
)
