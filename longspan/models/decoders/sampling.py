"""The choice of the next token: the most likely one, or a sample from the tokens that some rules keep."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOAT32_BITS = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """The numbers of the rules, as arrays. A rule whose number is None is not part of the program."""

    temperature: Any = None  # None: the most likely token
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None


def choose(sampling: Sampling, logits: jax.Array, seen: Any, keys: Any, step: Any) -> jax.Array:
    """The next token of each row, int32 [B].

    The rules apply in Hugging Face's order, each to the tokens that the previous one kept.

    Args:
        sampling: the rules.
        logits: [B, vocab_size].
        seen: bool [B, vocab_size], the tokens of each row so far; used by the repetition penalty.
        keys: a random key per row; used with a temperature.
        step: the number of tokens before this one, folded into the keys so that each draw has its own.
    """
    scores = logits.astype(jnp.float32)
    if sampling.repetition_penalty is not None:
        penalty = sampling.repetition_penalty
        scores = jnp.where(seen, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)
    if sampling.temperature is None:
        return jnp.argmax(scores, axis=-1).astype(np.int32)
    scores = scores / sampling.temperature
    if sampling.top_k is not None:
        scores = _keep_greatest(scores, jnp.ones_like(scores), sampling.top_k)
    if sampling.top_p is not None:
        scores = _keep_greatest(scores, jax.nn.softmax(scores, axis=-1), sampling.top_p)
    if sampling.min_p is not None:
        greatest = jnp.max(scores, axis=-1, keepdims=True)
        scores = jnp.where(scores < greatest + jnp.log(sampling.min_p), -jnp.inf, scores)
    step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
    return jax.vmap(jax.random.categorical)(step_keys, scores).astype(np.int32)


def _keep_greatest(scores: jax.Array, weights: jax.Array, goal: Any) -> jax.Array:
    """The greatest scores whose weights sum to at least `goal`, including ties with the smallest; -inf elsewhere."""
    # A binary search for the smallest score to keep, over the bits of a float32 from the highest to the lowest. A bit
    # stays set if the scores at or above the threshold still weigh enough. Sorting a vocabulary is 10 times slower.
    order = _ordered_bits(scores)

    def try_bit(i, threshold):
        higher = threshold | (np.uint32(1) << (np.uint32(FLOAT32_BITS - 1) - i.astype(np.uint32)))
        weight = jnp.sum(jnp.where(order >= higher, weights, 0), axis=-1, keepdims=True)
        return jnp.where(weight >= goal, higher, threshold)

    threshold = jax.lax.fori_loop(0, FLOAT32_BITS, try_bit, jnp.zeros((*scores.shape[:-1], 1), np.uint32))
    return jnp.where(order >= threshold, scores, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """float32 as uint32 in the same order: negative numbers have all bits inverted, others the sign bit set."""
    bits = jax.lax.bitcast_convert_type(x, np.uint32)
    return jnp.where(bits >> np.uint32(31) == 1, ~bits, bits | np.uint32(1 << 31))
