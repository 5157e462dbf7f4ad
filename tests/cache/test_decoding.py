"""However tokens are appended, each query attends to the same keys as in the full pass.

All keys are different numbers, so the keys of a query are known without computing attention.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import longspan as ls
from longspan.testing import masks as every_mask
from tests.cache.brute import BATCH, HEADS, LENGTH, decodable, exact_masks, last_queries, tied, truth

FREE_SLOT = 2**30 - 1
COUNTS = (1, 4, LENGTH)  # few shapes, to compile little; rows may take fewer tokens


class Rows:
    """A cache, and the tokens that were appended to each row, all different numbers."""

    def __init__(self, mask, slack):
        try:
            self.plan = ls.cache.plan(mask, LENGTH, slack=slack)
        except ValueError as refused:
            assert "& Causal()" in str(refused)
            assume(False)
        self.mask, self.slack, self.seen = mask, slack, truth(mask)
        self.last, self.exact = last_queries(self.seen), not mask.inexact()
        bounds = np.zeros(LENGTH, bool) if self.plan.tied is None else self.plan.tied
        self.tied = tied(self.seen) if self.exact else bounds
        self.tokens: list[list[float]] = [[] for _ in range(BATCH)]
        self.furthest, self.count = [0] * BATCH, 0
        cache = ls.cache.init(self.plan, BATCH, 1, 1, jnp.float32)
        self.cache = replace(cache, k=cache.k * np.nan, v=cache.v * np.nan)  # free slots must not be read

    def append(self, count: int, lengths: list[int]):
        """Up to `lengths` tokens for each row, fewer or more where positions are tied."""
        before = self.cache
        lengths = [self._whole(row, count, n) for row, n in enumerate(lengths)]
        k = np.full((BATCH, count, 1, 1), np.nan, np.float32)  # padding must not be read either
        for row, n in enumerate(lengths):
            k[row, :n, 0, 0] = self.count + np.arange(n)
            self.tokens[row] += k[row, :n, 0, 0].tolist()
            self.count += n
        self.cache, view = before.append(k, -k, np.array(lengths))
        self._check_view(view, lengths)
        self._check_store(before, count, lengths)

    def _whole(self, row: int, count: int, wanted: int) -> int:
        start = len(self.tokens[row])
        ends = [n for n in range(min(count, LENGTH - start) + 1) if start + n == LENGTH or not self.tied[start + n]]
        return max((n for n in ends if n <= wanted), default=0) or max(ends, default=0) * (count == LENGTH)

    def _check_view(self, view, lengths):
        call = view.of(self.mask)
        k, v = (np.asarray(call[name])[..., 0, 0] for name in "kv")
        positions = {name: np.asarray(call[name]) for name in ("q_positions", "kv_positions")}
        allowed = truth(call["mask"], positions["q_positions"].shape[1], k.shape[1], **positions)
        for row, n in enumerate(lengths):
            tokens, start = np.array(self.tokens[row]), len(self.tokens[row]) - n
            for head in range(HEADS):
                for i in range(n):
                    wanted = tokens[self.seen[row, head, start + i, : len(tokens)]]
                    np.testing.assert_array_equal(np.sort(k[row, allowed[row, head, i]]), np.sort(wanted))
                    np.testing.assert_array_equal(np.sort(-v[row, allowed[row, head, i]]), np.sort(wanted))
                    assert not self.seen[row, head, start + i, len(tokens) :].any()

    def _check_store(self, before, count, lengths):
        held = np.asarray(self.cache.positions)
        assert not self.cache.overflowed.any()
        assert self.cache.length.tolist() == [len(tokens) for tokens in self.tokens]
        for row, n in enumerate(lengths):
            length, mine = len(self.tokens[row]), held[row][held[row] != FREE_SLOT]
            self.furthest[row] = max(self.furthest[row], length)
            assert len(set(mine)) == len(mine) and (mine < length).all()
            needed = [p for p in range(length) if self.last[p] >= length]
            assert set(needed) <= set(mine), "only what the rule forbids may go"
            k = np.asarray(self.cache.k)[row, held[row] != FREE_SLOT, 0, 0]
            np.testing.assert_array_equal(k, np.array(self.tokens[row])[mine.astype(int)])
            new = mine[mine >= length - n]
            if self.exact:
                assert (self.last[new.astype(int)] >= 0).all(), "what nobody sees is never stored"
            if self.exact and count > self.plan.at_once:
                assert (self.last[new.astype(int)] + self.slack >= length - 1).all(), "nor what is dead by the end"
            if n == 0:
                for name in ("k", "v", "positions"):
                    then, now = (np.asarray(getattr(c, name))[row] for c in (before, self.cache))
                    assert then.tobytes() == now.tobytes(), "a row without tokens stays as it is"

    def rollback(self, back: list[int]):
        """Rolls each row back as far as slack and ties allow."""
        back = [self._allowed(row, n) for row, n in enumerate(back)]
        self.cache = self.cache.rollback(back[0] if len(set(back)) == 1 else np.array(back))
        self.tokens = [tokens[: len(tokens) - n] for tokens, n in zip(self.tokens, back, strict=True)]

    def _allowed(self, row: int, wanted: int) -> int:
        length = len(self.tokens[row])
        least = self.furthest[row] - self.slack
        fits = [n for n in range(wanted + 1) if length - n >= max(least, 0) and (not n or not self.tied[length - n])]
        return max(fits)

    def fork(self, rows: list[int]):
        self.cache = self.cache.fork(np.array(rows))
        self.tokens = [list(self.tokens[row]) for row in rows]
        self.furthest = [self.furthest[row] for row in rows]

    def save(self, folder):
        self.cache.save(folder / "cache.safetensors")
        self.cache = ls.cache.restore(folder / "cache.safetensors", self.plan)


def numbers(most):
    return st.lists(st.integers(0, most), min_size=BATCH, max_size=BATCH)


APPEND = st.tuples(st.just("append"), st.tuples(st.sampled_from(COUNTS), numbers(LENGTH)))
TOKEN = st.tuples(st.just("append"), st.just((1, [1] * BATCH)))
ROLLBACK = st.tuples(st.just("rollback"), st.tuples(numbers(3)))
FORK = st.tuples(st.just("fork"), st.tuples(numbers(BATCH - 1)))
SAVE = st.tuples(st.just("save"), st.just(()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("caches")


def run(rows, events, folder):
    for name, arguments in events:
        if name == "fork" and not rows.exact:  # rows of arrays belong to rows of the cache
            continue
        getattr(rows, name)(*((folder,) if name == "save" else arguments))
    for _ in range(4):  # a key that was lost is missed here
        rows.append(1, [1] * BATCH)
    rows.append(LENGTH, [LENGTH] * BATCH)


@settings(max_examples=60)
@given(
    decodable(exact_masks()),
    st.sampled_from([0, 1, 3]),
    st.lists(st.one_of(APPEND, TOKEN, TOKEN, ROLLBACK, FORK, SAVE), max_size=12),
)
def test_any_sequence_of_operations_keeps_the_keys_of_the_full_pass(folder, mask, slack, events):
    run(Rows(mask, slack), events, folder)


@settings(max_examples=40)
@given(
    decodable(every_mask(LENGTH, LENGTH, batch=BATCH, heads=HEADS)),
    st.sampled_from([0, 2]),
    st.lists(st.one_of(APPEND, TOKEN, ROLLBACK), max_size=6),
)
def test_rules_with_arrays_and_users_rules_are_cut_to_the_kept_keys(folder, mask, slack, events):
    run(Rows(mask, slack), events, folder)


MASKS = [
    ls.Causal() & ls.Window(3, 0),
    ls.Causal() & (ls.Window(2, 0) | ls.Prefix(2)),
    ls.Causal() & (ls.Window(2, 0) | ls.Global((4, 11))),
    ls.Causal() | ls.Prefix(5),
    ls.Chunk(4),
    ls.Causal() & ls.PerHead((ls.Window(1, 0), ls.Window(4, 0))),
]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_one_prefill_and_single_steps(folder, mask):
    for prompt in (0, 5, 8, 16):
        rows = Rows(mask, 0)
        rows.append(LENGTH, [prompt] * BATCH)
        run(rows, [], folder)


def test_several_rollbacks_cannot_go_further_back_than_one():
    plan = ls.cache.plan(ls.Causal() & ls.Window(3, 0), 50, slack=2)
    cache = ls.cache.init(plan, 1, 1, 1, jnp.float32)
    one = jnp.ones((1, 1, 1, 1))
    for _ in range(20):
        cache, _ = cache.append(one, one)
    back = cache.rollback(1).rollback(1)
    for again in (back, back.append(one, one)[0].rollback(1)):
        with pytest.raises(ValueError, match=r"Row 0 cannot be rolled back to 17 tokens: it once held 20, .* slack=2"):
            again.rollback(1)
    far = back
    for _ in range(3):
        far, _ = far.append(one, one)
    assert far.rollback(2).length.tolist() == [19]


def test_free_slots_are_hidden_from_rules_that_would_allow_them():
    """Also from masks other than the plan's: equal plans may belong to different masks."""
    far = ls.Causal() | ~ls.Window(100, 100)
    plan = ls.cache.plan(ls.Causal(), 9)
    assert plan == ls.cache.plan(far, 9)
    cache = ls.cache.init(plan, 1, 1, 1, jnp.float32)
    _, view = cache.append(jnp.ones((1, 2, 1, 1)), jnp.ones((1, 2, 1, 1)))
    call = view.of(far)
    kept = {name: np.asarray(call[name]) for name in ("q_positions", "kv_positions")}
    assert truth(call["mask"], 2, 9, **kept, batch=1)[0, 0].sum() == 3


PACKED = MASKS[0] & ls.Segments(np.repeat([[0, 1, 2]], 333, axis=1))


@pytest.mark.parametrize("mask", [MASKS[0], MASKS[1], PACKED], ids=repr)
def test_prompts_visit_as_few_tiles_as_the_full_pass_does(mask):
    """For the first chunk, when slots are free, and for a chunk that is not aligned with the ring."""
    cache, tiles = ls.cache.init(ls.cache.plan(mask, 999), 1, 1, 1, jnp.float32), dict(q_tile=16, kv_tile=16)
    full = mask.layout(999, 999, **tiles).visits() / 999
    for count in (331, 333):
        cache, view = cache.append(*[jnp.ones((1, count, 1, 1))] * 2)
        call = view.of(mask)
        positions = {name: call[name] for name in ("q_positions", "kv_positions")}
        layout = call["mask"].layout(count, call["k"].shape[1], **positions, **tiles)
        assert layout.visits() <= 1.5 * full * count
