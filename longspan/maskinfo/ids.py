"""Ids that name the tokens of a row, and what follows from them: positions, lengths, offsets.

An id >= 0 names a token's document (or chunk, or type), a negative one is padding. Everything here sorts or scans, so
it needs memory linear in the number of tokens, and static shapes, so it works under jit.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from longspan.maskinfo.checks import check_ints, check_size, is_traced

PADDING = -1
LAST_POSITION = np.iinfo(np.int32).max


class Sequences(NamedTuple):
    """The sequences of a batch on both sides, as cumulative lengths, and what may be wrong with them."""

    q_offsets: Any
    kv_offsets: Any
    count: Any  # how many there are; more than the offsets hold if they are too short
    in_order: Any  # whether each side runs through the sequences in one order, so that offsets can tell


def number_by_first_appearance(keys: tuple[Any, ...], valid: Bool[Array, "n"]) -> Int[Array, "n"]:
    """Numbers equal tuples of keys alike, from 0 in order of first appearance; -1 where not valid."""
    first = first_equal((*keys, valid.astype(np.int32)))
    leads = (first == jnp.arange(valid.size, dtype=np.int32)) & valid
    number = jnp.cumsum(leads, dtype=np.int32) - 1
    return jnp.where(valid, number[first], PADDING)


def first_equal(keys: tuple[Any, ...]) -> Int[Array, "n"]:
    """For each entry, the index of the first one with equal keys."""
    n = keys[0].size
    order = jnp.lexsort(keys).astype(np.int32)
    if not n:
        return order
    ranked = [k[order] for k in keys]
    starts = jnp.zeros(n, bool).at[0].set(True)
    for k in ranked:
        starts = starts.at[1:].set(starts[1:] | (k[1:] != k[:-1]))
    # The sort is stable: a run of equals starts with the earliest.
    run = jax.lax.cummax(jnp.where(starts, jnp.arange(n, dtype=np.int32), np.int32(0)))
    return jnp.zeros(n, np.int32).at[order].set(order[run])


@jax.jit
@jax.vmap
def name_chunks(q_ids, kv_ids, q_chunks, kv_chunks):
    """Ids of the chunks: chunk + 1 in a row of one document, else one per (document, chunk), counted from 1."""
    ids, chunks = jnp.concatenate([q_ids, kv_ids]), jnp.concatenate([q_chunks, kv_chunks])
    named = jnp.where(_has_several(ids), number_by_first_appearance((ids, chunks), ids >= 0) + 1, chunks + 1)
    return _split(jnp.where(ids >= 0, named, PADDING), q_ids.size)


@jax.jit
@jax.vmap
def name_types(q_ids, kv_ids, q_types, kv_types):
    """Ids of token types: the type in a row of one document, else one per (document, type), counted from 1."""
    ids, types = jnp.concatenate([q_ids, kv_ids]), jnp.concatenate([q_types, kv_types])
    valid = (ids >= 0) & (types >= 0)
    named = jnp.where(_has_several(ids), number_by_first_appearance((ids, types), valid) + 1, types)
    return _split(jnp.where(valid, named, PADDING), q_ids.size)


def has_several(ids: Int[Array, "B L"]) -> Bool[Array, "B"]:
    """Whether each row holds more than one document."""
    return jax.vmap(_has_several)(ids)


def lengths_of(ids: Int[Array, "B L"]) -> Int[Array, "B"]:
    """How many tokens of each row are not padding."""
    return jnp.sum(ids >= 0, axis=1, dtype=np.int32)


@partial(jax.jit, static_argnums=1)
def positions_of(ids: Int[Array, "B L"], padding: int) -> Int[Array, "B L"]:
    """Positions that restart wherever the id changes."""
    if not ids.shape[1]:
        return jnp.zeros(ids.shape, np.int32)
    slots = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=np.int32).reshape(1, -1), ids.shape)
    changes = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    starts = jax.lax.cummax(jnp.where(changes, slots, np.int32(0)), axis=1)
    return jnp.where(ids >= 0, slots - starts, np.int32(padding))


def from_offsets(offsets: Int[Array, "n"], length: int) -> Int[Array, "1 length"]:
    """One row of ids 0, 1, ... for the sequences between the offsets; padding after the last."""
    slots = jnp.arange(length, dtype=np.int32)
    ids = jnp.searchsorted(offsets, slots, side="right").astype(np.int32) - 1
    return jnp.where(slots < offsets[-1], ids, PADDING).reshape(1, -1)


def check_offsets(name: str, offsets: Any) -> jax.Array:
    """Cumulative lengths [0, n0, n0+n1, ...]."""
    offsets = check_ints(name, offsets, 1, "(n+1,)")
    known = None if is_traced(offsets) else np.asarray(offsets)
    if not offsets.size or (known is not None and (known[0] != 0 or np.any(np.diff(known) < 0))):
        got = "an array without entries" if known is None or not known.size else known.tolist()
        raise ValueError(
            f"{name} must start at 0 and never fall: [0, n0, n0+n1, ...], got {got}. "
            "Pairs [start0, end0, ...] go to `MaskInfo.from_cu_seqlens`."
        )
    return offsets


def check_total(name: str, size: Any, offsets: jax.Array) -> int:
    """How many tokens there are: as given, or as the offsets say."""
    if size is not None:
        size = check_size(name, size)
        if not is_traced(offsets) and size < int(offsets[-1]):
            raise ValueError(f"{name} must be >= {int(offsets[-1])}, the last offset, got {size}.")
        return size
    if is_traced(offsets):
        raise ValueError(f"{name} must be given if the offsets are traced, because it fixes shapes.")
    return int(offsets[-1])


@partial(jax.jit, static_argnums=2)
def sequences(q_ids: Int[Array, "B T"], kv_ids: Int[Array, "B S"], most: int) -> Sequences:
    """The sequences of all rows in order, both sides numbered alike, as offsets of `most` sequences.

    Padding is left out. A sequence that only one side has is empty on the other, so that the two stay aligned.
    """
    q_lengths, kv_lengths, real, in_order = _row_sequences(q_ids, kv_ids)
    order = jnp.argsort(~real.reshape(-1), stable=True)[:most]
    q_offsets, kv_offsets = (_cumulate(a.reshape(-1)[order], most) for a in (q_lengths, kv_lengths))
    return Sequences(q_offsets, kv_offsets, jnp.sum(real, dtype=np.int32), jnp.all(in_order))


@jax.vmap
def _row_sequences(q_ids, kv_ids):
    """A row's sequences in order: their lengths on both sides, which entries are real, whether there is one order."""
    q_slots, kv_slots = (jnp.arange(ids.size, dtype=np.int32) for ids in (q_ids, kv_ids))
    q_first, q_count = _find(q_ids, q_ids)
    kv_first, kv_count = _find(kv_ids, kv_ids)
    in_q, _ = _find(kv_ids, q_ids)
    _, q_in_kv = _find(q_ids, kv_ids)
    # By id if ids ascend. Otherwise as the queries have them, and what only the keys have follows what comes before it
    # among the keys.
    ascend = _grows(q_ids) & _grows(kv_ids)
    only_kv = (kv_ids >= 0) & (in_q < 0)
    after = jax.lax.cummax(in_q) if kv_ids.size else in_q
    leads = jnp.concatenate([(q_ids >= 0) & (q_first == q_slots), only_kv & (kv_first == kv_slots)])
    major = jnp.where(ascend, jnp.concatenate([q_ids, kv_ids]), jnp.concatenate([q_slots, after]))
    minor = jnp.concatenate([q_slots * 0, kv_slots + 1])
    order = jnp.lexsort((minor, major, ~leads)).astype(np.int32)
    q_lengths = jnp.concatenate([q_count, kv_slots * 0])[order]
    kv_lengths = jnp.concatenate([q_in_kv, kv_count])[order]
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=np.int32))
    q_place = jnp.where(q_ids >= 0, _take(place, q_first), PADDING)
    kv_place = jnp.where(in_q >= 0, _take(place, in_q), _take(place, q_ids.size + kv_first))
    kv_place = jnp.where(kv_ids >= 0, kv_place, PADDING)
    real = leads[order]
    in_order = _grows(q_place) & _grows(kv_place)
    return jnp.where(real, q_lengths, 0), jnp.where(real, kv_lengths, 0), real, in_order


