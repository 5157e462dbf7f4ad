"""The page's cache and devices equal the plans of Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import longspan as ls
from longspan.cache.picture import eviction_steps
from longspan.explorer import caches
from longspan.explorer.document import document
from longspan.testing import masks
from tests.explorer.evaluator import ask, needs_node

pytestmark = needs_node

T, B, N = 19, 2, 2
DECODABLE = masks(T, T, batch=B, heads=N, leaves=3).map(lambda mask: mask & ls.Causal())


def slots_of(spans):
    return [key for start, stop in spans for key in range(start, stop)]


def check_cache(answers, plan, steps=None):
    """The page's answers for each step equal the plan's evictions."""
    evicted_at = eviction_steps(plan)
    for t, answer in enumerate(answers):
        step = t if steps is None else max(s for s in steps if s <= t)
        kept = [key for key in range(step + 1) if evicted_at[key] > step]
        assert slots_of(answer["kept"]) == kept
        assert slots_of(answer["evicted"]) == sorted(set(range(step + 1)) - set(kept))
        assert (answer["step"], answer["kept_count"], answer["evicted_count"]) == (
            step,
            len(kept),
            step + 1 - len(kept),
        )
        assert answer["pinned"] == [key for key in plan.pinned if key <= step]
        assert answer["used_bytes"] == len(kept) * plan.nbytes(1, 1, 64, np.float16) // max(plan.capacity, 1)
        assert answer["slots"] == plan.capacity and answer["bytes"] == plan.nbytes(1, 1, 64, np.float16)
        assert answer["full_bytes"] == plan.full_nbytes(1, 1, 64, np.float16)
        assert answer["text"] == str(plan).splitlines() and answer["sampled"] is (steps is not None)


@pytest.mark.check
@given(DECODABLE)
def test_the_cache_after_every_step_is_that_of_the_plan(mask):
    answers = ask(document(mask, T), *(["cache", t] for t in range(T)))
    check_cache(answers, ls.cache.plan(mask, T))
    needed = np.asarray(mask.dense(T)).any((0, 1))
    for t, answer in enumerate(answers):
        assert set(np.flatnonzero(needed[t + 1 :].any(0))) & set(range(t + 1)) <= set(slots_of(answer["kept"]))


PLANNED = [
    ls.Causal(),
    ls.Causal() & ls.Window(6, 0),
    ls.Causal() & (ls.Window(6, 0) | ls.Prefix(3)),
    ls.Causal() & (ls.Window(4, 0) | ls.Global((5, 40), rows=False)),
    ls.Causal() & (ls.Window(4, 0) | ls.Global((5, 10, 15, 14, 85, 90), rows=False)),
    ls.Causal() & ls.Window(4, 0, dilation=3),
    ls.Causal() & ls.Chunk(13),
    ls.Causal() & ls.Chunk(8) | ls.Prefix(2),
    ls.Causal() & ls.Empty(),
    ls.Causal() & (ls.Blocks(np.random.default_rng(0).integers(-1, 13, (1, 13, 2)), 7) | ls.Window(1, 0)),
    ls.PerHead((ls.Causal() & ls.Window(3, 0), ls.Causal() & ls.Chunk(5))),
]


@pytest.mark.parametrize("mask", PLANNED, ids=repr)
def test_the_cache_of_each_form_of_plan(mask):
    length = 91
    check_cache(ask(document(mask, length), *(["cache", t] for t in range(length))), ls.cache.plan(mask, length))


def test_sampled_steps_are_those_of_the_plan(monkeypatch):
    monkeypatch.setattr(caches, "MAX_CHARACTERS", 150)
    monkeypatch.setattr(caches, "MAX_STEPS", 7)
    mask, length = PLANNED[9], 91
    made = document(mask, length)
    assert made["cache"]["runs"] is None and made["cache"]["steps"][0] == 0 and len(made["cache"]["steps"]) > 2
    answers = ask(made, *(["cache", t] for t in range(length)))
    check_cache(answers, ls.cache.plan(mask, length), made["cache"]["steps"])


@pytest.mark.check
@given(
    masks(T, T, batch=B, heads=N, leaves=3), st.sampled_from([2, 4, 8, 16]), st.sampled_from(["contiguous", "zigzag"])
)
def test_devices_hold_and_receive_what_the_plan_says(mask, count, order):
    (found,) = ask(document(mask, T), ["devices", count, order])
    try:
        plan = ls.parallel.plan(mask, T, count, order)
    except ValueError as error:
        assert found["error"] == str(error)
        return
    assert found["text"] == str(plan).splitlines() and found["stale"] is False
    names = ("rows", "load", "data", "sent_rows", "sent_rows_backward", "bound_rows", "gather_rows")
    assert {name: found[name] for name in names} == {name: getattr(plan, name) for name in names}
    assert [step["rows"] for step in found["steps"]] == [step.rows for step in plan.steps]
    held = [slots_of(device["holds"]) for device in found["devices"]]
    assert sorted(key for keys in held for key in keys) == list(range(T))
    pairs = [device["pairs"] for device in found["devices"]]
    assert pairs == ([None] * count if plan.pairs is None else list(plan.pairs))
    for device, own in zip(found["devices"], held, strict=True):
        assert device["received"] <= plan.sent_rows
        for _, start, stop, sources, _ in device["receives"]:
            assert not set(range(start, stop)) & set(own)
            assert set(range(start, min(stop, T))) <= {key for source in sources for key in held[source]} or stop > T


def test_devices_receive_every_key_that_their_queries_attend_to():
    length = 96
    for mask in (ls.Causal() & ls.Window(13, 0), ls.Window(5, 5) | ls.Global((0,)), ls.Causal() & ls.Chunk(32)):
        dense, made = np.asarray(mask.dense(length))[0, 0], document(mask, length)
        for order in ("contiguous", "zigzag"):
            (found,) = ask(made, ["devices", 4, order])
            for device in found["devices"]:
                own = slots_of(device["holds"])
                received = {key for _, start, stop, _, _ in device["receives"] for key in range(start, stop)}
                # Global query 0 is sent to all devices, which send back its outputs.
                needed = set(np.flatnonzero(dense[[query for query in own if query]].any(0)))
                assert not device["others"] and needed <= set(own) | received


def test_without_a_plan_the_reason_is_given():
    positions = np.arange(8, dtype=np.int32)[::-1].copy()
    cases = [
        (dict(mask=ls.Causal(), kv_len=5), "a cache needs as many queries as keys", "as many queries as keys"),
        (dict(mask=ls.Causal(), q_positions=positions), "the positions of the tokens differ", "the positions of the"),
        (dict(mask=ls.Full()), "lets queries attend to later keys", None),
    ]
    for options, of_cache, of_devices in cases:
        mask = options.pop("mask")
        cached, shared = ask(document(mask, 8, **options), ["cache", 0], ["devices", 2, "zigzag"])
        assert of_cache in cached["error"]
        if of_devices is not None:
            assert of_devices in shared["error"]


def test_plans_are_stale_when_a_number_leaves_its_value():
    made = document(ls.Causal() & ls.Window(3, 0), 16)
    before, _, cached, shared, _, after = ask(
        made, ["cache", 5], ["set", 4, 0], ["cache", 5], ["devices", 2], ["set", 3, 0], ["cache", 5]
    )
    assert (before["stale"], cached["stale"], shared["stale"], after["stale"]) == (False, True, True, False)


def test_questions_outside_of_the_plans_are_errors():
    late, none, order = ask(
        document(ls.Causal(), 16), ["cache", 16], ["devices", 3, "zigzag"], ["devices", 2, "diagonal"]
    )
    assert "t must be an integer from 0 to 15, got 16." in late["error"]
    assert "There are plans for 2, 4, 8, 16 devices, not for 3." in none["error"]
    assert "The order must be contiguous or zigzag, got diagonal." in order["error"]
