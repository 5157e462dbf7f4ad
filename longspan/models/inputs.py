"""What calls of all models give: token ids or their embeddings, and arrays of the same shape."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from longspan.checks import is_abstract, is_array, is_int


def shape_of_input(config: Any, input_ids: Any, inputs_embeds: Any) -> tuple[int, int]:
    """The batch and the number of tokens."""
    if (input_ids is None) == (inputs_embeds is None):
        both = "neither" if input_ids is None else "both"
        raise ValueError(f"Pass `input_ids` or `inputs_embeds`, one of the two; got {both}.")
    return _shape_of_ids(config, input_ids) if inputs_embeds is None else _shape_of_embeds(config, inputs_embeds)


def _shape_of_ids(config: Any, input_ids: Any) -> tuple[int, int]:
    _check_array("input_ids", input_ids)
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(f"`input_ids` must have shape [B, T] with no axis of length 0, got {tuple(input_ids.shape)}.")
    check_rows("input_ids", input_ids, config.vocab_size, "vocab_size")
    B, T = input_ids.shape
    return B, T


def _shape_of_embeds(config: Any, inputs_embeds: Any) -> tuple[int, int]:
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


def check_shape(name: str, value: Any, wanted: list[tuple[int, int]]) -> None:
    """Raises an error unless `value` is an array of one of the wanted shapes."""
    _check_array(name, value)
    if tuple(value.shape) not in wanted:
        shapes = " or ".join(map(str, dict.fromkeys(wanted)))
        raise ValueError(f"`{name}` must have the shape of the input, {shapes}, got {tuple(value.shape)}.")


def check_rows(name: str, rows: Any, count: int, size: str) -> None:
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
