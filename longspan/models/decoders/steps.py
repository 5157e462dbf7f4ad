"""The compiled programs of `generate`: prefill in chunks, then decode in bursts of a few tokens.

Parameters are arguments and the cache is donated, so neither is copied.
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
from longspan.models.graph import HashedGraph

BURST = 8  # decode steps between two returns to the host
NO_TOKEN = -1  # in place of a token of a row that has finished


class DecodeSettings(NamedTuple):
    """The arrays of a request that stay the same for all decode steps."""

    sampling: Sampling
    stop_tokens: Any  # int32 [n]: a row is finished after one of these
    keys: Any  # a random key for each row, or None
    ropes: dict[str, tuple[Any, Any]]  # (inv_freq [B, D/2], factor) by kind of layer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The progress of each row of a batch."""

    last_hidden: Any  # [B, D]: the hidden state of each prompt's last token
    tokens: Any  # int32 [B]: the newest token, which is not in the cache yet
    remaining: Any  # int32 [B]: tokens that may still follow; 0: finished
    step: Any  # int32: decode steps so far
    seen: Any  # bool [B, vocab_size]: tokens of the row so far; None without a repetition penalty


class ProgramKey(NamedTuple):
    """The static argument of the programs of a model."""

    graph: HashedGraph
    in_place: bool  # whether decode steps read parameters, keys and values from their stacks without copying them


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def allocate(
    config: DecoderConfig, batch: int, length: int, dtype: Any, heads_first: bool = False
) -> tuple[DecoderCache, jax.Array]:
    """An empty cache, and zeros for the hidden state of each prompt's last token."""
    cache = empty_cache(config, batch, length, dtype, heads_first=heads_first)
    return cache, jnp.zeros((batch, config.hidden_size), dtype)


@partial(jax.jit, static_argnums=(0,), donate_argnums=(2, 3))
def prefill(
    program: ProgramKey, params, cache: DecoderCache, last_hidden, ids, lengths, ropes
) -> tuple[DecoderCache, jax.Array]:
    """The cache with one more chunk of each prompt, and the hidden state of each row's last token so far.

    Args:
        program: the model's structure.
        params: the model's parameters.
        cache: the cache.
        last_hidden: [B, D], kept for rows without a token in this chunk.
        ids: the chunk, int32 [B, n].
        lengths: int32 [B]: the number of tokens that each row has in the chunk.
        ropes: as in `DecodeSettings`.
    """
    model = nnx.merge(program.graph.graph, params)
    x, cache = _hidden_states(model, cache, ids, lengths, ropes, in_place=False)
    newest = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    return cache, jnp.where(lengths[:, None] > 0, newest, last_hidden)


@partial(jax.jit, static_argnums=(0,), donate_argnums=(2, 3))
def decode_burst(
    program: ProgramKey, params, cache: DecoderCache, state: DecodeState, settings: DecodeSettings
) -> tuple[DecoderCache, DecodeState, jax.Array]:
    """The next tokens of each row, int32 [BURST, B]; `NO_TOKEN` after a row has finished.

    The first call returns one token, which can be streamed at once; later calls return up to `BURST`. Both are one
    program, which is compiled once.
    """
    model = nnx.merge(program.graph.graph, params)
    batch, is_first = state.tokens.shape[0], state.step == 0

    def choose_first(state):
        return _with_next_token(model, state.last_hidden[:, None], state, settings, program.in_place)

    def goes_on(carry):
        index, _, state, _ = carry
        return (index < BURST) & ~is_first & jnp.any(state.remaining > 0)

    def decode_step(carry):
        index, cache, state, tokens = carry
        active = state.remaining > 0
        ids, lengths = state.tokens[:, None], active.astype(np.int32)
        x, cache = _hidden_states(model, cache, ids, lengths, settings.ropes, in_place=program.in_place)
        state = _with_next_token(model, x, state, settings, program.in_place)
        return index + 1, cache, state, tokens.at[index].set(jnp.where(active, state.tokens, np.int32(NO_TOKEN)))

    has_first = is_first & (state.remaining > 0)
    state = jax.lax.cond(is_first, choose_first, lambda state: state, state)
    tokens = jnp.full((BURST, batch), NO_TOKEN, np.int32)
    tokens = tokens.at[0].set(jnp.where(has_first, state.tokens, np.int32(NO_TOKEN)))
    _, cache, state, tokens = jax.lax.while_loop(goes_on, decode_step, (np.int32(0), cache, state, tokens))
    return cache, state, tokens


def _hidden_states(
    model: CausalLM, cache: DecoderCache, ids, lengths, ropes, *, in_place: bool
) -> tuple[jax.Array, DecoderCache]:
    tokens, cache = cached_tokens_of(model.config, ids.shape, cache, lengths, model.dtype, ropes)
    x, stacks = model._apply_layers(model._embedded(ids, None), tokens, cache.stacks, in_place=in_place)
    return x, replace(cache, stacks=stacks)


def _with_next_token(
    model: CausalLM, x: jax.Array, state: DecodeState, settings: DecodeSettings, in_place: bool
) -> DecodeState:
    """The state with one more token in each row, chosen from the hidden states x [B, 1, D] of the last ones."""
    logits = model._logits(model.norm(x), in_place=in_place)[:, 0]
    tokens = choose(settings.sampling, logits, state.seen, settings.keys, state.step)
    stops = jnp.any(tokens[:, None] == settings.stop_tokens[None], axis=1)
    remaining = jnp.where(stops, 0, jnp.maximum(state.remaining - 1, 0))
    seen = state.seen
    if seen is not None:
        seen = seen | (jnp.arange(logits.shape[1])[None] == tokens[:, None])
    return replace(state, tokens=tokens, remaining=remaining, step=state.step + 1, seen=seen)
