"""Masks inside kernels: a rule that was recorded outside holds on the blocks that a kernel loads."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.engines import door
from longspan.engines.door import ENTRIES, NUMBER, PAIRS, SUMMARY, TABLE, Answer, record
from longspan.masks.sides import QUERIES
from tests.every_mask import every_mask

T, S, B, N = 12, 20, 3, 4
Q_TILE, KV_TILE = 5, 7
RNG = np.random.default_rng(0)


class StrictNamespace(door.KernelNamespace):
    """jax.numpy as Mosaic has it: no select between bools."""

    def where(self, condition, yes, no):
        assert jnp.asarray(yes).dtype != bool, "logic, not `where`, for bools"
        return jnp.where(condition, yes, no)


@pytest.fixture(autouse=True)
def strict_namespace(monkeypatch):
    monkeypatch.setattr(door, "KernelNamespace", StrictNamespace)


def load(answers: list[Answer], row: int, head: int, tiles: tuple[int, int], place: int):
    """The part of an answer that a kernel loads for one batch row, head and pair of tiles."""
    kind, axis, array, _ = answers[place]
    if kind == TABLE:
        return array
    if kind == NUMBER:
        return array[row if array.shape[0] > 1 else 0]
    array = array[row if array.shape[0] > 1 else 0, head if array.shape[1] > 1 else 0]
    q, kv = (slice(tile * size, (tile + 1) * size) for tile, size in zip(tiles, (Q_TILE, KV_TILE), strict=True))
    if kind == PAIRS:
        return array[q, kv]
    if kind == SUMMARY:
        return array[tiles[0] if axis == QUERIES else tiles[1]]
    assert kind == ENTRIES
    return array[q].reshape(-1, 1) if axis == QUERIES else array[kv].reshape(1, -1)


def blocks(mask, **positions):
    """(recorded mask, loader, row, head, tiles, the truth) for some blocks of a mask, the ragged ones included."""
    layout = mask.layout(T, S, q_tile=Q_TILE, kv_tile=KV_TILE, **positions)
    recorded = record(layout, B, N)
    dense = np.broadcast_to(mask.dense(T, S, **positions), (B, N, T, S))
    for row, head, *tiles in ((1, 2, 0, 0), (2, 0, 1, 1), (0, 3, 2, 2), (1, 1, 2, 0)):
        q, kv = (slice(tile * size, (tile + 1) * size) for tile, size in zip(tiles, (Q_TILE, KV_TILE), strict=True))
        yield (
            recorded,
            partial(load, recorded.answers, row, head, tuple(tiles)),
            row,
            head,
            tiles,
            dense[row, head, q, kv],
        )


MASKS = every_mask(B, N, T, S)


def check_allowed(mask, **positions):
    for recorded, loaded, row, head, (i, j), truth in blocks(mask, **positions):
        q_index = jnp.arange(i * Q_TILE, i * Q_TILE + truth.shape[0], dtype=jnp.int32).reshape(-1, 1)
        kv_index = jnp.arange(j * KV_TILE, j * KV_TILE + truth.shape[1], dtype=jnp.int32).reshape(1, -1)
        got = recorded.allowed(loaded, jnp.int32(row), jnp.int32(head), q_index, kv_index)
        np.testing.assert_array_equal(np.broadcast_to(got, truth.shape), truth)


def check_bounds(mask, **positions):
    for recorded, loaded, row, head, (i, j), truth in blocks(mask, **positions):
        starts = jnp.int32(i * Q_TILE), jnp.int32(j * KV_TILE)
        some, every = recorded.classify(loaded, jnp.int32(row), jnp.int32(head), *starts)
        assert some.shape == every.shape == ()
        assert bool(some) >= truth.any()
        assert bool(every) <= truth.all()


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_recorded_rule_holds_on_the_blocks_of_a_kernel(mask):
    check_allowed(mask)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_recorded_rule_bounds_the_tiles_of_a_kernel(mask):
    check_bounds(mask)


@pytest.mark.parametrize("check", [check_allowed, check_bounds])
def test_positions_are_answers_too(check):
    mask = ls.Causal() & (ls.Window(3, 0) | ls.Global((4, 7, 11)))
    check(mask, q_positions=RNG.integers(0, 20, (B, T)), kv_positions=RNG.permutation(20))


def test_tiles_of_comparisons_are_bounded_as_tightly_as_outside():
    ids = np.repeat(np.arange(4), 5)[None]
    mask = ls.Causal() & ls.Segments(ids[:, :T], ids)
    kinds = []
    for recorded, loaded, row, head, (i, j), truth in blocks(mask):
        starts = jnp.int32(i * Q_TILE), jnp.int32(j * KV_TILE)
        some, every = recorded.classify(loaded, jnp.int32(row), jnp.int32(head), *starts)
        kinds.append((bool(some), bool(every), bool(truth.any()), bool(truth.all())))
    assert (False, False, False, False) in kinds


def test_an_array_that_is_asked_for_twice_is_one_answer():
    ids = jnp.asarray(RNG.integers(0, 3, (B, S)))
    mask = (ls.Segments(ids[:, :T], ids) | ls.Segments(ids[:, :T], ids)) & ls.Segments(ids[:, :T], ids)
    kv = [a for a in record(mask.layout(T, S, q_tile=Q_TILE, kv_tile=KV_TILE), B, N).answers if a.kind == ENTRIES]
    assert len([a for a in kv if a.axis != QUERIES]) == 1


def test_recording_works_inside_a_traced_program():
    @jax.jit
    def truth(ids):
        mask = ls.Causal() & ls.Segments(ids[:, :T], ids)
        recorded = record(mask.layout(T, S, q_tile=Q_TILE, kv_tile=KV_TILE), B, N)
        index = jnp.arange(Q_TILE).reshape(-1, 1), jnp.arange(KV_TILE).reshape(1, -1)
        return recorded.allowed(partial(load, recorded.answers, 1, 0, (0, 0)), jnp.int32(1), jnp.int32(0), *index)

    ids = jnp.asarray(RNG.integers(0, 2, (B, S)))
    want = (ls.Causal() & ls.Segments(ids[:, :T], ids)).dense(T, S)[1, 0, :Q_TILE, :KV_TILE]
    np.testing.assert_array_equal(np.asarray(truth(ids)), np.asarray(want))
