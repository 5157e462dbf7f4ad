"""Checks of the arguments of `generate`, before anything is computed."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from longspan.checks import check_static_size
from longspan.models.decoders.cache import DecoderCache
from longspan.models.decoders.causal_lm import CausalLM
from longspan.models.decoders.family import DecoderConfig

# Sizes are rounded up, so that few programs are compiled: to powers of two from the first number to the second, then
# to multiples of the second.
ROWS = 1, 8
LENGTHS = 128, 2048


def check_model(model: Any) -> None:
    """Raises unless the model is a decoder whose parameters are arrays."""
    if not isinstance(model, CausalLM):
        raise TypeError(
            f"`model` must be a decoder, `models.CausalLM`, got {type(model).__name__}. Encoders do not generate: load "
            "the checkpoint of a decoder with `hf.load`."
        )
    if isinstance(model.embed.embedding.get_raw_value(), Tracer):
        raise TypeError(
            "`generate` got a model with traced parameters, but it compiles its own programs. Call it outside of `jit`."
        )


def check_cache(config: DecoderConfig, cache: DecoderCache) -> None:
    """Raises if a cache rejected tokens: inside `jit` it can only set a flag."""
    for kind, slots in cache.slots.items():
        if np.asarray(slots.overflowed).any():
            raise ValueError(
                f"{config.mask(kind)!r} lets a token attend to later tokens. `generate` supports this only inside one "
                "chunk of a prompt (`prefill_chunk` tokens), because it decodes new tokens one at a time. Add "
                "`& Causal()` to the mask of the layers."
            )


def check_prompts(config: DecoderConfig, prompts: Any) -> list[np.ndarray]:
    """The prompts as int32 arrays."""
    if isinstance(prompts, str | bytes) or not hasattr(prompts, "__iter__"):
        raise TypeError(f"`prompts` must be a list of arrays of token ids, got {type(prompts).__name__}.")
    rows = [_token_ids(number, prompt) for number, prompt in enumerate(prompts)]
    for number, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"Prompt {number} is empty. Give at least one token, such as the BOS token.")
        outside = row[(row < 0) | (row >= config.vocab_size)]
        if len(outside):
            raise ValueError(
                f"Prompt {number} has the token id {outside[0]}, but the model's vocabulary has the ids 0 to "
                f"{config.vocab_size - 1}. Use the tokenizer of this model."
            )
    return [row.astype(np.int32) for row in rows]


def _token_ids(number: int, prompt: Any) -> np.ndarray:
    row = None
    if not isinstance(prompt, str):
        try:
            row = np.asarray(prompt)
        except ValueError:  # lists of different lengths
            row = None
    if row is None:
        raise ValueError(f"Prompt {number} must be token ids, ints [T], got {type(prompt).__name__}.")
    is_int = np.issubdtype(row.dtype, np.integer)
    if row.ndim == 1 and (is_int or row.size == 0):
        return row
    if row.ndim == 0 and is_int:
        raise ValueError("`prompts` must be a list of prompts, got a single prompt. Put it in a list: `[prompt]`.")
    raise ValueError(f"Prompt {number} must be token ids, ints [T], got shape {row.shape} of {row.dtype}.")


def check_lengths(config: DecoderConfig, rows: Sequence[np.ndarray], max_new_tokens: int, max_length: Any) -> int:
    """The number of tokens per row that caches are allocated for."""
    if not rows:
        return LENGTHS[0]
    longest = int(np.argmax([len(row) for row in rows]))
    count = len(rows[longest])
    needed = count + max_new_tokens
    request = (
        f"Prompt {longest} has {count} tokens, so with max_new_tokens={max_new_tokens} it needs {needed} positions"
    )
    if config.longest is not None and needed > config.longest:
        raise ValueError(
            f"{request}. The model has only max_position_embeddings={config.longest}. Shorten the prompt, or ask "
            "for fewer new tokens."
        )
    if max_length is not None:
        max_length = check_static_size("max_length", max_length, 1)
        if needed > max_length:
            raise ValueError(
                f"{request}, more than max_length={max_length}. Give a larger `max_length`, or leave it out."
            )
        return max_length
    rounded = bucket(needed, *LENGTHS)
    if config.longest is None:
        return rounded
    return min(rounded, config.longest)


def bucket(size: int, minimum: int, unit: int) -> int:
    """The size that programs are compiled for: a power of two from `minimum` to `unit`, then a multiple of `unit`.

    Example:
        >>> [bucket(rows, *ROWS) for rows in (1, 3, 8, 9, 30)]
        [1, 4, 8, 16, 32]
        >>> [bucket(length, *LENGTHS) for length in (3, 129, 1000, 4352)]
        [128, 256, 1024, 6144]
    """
    if size > unit:
        return -(-size // unit) * unit
    return max(minimum, 1 << (size - 1).bit_length())


def check_options(
    rows: int,
    *,
    max_new_tokens: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    repetition_penalty: Any,
    key: Any,
    prefill_chunk: Any,
) -> None:
    """Raises unless each number is valid and they fit together."""
    check_static_size("max_new_tokens", max_new_tokens, 0)
    check_static_size("prefill_chunk", prefill_chunk, 1)
    _check_number("temperature", temperature, lambda x: x >= 0, "a number that is at least 0")
    if top_k is not None:
        check_static_size("top_k", top_k, 1)
    for name, share in (("top_p", top_p), ("min_p", min_p)):
        if share is not None:
            _check_number(name, share, lambda x: 0 < x <= 1, "a number that is more than 0 and at most 1")
    _check_number("repetition_penalty", repetition_penalty, lambda x: x > 0, "a positive number")
    if temperature and key is None:
        raise ValueError(
            f"temperature={temperature} samples tokens, which needs a random `key`. Give `key=jax.random.key(0)`."
        )
    for name, value in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        if value is not None and not temperature:
            raise ValueError(
                f"`{name}` restricts sampling, but temperature=0 takes the most likely token. Give a positive "
                f"`temperature`, or leave `{name}` out."
            )
    if key is not None:
        _check_key(key, rows)


def _check_number(name: str, value: Any, is_valid: Callable[[Any], bool], expected: str) -> None:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not np.isfinite(value) or not is_valid(value):
        raise ValueError(f"`{name}` must be {expected}, got {value!r}.")


def _check_key(key: Any, rows: int) -> None:
    dtype, shape = getattr(key, "dtype", None), tuple(getattr(key, "shape", ()))
    is_new_style = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    is_old_style = dtype == np.uint32 and len(shape) > 0
    # The last axis of old-style keys holds the words of one key.
    keys_shape = shape if is_new_style else shape[:-1]
    if (is_new_style or is_old_style) and keys_shape in ((), (rows,)):
        return
    got = type(key).__name__
    if dtype is not None:
        got = f"{dtype} {list(shape)}"
    raise ValueError(f"`key` must be one key, `jax.random.key(0)`, or one per prompt [{rows}], got {got}.")


def stop_tokens_of(model: CausalLM, given: Any) -> tuple[int, ...]:
    """The token ids that end an answer."""
    if given is None:
        given = _generation_config(model).get("eos_token_id", json.loads(model.config.extra).get("eos_token_id"))
    if given is None:
        return ()
    ids = np.atleast_1d(np.asarray(given))
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"`stop_tokens` must be token ids, ints, or () for none, got {given!r}.")
    # Ids outside of the vocabulary are never generated, and may not fit into an int32.
    return tuple(int(token) for token in ids if 0 <= token < model.config.vocab_size)


def _generation_config(model: CausalLM) -> dict[str, Any]:
    """The checkpoint's generation config, if the directory still has one."""
    if model.source is None:
        return {}
    path = Path(model.source) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Repair it, or give `stop_tokens`.") from None
    if not isinstance(content, dict):
        return {}
    return content
