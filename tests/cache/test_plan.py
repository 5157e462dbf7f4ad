"""Plans against brute force: capacity, form, and printed reasons."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import longspan as ls
from longspan.cache.lifetimes import lifetimes
from longspan.cache.plan import CachePlan
from longspan.cache.slots import SlotAllocation, slot_of
from longspan.masks.base import NO_QUERY, Mask, rule
from longspan.testing import masks as every_mask
from tests.cache.brute import HEADS, LENGTH, decodable, exact_masks, last_queries, max_alive, tied, truth

pytestmark = pytest.mark.quick

WINDOW = ls.Causal() & ls.Window(3, 0)
PINNED = ls.Causal() & (ls.Window(3, 0) | ls.Prefix(2))
SLACK = st.sampled_from([0, 0, 1, 3])


def planned(mask, length=LENGTH, slack=0) -> CachePlan:
    """The plan; masks that tie every position to the next are skipped."""
    try:
        return ls.cache.plan(mask, length, slack=slack)
    except ValueError as refused:
        assert "& Causal()" in str(refused)
        assume(False)
        raise


# Capacity


@given(decodable(exact_masks()), SLACK)
def test_capacity_is_that_of_brute_force_for_static_rules_in_any_nesting(mask, slack):
    plan = planned(mask, slack=slack)
    assert plan.capacity == max_alive(last_queries(truth(mask)), slack)
    assert not mask.inexact()


@given(decodable(every_mask(LENGTH, LENGTH, heads=HEADS)), SLACK)
def test_capacity_is_never_less_than_that_of_brute_force_for_any_rule(mask, slack):
    plan = planned(mask, slack=slack)
    last = last_queries(truth(mask))
    assert plan.capacity >= max_alive(last, slack)
    assert (lifetimes(mask, LENGTH).last >= last).all()


@given(exact_masks(), st.integers(0, 2**32 - 1), st.sampled_from([-1, 1]))
def test_the_nearest_query_is_that_of_the_truth_table(mask, seed, step):
    key, at = np.arange(LENGTH), np.random.default_rng(seed).integers(0, LENGTH, LENGTH)
    for head in range(HEADS):
        found, table = mask.of_head(head).nearest_query(key, at, step), truth(mask)[0, head]
        for k in key:
            queries = np.nonzero(table[:, k])[0]
            queries = queries[queries <= at[k]] if step < 0 else queries[queries >= at[k]]
            inside = 0 <= found[k] < LENGTH
            assert ([found[k]] if inside else []) == list(queries[-1:] if step < 0 else queries[:1])
            assert np.abs(found[k]) <= NO_QUERY


@given(exact_masks())
def test_positions_are_tied_where_a_query_attends_past_them(mask):
    np.testing.assert_array_equal(lifetimes(mask, LENGTH).tied, tied(truth(mask)))


@given(decodable(every_mask(LENGTH, LENGTH, heads=HEADS)), SLACK)
def test_keys_that_are_alive_at_the_same_time_have_different_slots(mask, slack):
    plan, key = planned(mask, slack=slack), np.arange(LENGTH)
    end = lifetimes(mask, LENGTH).last
    end = np.where(end < 0, -1, end + slack)
    slots = slot_of(SlotAllocation(plan.capacity, plan.ring, plan.pinned, plan.table), key)
    for a in key[end >= key]:
        assert 0 <= slots[a] < plan.capacity
        for b in key[(end >= key) & (key > a) & (key <= end[a])]:
            assert slots[a] != slots[b]


@pytest.mark.parametrize(
    ("mask", "length", "slack", "capacity"),
    [
        (ls.Causal(), 100, 0, 100),
        (WINDOW, 100, 0, 4),
        (WINDOW, 100, 2, 6),
        (WINDOW, 3, 2, 3),
        (PINNED, 100, 0, 6),
        (PINNED, 100, 5, 11),
        (ls.Causal() & ls.Chunk(8), 100, 0, 8),
        (ls.Chunk(8), 100, 0, 8),
        (ls.Causal() & ls.Prefix(7), 100, 0, 7),
        (ls.Causal() & ls.Global((3, 50), rows=False), 100, 0, 2),
        (ls.Causal() & (ls.Window(3, 0) | ls.Global((3, 50))), 100, 0, 51),
        (ls.Causal() & ls.PerHead((ls.Window(3, 0), ls.Window(9, 0))), 100, 0, 10),
        (ls.Causal() & ls.Window(2, 0, dilation=5), 100, 0, 11),
        (ls.Empty(), 100, 0, 0),
        (ls.Causal(-100), 100, 5, 0),
        (ls.Causal(-1), 100, 0, 99),
        (ls.Full(), 1, 0, 1),
    ],
    ids=repr,
)
def test_capacity_in_cases_that_can_be_counted_by_hand(mask, length, slack, capacity):
    assert ls.cache.plan(mask, length, slack=slack).capacity == capacity


def test_rules_with_arrays_are_bounded_by_static_rules():
    ids, lengths, flags = np.zeros((2, 99), int), np.array([5, 50]), np.ones((1, 99), bool)
    for data in (ls.Segments(ids), ls.KvLengths(lengths), ls.Global(q_flags=flags, kv_flags=flags)):
        plan = ls.cache.plan(WINDOW & data, 99)
        assert (plan.capacity, plan.form) == (4, "a ring")
        assert repr(data) in plan.why
        assert ls.cache.plan(ls.Causal() & data, 99).capacity == 99


def test_each_head_of_a_static_table_counts_and_a_traced_table_is_bounded():
    table = np.array([[[0], [1], [2], [3]], [[0], [0], [2], [2]]])
    assert ls.cache.plan(ls.Causal() & ls.Blocks(table, 4), 16).capacity == 8
    data = ls.Causal() & ls.Window(5, 0) & ls.Blocks(jnp.asarray(table), 4)
    assert ls.cache.plan(data, 16).capacity == 6

    @jax.jit
    def inside(table):
        plan = ls.cache.plan(ls.Causal() & ls.Window(5, 0) & ls.Blocks(table, 4), 16)
        return ls.cache.init(plan, 1, 1, 2, jnp.float32)

    with jax.checking_leaks():
        assert inside(jnp.asarray(table)).k.shape == (1, 6, 1, 2)


# Form


def form_of(last, slack) -> str:
    """The first form that takes no more slots than keys are alive at the same time."""
    length = len(last)
    end = np.where(last < 0, -1, np.minimum(last + slack, length - 1))
    alive = [k for k in range(length) if end[k] >= k]
    capacity = max_alive(last, slack)
    pinned = [k for k in alive if any(end[k] > end[j] for j in alive if j > k)]
    for chosen in ([], pinned):
        ring, others = capacity - len(chosen), [k for k in alive if k not in chosen]
        meet = any(a < b <= end[a] and (b - a) % max(ring, 1) == 0 for a in others for b in others)
        if ring >= 0 and not meet and (ring or not others):
            return ("pinned" if chosen else "ring") if capacity else "nothing"
    return "table"


@given(decodable(exact_masks()), SLACK)
def test_the_form_is_the_first_that_needs_no_slot_beyond_the_capacity(mask, slack):
    plan = planned(mask, slack=slack)
    form = "table" if plan.table is not None else "pinned" if plan.pinned else "ring" if plan.capacity else "nothing"
    assert form == form_of(last_queries(truth(mask)), slack)


@pytest.mark.parametrize(
    ("mask", "form"),
    [
        (WINDOW, "a ring"),
        (ls.Causal(), "a ring"),
        (ls.Causal() & ls.Chunk(8), "a ring"),
        (WINDOW & ~ls.Prefix(1), "a ring"),  # a key that no query attends to does not require a table
        (PINNED, "2 pinned keys and a ring"),
        (PINNED & ~ls.Prefix(1), "1 pinned key and a ring"),
        (ls.Causal() & (ls.Window(3, 0) | ls.Global((0, 9), rows=False)), "2 pinned keys and a ring"),
        (ls.Causal() & (ls.Window(3, 0) | ls.Global((5, 20))), "a table"),
        (ls.Empty(), "no slots"),
    ],
    ids=repr,
)
def test_forms_of_common_masks(mask, form):
    assert ls.cache.plan(mask, 40).form == form


# Printed text


def test_plans_hash_compare_by_content_and_print():
    plan = ls.cache.plan(PINNED, 1000, slack=1)
    same = ls.cache.plan(ls.Causal() & (ls.Prefix(2) | ls.Window(3, 0)), 1000, slack=1)
    assert plan == same and hash(plan) == hash(same)
    others = [ls.cache.plan(PINNED, 1000), ls.cache.plan(PINNED, 999, slack=1), ls.cache.plan(WINDOW, 1000, slack=1)]
    assert len({plan, same, *others}) == 4 and plan != "plan"
    assert repr(plan) == "CachePlan(7 of 1,000 positions, 2 pinned keys and a ring)"
    assert str(plan) == (
        "7 slots for 1,000 positions (0.70% of a full cache), used as 2 pinned keys and a ring\n"
        "each key is kept for 5 steps; 2 keys are kept forever\n"
        "a rollback may remove up to 1 token"
    )


def test_plans_of_tables_differ_where_the_tables_do():
    tables = [np.array([[[0], [0], [1], [1]]]), np.array([[[0], [1], [0], [1]]])]
    plans = [ls.cache.plan(ls.Causal() & ls.Blocks(t, 4), 16) for t in tables]
    assert plans[0] != plans[1]


def test_bytes_are_those_of_the_arrays():
    plan = ls.cache.plan(PINNED, 1000)
    for dtype in (jnp.float32, jnp.bfloat16):
        cache = ls.cache.init(plan, 3, 2, 5, dtype, v_head_dim=7)
        assert plan.nbytes(3, 2, 5, dtype, v_head_dim=7) == cache.k.nbytes + cache.v.nbytes
    assert plan.nbytes(3, 2, 5, "float32") == 6 * 3 * 2 * 10 * 4
    assert plan.full_nbytes(3, 2, 5, "float32") == 1000 * 3 * 2 * 10 * 4


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (ls.Causal(), "no key can be evicted: every key is needed until the end because of Causal()"),
        (
            ls.Causal() & (ls.Window(3, 0) | ls.Full()),
            "no key can be evicted: every key is needed until the end because of Causal(), Full()",
        ),
        (
            ls.PerHead((WINDOW, ls.Causal(-1))),
            "no key can be evicted: every key is needed until the end because of Causal(-1)",
        ),
        (ls.Causal() | ls.Prefix(9), "no key can be evicted: every key is needed until the end because of Causal()"),
        (
            ls.Causal() & ls.Window(100, 0),
            "no key can be evicted: every key is needed until the end because of Causal(), Window(100, 0)",
        ),
        (WINDOW & ~(ls.Chunk(3) | ls.Prefix(3)), "each key is kept for up to 4 steps"),
        (
            WINDOW & ~ls.Window(1, 0, dilation=2),
            "; fewer keys may be enough, because the plan does not evaluate ~Window(1, 0, dilation=2)",
        ),
        (
            WINDOW & ls.Window(2, 0, dilation=2) & ls.Window(2, 0, dilation=3),
            "because the plan does not evaluate Window(2, 0, dilation=2), Window(2, 0, dilation=3)",
        ),
        (WINDOW, "each key is kept for 4 steps"),
        (PINNED, "each key is kept for 4 steps; 2 keys are kept forever"),
        (ls.Causal() & ls.Chunk(5), "each key is kept for up to 5 steps; the cache never holds more than 5 keys"),
        (ls.Empty(), "no query attends to any key"),
    ],
    ids=repr,
)
def test_why_names_the_rules_that_keep_keys(mask, why):
    assert why in ls.cache.plan(mask, 30).why


def test_a_users_rule_is_assumed_to_allow_everything_and_named():
    mine = ls.Custom(lambda q, k: (q - k) % 2 == 0)
    assert ls.cache.plan(WINDOW & mine, 30).capacity == 4
    assert (
        "; fewer keys may be enough, because the plan does not evaluate Custom(<lambda>)"
        in ls.cache.plan(WINDOW & mine, 30).why
    )

    @rule
    class Odd(ls.Window):
        def allowed(self, q, kv):
            return kv.position % 2 == 1

    @rule
    class Shifted(Mask):
        mask: Mask
        notes: np.ndarray

        def parts(self):
            return (self.mask,)

        def with_parts(self, parts):
            return Shifted(*parts, self.notes)

        def allowed(self, q, kv):
            return self.mask.allowed(q, kv)

    for own in (Odd(3, 0), Shifted(ls.Chunk(3), np.zeros(1, int))):
        assert own.inexact() == (own,)
        plan = ls.cache.plan(ls.Causal() & own, 30)
        assert plan.capacity == 30 and repr(own) in plan.why
        assert ls.cache.plan(ls.Causal() & own & ls.Window(3, 0), 30).capacity == 4


# Errors


@pytest.mark.parametrize(
    "mask",
    [
        ls.Full(), ls.Window(3, 3), ls.Causal(1), ls.Chunk(99), ls.Segments(np.zeros((1, 30), int)),
        ls.Causal() | ~ls.Causal(),
    ],
    ids=repr,
)  # fmt: skip
def test_masks_that_tie_every_position_to_the_next_are_refused_and_the_cure_is_named(mask):
    with pytest.raises(ValueError, match=re.escape(f"Decode with `({mask!r}) & Causal()`")):
        ls.cache.plan(mask, 30)
    assert ls.cache.plan(mask & ls.Causal(), 30).tied is None


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"must be a Mask, got MaskInfo. For a MaskInfo, pass `info.mask`"):
        ls.cache.plan(ls.MaskInfo.from_random(1, 4, 4), 4)  # type: ignore[arg-type]
    for length in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="`length` must be a Python int >= 1"):
            ls.cache.plan(WINDOW, length)
    with pytest.raises(ValueError, match="`slack` must be a Python int >= 0"):
        ls.cache.plan(WINDOW, 9, slack=-1)
    with pytest.raises(TypeError, match="`length` sets array shapes"):
        ls.cache.plan(WINDOW, jnp.array(9))


def test_arrays_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"Segments.q_ids covers 50 queries, but the call has 99"):
        ls.cache.plan(WINDOW & ls.Segments(np.zeros((2, 50), int)), 99)
    with pytest.raises(ValueError, match=r"Blocks.table covers 6 blocks of 4 queries"):
        ls.cache.plan(WINDOW & ls.Blocks(np.zeros((1, 6, 1), int), 4), 99)


# Work


def counting(mask, monkeypatch):
    """The sizes of all calls of `nearest_query`, of any rule, while planning."""
    asked = []
    for kind in {type(part) for part in mask.walk()}:
        plain = kind.nearest_query

        def ask(self, key, at, step, plain=plain):
            asked.append(np.size(key))
            return plain(self, key, at, step)

        monkeypatch.setattr(kind, "nearest_query", ask)
    return asked


HEAD_WINDOWS = ls.PerHead(tuple(ls.Window(10 * (h % 2 + 1), 0) for h in range(16)))
RANDOM = np.random.default_rng(0).integers(0, 16384, (1, 16384, 3))
EVEN, ODD = (np.where(np.arange(16384)[None, :, None] % 2 == i, 0, -1) for i in (0, 1))


@pytest.mark.parametrize(
    "mask",
    [
        ls.Causal() & ls.Window(1023, 0),
        ls.Causal() & (ls.Window(1023, 0) | ls.Prefix(4)),
        ls.Causal() & (ls.Window(255, 0) | ls.Global((5, 70000))),
        ls.Causal() & ls.Blocks(RANDOM, 64),
        ls.Causal() & ls.Blocks(EVEN, 64) & ls.Blocks(ODD, 64),  # each search moves the other by one block
        ls.Causal() & HEAD_WINDOWS & ls.Segments(np.zeros((1, 2**20), np.int32)),
        ls.Causal() & ls.Window(100, 0, dilation=7),
        ls.Causal() & ls.Window(2**20, 0, dilation=1000) & ls.Window(2**20, 0, dilation=999),  # 999 rounds
    ],
    ids=lambda m: repr(m)[:60],
)
def test_planning_a_million_tokens_is_linear_work(mask, monkeypatch):
    asked = counting(mask, monkeypatch)
    ls.cache.plan(mask, 2**20)
    assert sum(asked) <= (170 if mask.inexact() else 40) * 2**20


def test_equal_structures_are_planned_once():
    plans = [ls.cache.plan(WINDOW & ls.Segments(np.full((2, 99), i)), 99) for i in range(3)]
    assert plans[0] is plans[1] is plans[2]
