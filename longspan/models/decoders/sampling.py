"""Which token comes next: the likeliest, or one drawn from what a few rules leave."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BITS = 32  # of a float32: as many halvings find any of them


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """The numbers of a choice, arrays; what is None is left out of the program."""

    temperature: Any = None  # None: the likeliest
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None


def choose(sampling: Sampling, logits: jax.Array, seen: Any, keys: Any, number: Any) -> jax.Array:
    """The next token of each row, int32 [B].

    The rules come in Hugging Face's order, each on what the one before left.

    Args:
        sampling: the rules.
        logits: [B, vocab_size].
        seen: bool [B, vocab_size], the tokens that a row has; only asked for with a repetition penalty.
        keys: of each row; only asked for with a temperature.
        number: how many tokens came before: it tells the draws of one row apart.
    """
    scores = logits.astype(jnp.float32)
    if sampling.repetition_penalty is not None:
        penalty = sampling.repetition_penalty
        scores = jnp.where(seen, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)
    if sampling.temperature is None:
        return jnp.argmax(scores, axis=-1).astype(np.int32)
    scores = scores / sampling.temperature
    if sampling.top_k is not None:
        scores = _keep(scores, jnp.ones_like(scores), sampling.top_k)
    if sampling.top_p is not None:
        scores = _keep(scores, jax.nn.softmax(scores, axis=-1), sampling.top_p)
    if sampling.min_p is not None:
        likeliest = jnp.max(scores, axis=-1, keepdims=True)
        scores = jnp.where(scores < likeliest + jnp.log(sampling.min_p), -jnp.inf, scores)
    own = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    return jax.vmap(jax.random.categorical)(own, scores).astype(np.int32)


def _keep(scores: jax.Array, weights: jax.Array, goal: Any) -> jax.Array:
    """The greatest scores that together weigh at least `goal`, with all that equal the last of them; -inf elsewhere.

    The last one is found bit by bit, from the top: sorting a vocabulary takes ten times as long.
    """
    order = _ordered(scores)

    def try_bit(i, least):
        higher = least | (np.uint32(1) << (np.uint32(BITS - 1) - i.astype(np.uint32)))
        weight = jnp.sum(jnp.where(order >= higher, weights, 0), axis=-1, keepdims=True)
        return jnp.where(weight >= goal, higher, least)

    least = jax.lax.fori_loop(0, BITS, try_bit, jnp.zeros((*scores.shape[:-1], 1), np.uint32))
    return jnp.where(order >= least, scores, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """float32 as uint32 of the same order."""
    bits = jax.lax.bitcast_convert_type(x, np.uint32)
    return jnp.where(bits >> np.uint32(31) == 1, ~bits, bits | np.uint32(1 << 31))
