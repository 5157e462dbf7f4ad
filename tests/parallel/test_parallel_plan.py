"""Plans: the rows that are sent, their lower bound, and the load."""

import jax.numpy as jnp
import numpy as np
import pytest

import longspan as ls
from longspan.parallel.plan import cached_plan, plan_communication

T, SHARDS = 16384, 8
GATHER = 7 * 2048
IDS, FLAGS = np.zeros((2, T), int), np.zeros((2, T), bool)


def plan(mask, order="contiguous", **more):
    return ls.parallel.plan(mask, T, SHARDS, order, **more)


def test_a_window_sends_its_own_length():
    found = plan(ls.Causal() & ls.Window(511, 0))
    assert (found.sent_rows, found.sent_rows_backward, found.bound_rows) == (511, 511, 511)
    assert f"{found.load:.2f}" == "1.02"


def test_a_window_over_several_shards_sends_its_own_length():
    found = plan(ls.Window(7000, 100))
    assert found.sent_rows == found.bound_rows == 7100
    assert [step.shift for step in found.steps] == [4, 3, 2, 1, -1]


@pytest.mark.parametrize(
    "mask", [ls.Chunk(2048), ls.Chunk(64), ls.Segments(IDS) & ls.Chunk(1024), ls.Empty()], ids=repr
)
def test_masks_within_shards_send_nothing(mask):
    assert plan(mask).sent_rows == 0
    assert not plan(mask).steps


def test_a_bound_on_documents_turns_a_ring_into_a_halo():
    causal = ls.Causal() & ls.Segments(IDS)
    assert plan(causal).sent_rows == GATHER
    assert plan(causal).data
    assert plan(causal & ls.Window(99, 0)).sent_rows == 99


def test_causal_is_a_ring_and_zigzag_balances_it():
    contiguous, zigzag = plan(ls.Causal()), plan(ls.Causal(), "zigzag")
    for found in (contiguous, zigzag):
        assert (found.sent_rows, found.sent_rows_backward) == (GATHER, 2 * GATHER)
    assert contiguous.load > 1.85
    assert zigzag.load < 1.01


