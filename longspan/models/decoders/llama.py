"""Llama (arXiv:2302.13971, arXiv:2407.21783): the decoder that the other families are based on."""

from dataclasses import dataclass
from typing import ClassVar

from longspan.models.decoders.causal_lm import CausalLM
from longspan.models.decoders.family import DecoderConfig, DecoderFamily
from longspan.models.family import Task
from longspan.models.fields import check_flags


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """A Llama: full causal attention, grouped key/value heads, one set of rotary frequencies.

    Fields have the names of `config.json`; the defaults are Llama-7B.

    Args:
        num_key_value_heads: the number of key/value heads; by default `num_attention_heads`.
        head_dim: the size of a head; by default hidden_size / num_attention_heads.
        rope_parameters: the rotary parameters, as in `ls.rope.frequencies`; by default the base 10000.
        attention_bias: whether the four projections of attention have biases.
        mlp_bias: whether the projections of the MLP have biases.
        tie_word_embeddings: whether the logits are computed with the word embeddings.
        extra: the other keys of a `config.json` as JSON text, which `hf.save` writes back.

    Example:
        >>> from longspan import models
        >>> models.LlamaConfig(hidden_size=2048, num_key_value_heads=8).heads
        (32, 8, 64)
    """

    attention_bias: bool = False
    mlp_bias: bool = False

    model_type: ClassVar[str] = "llama"

    def __post_init__(self):
        super().__post_init__()
        check_flags(self, "attention_bias", "mlp_bias")

    @property
    def family(self) -> DecoderFamily:
        return LLAMA

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, self.mlp_bias


CAUSAL_LM = Task(CausalLM, names=(("head.", "lm_head."),), tied="lm_head.weight")

LLAMA = DecoderFamily(config=LlamaConfig, name="Llama", tasks=(CAUSAL_LM,))
