"""Checks of the arrays that every model takes: token ids or embeddings, and arrays of the same shape."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from longspan.checks import is_abstract, is_array, is_int


def shape_of_input(config: Any, input_ids: Any, inputs_embeds: Any) -> tuple[int, int]:
    """The shape (B, T) of the input."""
    if (input_ids is None) == (inputs_embeds is None):
        got = "neither" if input_ids is None else "both"
        raise ValueError(f"Pass either `input_ids` or `inputs_embeds`, got {got}.")
    if inputs_embeds is None:
        return _shape_of_ids(config, input_ids)
    return _shape_of_embeds(config, inputs_embeds)


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
            f"`{name}` must be a NumPy or JAX array, got a {type(value).__name__}. Convert it with `np.asarray`, or "
            'call the tokenizer with `return_tensors="np"`.'
        )


def check_shape(name: str, value: Any, shapes_allowed: list[tuple[int, int]]) -> None:
    """Raises unless `value` is an array that has one of the shapes."""
    _check_array(name, value)
    if tuple(value.shape) not in shapes_allowed:
        shapes = " or ".join(map(str, dict.fromkeys(shapes_allowed)))
        raise ValueError(f"`{name}` must have the shape of the input, {shapes}, got {tuple(value.shape)}.")


def check_rows(name: str, rows: Any, count: int, size: str) -> None:
    """Raises unless `rows` are row numbers of a table. Traced ones are not checked: outside of the table they give NaN.

    Args:
        name: the argument's name.
        rows: the row numbers.
        count: the number of rows of the table.
        size: the config field that sets `count`.
    """
    if not is_int(rows):
        raise ValueError(f"`{name}` must be ints, got {rows.dtype}.")
    if is_abstract(rows) or not getattr(rows, "is_fully_addressable", True):
        return
    numbers = np.asarray(rows)
    first, last = numbers.min(), numbers.max()
    if first < 0 or last >= count:
        raise ValueError(
            f"`{name}` must be from 0 to {count - 1}, because the config has {size}={count}; got {first} to {last}."
        )
