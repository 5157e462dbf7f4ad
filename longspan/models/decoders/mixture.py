"""`Mixture`: the numbers of a mixture of experts. `route`: the experts of each token, and their weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longspan.array_types import statistics_dtype
from longspan.models.fields import check_counts


class ClampedGate(NamedTuple):
    """gpt-oss's gate: (up + 1) · gate · sigmoid(alpha · gate), with gate ≤ limit and |up| ≤ limit."""

    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(gate * self.alpha))


class Mixture(NamedTuple):
    """The experts of a layer, and the weights of a token's experts."""

    count: int  # experts
    chosen: int  # experts of each token
    width: int  # hidden units of an expert
    normalized: bool  # whether the weights of a token's experts are divided by their sum
    rounded: bool = True  # whether the weights are rounded to the dtype of the computation
    # gpt-oss: the softmax is over the chosen experts only, the router and the experts have biases, and the columns of
    # gate and up alternate in one matrix.
    clamped: ClampedGate | None = None


def check_mixture(config: Any, count: str, width: str) -> None:
    """Raises unless the numbers of a config's mixture are valid.

    Args:
        config: the config.
        count: the name of its field for the number of experts.
        width: the name of its field for the hidden units of an expert.
    """
    check_counts(config, count, "num_experts_per_tok", width)
    if config.num_experts_per_tok > getattr(config, count):
        raise ValueError(
            f"num_experts_per_tok={config.num_experts_per_tok} must be at most {count}={getattr(config, count)}, "
            "because a layer has no more experts for a token. Change one of them."
        )


def read_same(content: Mapping[str, Any], names: tuple[str, str], where: str) -> Any:
    """The value under two names of one setting. Raises if both are there and differ."""
    given = {name: content[name] for name in names if content.get(name) is not None}
    if len(given) == 2 and given[names[0]] != given[names[1]]:
        raise ValueError(
            f"{where} has {names[0]}={given[names[0]]!r:.200} and {names[1]}={given[names[1]]!r:.200}, two names of "
            "one setting. Remove the wrong one."
        )
    return next(iter(given.values()), None)


def route(mixture: Mixture, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The experts of each token, int32 [tokens, chosen], and their weights, for the router's logits [tokens, experts].

    Of experts with equal probabilities, the one with the smaller number is chosen first.

    Example:
        >>> mixture = Mixture(count=3, chosen=2, width=5, normalized=True)
        >>> experts, weights = route(mixture, jnp.log(jnp.array([[0.6, 0.1, 0.3]])))
        >>> print(experts, np.asarray(weights).round(3))
        [[0 2]] [[0.667 0.333]]
    """
    if mixture.clamped is not None:
        values, experts = jax.lax.top_k(logits, mixture.chosen)
        return experts, jax.nn.softmax(values, axis=-1)
    probabilities = jax.nn.softmax(logits.astype(statistics_dtype(logits.dtype)), axis=-1)
    weights, experts = jax.lax.top_k(probabilities, mixture.chosen)
    if mixture.normalized:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    if mixture.rounded:
        weights = weights.astype(logits.dtype)
    return experts, weights
