"""Plans of up to 2**30 - 1 positions: lifetimes that repeat are planned from one period, and lists have a limit."""

import sys
import tracemalloc
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import longspan as ls
from longspan.cache.lifetimes import lifetimes
from longspan.cache.outline import Cut, Outline
from longspan.cache.plan import _plan_from
from longspan.masks.base import Mask, rule
from tests.cache.brute import decodable
from tests.cache.test_sequences import position_masks

pytestmark = pytest.mark.quick

LONGEST = 2**30 - 1
ONE = ls.Window(3, 0)
CASES = {
    "a window": (ls.Causal() & ls.Window(1023, 0), 1024, "a ring"),
    "a window and pinned keys": (
        ls.Causal() & (ls.Window(1023, 0) | ls.Prefix(200)),
        1224,
        "200 pinned keys and a ring",
    ),
    "pinned keys, far apart": (ls.Causal() & (ONE | ls.Global((0, 7000), rows=False)), 6, "2 pinned keys and a ring"),
    "chunks": (ls.Causal() & ls.Chunk(8192), 8192, "a ring"),
    "chunks that see ahead": (ls.Chunk(64), 64, "a ring"),
    "a dilated window": (ls.Causal() & ls.Window(100, 0, dilation=7), 701, "a ring"),
    "a window of blocks": (ls.BlockCausal(16) & ls.Window(100, 15), 101, "a ring"),
    "a window per head": (ls.Causal() & ls.PerHead((ONE, ls.Window(90, 0))), 91, "a ring"),
    "documents in a window": (ls.Causal() & ls.Window(99, 0) & ls.KvLengths(np.array([5, 9])), 100, "a ring"),
    "a long prefix": (ls.Causal() & ls.Prefix(100_000), 100_000, "a ring"),
    "causal": (ls.Causal(), None, "a ring"),
    "causal blocks": (ls.BlockCausal(64), None, "a ring"),
    "a prefix-LM": (ls.Causal() | ls.Prefix(500), None, "a ring"),
    "a window beyond the length": (ls.Causal() & ls.Window(2**31, 0), None, "a ring"),
    "nothing": (ls.Empty(), 0, "no slots"),
}


