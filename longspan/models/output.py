"""What a model returns."""

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Output:
    """What a model returns, under the names that Hugging Face users know; what a model does not have is None.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> config = models.BertConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> output = models.TokenClassifier(config, rngs=nnx.Rngs(0))(jnp.ones((1, 5), int))
        >>> output.logits.shape, output.last_hidden_state.shape, output.pooler_output
        ((1, 5, 2), (1, 5, 6), None)
    """

    # Not shapes for the checker: JAX rebuilds the object with placeholders.
    last_hidden_state: Any  # [B, T, hidden_size]
    pooler_output: Any = None  # [B, hidden_size]
    logits: Any = None  # [B, num_labels], [B, T, num_labels] or [B, T, vocab_size]
    start_logits: Any = None  # [B, T]
    end_logits: Any = None  # [B, T]
    cache: Any = None  # of a decoder that was given one: with the tokens of the call
