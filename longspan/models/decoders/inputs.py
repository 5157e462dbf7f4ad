"""The inputs of a decoder's call: their checks, and the masks and positions made from them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.checks import is_int, is_known
from longspan.masks import positions_from_segments
from longspan.models.decoders.attention import DecoderTokens
from longspan.models.decoders.cache import DecoderCache, plan_layouts
from longspan.models.decoders.family import FULL, SLIDING, DecoderConfig
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
    """The shape (B, T) of the input. Raises unless the arguments fit together and fit the model."""
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
                "`cache` and `mesh` were both given, but decoding with a cache runs on one device, and `mesh` shards "
                "whole sequences. Give one of them."
            )
        _check_cache(config, cache, shape, attention_mask)
        for name, array in (("positions", positions), ("segment_ids", segment_ids)):
            if array is not None:
                raise ValueError(
                    f"`{name}` and `cache` were both given, but a cache counts the positions itself, and each of its "
                    f"rows is one document. Leave `{name}` out."
                )
    return shape


def tokens_of(
    config: DecoderConfig,
    shape: tuple[int, int],
    attention_mask,
    positions,
    segment_ids,
    sharding: SequenceSharding = UNSHARDED,
) -> DecoderTokens:
    """The masks and positions of a call without a cache.

    Masks compare places in the row, not `positions`: padding and packed documents do not change the distance between
    two tokens of one document.
    """
    segments = _segments(shape, attention_mask, segment_ids)
    masks = {}
    for kind in dict.fromkeys(config.kinds):
        masks[kind] = config.mask(kind)
        if segments is not None:
            masks[kind] = config.packed_mask(kind, segments)
    if positions is None:
        positions = _default_positions(shape[1], segments, sharding)
    return DecoderTokens(masks, ropes_of(config, shape[1]), jnp.asarray(positions, jnp.int32), sharding=sharding)


def _default_positions(length: int, segments, sharding: SequenceSharding) -> Any:
    """Positions counted from 0 in each row and in each document."""
    slot_positions = sharding.positions(length)
    if slot_positions is None:
        if segments is None:
            return jnp.arange(length, dtype=np.int32)
        return positions_from_segments(segments)
    if segments is None:
        return slot_positions
    # Counting needs the row in its own order: sort the segments, count, and put the result back into the slots.
    in_order = segments[:, np.argsort(slot_positions)]
    return positions_from_segments(in_order)[:, slot_positions]


def cached_tokens_of(
    config: DecoderConfig, shape: tuple[int, int], cache: DecoderCache, lengths, dtype, ropes=None
) -> tuple[DecoderTokens, DecoderCache]:
    """The layouts and positions of new tokens, which follow those in the cache, and the cache with these positions."""
    positions = cache.length[:, None] + jnp.arange(shape[1], dtype=np.int32)[None]
    cache, steps = cache.advanced(shape[1], lengths)
    if ropes is None:
        ropes = ropes_of(config, cache.max_length)
    return DecoderTokens(plan_layouts(config, steps, dtype), ropes, positions, steps), cache


def ropes_of(config: DecoderConfig, seq_len: int) -> dict[str, tuple[Any, Any]]:
    """The rotary frequencies and factors by kind of layer, for rows of this length."""
    return {kind: config.frequencies(kind, seq_len) for kind in dict.fromkeys(config.kinds)}


def tokens_first(attention_mask: Any) -> tuple[jax.Array, jax.Array]:
    """The order [B, T] that moves each row's padding behind its tokens, and the number of tokens [B]."""
    valid = jnp.asarray(attention_mask).astype(bool)
    return jnp.argsort(~valid, axis=1, stable=True), jnp.sum(valid, axis=1, dtype=np.int32)


def _segments(shape: tuple[int, int], attention_mask, segment_ids) -> jax.Array | None:
    """The segment id of every token, -1 for padding; None if a row is one document without padding."""
    if attention_mask is None and segment_ids is None:
        return None
    if attention_mask is None:
        return jnp.asarray(segment_ids)
    if segment_ids is None:
        segment_ids = jnp.zeros(shape, jnp.int32)
    is_token = jnp.asarray(attention_mask).astype(bool)
    return jnp.where(is_token, jnp.asarray(segment_ids, jnp.int32), np.int32(-1))


def _check_cache(config: DecoderConfig, cache: Any, shape: tuple[int, int], attention_mask: Any) -> None:
    if not isinstance(cache, DecoderCache):
        raise TypeError(f"`cache` must come from `model.init_cache(batch, length)`, got {type(cache).__name__}.")
    if cache.runs != config.runs:
        raise ValueError(
            "`cache` was made for another model: its layers differ from this model's in number or in kind "
            f"('{FULL}' or '{SLIDING}'). Make one with `init_cache(batch, length)` of this model."
        )
    _, *sizes = config.heads
    if cache.kv_sizes != tuple(sizes):
        (heads, head_dim), (expected_heads, expected_dim) = cache.kv_sizes, sizes
        raise ValueError(
            f"`cache` was made for another model: it has num_key_value_heads={heads} and head_dim={head_dim}, but this "
            f"model has num_key_value_heads={expected_heads} and head_dim={expected_dim}. Make one with "
            "`init_cache(batch, length)` of this model."
        )
    if cache.length.shape[0] != shape[0]:
        raise ValueError(
            f"`cache` has {cache.length.shape[0]} rows and the input has {shape[0]}. Make a cache with as many rows as "
            "the input."
        )
    new_tokens: Any = shape[1]
    if attention_mask is not None:
        new_tokens = jnp.asarray(attention_mask).astype(bool).sum(axis=1)
    total = cache.length + new_tokens
    if is_known(total) and int(total.max()) > cache.max_length:
        raise ValueError(
            f"The cache was made for {cache.max_length} tokens per row, but this call needs {int(total.max())}. Make a "
            "longer one: `model.init_cache(batch, length)`."
        )
