"""`generate`: decoding from prompts, with caches that are allocated from the masks of the layers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType
from jaxtyping import Int

from longspan.array_types import Array, no_type_check
from longspan.axes import auto_mesh, on_auto_mesh
from longspan.models.decoders.causal_lm import CausalLM
from longspan.models.decoders.memory import check_memory
from longspan.models.decoders.requests import (
    ROWS,
    bucket,
    check_cache,
    check_lengths,
    check_model,
    check_options,
    check_prompts,
    stop_tokens_of,
)
from longspan.models.decoders.sampling import Sampling
from longspan.models.decoders.steps import (
    NO_TOKEN,
    DecodeSettings,
    DecodeState,
    ProgramKey,
    allocate,
    decode_burst,
    prefill,
)
from longspan.models.graph import HashedGraph, without_source

MIN_CHUNK = 32  # tokens: smaller chunks of a prompt would save little time
STOP_TOKENS_UNIT = 8  # the number of stop tokens is padded to a multiple, so that one more compiles nothing new


@no_type_check
def generate(
    model: CausalLM,
    prompts: Sequence[Int[Array, "T"] | Sequence[int]],
    *,
    max_new_tokens: int,
    max_length: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop_tokens: Sequence[int] | int | None = None,
    key: jax.Array | None = None,
    stream: Callable[[int, int], Any] | None = None,
    prefill_chunk: int = 2048,
) -> list[np.ndarray]:
    """Generates tokens after each prompt and returns the new ones, int32, including the stop token.

    The answer to a prompt does not depend on the other prompts. The cache of a layer holds the keys that its mask can
    still attend to: a layer with a sliding window stores one window, whatever the length.

    Programs are compiled for few sizes and reused. Batches are padded to 1, 2, 4 or 8 rows, then to multiples of 8;
    caches to 128, 256, 512, 1,024 or 2,048 tokens, then to multiples of 2,048. Calls whose sizes round to the same
    numbers compile nothing new.

    Args:
        model: a decoder, for example from `hf.load`.
        prompts: token ids. Prompts may have different lengths.
        max_new_tokens: the maximum number of tokens of an answer.
        max_length: the number of tokens of a row, prompt and answer, that caches are allocated for. By default the
            longest prompt plus `max_new_tokens`, rounded up as above and limited to the model's maximum length.
        temperature: 0 takes the most likely token. A positive number samples tokens and needs a `key`.
        top_k: samples from the k most likely tokens.
        top_p: samples from the smallest set of tokens whose probabilities sum to at least this.
        min_p: samples from tokens whose probability is at least this share of the highest one.
        repetition_penalty: a number above 1 makes tokens that the row already contains less likely.
        stop_tokens: token ids that end an answer; () for none. By default the `eos_token_id` of the checkpoint's
            generation config, or of its config.
        key: the random key for sampling: one, from which each row gets its own, or one per prompt.
        stream: called as stream(row, token) for each new token, in order, after every few decode steps.
        prefill_chunk: the number of prompt tokens that are computed at once. A smaller number needs less memory.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> config = models.MistralConfig(
        ...     vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, num_key_value_heads=1,
        ...     sliding_window=4, intermediate_size=8,
        ... )
        >>> model = models.CausalLM(config, rngs=nnx.Rngs(0))
        >>> [len(tokens) for tokens in ls.generate(model, [[3, 7, 5], [2]], max_new_tokens=6)]
        [6, 6]
    """
    check_model(model)
    rows = check_prompts(model.config, prompts)
    sampling_options = dict(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    check_options(len(rows), **sampling_options, max_new_tokens=max_new_tokens, key=key, prefill_chunk=prefill_chunk)
    max_new_tokens = int(max_new_tokens)  # it may be NumPy's
    length = check_lengths(model.config, rows, max_new_tokens, max_length)
    stop_ids = stop_tokens_of(model, stop_tokens)
    if not rows or max_new_tokens == 0:
        return [np.zeros(0, np.int32) for _ in rows]
    # Empty rows fill the batch up. They take no decode step.
    batch = rows + [np.zeros(0, np.int32)] * (bucket(len(rows), *ROWS) - len(rows))
    settings = DecodeSettings(
        sampling=_sampling(**sampling_options),
        stop_tokens=_padded(stop_ids),
        keys=_row_keys(key, len(batch)) if temperature else None,
        ropes=_ropes(model, batch, max_new_tokens),
    )
    answers: list[list[int]] = [[] for _ in rows]
    for tokens in _decode(model, batch, length, max_new_tokens, settings, prefill_chunk):
        for row, token in tokens:
            answers[row].append(token)
            if stream is not None:
                stream(row, token)
    return [np.array(tokens, np.int32) for tokens in answers]


def _decode(
    model: CausalLM,
    rows: list[np.ndarray],
    length: int,
    max_new_tokens: int,
    settings: DecodeSettings,
    prefill_chunk: int,
) -> Iterator[list[tuple[int, int]]]:
    """Prefills the cache, then yields the (row, token) pairs of each burst."""
    config = model.config
    graph, params = nnx.split(without_source(model))
    params, settings = on_auto_mesh((params, settings))
    program = ProgramKey(HashedGraph(graph), model._reads_in_place(len(rows)))
    check_memory(config, len(rows), length, model.dtype)
    heads_first = jax.default_backend() == "tpu"  # TPU kernels read this order without a transposed copy of the cache
    cache, last_hidden = _on_auto_axes(allocate, config, len(rows), length, model.dtype, heads_first)
    for ids, lengths in prompt_chunks(rows, prefill_chunk):
        cache, last_hidden = _on_auto_axes(prefill, program, params, cache, last_hidden, ids, lengths, settings.ropes)
    check_cache(config, cache)
    seen = None
    if settings.sampling.repetition_penalty is not None:
        seen = _tokens_seen(rows, config.vocab_size)
    remaining = np.array([max_new_tokens if len(row) else 0 for row in rows], np.int32)
    state = DecodeState(last_hidden, np.zeros_like(remaining), remaining, np.int32(0), seen)
    while np.asarray(state.remaining).any():
        cache, state, tokens = _on_auto_axes(decode_burst, program, params, cache, state, settings)
        check_cache(config, cache)
        found = np.asarray(tokens)
        yield [(int(row), int(found[step, row])) for step, row in np.argwhere(found != NO_TOKEN)]


def _on_auto_axes(program: Callable, *arguments: Any) -> Any:
    """program(*arguments) with automatic mesh axes: explicit ones would need the sharding of every cache array."""
    mesh = jax.sharding.get_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return program(*arguments)
    with jax.set_mesh(auto_mesh(mesh)):
        return program(*arguments)


def prompt_chunks(rows: Sequence[np.ndarray], max_chunk: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The prompts in chunks (ids [B, n], lengths [B]), from the first token to the last, with few different n."""
    start, longest = 0, max(len(row) for row in rows)
    while start < longest:
        size = chunk_size(longest - start, max_chunk)
        pieces = [row[start : start + size] for row in rows]
        ids = np.zeros((len(rows), size), np.int32)
        for padded_row, piece in zip(ids, pieces, strict=True):
            padded_row[: len(piece)] = piece
        yield ids, np.array([len(piece) for piece in pieces], np.int32)
        start += size


