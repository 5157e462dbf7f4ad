"""Checks of the arguments of an encoder's call, before anything is computed."""

from typing import Any

from longspan.checks import is_int
from longspan.models.encoders.family import EncoderConfig
from longspan.models.inputs import check_rows, check_shape, shape_of_input


def check_inputs(
    config: EncoderConfig,
    input_ids: Any,
    attention_mask: Any,
    token_type_ids: Any,
    global_attention_mask: Any,
    position_ids: Any,
    inputs_embeds: Any,
    segment_ids: Any = None,
) -> tuple[int, int]:
    """The shape (B, T) of the input. Raises unless the arguments fit together and fit the model."""
    shape = shape_of_input(config, input_ids, inputs_embeds)
    rows = config.position_rows
    if position_ids is None and rows is not None and shape[1] > config.max_tokens:
        raise ValueError(
            f"The input has {shape[1]} tokens, but this model has positions for {config.max_tokens}. Truncate or split "
            "the input, pass `position_ids`, or give a BERT or RoBERTa more positions with `hf.extend`."
        )
    masks = dict(attention_mask=attention_mask, global_attention_mask=global_attention_mask, segment_ids=segment_ids)
    for name, mask in masks.items():
        if mask is not None:
            check_shape(name, mask, [shape])
    if segment_ids is not None and not is_int(segment_ids):
        raise ValueError(f"`segment_ids` must be ints, got {segment_ids.dtype}.")
    if token_type_ids is not None:
        _check_token_types(config, token_type_ids, shape)
    if position_ids is not None:
        check_shape("position_ids", position_ids, [shape, (1, shape[1])])
        if rows is not None:
            check_rows("position_ids", position_ids, rows, "max_position_embeddings")
        elif not is_int(position_ids):
            raise ValueError(f"`position_ids` must be ints, got {position_ids.dtype}.")
    return shape


def _check_token_types(config: EncoderConfig, token_type_ids: Any, shape: tuple[int, int]) -> None:
    if not config.token_types:
        raise ValueError(f"`token_type_ids` is not supported by this {config.model_type} model. Leave it out.")
    check_shape("token_type_ids", token_type_ids, [shape])
    check_rows("token_type_ids", token_type_ids, config.token_types, "type_vocab_size")
