"""Segment ids, and the positions, lengths and offsets derived from them.

An id >= 0 is the number of a token's document (or chunk, or type); a negative id is padding. All functions sort or
scan: memory is linear in the number of tokens, and shapes are static, so they work under jit.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from longspan.maskinfo.checks import check_ints, check_size, is_traced

PADDING = -1
LAST_POSITION = np.iinfo(np.int32).max  # the position of padding among keys: after all queries


class Sequences(NamedTuple):
    """The sequences of a batch as cumulative lengths of both sides, and whether these describe the ids."""

    q_offsets: Any
    kv_offsets: Any
    count: Any  # number of sequences; if it is larger than the number of offsets allows, the offsets are cut off
    in_order: Any  # whether both sides hold the sequences in the same order, each in one piece


def number_by_first_appearance(keys: tuple[Any, ...], valid: Bool[Array, "n"]) -> Int[Array, "n"]:
    """A number for each entry: equal tuples of keys share one, from 0 by first appearance; -1 where not valid."""
    first = first_equal((*keys, valid.astype(np.int32)))
    is_first = (first == jnp.arange(valid.size, dtype=np.int32)) & valid
    number = jnp.cumsum(is_first, dtype=np.int32) - 1
    return jnp.where(valid, number[first], PADDING)


def first_equal(keys: tuple[Any, ...]) -> Int[Array, "n"]:
    """For each entry, the index of the first entry with equal keys."""
    # Sorting makes equal entries adjacent. A running maximum over the places where the keys change gives each entry the
    # place where its run starts; the sort is stable, so a run starts with its earliest entry.
    n = keys[0].size
    order = jnp.lexsort(keys).astype(np.int32)
    if not n:
        return order
    starts = jnp.zeros(n, bool).at[0].set(True)
    for key in keys:
        ranked = key[order]
        starts = starts.at[1:].set(starts[1:] | (ranked[1:] != ranked[:-1]))
    run = jax.lax.cummax(jnp.where(starts, jnp.arange(n, dtype=np.int32), np.int32(0)))
    return jnp.zeros(n, np.int32).at[order].set(order[run])


@jax.jit
@jax.vmap
def chunk_ids(q_ids, kv_ids, q_chunks, kv_chunks):
    """Ids of chunks: chunk + 1 in a row of one document, else one per (document, chunk), counted from 1."""
    ids, chunks = jnp.concatenate([q_ids, kv_ids]), jnp.concatenate([q_chunks, kv_chunks])
    numbers = number_by_first_appearance((ids, chunks), ids >= 0) + 1
    found = jnp.where(ids >= 0, jnp.where(_has_several(ids), numbers, chunks + 1), PADDING)
    return found[: q_ids.size], found[q_ids.size :]


@jax.jit
@jax.vmap
def type_ids(q_ids, kv_ids, q_types, kv_types):
    """Ids of token types: the type in a row of one document, else one per (document, type), counted from 1."""
    ids, types = jnp.concatenate([q_ids, kv_ids]), jnp.concatenate([q_types, kv_types])
    valid = (ids >= 0) & (types >= 0)
    numbers = number_by_first_appearance((ids, types), valid) + 1
    found = jnp.where(valid, jnp.where(_has_several(ids), numbers, types), PADDING)
    return found[: q_ids.size], found[q_ids.size :]


def has_several(ids: Int[Array, "B L"]) -> Bool[Array, "B"]:
    """Whether each row holds more than one document."""
    return jax.vmap(_has_several)(ids)


def lengths_of(ids: Int[Array, "B L"]) -> Int[Array, "B"]:
    """The number of tokens of each row that are not padding."""
    return jnp.sum(ids >= 0, axis=1, dtype=np.int32)


@partial(jax.jit, static_argnums=1)
def positions_of(ids: Int[Array, "B L"], padding: int) -> Int[Array, "B L"]:
    """Positions that restart where the id changes; `padding` for padding."""
    if not ids.shape[1]:
        return jnp.zeros(ids.shape, np.int32)
    slots = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=np.int32).reshape(1, -1), ids.shape)
    changes = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    starts = jax.lax.cummax(jnp.where(changes, slots, np.int32(0)), axis=1)
    return jnp.where(ids >= 0, slots - starts, np.int32(padding))


def from_offsets(offsets: Int[Array, "n"], length: int) -> Int[Array, "1 length"]:
    """One row of ids 0, 1, ... for the sequences between the offsets; padding after the last offset."""
    slots = jnp.arange(length, dtype=np.int32)
    ids = jnp.searchsorted(offsets, slots, side="right").astype(np.int32) - 1
    return jnp.where(slots < offsets[-1], ids, PADDING).reshape(1, -1)


def check_offsets(name: str, offsets: Any) -> jax.Array:
    """Cumulative lengths [0, n0, n0+n1, ...], as int32."""
    offsets = check_ints(name, offsets, 1, "(n+1,)")
    if not offsets.size:
        raise _wrong_offsets(name, "an array without entries")
    if not is_traced(offsets):
        known = np.asarray(offsets)
        if known[0] != 0 or np.any(np.diff(known) < 0):
            raise _wrong_offsets(name, known.tolist())
    return offsets


def _wrong_offsets(name: str, got: Any) -> ValueError:
    return ValueError(
        f"{name} must start at 0 and never decrease: [0, n0, n0+n1, ...], got {got}. "
        "For pairs [start0, end0, ...] use `MaskInfo.from_cu_seqlens`."
    )


def check_total(name: str, size: Any, offsets: jax.Array) -> int:
    """The number of slots: `size` if given, else the last offset."""
    if size is not None:
        size = check_size(name, size)
        if not is_traced(offsets) and size < int(offsets[-1]):
            raise ValueError(f"{name} must be >= {int(offsets[-1])}, the last offset, got {size}.")
        return size
    if is_traced(offsets):
        raise ValueError(
            f"{name} must be given if the offsets are traced, because it sets array shapes. Pass a Python int."
        )
    return int(offsets[-1])


@partial(jax.jit, static_argnums=2)
def sequences(q_ids: Int[Array, "B T"], kv_ids: Int[Array, "B S"], max_segments: int) -> Sequences:
    """The sequences of all rows in order, the same numbers on both sides, as offsets of `max_segments` sequences.

    Padding is left out. A sequence that only one side has is empty on the other, so that both sides stay aligned.
    """
    # Each row gives as many entries as it has slots, of which some are sequences. A stable sort moves the sequences of
    # all rows to the front without changing their order.
    q_lengths, kv_lengths, is_sequence, in_order = _row_sequences(q_ids, kv_ids)
    order = jnp.argsort(~is_sequence.reshape(-1), stable=True)[:max_segments]
    q_offsets = _offsets(q_lengths.reshape(-1)[order], max_segments)
    kv_offsets = _offsets(kv_lengths.reshape(-1)[order], max_segments)
    return Sequences(q_offsets, kv_offsets, jnp.sum(is_sequence, dtype=np.int32), jnp.all(in_order))


@jax.vmap
def _row_sequences(q_ids, kv_ids):
    """A row's sequences in order: lengths on both sides, which entries are sequences, whether both sides are in order.

    The order is by id if ids ascend on both sides. Otherwise it is the order of the queries, and a sequence that only
    keys have follows the sequences that come before it among the keys.
    """
    # There is one entry per slot: T of queries, then S of keys. An entry stands for a sequence if it is the first slot
    # of an id among the queries, or the first of an id that only keys have. The entries of sequences are sorted by
    # (major, minor), all others go last. At the end each token gets the rank of its sequence: if ranks never decrease
    # along a side, cumulative lengths in this order describe the ids of that side.
    q_slots, kv_slots = jnp.arange(q_ids.size, dtype=np.int32), jnp.arange(kv_ids.size, dtype=np.int32)
    q_first, q_count = _find(q_ids, q_ids)
    kv_first, kv_count = _find(kv_ids, kv_ids)
    first_in_q, _ = _find(kv_ids, q_ids)
    _, count_in_kv = _find(q_ids, kv_ids)
    only_kv = (kv_ids >= 0) & (first_in_q < 0)
    is_sequence = jnp.concatenate([(q_ids >= 0) & (q_first == q_slots), only_kv & (kv_first == kv_slots)])

    ascending = _never_decreases(q_ids) & _never_decreases(kv_ids)
    follows = first_in_q  # for each key, the last query sequence that starts among the keys up to it
    if kv_ids.size:
        follows = jax.lax.cummax(first_in_q)
    major = jnp.where(ascending, jnp.concatenate([q_ids, kv_ids]), jnp.concatenate([q_slots, follows]))
    minor = jnp.concatenate([q_slots * 0, kv_slots + 1])
    order = jnp.lexsort((minor, major, ~is_sequence)).astype(np.int32)
    is_sequence = is_sequence[order]
    q_lengths = jnp.where(is_sequence, jnp.concatenate([q_count, kv_slots * 0])[order], 0)
    kv_lengths = jnp.where(is_sequence, jnp.concatenate([count_in_kv, kv_count])[order], 0)

    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=np.int32))
    q_rank = jnp.where(q_ids >= 0, _take(rank, q_first), PADDING)
    kv_rank = jnp.where(first_in_q >= 0, _take(rank, first_in_q), _take(rank, q_ids.size + kv_first))
    kv_rank = jnp.where(kv_ids >= 0, kv_rank, PADDING)
    return q_lengths, kv_lengths, is_sequence, _never_decreases(q_rank) & _never_decreases(kv_rank)


def _find(ids, among):
    """For each id, the first slot with an equal id `among` others (-1: none), and the number of such slots."""
    if not ids.size or not among.size:
        return jnp.full(ids.size, -1, np.int32), jnp.zeros(ids.size, np.int32)
    order = jnp.argsort(among, stable=True).astype(np.int32)
    ranked = among[order]
    left = jnp.searchsorted(ranked, ids, side="left").astype(np.int32)
    right = jnp.searchsorted(ranked, ids, side="right").astype(np.int32)
    found = (left < right) & (ids >= 0)
    return jnp.where(found, _take(order, left), -1), jnp.where(found, right - left, 0)


def _take(array, index):
    """Entries of an array; indices out of range are clipped, and an empty array gives zeros."""
    if not array.size:
        return index * 0
    return array[jnp.clip(index, 0, array.size - 1)]


def _never_decreases(values):
    """Whether the entries that are not negative (padding) never decrease."""
    if not values.size:
        return jnp.array(True)
    return jnp.all((values < 0) | (values >= jax.lax.cummax(values)))


def _offsets(lengths, max_segments: int):
    """[0, n0, n0+n1, ...], where the tail repeats the total."""
    return jnp.cumsum(jnp.pad(lengths, (1, max_segments - lengths.size)), dtype=np.int32)


def _has_several(ids):
    least = jnp.min(ids, where=ids >= 0, initial=LAST_POSITION)
    return jnp.max(ids, initial=PADDING) > least