def chunk_size(remaining: int, max_chunk: int) -> int:
    """The size of the next chunk: one of few sizes, each a quarter of the next larger one.

    Example:
        >>> [chunk_size(remaining, 2048) for remaining in (5000, 1900, 900, 388, 4)]
        [2048, 2048, 512, 512, 32]
    """
    sizes = [max_chunk]
    while sizes[-1] > MIN_CHUNK:
        sizes.append(max(sizes[-1] // 4, 1))
    # A chunk with up to a quarter of padding costs less than two smaller ones.
    fitting = [size for size in sizes if size * 3 <= remaining * 4]
    return fitting[0] if fitting else sizes[-1]


def _sampling(*, temperature: Any, top_k: Any, top_p: Any, min_p: Any, repetition_penalty: Any) -> Sampling:
    """The rules of a request; rules that change nothing are None."""
    if not temperature:
        temperature = top_k = top_p = min_p = None
    if repetition_penalty == 1:
        repetition_penalty = None
    numbers = temperature, top_k, top_p, min_p, repetition_penalty
    return Sampling(*map(_float32, numbers))


def _float32(value: Any) -> Any:
    if value is None:
        return None
    # Beyond these limits the float32, or a quotient by it, would be 0 or infinite.
    return np.float32(np.clip(value, 1e-30, 1e30))


def _padded(stop_tokens: tuple[int, ...]) -> np.ndarray:
    """The stop tokens and `NO_TOKEN`, a multiple of `STOP_TOKENS_UNIT` and at least one unit."""
    count = STOP_TOKENS_UNIT * max(1, -(-len(stop_tokens) // STOP_TOKENS_UNIT))
    return np.array([*stop_tokens, *[NO_TOKEN] * (count - len(stop_tokens))], np.int32)


def _row_keys(key: Any, batch: int) -> Any:
    """A random key for each row. The key of row i does not depend on the batch size."""
    if jnp.issubdtype(key.dtype, jnp.integer):
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(batch))
    # Padded with the last key, and in NumPy: JAX would compile a program for each number of keys.
    data = np.asarray(jax.random.key_data(key))
    padded = jnp.asarray(data[np.minimum(np.arange(batch), len(data) - 1)])
    return jax.random.wrap_key_data(padded, impl=jax.random.key_impl(key))


def _ropes(model: CausalLM, rows: Sequence[np.ndarray], max_new_tokens: int) -> dict[str, tuple[Any, Any]]:
    """The rotary frequencies of each row, by kind of layer. Some types depend on the row's length."""
    config, ropes = model.config, {}
    lengths = [len(row) + max_new_tokens for row in rows]
    for kind in dict.fromkeys(config.kinds):
        by_length = {length: config.frequencies(kind, length) for length in set(lengths)}
        (factor,) = {factor for _, factor in by_length.values()}
        ropes[kind] = np.stack([by_length[length][0] for length in lengths]), np.float32(factor)
    return ropes


def _tokens_seen(rows: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    seen = np.zeros((len(rows), vocab_size), bool)
    for seen_by_row, row in zip(seen, rows, strict=True):
        seen_by_row[row] = True
    return seen
