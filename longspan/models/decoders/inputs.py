"""What a call gives a decoder, checked before anything is computed from it, and the place of every token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.checks import is_int, is_known
from longspan.masks import positions_from_segments
from longspan.models.decoders.attention import Tokens
from longspan.models.decoders.cache import DecoderCache, layouts
from longspan.models.decoders.family import DecoderConfig
from longspan.models.inputs import check_shape, shape_of_input
from longspan.parallel.sequence_sharding import UNSHARDED, SequenceSharding


def check_inputs(
    config: DecoderConfig,
    input_ids: Any,
    attention_mask: Any,
    positions: Any,
    inputs_embeds: Any,
    segment_ids: Any,
    cache: Any,
    sharding: SequenceSharding = UNSHARDED,
) -> tuple[int, int]:
    """The batch and the number of tokens, after checking that all arguments are of one call that the model can run."""
    shape = shape_of_input(config, input_ids, inputs_embeds)
    for name, array in (("attention_mask", attention_mask), ("segment_ids", segment_ids)):
        if array is not None:
            check_shape(name, array, [shape])
    if positions is not None:
        check_shape("positions", positions, [shape, (1, shape[1])])
        if not is_int(positions):
            raise ValueError(f"`positions` must be ints, got {positions.dtype}.")
    if cache is not None:
        if sharding.mesh is not None:
            raise ValueError(
                "A `cache` is decoded with on one device; a `mesh` shares whole sequences. Give one of them."
            )
        _check_cache(config, cache, shape, attention_mask)
        for name, array in (("positions", positions), ("segment_ids", segment_ids)):
            if array is not None:
                raise ValueError(
                    f"`{name}` and `cache` were both given, but a cache counts the tokens of each row itself, all of "
                    f"one document. Leave `{name}` out."
                )
    return shape


def tokens_of(
    config: DecoderConfig,
    shape: tuple[int, int],
    attention_mask,
    positions,
    segment_ids,
    sharding: SequenceSharding = UNSHARDED,
) -> Tokens:
    """The masks and the positions of a call without a cache.

    Masks go by slots, or by the tokens' places before devices shared them: padding at either end and packed documents
    leave the distances inside of a document alone.
    """
    kinds, ids = dict.fromkeys(config.kinds), _documents(shape, attention_mask, segment_ids)
    masks = {kind: config.mask(kind) if ids is None else config.packed_mask(kind, ids) for kind in kinds}
    if positions is None:
        positions = _counted(shape[1], ids, sharding)
    return Tokens(masks, ropes_of(config, shape[1]), jnp.asarray(positions, jnp.int32), sharding=sharding)


def _counted(length: int, ids, sharding: SequenceSharding) -> Any:
    """Positions where none are given: tokens are counted in each row, and in each document."""
    at = sharding.positions(length)
    if ids is None:
        return jnp.arange(length, dtype=np.int32) if at is None else at
    return positions_from_segments(ids) if at is None else positions_from_segments(ids[:, np.argsort(at)])[:, at]


def cached_tokens_of(
    config: DecoderConfig, shape: tuple[int, int], cache: DecoderCache, lengths, dtype, ropes=None
) -> tuple[Tokens, DecoderCache]:
    """The new tokens, whose positions are those that the cache gives them, and the cache with those."""
    at = cache.length[:, None] + jnp.arange(shape[1], dtype=np.int32)[None]
    cache, steps = cache.advanced(shape[1], lengths)
    ropes = ropes_of(config, cache.max_length) if ropes is None else ropes
    return Tokens(layouts(config, steps, dtype), ropes, at, steps), cache


def ropes_of(config: DecoderConfig, seq_len: int) -> dict[str, tuple[Any, Any]]:
    """The rotary frequencies and factors of all kinds of layers, for rows of this length."""
    return {kind: config.frequencies(kind, seq_len) for kind in dict.fromkeys(config.kinds)}


def tokens_first(attention_mask: Any) -> tuple[jax.Array, jax.Array]:
    """The order [B, T] in which each row's tokens come before its padding, and how many they are."""
    valid = jnp.asarray(attention_mask).astype(bool)
    return jnp.argsort(~valid, axis=1, stable=True), jnp.sum(valid, axis=1, dtype=np.int32)


def _documents(shape: tuple[int, int], attention_mask, segment_ids) -> jax.Array | None:
    """The document of every token, -1 for padding; None if all are of one."""
    if attention_mask is None:
        return None if segment_ids is None else jnp.asarray(segment_ids)
    ids = jnp.zeros(shape, jnp.int32) if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    return jnp.where(jnp.asarray(attention_mask).astype(bool), ids, np.int32(-1))


def _check_cache(config: DecoderConfig, cache: Any, shape: tuple[int, int], attention_mask: Any) -> None:
    if not isinstance(cache, DecoderCache):
        raise TypeError(f"`cache` must be what `model.init_cache(batch, length)` gives, got {type(cache).__name__}.")
    if cache.runs != config.runs:
        raise ValueError(
            f"`cache` was made for {len(cache)} layers of another model, and this one has {config.num_hidden_layers}. "
            "Make one with its own `model.init_cache(batch, length)`."
        )
    if cache.length.shape[0] != shape[0]:
        raise ValueError(f"`cache` has {cache.length.shape[0]} rows and the input {shape[0]}. Give each row its own.")
    new = shape[1] if attention_mask is None else jnp.asarray(attention_mask).astype(bool).sum(axis=1)
    total = cache.length + new
    if is_known(total) and int(total.max()) > cache.max_length:
        raise ValueError(
            f"The cache was made for {cache.max_length} tokens, and {int(total.max())} are asked for. Make a longer "
            "one: `model.init_cache(batch, length)`."
        )
