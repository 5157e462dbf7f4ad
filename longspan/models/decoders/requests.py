"""What is asked of `generate`, checked before anything is computed from it."""

import json
from collections.abc import Sequence
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

# Programs are compiled for few sizes: powers of two up to the second number, then multiples of it.
ROWS = 1, 8
LENGTHS = 128, 2048


def check_model(model: Any) -> None:
    """Raises unless the model is a decoder."""
    if not isinstance(model, CausalLM):
        raise TypeError(
            f"`model` must be a decoder, `models.CausalLM`, as `hf.load` gives for one, got {type(model).__name__}. "
            "Encoders do not generate."
        )
    if isinstance(model.embed.embedding.get_raw_value(), Tracer):
        raise TypeError("`generate` compiles its own programs: call it outside of `jit`, with a model of arrays.")


def check_cache(config: DecoderConfig, cache: DecoderCache) -> None:
    """Raises if a cache could not take what it was given; inside jit it only notes that."""
    for kind, slots in cache.slots.items():
        if np.asarray(slots.overflowed).any():
            raise ValueError(
                f"{config.mask(kind)!r} lets a token see tokens after it, which must then be computed together: a "
                "prompt must hold all of a prefix, in one chunk (`prefill_chunk`), and new tokens come one by one. "
                "Give layers a mask with `& Causal()`."
            )


def check_prompts(config: DecoderConfig, prompts: Any) -> list[np.ndarray]:
    """The prompts, int32."""
    if isinstance(prompts, str | bytes) or not hasattr(prompts, "__iter__"):
        raise TypeError(f"`prompts` must be a list of arrays of token ids, got {type(prompts).__name__}.")
    rows = [_row(number, prompt) for number, prompt in enumerate(prompts)]
    for number, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"Prompt {number} is empty. Give at least one token, such as the one that begins a text.")
        if row.min() < 0 or row.max() >= config.vocab_size:
            bad = int(row.min() if row.min() < 0 else row.max())
            raise ValueError(
                f"Prompt {number} has the token id {bad}, but the model's vocabulary has 0 to {config.vocab_size - 1}. "
                "Is the tokenizer another model's?"
            )
    return [row.astype(np.int32) for row in rows]


def _row(number: int, prompt: Any) -> np.ndarray:
    try:
        row = np.asarray(prompt) if not isinstance(prompt, str) else None
    except ValueError:  # lists of different lengths
        row = None
    if row is not None and row.ndim == 1 and (row.size == 0 or np.issubdtype(row.dtype, np.integer)):
        return row
    if row is not None and row.ndim == 0 and np.issubdtype(row.dtype, np.integer):
        raise ValueError("`prompts` must be a list of prompts, got one prompt. Give it in a list: `[prompt]`.")
    got = type(prompt).__name__ if row is None else f"shape {row.shape} of {row.dtype}"
    raise ValueError(f"Prompt {number} must be token ids, ints [T], got {got}.")


def check_lengths(config: DecoderConfig, rows: Sequence[np.ndarray], most: int, max_length: Any) -> int:
    """How many tokens caches are made for."""
    if not rows:
        return LENGTHS[0]
    row = int(np.argmax([len(row) for row in rows]))
    needed = len(rows[row]) + most
    what = f"Prompt {row} has {len(rows[row])} tokens, which with max_new_tokens={most} are {needed}"
    if config.longest is not None and needed > config.longest:
        raise ValueError(
            f"{what}, but the model has max_position_embeddings={config.longest}. Shorten the prompt, or ask for fewer "
            "new tokens."
        )
    if max_length is None:
        rounded = bucket(needed, *LENGTHS)
        return rounded if config.longest is None else min(rounded, config.longest)
    max_length = check_static_size("max_length", max_length, 1)
    if needed > max_length:
        raise ValueError(f"{what}, more than max_length={max_length}. Give a larger one, or leave it out.")
    return max_length


def bucket(size: int, least: int, unit: int) -> int:
    """The size that programs are compiled for: a power of two from `least` to `unit`, then a multiple of `unit`.

    Example:
        >>> [bucket(rows, *ROWS) for rows in (1, 3, 8, 9, 30)]
        [1, 4, 8, 16, 32]
        >>> [bucket(length, *LENGTHS) for length in (3, 129, 1000, 4352)]
        [128, 256, 1024, 6144]
    """
    if size > unit:
        return -(-size // unit) * unit
    return max(least, 1 << (size - 1).bit_length())


def check_options(
    rows: int, most: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, penalty: Any, key: Any, chunk: Any
) -> None:
    """Raises unless the numbers make sense together."""
    check_static_size("max_new_tokens", most, 0)
    check_static_size("prefill_chunk", chunk, 1)
    _check_number("temperature", temperature, lambda x: x >= 0, "a number from 0 on")
    if top_k is not None:
        check_static_size("top_k", top_k, 1)
    if top_p is not None:
        _check_number("top_p", top_p, lambda x: 0 < x <= 1, "a number above 0 and up to 1")
    if min_p is not None:
        _check_number("min_p", min_p, lambda x: 0 < x <= 1, "a number above 0 and up to 1")
    _check_number("repetition_penalty", penalty, lambda x: x > 0, "a positive number")
    if temperature and key is None:
        raise ValueError(f"temperature={temperature} draws tokens and needs a `key`: `key=jax.random.key(0)`.")
    drawn = [name for name, value in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p)) if value is not None]
    if drawn and not temperature:
        raise ValueError(f"`{drawn[0]}` says what to draw tokens from, but temperature=0 draws none. Give both.")
    if key is not None:
        _check_key(key, rows)


def _check_number(name: str, value: Any, fits: Any, wanted: str) -> None:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not np.isfinite(value) or not fits(value):
        raise ValueError(f"`{name}` must be {wanted}, got {value!r}.")


def _check_key(key: Any, rows: int) -> None:
    dtype, shape = getattr(key, "dtype", None), tuple(getattr(key, "shape", ()))
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    own = shape if typed else shape[:-1]
    if not (typed or (dtype == np.uint32 and shape)) or own not in ((), (rows,)):
        raise ValueError(
            f"`key` must be one key, `jax.random.key(0)`, or one per prompt [{rows}], got "
            f"{type(key).__name__ if dtype is None else f'{dtype} {list(shape)}'}."
        )


def stop_tokens_of(model: CausalLM, given: Any) -> tuple[int, ...]:
    """The ids that end an answer."""
    if given is None:
        given = _generation_config(model).get("eos_token_id", json.loads(model.config.extra).get("eos_token_id"))
    found = np.atleast_1d(np.asarray([] if given is None else given))
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise ValueError(f"`stop_tokens` must be token ids, ints, or () for none, got {given!r}.")
    # Others never come, and may not fit an int32.
    return tuple(int(token) for token in found if 0 <= token < model.config.vocab_size)


def _generation_config(model: CausalLM) -> dict[str, Any]:
    """What lies beside the checkpoint, if it still does."""
    path = Path(model.source or "") / "generation_config.json"
    if model.source is None or not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Repair it, or give `stop_tokens`.") from None
    return content if isinstance(content, dict) else {}