@pytest.mark.parametrize("length", [2**28, LONGEST])
@pytest.mark.parametrize("name", CASES)
def test_memory_does_not_grow_with_the_length(name, length):
    mask, capacity, form = CASES[name]
    tracemalloc.start()
    try:
        plan = ls.cache.plan(mask, length, slack=3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * 2**20
    evicts = capacity is not None and capacity not in (0, 100_000)
    assert (plan.capacity, plan.form) == (length if capacity is None else capacity + 3 * evicts, form)
    tables = [x for x in (plan.table, plan.end, plan.tied) if x is not None]
    assert sum(x.nbytes for x in tables) < 2**20


@settings(max_examples=60)
@given(
    decodable(position_masks(3000)),
    st.sampled_from([1301, 3000, 5000]),
    st.sampled_from([0, 0, 1, 9]),
    st.sampled_from([1, 4]),
)
def test_an_outline_gives_the_plan_that_every_position_gives(mask, length, slack, margin_factor):
    found = lifetimes(mask, length, slack, margin_factor)
    every, place, outline = lifetimes(mask, length, slack, None), np.arange(length), found.outline
    assume(outline.cuts)
    np.testing.assert_array_equal(outline.ends_at(found.last, place), every.last)
    np.testing.assert_array_equal(outline.at(found.tied, place), every.tied)
    assume(not every.tied[1:].all())
    short, long = (_plan_from(mask, length, slack, needs) for needs in (found, every))
    assert long is not None
    if short is None:  # the outline does not decide it: planned from every position
        return
    for name in (field.name for field in fields(long) if field.name not in ("mask", "end", "tied", "outline")):
        assert getattr(short, name) == getattr(long, name), name
    if long.end is not None:
        np.testing.assert_array_equal(short.outline.ends_at(short.end, place), long.end)
    assert (short.tied is None) == (long.tied is None)


COMMON = [
    ls.Causal(), ls.Causal(-2), ls.Causal() & ONE, ls.Causal() & (ONE | ls.Prefix(200)), ls.Chunk(8), ls.BlockCausal(5),
    ls.Causal() & ls.Chunk(8), ls.Causal(-1) & ls.Chunk(8), ls.Causal() & (ls.Chunk(8) | ls.Prefix(2)),
    ls.Causal() & ls.Window(9, 0, dilation=4), ls.Causal() & ls.Chunk(6) & ls.Window(3, 0, dilation=4),
    ls.Causal() & ~ls.Window(5, 5), ls.Causal() | ls.Prefix(9), ls.Causal() & ls.Prefix(2000),
    ls.Causal() & (ONE | ls.Global((5, 4000), rows=False)),
    ls.Causal() & (ls.Window(9, 0) | ls.Segments(np.zeros((1, 9000), int))),
]  # fmt: skip


@pytest.mark.parametrize("mask", COMMON, ids=repr)
def test_common_masks_are_planned_from_an_outline_with_the_same_digest(mask):
    for slack in (0, 5):
        plan = ls.cache.plan(mask, 9000, slack=slack)
        every = _plan_from(mask, 9000, slack, lifetimes(mask, 9000, slack, None))
        assert lifetimes(mask, 9000, slack).outline.cuts and every is not None
        assert (plan.digest, plan.at_once, plan.why) == (every.digest, every.at_once, every.why)


@pytest.mark.parametrize("margin_factor", [1, 4])
def test_ends_that_slack_moves_towards_a_cut_stay_fixed(margin_factor):
    mask = ls.Global((1956,), columns=False)
    short, every = (_plan_from(mask, 3001, 17, lifetimes(mask, 3001, 17, n)) for n in (margin_factor, None))
    assert short is not None and short.outline.cuts and short == every


def test_lengths_above_four_million_have_a_digest_of_the_outline():
    plans = [
        ls.cache.plan(mask, length)
        for length in (2**23, 2**23 + 8)
        for mask in (ls.Causal() & ls.Chunk(8), ls.Causal() & ls.Window(7, 0), ls.Chunk(8), ls.Causal() | ls.Prefix(8))
    ]
    assert len({plan.digest for plan in plans}) == len(plans)
    assert ls.cache.plan(ls.Causal() & ls.Window(7, 0), 2**23) == ls.cache.plan(ls.Band(-7, 0), 2**23)


def test_positions_fold_onto_the_period_before_a_cut_in_jax_as_in_numpy():
    outline = Outline(40, 3, (Cut(7, 9), Cut(25, 6)), reach=2)
    keys = [*range(7), *range(16, 25), *range(31, 40)]
    assert outline.keys.tolist() == keys
    place = np.arange(40)
    index, represents = outline.fold(place)
    wanted = [p if p in keys else 4 + (p - 7) % 3 if p < 16 else 22 + (p - 25) % 3 for p in range(40)]
    assert represents.tolist() == wanted and np.array(keys)[index].tolist() == wanted
    fold = jax.jit(lambda p: outline.fold(p, jnp))
    for one, other in zip(fold(place.astype(np.int32)), (index, represents), strict=True):
        np.testing.assert_array_equal(one, other)
    ends = np.minimum(outline.keys + np.where(outline.keys % 3 == 0, 1, 99), 39)  # some move, some are fixed
    wanted = np.minimum(place + np.where(place % 3 == 0, 1, 99), 39)
    np.testing.assert_array_equal(outline.ends_at(ends, place), wanted)


lifetimes_module, plan_module = sys.modules["longspan.cache.lifetimes"], sys.modules["longspan.cache.plan"]
LISTED = ls.Causal() & (ls.Window(3, 0) | ls.Global((5, 20)))


def test_plans_that_list_positions_have_a_limit_with_the_bytes_needed():
    message = (
        r"33,554,433 positions lists every position, .* about 4,294,967,424 bytes. The limit is 33,554,432 positions"
    )
    with pytest.raises(ValueError, match=message):
        ls.cache.plan(LISTED, 2**25 + 1)

    @rule
    class Own(Mask):
        def allowed(self, q, kv):
            return q.position == kv.position

        def nearest_query(self, key, at, step):
            return np.where((at - key) * step <= 0, key, 2**62 * step)

    with pytest.raises(ValueError, match=r"A plan of Causal\(\) & Own\(\) for 268,435,456 positions lists every"):
        ls.cache.plan(ls.Causal() & Own(), 2**28)
    assert ls.cache.plan(ls.Causal() & Own(), 3000).capacity == 1
    assert ls.cache.plan(LISTED, 3000).form == "a table"


def cache_hits():
    """Of plans, and of lifetimes at every position."""
    caches = plan_module._cached_plan.cached, lifetimes_module._cached_at_every_position.cached
    return [cache.cache_info().hits for cache in caches]


def test_plans_that_list_many_positions_are_not_cached(monkeypatch):
    monkeypatch.setattr(lifetimes_module, "MAX_CACHED_LENGTH", 1000)
    monkeypatch.setattr(plan_module, "MAX_CACHED_LENGTH", 1000)
    for length, more in ((1001, 0), (1000, 1)):
        plans = [ls.cache.plan(LISTED, length)]
        before = cache_hits()
        plans += [ls.cache.plan(LISTED, length), lifetimes(LISTED, length, 0, None)]
        after = cache_hits()
        assert [b - a for a, b in zip(before, after, strict=True)] == [more, more]
        assert (plans[0] is plans[1]) == bool(more) and plans[0] == plans[1]


@pytest.mark.parametrize("length", [2**30, 2**31, 2**40])
def test_lengths_beyond_the_range_of_positions_are_refused(length):
    with pytest.raises(ValueError, match=rf"`length` must be at most 1,073,741,823 \(2\*\*30 - 1\).*got {length:,}"):
        ls.cache.plan(ls.Causal() & ONE, length)


def test_chunks_with_padding_reach_the_last_position_of_all():
    mask = ls.Causal() & ONE
    cache = ls.cache.init(ls.cache.plan(mask, LONGEST), 2, 1, 1, jnp.float32)
    cache = replace(
        cache, length=jnp.array([LONGEST - 1, LONGEST - 3], np.int32), furthest=cache.length + (LONGEST - 1)
    )
    x = jnp.ones((2, 7, 1, 1))
    for lengths in ([1, 2], [0, 1], [0, 0]):
        cache, view = cache.append(x, x, np.array(lengths))
        out = ls.attention(x, **view.of(mask), engine="reference")
        for row, count in enumerate(lengths):
            np.testing.assert_allclose(out[row, :count], 1, rtol=0, atol=1e-6)
    assert cache.length.tolist() == [LONGEST, LONGEST] and not cache.overflowed.any()
    assert sorted(cache.positions[1].tolist()) == [LONGEST - 3, LONGEST - 2, LONGEST - 1, LONGEST]
    with pytest.raises(ValueError, match=r"planned for 1073741823 positions, but a row would have 1073741824"):
        cache.append(x, x, np.array([1, 0]))


def test_pictures_of_very_many_positions_are_refused_and_those_of_a_cache_are_not():
    plan = ls.cache.plan(ls.Causal() & ls.Chunk(8), 2**28)
    for step in (None, 9):
        with pytest.raises(ValueError, match=r"A picture of CachePlan\(8 of 268,435,456 .* about 34,359,738,368 bytes"):
            plan.show(step)
    assert (
        ls.cache.plan(ls.Causal() & ls.Chunk(8), 9000).show(30).startswith("31 of 9,000 positions: 8 kept, 23 evicted")
    )
    cache, _ = ls.cache.init(plan, 1, 1, 1, jnp.float32).append(*[jnp.ones((1, 9, 1, 1))] * 2)
    assert cache.show().startswith("9 of 268,435,456 positions: 1 kept, 8 evicted")


def test_masks_are_compared_with_those_of_a_long_plan():
    plan = ls.cache.plan(ls.Causal() & ls.Window(9, 0), 2**28)
    _, view = ls.cache.init(plan, 1, 1, 1, jnp.float32).append(*[jnp.ones((1, 3, 1, 1))] * 2)
    for narrower in (ls.Causal() & ls.Chunk(10), ls.Causal() & ls.Window(4, 0, dilation=2)):
        assert view.of(narrower)["mask"] == narrower
    with pytest.raises(ValueError, match=r"needs key 0 until query 9. .* queries up to 10 may attend to key 0"):
        view.of(ls.Causal() & ls.Chunk(11))
    with pytest.raises(ValueError, match=r"needs key 268435001 until query 268435010. .* up to 268435455 may"):
        view.of(ls.Causal() & (ls.Window(9, 0) | ls.Global((268435001,), rows=False)))
    with pytest.raises(ValueError, match=r"lets queries attend to later keys. These keys must be appended together"):
        view.of(ls.Window(9, 1) & ls.Chunk(10))
