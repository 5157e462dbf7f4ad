"""What a call gives an encoder, checked before anything is computed from it."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from longspan._checks import is_abstract, is_array, is_int
from longspan.models.encoders._family import EncoderConfig


def check_inputs(
    config: EncoderConfig,
    input_ids: Any,
    attention_mask: Any,
    token_type_ids: Any,
    global_attention_mask: Any,
    position_ids: Any,
    inputs_embeds: Any,
) -> tuple[int, int]:
    """The batch and the number of tokens, after checking that all arguments are of one call that the model can run."""
    if (input_ids is None) == (inputs_embeds is None):
        both = "neither" if input_ids is None else "both"
        raise ValueError(f"Pass `input_ids` or `inputs_embeds`, one of the two; got {both}.")
    shape = _shape_of_ids(config, input_ids) if inputs_embeds is None else _shape_of_embeds(config, inputs_embeds)
    if position_ids is None and shape[1] > config.max_tokens:
        raise ValueError(
            f"The input has {shape[1]} tokens, but this model has positions for {config.max_tokens}. Truncate or split "
            "it, pass `position_ids`, or give a BERT or RoBERTa more positions with `hf.extend`."
        )
    for name, mask in (("attention_mask", attention_mask), ("global_attention_mask", global_attention_mask)):
        if mask is not None:
            _check_shape(name, mask, [shape])
    if token_type_ids is not None:
        _check_shape("token_type_ids", token_type_ids, [shape])
        _check_rows("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size")
    if position_ids is not None:
        _check_shape("position_ids", position_ids, [shape, (1, shape[1])])
        _check_rows("position_ids", position_ids, config.max_position_embeddings, "max_position_embeddings")
    return shape


def _shape_of_ids(config: EncoderConfig, input_ids: Any) -> tuple[int, int]:
    _check_array("input_ids", input_ids)
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(f"`input_ids` must have shape [B, T] with no axis of length 0, got {tuple(input_ids.shape)}.")
    _check_rows("input_ids", input_ids, config.vocab_size, "vocab_size")
    B, T = input_ids.shape
    return B, T


def _shape_of_embeds(config: EncoderConfig, inputs_embeds: Any) -> tuple[int, int]:
    _check_array("inputs_embeds", inputs_embeds)
    shape, size = tuple(inputs_embeds.shape), config.hidden_size
    if len(shape) != 3 or 0 in shape or shape[2] != size:
        raise ValueError(
            f"`inputs_embeds` must have shape [B, T, hidden_size={size}] with no axis of length 0, got {shape}."
        )
    if not jnp.issubdtype(inputs_embeds.dtype, jnp.floating):
        raise ValueError(f"`inputs_embeds` must be floats, got {inputs_embeds.dtype}. Pass token ids as `input_ids`.")
    return shape[0], shape[1]


def _check_array(name: str, value: Any) -> None:
    if not is_array(value):
        raise TypeError(
            f"`{name}` must be a NumPy or JAX array, got a {type(value).__name__}. Convert it with `np.asarray`; "
            '`return_tensors="np"` makes a tokenizer do so.'
        )


def _check_shape(name: str, value: Any, wanted: list[tuple[int, int]]) -> None:
    _check_array(name, value)
    if tuple(value.shape) not in wanted:
        shapes = " or ".join(map(str, dict.fromkeys(wanted)))
        raise ValueError(f"`{name}` must have the shape of the input, {shapes}, got {tuple(value.shape)}.")


def _check_rows(name: str, rows: Any, count: int, size: str) -> None:
    """Rows of a table are ints that it has; those that are traced are not known yet, and outside of it give NaN."""
    if not is_int(rows):
        raise ValueError(f"`{name}` must be ints, got {rows.dtype}.")
    if is_abstract(rows) or not getattr(rows, "is_fully_addressable", True):
        return
    known = np.asarray(rows)
    low, high = known.min(), known.max()
    if low < 0 or high >= count:
        raise ValueError(
            f"`{name}` must be from 0 to {count - 1}, by the config's {size}={count}, got {low} to {high}."
        )
