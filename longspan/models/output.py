"""What a model returns."""

from dataclasses import dataclass

import jax
from jaxtyping import Float

from longspan._types import Array


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

    last_hidden_state: Float[Array, "B T D"]
    pooler_output: Float[Array, "B D"] | None = None
    logits: Float[Array, "..."] | None = None
    start_logits: Float[Array, "B T"] | None = None
    end_logits: Float[Array, "B T"] | None = None
