"""OLMo 2 (arXiv:2501.00656): norms of the outputs of attention and MLP instead of their inputs."""

from dataclasses import dataclass
from typing import ClassVar

from longspan.models.decoders.family import IGNORED_KEYS, LAYER_NAMES, DecoderConfig, DecoderFamily, names_of
from longspan.models.decoders.llama import CAUSAL_LM
from longspan.models.fields import check_flags


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """An OLMo 2: x + norm(attention(x)), then x + norm(mlp(x)).

    Queries and keys are normalised over all heads together, before they are rotated. Fields have the names of
    `config.json`, explained in `LlamaConfig`; the defaults are Hugging Face's.

    Args:
        attention_bias: whether the four projections of attention have biases.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> config = models.Olmo2Config(vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> attention = models.CausalLM(config, rngs=nnx.Rngs(0)).layers[0].attention
        >>> attention.query_norm.scale.shape
        (1, 8)
    """

    vocab_size: int = 50304
    rms_norm_eps: int | float = 1e-5
    attention_bias: bool = False

    model_type: ClassVar[str] = "olmo2"

    def __post_init__(self):
        super().__post_init__()
        check_flags(self, "attention_bias")

    @property
    def family(self) -> DecoderFamily:
        return OLMO2

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, False


NAMES = names_of(
    *LAYER_NAMES,
    ("attention_out_norm.", "post_attention_layernorm."),
    ("mlp_out_norm.", "post_feedforward_layernorm."),
)

OLMO2 = DecoderFamily(
    config=Olmo2Config,
    name="Olmo2",
    tasks=(CAUSAL_LM,),
    names=NAMES,
    ignored_keys=IGNORED_KEYS,
    norm_rounds_first=False,
    input_norms=False,
    branch_norms=True,
    joint_qk_norm=True,
)
