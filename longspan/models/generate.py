"""`generate`: a decoder goes on from prompts, with caches allocated from its layers' masks."""

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
from longspan.models.decoders.room import check_room
from longspan.models.decoders.sampling import Sampling
from longspan.models.decoders.steps import NOTHING, Compiled, Rules, State, burst, prefill, start
from longspan.models.graph import Graph, without_source

SHORTEST = 32  # tokens of a prompt's chunk, from which on smaller ones would save little
STOPS = 8  # the number of stop tokens is rounded up to a multiple, so that another one compiles nothing


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
    """The new tokens after each prompt, int32, the stop token included.

    A row's answer does not depend on the rows beside it. Layers keep what their masks will look at again: one with a
    window its window, whatever the length. Programs are compiled for few sizes, and kept: batches are padded to 1, 2,
    4 or 8 rows, then to multiples of 8, with rows that take no step; caches to 128, 256, 512, 1,024 or 2,048 tokens,
    then to multiples of 2,048. Calls of the same sizes compile nothing new.

    Args:
        model: a decoder, as `hf.load` gives.
        prompts: token ids, of any lengths.
        max_new_tokens: the most tokens of an answer.
        max_length: the most tokens of a row, prompt and answer, that caches are made for, as given. By default the
            longest prompt and `max_new_tokens`, rounded up as above, but not beyond what the model was made for.
        temperature: 0 takes the likeliest token; else tokens are drawn, and a `key` is needed.
        top_k: draws from the k likeliest tokens.
        top_p: draws from the fewest tokens that together have this probability.
        min_p: draws from tokens at least this share as likely as the likeliest.
        repetition_penalty: above 1, tokens that a row has already become less likely.
        stop_tokens: ids that end an answer; by default those of the checkpoint's generation config, or of its config;
            () for none.
        key: of the draws: one, from which every row gets its own, or one per prompt.
        stream: called as stream(row, token) for every new token, a few at a time, in order.
        prefill_chunk: how many tokens of a prompt are computed at once: fewer need less memory.

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
    check_options(len(rows), max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, key, prefill_chunk)
    max_new_tokens = int(max_new_tokens)  # perhaps NumPy's
    length = check_lengths(model.config, rows, max_new_tokens, max_length)
    stop = stop_tokens_of(model, stop_tokens)
    if not rows or max_new_tokens == 0:
        return [np.zeros(0, np.int32) for _ in rows]
    sampling = Sampling(
        temperature=_number(temperature) if temperature else None,
        top_k=_number(top_k) if temperature else None,
        top_p=_number(top_p) if temperature else None,
        min_p=_number(min_p) if temperature else None,
        repetition_penalty=_number(repetition_penalty) if repetition_penalty != 1 else None,
    )
    batch = rows + [np.zeros(0, np.int32)] * (bucket(len(rows), *ROWS) - len(rows))
    keys = _keys(key, len(batch)) if temperature else None
    rules = Rules(sampling, _padded(stop), keys, _ropes(model, batch, max_new_tokens))
    answers: list[list[int]] = [[] for _ in rows]
    for tokens in _bursts(model, batch, length, max_new_tokens, rules, prefill_chunk):
        for row, token in tokens:
            answers[row].append(token)
            if stream is not None:
                stream(row, token)
    return [np.array(tokens, np.int32) for tokens in answers]


def _bursts(
    model: CausalLM, rows: list[np.ndarray], length: int, most: int, rules: Rules, chunk: int
) -> Iterator[list[tuple[int, int]]]:
    """(row, token) of all answers, a few at a time. Rows without a prompt fill the batch up, and have no answer."""
    graph, params = nnx.split(without_source(model))
    params, rules = on_auto_mesh((params, rules))
    of = Compiled(Graph(graph), model._reads_in_place(len(rows)))
    check_room(model.config, len(rows), length, model.dtype)
    cache, last = _run_program(start, model.config, len(rows), length, model.dtype)
    for ids, lengths in chunks(rows, chunk):
        cache, last = _run_program(prefill, of, params, cache, last, ids, lengths, rules.ropes)
    check_cache(model.config, cache)
    seen = None if rules.sampling.repetition_penalty is None else _seen(rows, model.config.vocab_size)
    left = np.array([most if len(row) else 0 for row in rows], np.int32)
    state = State(last, np.zeros_like(left), left, np.int32(0), seen)
    while np.asarray(state.left).any():
        cache, state, tokens = _run_program(burst, of, params, cache, state, rules)
        check_cache(model.config, cache)
        found = np.asarray(tokens)
        yield [(int(row), int(found[step, row])) for step, row in np.argwhere(found != NOTHING)]


def _run_program(program: Callable, *arguments: Any) -> Any:
    """A program, where XLA places values by itself: of explicit axes the types of caches would have to be found out."""
    mesh = jax.sharding.get_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return program(*arguments)
    with jax.set_mesh(auto_mesh(mesh)):
        return program(*arguments)


def chunks(rows: Sequence[np.ndarray], most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids [B, n], lengths [B]) of the prompts' tokens from the first to the last, for few different n."""
    at, longest = 0, max(len(row) for row in rows)
    while at < longest:
        size = chunk_size(longest - at, most)
        pieces = [row[at : at + size] for row in rows]
        ids = np.zeros((len(rows), size), np.int32)
        for own, piece in zip(ids, pieces, strict=True):
            own[: len(piece)] = piece
        yield ids, np.array([len(piece) for piece in pieces], np.int32)
        at += size