def test_the_order_is_that_of_the_lesser_load(capsys):
    assert ls.parallel.order([ls.Causal(), ls.Causal() & ls.Window(511, 0)], T, SHARDS) == "zigzag"
    assert ls.parallel.order(ls.Window(511, 511), T, SHARDS) == "contiguous"
    blocks = ls.Causal() & ls.Blocks(np.zeros((1, T // 64, 1), int), 64)
    assert ls.parallel.order([ls.Causal(), blocks], T, SHARDS) == "contiguous"
    assert capsys.readouterr().out == ""
    loads = {order: plan(ls.Causal(), order).load for order in ("contiguous", "zigzag")}
    assert (
        loads["contiguous"] > 1.85
        and loads["zigzag"] < 1.01
        and "zigzag, load max/mean 1.00" in str(plan(ls.Causal(), "zigzag"))
    )


def test_plans_of_static_masks_are_cached_by_all_their_inputs():
    window = ls.Causal() & ls.Window(511, 0)
    assert plan(window) is plan(ls.Causal() & ls.Window(511, 0))
    table = blocks()
    calls = [
        lambda: plan(window),
        lambda: plan(window, "zigzag"),
        lambda: ls.parallel.plan(window, T, 4),
        lambda: ls.parallel.plan(window, T // 2, SHARDS),
        lambda: plan(ls.Causal() & ls.Window(510, 0)),
        lambda: plan(ls.Blocks(table, 64)),
        lambda: plan(ls.Blocks(table, 64), kv_heads=2),
        lambda: plan(ls.Blocks(blocks(number=1), 64)),
        lambda: plan(ls.Window(3, 3) | ls.Global((5,))),
        lambda: plan_communication(ls.Window(3, 3) | ls.Global((5,)), T, SHARDS, "contiguous", travel=False),
        lambda: plan_communication(ls.Window(3, 3) | ls.Global((5,)), T, SHARDS, "contiguous", positions=False),
    ]
    first = [call() for call in calls]
    assert len({str(found) for found in first}) == len(first) == len({id(found) for found in first})
    assert all(call() is found for call, found in zip(calls, first, strict=True))
    assert cached_plan.cache_info().maxsize == 64


def test_plans_of_masks_with_arrays_are_not_cached():
    count = cached_plan.cache_info().currsize
    mask = ls.Causal() & ls.Segments(IDS)
    assert plan(mask) == plan(mask) and plan(mask) is not plan(mask)
    assert cached_plan.cache_info().currsize == count


def test_pinned_columns_cost_twice_their_number_at_most():
    found = plan(ls.Causal() & (ls.Window(511, 0) | ls.Prefix(4)))
    assert found.bound_rows == 515
    assert found.sent_rows == 511 + 7


def test_global_queries_are_sent():
    found = plan(ls.Window(512, 512) | ls.Global((0, 9000)))
    assert found.sent_rows < 0.1 * GATHER
    assert found.queries == (0, 9000)


def test_flags_have_a_capacity_and_a_fallback():
    mask = ls.Window(64, 64) | ls.Global(q_flags=FLAGS, kv_flags=FLAGS)
    assert plan(mask).capacity == 128
    assert plan(mask).fallback.sent_rows == GATHER
    assert plan(mask, global_capacity=0).fallback is None
    assert plan(mask, global_capacity=7).capacity == 7


def test_unbounded_rules_are_named():
    assert "Custom(every) has no bounds" in str(plan(ls.Custom(every)))


def every(q, k):
    return q == k


def test_rows_do_not_grow_with_the_length():
    mask = ls.Causal() & (ls.Window(511, 0) | ls.Prefix(4) | ls.Global((77,)))
    found = [ls.parallel.plan(mask, length, SHARDS) for length in (1 << 14, 1 << 17, 1 << 20)]
    assert len({(p.sent_rows, p.sent_rows_backward, p.bound_rows, p.queries) for p in found}) == 1


def test_ten_million_tokens_on_thousands_of_devices_are_planned_at_once():
    found = ls.parallel.plan(ls.Causal() & ls.Window(4095, 0), 10 << 20, 4096)
    assert found.sent_rows == found.bound_rows == 4095


def test_plans_hash_and_equal_plans_are_equal():
    masks = [
        lambda: ls.Causal() & ls.Segments(IDS),
        lambda: ls.Window(3, 0),
        lambda: ls.Blocks(np.zeros((1, 8, 1), int), 2048),
    ]
    for make in masks:
        assert plan(make()) == plan(make())
        assert hash(plan(make())) == hash(plan(make()))
    assert plan(ls.Window(3, 0)) != plan(ls.Window(3, 0), "zigzag")


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("shards", [3, 8])
def test_a_plan_covers_the_keys_that_devices_need(shards, order):
    """Every key that a device needs is its own, or is received."""
    length = 48
    for mask in (ls.Window(5, 3), ls.Chunk(7), ls.Causal() & (ls.Window(2, 0) | ls.Prefix(5)), ls.Band(-20, -11)):
        found = ls.parallel.plan(mask, length, shards, order)
        if found.ring is not None:
            continue
        truth = np.asarray(mask.dense(length, length))[0, 0]
        place = ls.parallel.shard_batch(dict(x=np.zeros((1, length), int)), ls.parallel.mesh(sp=shards), order=order)
        at = np.asarray(place["positions"])[0].reshape(shards, -1)
        for device in range(shards):
            have = {*at[device].tolist(), *found.columns}
            size = found.rows // (1 if order == "contiguous" else 2)
            for step in found.halo:
                if 0 <= device - step.shift < shards:
                    begin = step.run * size + step.start
                    have |= {*at[device - step.shift][begin : begin + step.rows].tolist()}
            assert set(np.flatnonzero(truth[at[device]].any(0)).tolist()) <= have


def blocks(reach=None, heads=4, number=2):
    """A table of random blocks of 64 tokens, anywhere or at most `reach` blocks away."""
    rng, count = np.random.default_rng(0), T // 64
    if reach is None:
        return rng.integers(0, count, (heads, count, number))
    return np.clip(
        np.arange(count)[None, :, None] + rng.integers(-reach, reach + 1, (heads, count, number)), 0, count - 1
    )


def test_random_blocks_are_exchanged_by_head():
    found = plan(ls.Blocks(blocks(), 64))
    assert [step.kind for step in found.steps] == ["exchange"]
    assert found.bound_rows < found.sent_rows < 0.7 * GATHER
    assert found.sent_rows == found.sent_rows_backward
    # Query heads that share keys need them once: more blocks per key/value head, but fewer in all.
    assert found.sent_rows < plan(ls.Blocks(blocks(), 64), kv_heads=2).sent_rows < GATHER


def test_blocks_of_neighbours_are_exchanged_with_neighbours_only():
    found = plan(ls.Blocks(blocks(40), 64))
    assert [shift for shift, _ in found.exchange.shifts] == [2, 1, -1, -2]
    assert found.sent_rows < 0.25 * GATHER
    assert "shifts +2 +1 -1 -2" in str(found)


def test_blocks_that_most_devices_need_are_sent_to_all():
    drawn = ls.bigbird_random_blocks(T, block_size=64, num_random_blocks=3, num_heads=4, seed=0)
    found = plan(ls.bigbird(T, block_size=64, rand_attn=drawn))
    assert "keys that most devices need" in str(found)
    assert found.sent_rows < 2 * found.bound_rows < 0.15 * GATHER


def test_dynamic_tables_have_an_estimate_and_a_fallback():
    found = plan(ls.Blocks(jnp.asarray(blocks(number=1)), 64))
    assert found.exchange.data
    assert found.fallback.sent_rows == GATHER
    assert f"if a device needs more than {found.exchange.blocks} blocks of another device, each" in str(found)
    # Too many blocks for an exchange.
    assert plan(ls.Blocks(jnp.asarray(blocks(number=9)), 64)).ring is not None


def test_blocks_among_other_rules():
    table = blocks()
    alone = plan(ls.Blocks(table, 64)).sent_rows
    assert plan(ls.Blocks(table, 64) & ls.Segments(IDS)).sent_rows == alone
    assert plan(ls.Blocks(table, 64) & ls.Causal()).sent_rows < alone
    assert plan(ls.Blocks(table, 64) | ls.Segments(IDS)).ring is not None
    with pytest.raises(ValueError, match="kv_heads"):
        plan(ls.Blocks(table, 64), kv_heads=0)