def _find(ids, among):
    """For each id, the first slot of an equal one `among` others (-1: none) and how many there are."""
    if not ids.size or not among.size:
        return jnp.full(ids.size, -1, np.int32), jnp.zeros(ids.size, np.int32)
    order = jnp.argsort(among, stable=True).astype(np.int32)
    ranked = among[order]
    left, right = (jnp.searchsorted(ranked, ids, side=side).astype(np.int32) for side in ("left", "right"))
    found = (left < right) & (ids >= 0)
    return jnp.where(found, _take(order, left), -1), jnp.where(found, right - left, 0)


def _take(array, index):
    return array[jnp.clip(index, 0, max(array.size - 1, 0))] if array.size else index * 0


def _grows(places):
    """Whether the entries that are not padding never go back."""
    return jnp.all((places < 0) | (places >= jax.lax.cummax(places))) if places.size else jnp.array(True)


def _cumulate(counts, most: int):
    counts = jnp.pad(counts, (1, most - counts.size))
    return jnp.cumsum(counts, dtype=np.int32)


def _has_several(ids):
    least = jnp.min(ids, where=ids >= 0, initial=LAST_POSITION)
    return jnp.max(ids, initial=PADDING) > least


def _split(ids, at: int):
    return ids[:at], ids[at:]