def chunk_size(left: int, most: int) -> int:
    """How many tokens to compute at once, of those that are left: one of few sizes, each a quarter of the one before.

    Example:
        >>> [chunk_size(left, 2048) for left in (5000, 1900, 900, 388, 4)]
        [2048, 2048, 512, 512, 32]
    """
    sizes = [most]
    while sizes[-1] > SHORTEST:
        sizes.append(max(sizes[-1] // 4, 1))
    # A size that is a little too large costs less than two that are smaller.
    fitting = [size for size in sizes if size * 3 <= left * 4]
    return fitting[0] if fitting else sizes[-1]


def _number(value: Any) -> Any:
    # Beyond these a float32, or what is divided by it, would be 0 or infinite.
    return None if value is None else np.float32(np.clip(value, 1e-30, 1e30))


def _padded(stop: tuple[int, ...]) -> np.ndarray:
    return np.array([*stop, *[NOTHING] * (-len(stop) % STOPS)] or [NOTHING] * STOPS, np.int32)


def _keys(key: Any, count: int) -> Any:
    """A key for each row of a batch: row i has the same one in batches of every size."""
    typed = jax.random.wrap_key_data(key) if jnp.issubdtype(key.dtype, jnp.integer) else key
    if typed.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(typed, np.arange(count))
    # Padded in NumPy, with the last key: JAX would compile a program for each number of keys.
    data = np.asarray(jax.random.key_data(typed))
    padded = jnp.asarray(data[np.minimum(np.arange(count), len(data) - 1)])
    return jax.random.wrap_key_data(padded, impl=jax.random.key_impl(typed))


def _ropes(model: CausalLM, rows: Sequence[np.ndarray], most: int) -> dict[str, tuple[Any, Any]]:
    """The frequencies of each row: those of some types depend on its length, but not on the rows beside it."""
    config, found = model.config, {}
    for kind in dict.fromkeys(config.kinds):
        own = {n: config.frequencies(kind, n) for n in {len(row) + most for row in rows}}
        (factor,) = {factor for _, factor in own.values()}
        found[kind] = np.stack([own[len(row) + most][0] for row in rows]), np.float32(factor)
    return found


def _seen(rows: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    seen = np.zeros((len(rows), vocab_size), bool)
    for own, row in zip(seen, rows, strict=True):
        own[row] = True
    return seen
