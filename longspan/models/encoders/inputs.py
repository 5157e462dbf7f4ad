"""Checks of the arguments of an encoder's call, before anything is computed."""

from typing import Any

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
) -> tuple[int, int]:
    """The shape (B, T) of the input. Raises unless the arguments fit together and fit the model."""
    shape = shape_of_input(config, input_ids, inputs_embeds)
    if position_ids is None and shape[1] > config.max_tokens:
        raise ValueError(
            f"The input has {shape[1]} tokens, but this model has positions for {config.max_tokens}. Truncate or split "
            "the input, pass `position_ids`, or give a BERT or RoBERTa more positions with `hf.extend`."
        )
    for name, mask in (("attention_mask", attention_mask), ("global_attention_mask", global_attention_mask)):
        if mask is not None:
            check_shape(name, mask, [shape])
    if token_type_ids is not None:
        check_shape("token_type_ids", token_type_ids, [shape])
        check_rows("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size")
    if position_ids is not None:
        check_shape("position_ids", position_ids, [shape, (1, shape[1])])
        check_rows("position_ids", position_ids, config.max_position_embeddings, "max_position_embeddings")
    return shape
