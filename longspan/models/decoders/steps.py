"""The compiled programs of generation: prompts go into the cache chunk by chunk, then tokens come out a few at a time.

Parameters are arguments, the cache is donated: neither is copied.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from longspan.models.decoders.cache import DecoderCache, empty_cache
from longspan.models.decoders.causal_lm import CausalLM
from longspan.models.decoders.family import DecoderConfig
from longspan.models.decoders.inputs import cached_tokens_of
from longspan.models.decoders.sampling import Sampling, choose
from longspan.models.graph import Graph

BURST = 8  # tokens of a row between two looks of the host
NOTHING = -1  # in the place of a token: the row has finished


class Rules(NamedTuple):
    """What stays the same for all tokens of an answer."""

    sampling: Sampling
    stop: Any  # int32 [n]: tokens after which a row has finished
    keys: Any  # of each row, or None
    ropes: dict[str, tuple[Any, Any]]  # (inv_freq [B, D/2], factor) by kind of layer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Where the rows of a batch are."""

    last: Any  # [B, D]: the hidden state of each prompt's last token
    tokens: Any  # int32 [B]: the newest, not in the cache yet
    left: Any  # int32 [B]: how many may still come; 0: finished
    number: Any  # int32: how many came
    seen: Any  # bool [B, vocab_size], or None


class Compiled(NamedTuple):
    """What the programs of a model are compiled by."""

    graph: Graph
    step: bool  # whether a token is computed with matrices, keys and values read in place


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def start(config: DecoderConfig, batch: int, length: int, dtype: Any) -> tuple[DecoderCache, jax.Array]:
    """A cache without tokens, and room for what the last token of each prompt becomes."""
    return empty_cache(config, batch, length, dtype), jnp.zeros((batch, config.hidden_size), dtype)


@partial(jax.jit, static_argnums=(0,), donate_argnums=(2, 3))
def prefill(of: Compiled, params, cache: DecoderCache, last, ids, lengths, ropes) -> tuple[DecoderCache, jax.Array]:
    """The cache with some tokens more of each row, and `last` of the rows that had any: their last hidden state.

    Args:
        of: the program.
        params: the model's.
        cache: the cache.
        last: [B, D].
        ids: int32 [B, n].
        lengths: int32 [B]: how many of them each row has.
        ropes: as in `Rules`.
    """
    model = nnx.merge(of.graph.graph, params)
    x, cache = _hidden(model, cache, ids, lengths, ropes, step=False)
    newest = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    return cache, jnp.where(lengths[:, None] > 0, newest, last)


@partial(jax.jit, static_argnums=(0,), donate_argnums=(2, 3))
def burst(
    of: Compiled, params, cache: DecoderCache, state: State, rules: Rules
) -> tuple[DecoderCache, State, jax.Array]:
    """The first token of each answer, or up to `BURST` more, int32 [BURST, B]; `NOTHING` where a row has finished.

    One program for both: its first call returns one token, so that it can be streamed at once.
    """
    model = nnx.merge(of.graph.graph, params)
    batch, is_first = state.tokens.shape[0], state.number == 0

    def with_first(state):
        return _chosen(model, state.last[:, None], state, rules, of.step)

    def more(carry):
        number, _, state, _ = carry
        return (number < BURST) & ~is_first & jnp.any(state.left > 0)

    def one(carry):
        number, cache, state, tokens = carry
        alive = state.left > 0
        x, cache = _hidden(model, cache, state.tokens[:, None], alive.astype(np.int32), rules.ropes, step=of.step)
        state = _chosen(model, x, state, rules, of.step)
        return number + 1, cache, state, tokens.at[number].set(jnp.where(alive, state.tokens, np.int32(NOTHING)))

    begins = is_first & (state.left > 0)
    state = jax.lax.cond(is_first, with_first, lambda state: state, state)
    tokens = jnp.full((BURST, batch), NOTHING, np.int32).at[0].set(jnp.where(begins, state.tokens, np.int32(NOTHING)))
    _, cache, state, tokens = jax.lax.while_loop(more, one, (np.int32(0), cache, state, tokens))
    return cache, state, tokens


def _hidden(model: CausalLM, cache: DecoderCache, ids, lengths, ropes, *, step: bool) -> tuple[jax.Array, DecoderCache]:
    tokens, cache = cached_tokens_of(model.config, ids.shape, cache, lengths, model.dtype, ropes)
    x, stacks = model._apply_layers(model._embedded(ids, None), tokens, cache.stacks, step=step)
    return x, replace(cache, stacks=stacks)


def _chosen(model: CausalLM, x: jax.Array, state: State, rules: Rules, step: bool) -> State:
    """The state with a token more in each row, from what the layers made [B, 1, D] of the one before."""
    logits = model._logits(model.norm(x), step=step)[:, 0]
    tokens = choose(rules.sampling, logits, state.seen, rules.keys, state.number)
    stops = jnp.any(tokens[:, None] == rules.stop[None], axis=1)
    left = jnp.where(stops, 0, jnp.maximum(state.left - 1, 0))
    seen = state.seen
    if seen is not None:
        seen = seen | (jnp.arange(logits.shape[1])[None] == tokens[:, None])
    return replace(state, tokens=tokens, left=left, number=state.number + 1, seen=seen)
