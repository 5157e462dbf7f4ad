"""`Output`: the results of a model's call."""

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Output:
    """The results of a model's call, under Hugging Face's names. Fields that the model does not compute are None.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> config = models.BertConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> output = models.TokenClassifier(config, rngs=nnx.Rngs(0))(jnp.ones((1, 5), int))
        >>> output.logits.shape, output.last_hidden_state.shape, output.pooler_output
        ((1, 5, 2), (1, 5, 6), None)
    """

    # `Any`, not shapes: JAX rebuilds the object with placeholders, which a type checker would reject.
    last_hidden_state: Any  # [B, T, hidden_size]
    pooler_output: Any = None  # [B, hidden_size]
    logits: Any = None  # [B, num_labels], [B, T, num_labels] or [B, T, vocab_size]
    start_logits: Any = None  # [B, T]
    end_logits: Any = None  # [B, T]
    cache: Any = None  # of a decoder that was called with one: the cache after the call
